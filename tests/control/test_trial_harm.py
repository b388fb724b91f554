"""Cost and end of a trial whose windows give no verdict."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rooftune.engine.step import StepBatch
from rooftune.policies import wire
from rooftune.policies.guard import Reason
from rooftune.policies.verify import RollbackThresholds
from rooftune.tuner.control.cycle import observe as observe_stage
from rooftune.tuner.control.cycle.degradation import rising
from rooftune.tuner.observe.rows import ABORTED, FINISHED, IntArray
from tests.control.doubles import BOLD, Rig, options, proposes, rig
from tests.control.test_loop import BOOT, FITTING, memory_of, pushed, reverted


def on_trial(**given: Any) -> Rig:
    """The better setting has just been pushed."""
    run = rig(proposes(step_tokens=512, gain=0.12), options=options(search_requests=20, **given))
    run.run(8, until=pushed)
    return run


# --- exploration -------------------------------------------------------------------------------


def test_a_trial_costs_its_risk_for_as_long_as_the_new_setting_is_in_force() -> None:
    run = on_trial()
    run.run(8)  # the ramp, a block of either setting
    trial = run.trial
    assert trial is not None and run.records[-1].verify is not None and run.records[-1].verify.observed_gain is None
    new_s = run.engine.running.tuning_state().now_s - trial.began_s - 30.0
    assert run.records[-1].spent_slo_s == pytest.approx(trial.twin_error * new_s, rel=0.25)
    run.engine.running.revert(wire.RevertRequest(actor="bob", reason="no", block=False))
    run.run(1)
    assert sum(spent for _, spent in memory_of(run).days) == run.records[-2].spent_slo_s


def test_a_measured_cost_replaces_the_risk() -> None:
    run = on_trial()
    run.run_trial()
    assert run.setting == FITTING and run.records[-1].spent_slo_s == 0.0


# --- preemptions -------------------------------------------------------------------------------


def preempt(run: Rig, count: int) -> None:
    """Each of the engine's next ``count`` steps preempts one request."""
    left, honest = [count], run.port.steps_after

    def preempting(after: int) -> wire.StepColumns:
        page = honest(after)
        given = min(left[0], len(page.step))
        left[0] -= given
        return page.model_copy(update={"preemptions": tuple(int(at < given) for at in range(len(page.step)))})

    run.port.steps_after = preempting  # type: ignore[method-assign]  # a port's method, scripted


@pytest.mark.parametrize(("count", "back"), [(1, False), (3, True)])
def test_one_preemption_after_a_push_is_not_a_rate_but_several_are(count: int, back: bool) -> None:
    run = on_trial(thresholds=RollbackThresholds(preemptions_per_s=0.05))
    preempt(run, count)
    run.run(4, until=reverted)
    assert (run.records[-1].reason is Reason.OPERATOR_THRESHOLD) is back and (run.trial is None) is back


def test_if_no_preemption_is_allowed_one_is_enough_once_the_window_is_long_enough() -> None:
    run = on_trial(thresholds=RollbackThresholds(preemptions_per_s=0.0))
    preempt(run, 1)
    run.run(5, until=reverted)
    assert run.records[-1].reason is Reason.OPERATOR_THRESHOLD and run.setting == BOOT


# --- callers that hang up ----------------------------------------------------------------------


def test_hang_ups_count_only_if_fewer_happened_before() -> None:
    def ended(aborted: int, count: int = 100) -> IntArray:
        return np.array([ABORTED] * aborted + [FINISHED] * (count - aborted))

    assert rising(ended(40), ended(5), ABORTED)
    assert not rising(ended(40), ended(38), ABORTED), "they did so before"
    assert not rising(ended(40), ended(5)), "no request failed"


def test_constant_hang_ups_revert_no_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of all requests hang up, before and after the push."""
    monkeypatch.setattr(observe_stage, "STORM_SHARE", 1.0)  # otherwise nothing would be pushed
    run = rig(proposes(step_tokens=512, gain=0.12), options=options(search_requests=20, verify_s=40.0))
    run.engine.after_step = lambda engine: engine.abort_some(0.1) if engine.running.snapshot().step % 12 == 0 else None
    run.run(12, until=pushed)
    assert pushed(run.records[-1])
    monkeypatch.setattr(observe_stage, "STORM_SHARE", 0.1)
    run.run(4)
    assert Reason.ABORT_STORM not in run.reasons and Reason.VERIFYING in run.reasons[-4:]
    assert run.records[-1].verify is not None and run.records[-1].verify.verdict == "inconclusive"


# --- no progress -------------------------------------------------------------------------------


def all_clients_wait(run: Rig, tokens: int, clients: int) -> None:
    """Each client waits for its answer and sends no new request before it has it."""
    run.engine.silence()
    for _ in range(clients):
        run.engine.submit(100, tokens)


def test_a_push_under_which_no_request_finishes_is_reverted_early() -> None:
    run = on_trial(verify_s=120.0)
    all_clients_wait(run, 8000, 40)
    run.run(5, until=reverted)
    assert run.records[-1].reason is Reason.STALLED and run.setting == BOOT


def test_long_answers_without_a_queue_are_not_a_stall() -> None:
    run = on_trial(verify_s=120.0)
    all_clients_wait(run, 8000, 30)
    run.run(5)
    assert not any(reverted(record) for record in run.records) and run.setting == FITTING


# --- the day's budget --------------------------------------------------------------------------


def test_a_trial_that_spends_the_daily_budget_is_reverted() -> None:
    limits = replace(BOLD, exploration_slo_s_per_day=5.0)
    run = on_trial(limits=limits)
    run.engine.silence()
    run.run(80, until=reverted)  # nothing is measured, and two in a hundred are at risk
    assert run.records[-1].reason is Reason.EXPLORATION_BUDGET and run.setting == BOOT
    assert 5.0 < run.records[-1].spent_slo_s < 5.5
    assert memory_of(run).tried[-1].verdict == "inconclusive" and memory_of(run).trust.failed == 0


# --- the engine's own pace ---------------------------------------------------------------------


def test_slower_steps_at_the_pushed_size_count_against_the_push() -> None:
    """Chunks of about 512 tokens take nearly three times the modelled time; decodes are unchanged."""
    run = rig(proposes(step_tokens=512, gain=0.12), options=options(search_requests=20))
    runner = run.engine.running._loop._runner
    honest = runner.duration_s  # type: ignore[attr-defined]  # the test's own runner

    def awkward(step: StepBatch) -> float:
        tokens = sum(segment.end - segment.start for segment in step.segments)
        return float(honest(step) * (2.8 if 300 <= tokens <= 600 else 1.0))

    runner.duration_s = awkward  # type: ignore[attr-defined]  # as above
    run.run(8, until=pushed)
    run.run_trial()
    assert run.records[-1].reason in (Reason.HARMFUL, Reason.VERDICT_WORSE) and run.setting == BOOT
