"""A block at the engine, and the resume that lifts it: only one requested after that block."""

from typing import Any

import pytest

from rooftune.policies import wire
from rooftune.policies.guard import Reason
from rooftune.tuner.control.outcome import Stage
from rooftune.tuner.control.state import operator
from rooftune.tuner.ports.base import PortError, PortFault
from tests.control.doubles import Rig, options, proposes, rig

NO = wire.RevertRequest(actor="bob", reason="no", block=True)


def out_of_reach(name: str) -> None:
    raise PortError(PortFault.UNREACHABLE, f"{name}: not there")


def made(**more: Any) -> Rig:
    run = rig(proposes(step_tokens=512), options=options(search_requests=20), **more)
    run.run(2)
    return run


def ask(run: Rig, what: Any) -> None:
    what(run.store, "ann", "a reason", 0.0)


def blocked(run: Rig) -> bool:
    return run.engine.running.tuning_state().blocked


def test_a_late_resume_leaves_a_newer_block_in_place() -> None:
    run = made()
    run.port.script = out_of_reach
    ask(run, operator.resume)
    run.run(1)
    run.engine.running.revert(NO)
    run.port.script = None
    run.run(3)
    assert blocked(run) and "resume" not in run.port.calls
    assert run.records[-1].reason is Reason.BLOCKED_AFTER_REVERT and "request it again" in run.records[-1].detail
    ask(run, operator.resume)
    run.run(1)
    assert not blocked(run) and operator.pending(run.store) == (None, None)


def test_a_block_set_during_a_resume_stays() -> None:
    """When the cycle looked, there was nothing to lift."""
    armed: list[Stage] = []

    def after(stage: Stage) -> None:
        if stage in armed:
            armed.clear()
            run.engine.running.revert(NO)

    run = made(after_stage=after)
    ask(run, operator.resume)
    armed.append(Stage.DECIDE)
    run.run(2)
    assert blocked(run) and operator.pending(run.store) == (None, None)


def test_a_revert_requested_during_a_resume_wins() -> None:
    armed: list[Stage] = []

    def after(stage: Stage) -> None:
        if stage in armed:
            armed.clear()
            ask(run, operator.revert)

    run = made(after_stage=after)
    run.engine.running.revert(NO)
    run.run(1)
    ask(run, operator.resume)
    armed.append(Stage.DECIDE)
    run.run(1)
    assert blocked(run)
    run.run(2)
    assert blocked(run) and operator.pending(run.store) == (None, None)


@pytest.mark.parametrize("restart", [False, True])
def test_a_resume_lifts_the_known_block_and_none_of_a_later_boot(restart: bool) -> None:
    run = made()
    run.engine.running.revert(NO)
    run.run(1)
    run.port.script = out_of_reach
    ask(run, operator.resume)
    run.run(1)
    if restart:  # an engine that restarts forgets its block; then another one is set
        run.engine.start()
        run.engine.running.revert(NO)
    run.port.script = None
    run.run(2)
    assert blocked(run) is restart


def both_wait() -> Rig:
    """A revert and then a resume, requested while the engine does not answer."""
    run = made()
    run.port.script = out_of_reach
    ask(run, operator.revert)
    ask(run, operator.resume)
    run.run(1)
    return run


def test_a_pending_revert_and_resume_leave_the_engine_unblocked() -> None:
    run = both_wait()
    run.port.script = None
    run.run(1)
    assert run.records[-1].reason is Reason.BLOCKED_AFTER_REVERT and blocked(run)
    run.run(1)
    assert not blocked(run) and operator.pending(run.store) == (None, None)


def test_a_resume_after_a_pending_revert_does_not_lift_a_block_set_in_between() -> None:
    run = both_wait()
    run.engine.running.revert(NO)
    run.port.script = None
    run.run(3)
    assert blocked(run) and operator.pending(run.store)[0] is None
