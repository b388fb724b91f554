"""What a trial costs, and what ends it, where the comparison of two windows says nothing or too little."""

import pytest

from policies import wire
from tests.control.doubles import Rig, options, proposes, rig
from tests.control.test_loop import FITTING, memory_of, pushed

QUICK = options(search_requests=20)


def on_trial() -> Rig:
    """The better setting has just been pushed."""
    run = rig(proposes(step_tokens=512, gain=0.12), options=QUICK)
    run.run(8, until=pushed)
    return run


# --- exploration -------------------------------------------------------------------------------


def test_a_trial_that_nobody_could_judge_costs_what_was_at_risk_as_long_as_it_lasted() -> None:
    run = on_trial()
    run.engine.slow = 1.5  # another engine than before the push: nothing can be compared
    run.run(4)
    trial = memory_of(run).trial
    assert trial is not None and run.records[-1].verify is not None
    assert run.records[-1].verify.reason == "no_matched_traffic"
    lasted_s = run.engine.running.tuning_state().now_s - trial.began_s
    assert lasted_s > 30.0
    assert run.records[-1].spent_slo_s == pytest.approx(trial.twin_error * lasted_s, rel=0.05)
    run.engine.running.revert(wire.RevertRequest(actor="bob", reason="no", block=False))
    run.run(1)
    assert sum(spent for _, spent in memory_of(run).days) == run.records[-2].spent_slo_s


def test_what_was_measured_takes_the_place_of_what_was_at_risk() -> None:
    run = on_trial()
    run.run(6, until=lambda record: record.verify is not None and record.verify.verdict == "better")
    assert run.setting == FITTING and run.records[-1].spent_slo_s == 0.0
