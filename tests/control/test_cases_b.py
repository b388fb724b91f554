"""Cases B of docs/cases.md and those of C about the controller: records in, action and reason out."""

from dataclasses import replace

import pytest

from rooftune.policies import wire
from rooftune.policies.guard import Action, Reason
from rooftune.policies.slo import Slo, Target
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.signals.codes import Signal
from rooftune.tuner.control.state import operator
from rooftune.tuner.observe.protocol import ProtocolReader
from tests.control.doubles import BOLD, Rig, options, proposes, rig
from tests.control.live import BOOT, LiveEngine, Traffic
from tests.observe.fake_port import FakePort

QUICK = options(search_requests=20, search_every_s=20.0)


def codes(record: CycleRecord) -> set[str]:
    return {part.code for part in record.signals}


# --- 23 ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full() -> Rig:
    """Answers of hundreds of tokens on a pool that holds four of them."""
    traffic = Traffic(rate_rps=2.0, prompt_tokens=200, output_tokens=300, documents=0)
    engine = LiveEngine(traffic, kv_blocks=110, options={"reserve_whole_prompt": True})
    run = rig(proposes(step_tokens=512, gain=0.4), engine=engine, options=QUICK)
    run.run(8)
    return run


def test_case_23_kv_full_and_preempting_is_kv_bound_and_no_budget_is_moved(full: Rig) -> None:
    assert not full.port.moving
    assert full.records[-1].reason is Reason.KV_BOUND and full.records[-1].action is Action.HOLD
    assert Signal.KV_BOUND.value in codes(full.records[-1])
    assert full.records[-1].lease_left_s is not None, "what is in force stays"


def test_case_23_throughput_that_does_not_recover_is_an_alarm(full: Rig) -> None:
    """The load has dropped, the pace of the remaining requests has not recovered: tuning waits for an operator."""
    full.engine.slow = 4.0
    full.engine.abort_some(1.0)
    full.engine.carry(Traffic(rate_rps=0.3, prompt_tokens=200, output_tokens=60, documents=0))
    full.run(25, until=lambda r: Signal.THROUGHPUT_NOT_RECOVERED.value in codes(r))
    assert Signal.THROUGHPUT_NOT_RECOVERED.value in codes(full.records[-1])
    full.run(2)
    assert full.records[-1].action is Action.HOLD and not full.port.moving
    assert full.records[-1].reason in (Reason.FROZEN_BY_SIGNAL, Reason.KV_BOUND)


# --- 25 ----------------------------------------------------------------------------------------


def test_case_25_a_request_that_never_fits_is_a_stall_and_nothing_is_tuned() -> None:
    """One waits, is admitted, is preempted, and again; preemptions climb and nothing ends."""
    port = FakePort()
    run = rig(proposes(step_tokens=512), options=options(live=False, search_requests=1))
    run.controller._observer._reader = ProtocolReader(port)
    for cycle in range(3):
        for _ in range(30):
            port.step(
                prefill_tokens=500, decode_tokens=0, prefills=1, running=1, waiting=1, preemptions=1, kv_used=0.99
            )
        run.run(1)
        record = run.records[-1]
        assert (record.action, record.reason) == (Action.HOLD, Reason.STALLED), cycle
        assert Signal.STALLED.value in codes(record)
    assert not run.searcher.jobs


@pytest.mark.parametrize("meanwhile", ["nothing", "pause", "deploy"])
def test_case_25_a_push_under_which_the_engine_stalls_is_reverted(meanwhile: str) -> None:
    going: list[bool] = []
    run = rig(proposes(step_tokens=512), options=QUICK, deploying=lambda: bool(going))
    run.run(6, until=lambda r: r.action is Action.PUSH)
    if meanwhile == "pause":
        operator.pause(run.store, "ann", "lunch", 0.0)
    going += [True] * (meanwhile == "deploy")
    honest = run.port.steps_after

    def starving(after: int):  # type: ignore[no-untyped-def]  # a port's method, scripted
        page = honest(after)
        ones = tuple(1 for _ in page.step)
        return page.model_copy(update={"preemptions": ones, "waiting": ones})

    run.port.steps_after = starving  # type: ignore[method-assign]  # the rows of a scheduler that gets nowhere
    ended = run.port.requests_after
    run.port.requests_after = lambda after: _none_of(ended(after))  # type: ignore[method-assign]  # none ends
    run.controller._observer._window = run.controller._observer._window.fresh()
    run.run(3, until=lambda r: r.action is Action.REVERT)
    assert (run.records[-1].action, run.records[-1].reason) == (Action.REVERT, Reason.STALLED)
    assert run.setting == BOOT


def _none_of(page: wire.RequestColumns) -> wire.RequestColumns:
    empty = {name: () for name, value in page if isinstance(value, tuple) and name not in ("gap_bounds_s", "gap_over")}
    return page.model_copy(update=empty | {"gap_over": tuple(() for _ in page.gap_bounds_s), "next": page.after})


# --- 28 ----------------------------------------------------------------------------------------


def test_case_28_an_abort_storm_is_no_verdict_on_a_setting() -> None:
    run = rig(proposes(step_tokens=512), options=QUICK)
    run.run(2)
    hang_up = [True]

    def storm(engine: LiveEngine) -> None:
        if hang_up[0] and engine.running.snapshot().step % 3 == 0:
            engine.abort_some(0.3)

    run.engine.after_step = storm
    run.run(3)
    assert run.records[-1].reason is Reason.ABORT_STORM and not run.port.moving
    hang_up[0] = False
    run.run(16, until=lambda r: r.action is Action.PUSH)
    assert run.records[-1].action is Action.PUSH, "and when it is over, tuning continues"
    hang_up[0] = True
    run.run(3, until=lambda r: r.action is Action.REVERT)
    verify, memory = run.records[-1].verify, run.controller._book.memory
    assert verify is not None and (verify.verdict, verify.reason) == ("inconclusive", "not_measured")
    assert (run.records[-1].action, run.records[-1].reason) == (Action.REVERT, Reason.ABORT_STORM)
    assert run.setting == BOOT, "the push may be the cause, so it is reverted, long before half an hour"
    assert memory.tried[-1].verdict == "inconclusive" and memory.trust.failed == 0


# --- 38 ----------------------------------------------------------------------------------------


def test_case_38_an_engine_that_dies_under_a_push_does_not_count_against_the_push() -> None:
    run = rig(proposes(step_tokens=512), options=QUICK)
    run.run(6, until=lambda r: r.action is Action.PUSH)
    run.engine.start()
    run.run(1)
    assert run.records[-1].reason is Reason.ENGINE_RESTARTED
    assert run.controller._book.memory.tried == () and run.controller._book.memory.trust.failed == 0
    run.run(8, until=lambda r: r.action is Action.PUSH)
    assert run.records[-1].pushed == {"step_tokens": 512}


# --- errors ------------------------------------------------------------------------------------


def test_requests_that_fail_more_than_before_end_a_push_and_stop_new_ones() -> None:
    limits = replace(BOLD, max_inconclusive_s=600.0)
    slo = Slo((Target("ttft", 3.0, 0.99), Target("longest_gap", 0.3, 0.99)))
    run = rig(proposes(step_tokens=512), options=options(search_requests=20, limits=limits, slo=slo))
    run.run(6, until=lambda r: r.action is Action.PUSH)
    honest = run.port.requests_after

    def failing(after: int):  # type: ignore[no-untyped-def]  # a port's method, scripted
        page = honest(after)
        return page.model_copy(
            update={"ended": tuple("failed" if n % 3 == 0 else word for n, word in enumerate(page.ended))}
        )

    run.port.requests_after = failing  # type: ignore[method-assign]  # a third of all fail from now on
    run.run(3, until=lambda r: r.action is Action.REVERT)
    assert run.records[-1].action is Action.REVERT
    assert run.records[-1].reason in (Reason.ERRORS_RISING, Reason.VERDICT_WORSE)
    run.run(2)
    assert run.records[-1].reason is Reason.ERRORS_RISING and run.setting == BOOT
