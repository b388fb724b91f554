"""A trial as a switchback, on a live engine in this process: turns, verdicts, ramp, and what may come in between."""

import json
from dataclasses import replace
from typing import Any

import pytest

from rooftune.policies import wire
from rooftune.policies.guard import Action, Reason, WeekSpan
from rooftune.policies.proof.switchback import PAIRS
from rooftune.policies.verify import RollbackThresholds
from rooftune.tuner.control.explain.explain import explain
from rooftune.tuner.control.memory import KEY, Memory, knobs_of, recall
from rooftune.tuner.control.state import operator
from rooftune.tuner.ports.base import PortError, PortFault
from tests.control.doubles import BOLD, MemoryStore, Rig, options, proposes, rig
from tests.control.live import BOOT, LiveEngine, Traffic
from tests.control.test_loop import FITTING, memory_of, pushed, reverted


def on_trial(seed: int = 1, tokens: int = 512, engine: LiveEngine | None = None, **given: Any) -> Rig:
    """A push has just been sent, after a history of a few blocks."""
    made = options(search_requests=60, **given)
    run = rig(proposes(step_tokens=tokens, gain=0.2), engine=engine or LiveEngine(seed=seed), options=made)
    run.run(20, until=pushed)
    assert pushed(run.records[-1])
    return run


def until_arm(run: Rig, new: bool, most: int = 40) -> Rig:
    """Runs until a turn of the pairs under the new (or old) setting is in force."""
    arm = "new" if new else "old"
    run.run(most, until=lambda r: r.verify is not None and r.verify.arm == arm)
    assert run.setting == (FITTING if new else BOOT)
    return run


# --- verdicts ----------------------------------------------------------------------------------


def verdict_of_the_same_setting(seed: int, rate_rps: float) -> str:
    """A budget of one token less is the same setting for every purpose."""
    run = on_trial(tokens=2047, engine=LiveEngine(Traffic(rate_rps=rate_rps), seed=seed), seed=seed)
    run.run_trial()
    assert run.trial is None
    verify = run.records[-1].verify
    assert verify is not None
    return verify.verdict


def test_the_same_setting_against_itself_hardly_ever_gets_a_verdict() -> None:
    found = [verdict_of_the_same_setting(seed, 2.0) for seed in range(3)]
    # With 5 % each, more than one of three gets a verdict in 0.7 % of the runs; the slow test below counts more.
    assert sum(verdict != "inconclusive" for verdict in found) <= 1


@pytest.mark.slow
def test_the_same_setting_against_itself_gets_a_verdict_in_one_trial_of_twenty_at_most() -> None:
    found = [verdict_of_the_same_setting(seed, (1.6, 2.0, 2.4)[seed % 3]) for seed in range(20)]
    # Of 20 trials with 5 % each, more than 3 get a verdict in 1.6 % of the runs.
    assert sum(verdict != "inconclusive" for verdict in found) <= 3


def test_a_real_gain_is_kept_and_a_harmful_push_goes_back_after_its_first_turn() -> None:
    run = on_trial()
    run.run_trial()
    verify, memory = run.records[-1].verify, memory_of(run)
    assert verify is not None and verify.verdict == "better" and verify.requests >= run.options.min_requests
    assert run.setting == FITTING and memory.kept is not None and memory.tried[-1].verdict == "better"
    worse = rig(
        proposes(step_tokens=2048, gain=0.2),
        engine=LiveEngine(Traffic(documents=3), boot=FITTING, options={"ceiling_tokens": 2048}),
        options=options(search_requests=100),
    )
    worse.run(20, until=pushed)
    worse.run_trial()
    assert worse.records[-1].reason in (Reason.HARMFUL, Reason.VERDICT_WORSE) and worse.setting == FITTING
    assert memory_of(worse).kept is None and memory_of(worse).tried[-1].verdict in ("worse", "inconclusive")


def test_after_the_last_look_without_a_verdict_the_old_setting_is_back() -> None:
    run = on_trial(tokens=2047, seed=3)
    run.run_trial()
    last = run.records[-1]
    assert (last.action, last.reason) == (Action.REVERT, Reason.INCONCLUSIVE)
    assert last.verify is not None and last.verify.pairs == PAIRS[-1] and last.verify.look_pairs is None
    assert run.setting == BOOT and memory_of(run).tried[-1].verdict == "inconclusive"


# --- turns -------------------------------------------------------------------------------------


def test_the_turns_follow_the_schedule_and_last_half_of_verify_s() -> None:
    run = on_trial()
    run.run(16)
    trial = run.trial
    assert trial is not None and len(trial.turns) >= 5
    spans = [b.at_s - a.at_s for a, b in zip(trial.turns, trial.turns[1:], strict=False)]
    assert all(28.0 <= span <= 42.0 for span in spans)
    arms = [turn.setting == trial.after for turn in trial.turns[len(trial.ramp) :]]
    assert tuple(arms) == trial.arms[: len(arms)]
    assert [turn.pair for turn in trial.turns[1:]] == [k // 2 for k in range(len(arms))]


def test_a_far_proposal_is_approached_by_limited_steps_without_a_verdict() -> None:
    run = on_trial(limits=replace(BOLD, largest_ratio=2.0), tokens=300)
    assert run.records[-1].reason is Reason.STEP_LIMITED
    seen = run.run(10)
    steps = [record.in_force["step_tokens"] for record in seen if record.action is Action.SWITCH and record.in_force]
    assert run.records[-len(seen) - 1].pushed == {"step_tokens": 1024} and steps[:2] == [512, 300]
    ramp = [record.verify for record in seen if record.verify is not None and record.verify.arm == "ramp"]
    assert len(ramp) >= 8 and {verify.reason for verify in ramp} == {"not_measured"}


def test_people_are_told_whose_turn_it_is() -> None:
    run = until_arm(on_trial(), new=False)
    words = explain(run.records[-1])[3]
    assert f"of {2 * PAIRS[-1]}, old setting in force for another" in words and "a look after 2" in words


# --- what comes in between ---------------------------------------------------------------------


@pytest.mark.parametrize("new", [False, True])
def test_a_controller_that_was_killed_in_mid_trial_goes_on_with_it(new: bool) -> None:
    run = until_arm(on_trial(), new)
    before = recall(run.store).trial
    again = run.again()
    again.run(1)
    trial = again.trial
    assert before is not None and trial is not None and trial.turns[: len(before.turns)] == before.turns
    again.run_trial()
    assert again.setting == FITTING and memory_of(again).tried[-1].verdict == "better"


@pytest.mark.parametrize("arrived", [False, True])
def test_a_switch_whose_answer_was_lost_is_recognised_by_the_next_reading(arrived: bool) -> None:
    run = on_trial()
    honest, lost = run.port.push, list[wire.PushRequest]()

    def lose_once(request: wire.PushRequest) -> wire.PushAnswer | wire.Refusal:
        if lost or request.knobs.step_tokens is None:
            return honest(request)
        lost.append(request)
        if arrived:
            honest(request)
        raise PortError(PortFault.TIMEOUT, "no answer")

    run.port.push = lose_once  # type: ignore[method-assign]  # scripted
    run.run(20, until=lambda record: record.reason is Reason.UNREACHABLE)
    assert lost and run.setting == (BOOT if arrived else FITTING)
    run.run(1)
    trial = run.trial
    assert trial is not None and run.setting == BOOT
    assert trial.turn.setting == knobs_of(BOOT) and (run.records[-1].action is Action.SWITCH) is not arrived


@pytest.mark.parametrize("new", [False, True])
def test_an_operators_revert_ends_the_trial_in_either_turn(new: bool) -> None:
    run = until_arm(on_trial(), new)
    operator.revert(run.store, "ann", "a reason", 0.0)
    run.run(2)
    assert run.engine.running.tuning_state().blocked and run.setting == BOOT
    assert run.trial is None and memory_of(run).tried == ()


def test_a_pause_keeps_the_turn_and_what_arrives_in_it_later_does_not_count() -> None:
    run = until_arm(on_trial(), new=True)
    operator.pause(run.store, "ann", "a reason", 0.0)
    run.run(8)
    assert run.setting == FITTING and run.records[-1].reason is Reason.PAUSED
    trial = run.trial
    operator.resume(run.store, "ann", "a reason", 0.0)
    run.run(2)
    after = run.trial
    assert trial is not None and after is not None and len(after.turns) == len(trial.turns) + 1
    most = 1.6 * 2.0 * trial.block_s  # 2 requests a second for one block
    assert all(judged < most for _, _, judged in after.blocks)


def test_a_trial_is_given_up_without_a_lesson_when_its_maintenance_window_ends() -> None:
    run = until_arm(on_trial(), new=True)
    run.controller._judge._options = options(limits=replace(BOLD, no_push=(WeekSpan(0, 10_079),)))
    run.run(1)
    assert (run.records[-1].action, run.records[-1].reason) == (Action.REVERT, Reason.MAINTENANCE_WINDOW)
    assert run.setting == BOOT and run.trial is None and memory_of(run).tried == ()


def test_a_threshold_that_only_the_old_setting_crosses_does_not_end_the_trial() -> None:
    run = on_trial(thresholds=RollbackThresholds(gap_p99_s=0.3))
    run.run_trial()
    assert Reason.OPERATOR_THRESHOLD not in run.reasons and run.setting == FITTING


def test_a_trial_that_an_earlier_release_left_in_force_is_taken_back() -> None:
    run = until_arm(on_trial(), new=True)
    memory = memory_of(run)
    assert memory.trial is not None
    shared = {"push_cycle", "boot_id", "began_s", "since_s", "before", "after", "predicted_gain", "twin_error"}
    trial = memory.trial.model_dump(include=shared | {"predicted_attainment", "traffic"}) | {"stride": True}
    start = {"start": knobs_of(BOOT), "start_cycle": None, "gain": -0.01, "half_width": 0.02}
    kept = {"boot_id": "b", "setting": knobs_of(BOOT), "push_cycle": 3}
    for name in ("strides", "way"):
        stored = memory.model_dump() | {"trial": trial, "kept": kept | {name: start}, "shadow_s": 77.0}
        store = MemoryStore()
        store.values[KEY] = json.dumps(stored)
        found = recall(store)
        assert found.trial is None and found.kept is not None and found.shadow_s == 77.0
    run.store.values[KEY] = store.values[KEY]
    again = run.again()
    again.run(1)
    assert (again.records[-1].action, again.records[-1].reason) == (Action.REVERT, Reason.FOUND_FOREIGN)
    assert again.setting == BOOT and not any(map(reverted, again.run(2)))


def test_a_stored_trial_is_read_back_as_it_was() -> None:
    run = until_arm(on_trial(), new=False)
    memory = run.controller._book.memory
    assert Memory.model_validate_json(memory.model_dump_json()) == memory and memory.trial is not None
