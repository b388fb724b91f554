"""Strides: each may lose less than is measurable, but not all of them together."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from rooftune.policies import wire
from rooftune.policies.guard import Action, Reason
from rooftune.policies.slo import Slo, Target
from rooftune.policies.verify import Verdict, VerdictReason
from rooftune.tuner.control.cycle import judge as judgement
from rooftune.tuner.control.cycle.matched import Matched
from rooftune.tuner.control.cycle.verify import Checked
from rooftune.tuner.control.memory import Kept, Strides, Trial
from rooftune.tuner.ports.base import PortError, PortFault
from tests.control.doubles import BOLD, Rig, answer_of, options, rig
from tests.control.test_loop import BOOT, memory_of, pushed, reverted

Gains = dict[int, tuple[float, float]]


def test_small_losses_add_up_faster_than_their_noise() -> None:
    strides = Strides(start={"step_tokens": 2048})
    lost = []
    for _ in range(4):
        strides = strides.onward(-0.03, 0.05)
        lost.append(strides.lost)
    assert lost == [False, False, True, True] and not strides.won
    assert Strides(start={"step_tokens": 2048}).onward(0.1, 0.05).won


def seen_to_gain(gains: Gains) -> Callable[..., Checked]:
    """The real check with other figures: token budget of the push -> gain and half width, of a full window."""
    honest = judgement.check

    def check(trial: Trial, *others: object) -> Checked:
        found = honest(trial, *others)  # type: ignore[arg-type]  # as they came
        gain, half = gains[int(trial.after["step_tokens"])]
        better = gain > half
        verdict = Verdict.BETTER if better else Verdict.INCONCLUSIVE
        reason = VerdictReason.GAIN_SHOWN if better else VerdictReason.WITHIN_NOISE
        part = found.part.model_copy(
            update={
                "verdict": verdict.value, "reason": reason.value, "prediction_held": True,
                "observed_gain": gain, "half_width": half,
            }
        )  # fmt: skip
        matched = Matched(gain, half, True, 0.8, 0.8 + gain)
        return replace(
            found,
            matched=matched,
            passed=trial.stride and not better,
            part=part,
        )

    return check


def strides(monkeypatch: pytest.MonkeyPatch, gains: Gains, *wanted: int) -> Rig:
    monkeypatch.setattr(judgement, "check", seen_to_gain(gains))
    goals: Iterator[int] = iter(wanted)
    limits = replace(BOLD, largest_ratio=2.0)
    never_met = Slo((Target("longest_gap", 0.02, 0.99),))
    given = options(limits=limits, search_requests=20, search_every_s=20.0, slo=never_met)
    return rig(lambda job: answer_of(job, step_tokens=next(goals), gain=0.2), options=given)


SMALL = (-0.03, 0.05)


def test_strides_that_lost_in_total_are_reverted_to_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    run = strides(monkeypatch, {1024: SMALL, 512: SMALL, 256: SMALL}, *[128] * 20)
    run.run(60, until=reverted)
    assert [r.pushed for r in run.records if pushed(r)] == [{"step_tokens": n} for n in (1024, 512, 256)]
    last = run.records[-1]
    assert last.verify is not None and (last.verify.verdict, last.verify.reason) == ("worse", "loss_shown")
    assert last.verify.observed_gain == pytest.approx(-0.09) and "strides" in last.detail
    assert run.setting == BOOT and memory_of(run).tried[-1].before["step_tokens"] == 2048
    run.searcher.delay = 10**6
    run.run(2)
    assert memory_of(run).kept is None and run.setting == BOOT


def test_strides_that_lost_in_all_are_noted_from_their_start_also_when_the_answer_to_the_revert_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = strides(monkeypatch, {1024: SMALL, 512: SMALL, 256: SMALL}, *[128] * 20)
    honest = run.port.revert

    def lost(request: wire.RevertRequest) -> wire.PushAnswer | wire.Refusal:
        honest(request)
        raise PortError(PortFault.TIMEOUT, "no answer in time")

    run.port.revert = lost  # type: ignore[method-assign]  # scripted
    run.run(60, until=lambda record: record.reason is Reason.UNREACHABLE)
    run.searcher.delay = 10**6
    run.run(1)
    assert run.setting == BOOT and "it was worse" in run.records[-1].detail
    tried = memory_of(run).tried[-1]
    assert (tried.before["step_tokens"], tried.setting["step_tokens"]) == (2048, 256)


def test_the_setting_proven_before_the_strides_is_restored_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    run = strides(
        monkeypatch, {1500: (0.1, 0.05), 750: SMALL, 375: SMALL, 188: SMALL}, 1500, *[100] * 20
    )  # fmt: skip
    run.run(60, until=reverted)
    assert [r.pushed for r in run.records if pushed(r)] == [{"step_tokens": n} for n in (1500, 750, 375, 188)]
    assert run.setting.step_tokens == 1500
    run.searcher.delay = 10**6
    run.run(3)
    kept = memory_of(run).kept
    assert kept is not None and kept.setting["step_tokens"] == 1500 and kept.strides is None
    assert run.setting.step_tokens == 1500 and Action.REVERT not in [r.action for r in run.records[-3:]]


def test_a_gain_resets_the_account_of_earlier_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    run = strides(monkeypatch, {1024: SMALL, 512: (0.2, 0.05), 256: SMALL, 128: SMALL}, *[64] * 20)
    run.run(60, until=lambda r: r.pushed == {"step_tokens": 64})
    kept = memory_of(run).kept
    assert kept is not None and kept.strides is not None and kept.strides.start["step_tokens"] == 512
    assert kept.strides.gain == pytest.approx(-0.06)


def test_the_strides_of_a_state_that_0_1_wrote_are_read() -> None:
    kept = Kept.model_validate_json(
        '{"boot_id": "b", "setting": {"step_tokens": 256}, "push_cycle": 3, "way": {"start": {"step_tokens": 2048}}}'
    )
    assert kept.strides == Strides(start={"step_tokens": 2048})
