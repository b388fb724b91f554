"""The child process may die, hang or answer nonsense: the controller holds, reports it, and the setting stays."""

import os
import signal
import time

import pytest

from rooftune.policies.guard import Action, Reason
from rooftune.tuner.control.job import Job, Limits, SearchAnswer, WorkerError, WorkerFault
from rooftune.tuner.control.searcher.worker import ChildSearcher
from tests.control.doubles import Rig, answer_of, options, proposes, rig

QUICK = options(search_requests=20, search_every_s=30.0)


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=() if f is WorkerFault.DIED else pytest.mark.slow) for f in WorkerFault]
)
def test_a_child_that_fails_changes_nothing_in_force(fault: WorkerFault) -> None:
    failing = [True]

    def reply(job: Job) -> SearchAnswer | WorkerError:
        return WorkerError(fault, "on\npurpose") if failing[0] else answer_of(job, step_tokens=512)

    run = rig(reply, options=QUICK)
    run.run(4)
    record = run.records[-1]
    assert (record.action, record.reason) == (Action.HOLD, Reason.WORKER_FAILED)
    failed = [r for r in run.records if fault.value in r.detail]
    assert failed and "\n" not in failed[0].detail
    assert record.lease_left_s is not None and not run.port.moving
    failing[0] = False
    run.run(5, until=lambda r: r.action is Action.PUSH)
    assert run.records[-1].action is Action.PUSH, "it gets a new job when one is due"


def with_child(searcher: ChildSearcher) -> Rig:
    made = rig(proposes(), options=QUICK)
    again = rig(proposes(), options=QUICK, engine=made.engine, clock=made.clock)
    again.controller._planner._searcher = searcher
    return again


def wait_for(run: Rig, searcher: ChildSearcher, reason: Reason) -> None:
    until_s = time.monotonic() + 120.0
    while run.records[-1].reason is not reason and time.monotonic() < until_s:
        time.sleep(0.2)
        run.run(1)


@pytest.mark.slow
def test_a_killed_child_is_reported_and_restarted() -> None:
    searcher = ChildSearcher(Limits(timeout_s=120.0))
    try:
        run = with_child(searcher)
        run.run(3, until=lambda r: searcher.child_pid is not None)
        assert searcher.child_pid is not None and run.records[-1].reason is Reason.SEARCHING
        os.kill(searcher.child_pid, signal.SIGKILL)
        wait_for(run, searcher, Reason.WORKER_FAILED)
        assert "died" in " ".join(r.detail for r in run.records) and run.records[-1].lease_left_s is not None
        run.run(4)
        assert searcher.child_pid is not None, "a new one works on the next search"
    finally:
        searcher.close()


@pytest.mark.slow
def test_a_child_out_of_memory_is_reported() -> None:
    searcher = ChildSearcher(Limits(timeout_s=120.0, memory_bytes=60 << 20))
    try:
        run = with_child(searcher)
        run.run(3)
        wait_for(run, searcher, Reason.WORKER_FAILED)
        assert run.records[-1].action is Action.HOLD and not run.port.moving
        assert any(word in " ".join(r.detail for r in run.records) for word in ("out_of_memory", "died"))
    finally:
        searcher.close()
