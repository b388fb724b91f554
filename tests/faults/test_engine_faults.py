"""Engine faults: each ends in hold or revert, and nothing is lost for good."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rooftune.policies import wire
from rooftune.policies.guard import Action, Reason
from rooftune.policies.request import Setting
from rooftune.tuner.control.memory import KEY, Memory
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.state import operator
from rooftune.tuner.control.state.file import StoreError, StoreFault
from rooftune.tuner.ports.base import PortError, PortFault
from tests.control.doubles import BOLD, Rig, options, proposes, rig
from tests.control.live import BOOT, LiveEngine

pytestmark = pytest.mark.slow

QUICK = options(search_requests=20)
FITTING = BOOT._replace(step_tokens=512)
REASONS = {
    PortFault.UNREACHABLE: Reason.UNREACHABLE,
    PortFault.TIMEOUT: Reason.UNREACHABLE,
    PortFault.SERVER_ERROR: Reason.UNREACHABLE,
    PortFault.UNAUTHORIZED: Reason.UNAUTHORIZED,
    PortFault.READ_ONLY: Reason.REFUSED,
    PortFault.NO_PROTOCOL: Reason.NO_PROTOCOL,
    PortFault.PROTOCOL_MISMATCH: Reason.NO_PROTOCOL,
    PortFault.GARBAGE: Reason.GARBAGE,
}


def pushed(record: CycleRecord) -> bool:
    return record.action is Action.PUSH


def failing(fault: PortFault, *calls: str) -> Callable[[str], object]:
    def script(name: str) -> object:
        if name in calls:
            raise PortError(fault, f"{name} failed on purpose\nwith two lines")
        return None

    return script


def on_trial(**more: Any) -> Rig:
    """A rig whose push is in force and not judged yet."""
    run = rig(proposes(step_tokens=512), options=more.pop("options", QUICK), **more)
    run.run(8, until=pushed)
    assert run.setting == FITTING
    return run


def test_every_fault_has_a_reason() -> None:
    assert set(REASONS) == set(PortFault)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("fault", list(PortFault))
@pytest.mark.parametrize("call", ["state", pytest.param("steps", marks=SLOW), pytest.param("requests", marks=SLOW)])
def test_a_read_that_fails_holds_and_says_why(fault: PortFault, call: str) -> None:
    run = rig(proposes(step_tokens=512), options=QUICK)
    run.port.script = failing(fault, call)
    run.run(1)
    record = run.records[0]
    assert (record.action, record.reason) == (Action.HOLD, REASONS[fault])
    assert "on purpose" in record.detail and "\n" not in record.detail
    assert "push" not in run.port.calls
    run.port.script = None
    run.run(1)
    assert run.records[-1].observed is not None and run.records[-1].observed.requests > 20, "no row was lost"


@pytest.mark.parametrize("fault", [PortFault.UNREACHABLE, pytest.param(PortFault.UNAUTHORIZED, marks=SLOW)])
def test_a_failed_read_renews_nothing_and_the_lease_ends(fault: PortFault) -> None:
    run = on_trial()
    run.port.script = failing(fault, "state")
    run.run(5)
    assert run.setting == BOOT
    run.port.script = None
    run.run(2)
    assert "no verdict" in run.records[-2].detail
    assert run.records[-1].lease_left_s is not None, "and it goes on"


@pytest.mark.parametrize("fault", [PortFault.TIMEOUT, PortFault.UNAUTHORIZED, PortFault.READ_ONLY])
def test_a_renewal_that_fails_is_the_reason_of_the_cycle(fault: PortFault) -> None:
    run = rig(proposes(step_tokens=512), options=QUICK)
    run.port.script = failing(fault, "push")
    run.run(1)
    assert (run.records[0].action, run.records[0].reason) == (Action.HOLD, REASONS[fault])


@pytest.mark.parametrize("call", ["requests", "state"])
def test_a_requested_revert_is_done_although_reads_fail(call: str) -> None:
    run = on_trial()
    run.port.script = failing(PortFault.GARBAGE, call)
    operator.revert(run.store, "ann", "a bad night", 0.0)
    run.run(1)
    record = run.records[-1]
    assert (record.action, record.reason) == (Action.REVERT, Reason.BLOCKED_AFTER_REVERT)
    assert "on purpose" in record.detail and "ann" in record.detail
    assert run.setting == BOOT and run.engine.running.tuning_state().blocked
    reverts = run.port.calls.count("revert")
    run.run(1)
    assert (run.records[-1].action, run.records[-1].reason) == (Action.HOLD, Reason.GARBAGE)
    assert run.port.calls.count("revert") == reverts, "once"
    run.port.script = None
    run.run(1)
    memory = Memory.model_validate_json(run.store.values[KEY])
    assert run.records[-1].reason is Reason.BLOCKED_AFTER_REVERT and memory.trial is None


def test_a_requested_revert_is_retried_until_the_engine_answers() -> None:
    run = on_trial()
    run.port.script = failing(PortFault.UNREACHABLE, "state", "revert")
    operator.revert(run.store, "ann", "a bad night", 0.0)
    run.run(1)
    assert (run.records[-1].action, run.records[-1].reason) == (Action.HOLD, Reason.UNREACHABLE)
    assert "was not done" in run.records[-1].detail and run.setting == FITTING
    run.port.script = None
    run.run(1)
    assert (run.records[-1].action, run.records[-1].reason) == (Action.REVERT, Reason.BLOCKED_AFTER_REVERT)


def test_a_push_whose_answer_was_lost_is_recognised() -> None:
    run = rig(proposes(step_tokens=512, gain=0.12), options=QUICK)
    honest, lost_push = run.port.push, list[wire.PushRequest]()

    def lose_once(request: wire.PushRequest) -> wire.PushAnswer | wire.Refusal:
        answer = honest(request)
        if lost_push or not request.knobs.step_tokens:
            return answer
        lost_push.append(request)
        raise PortError(PortFault.TIMEOUT, "no answer in time")

    run.port.push = lose_once  # type: ignore[method-assign]  # scripted
    run.run(8, until=lambda record: record.reason is Reason.UNREACHABLE)
    lost = run.records[-1]
    assert lost.action is Action.HOLD and lost.pushed is None and run.setting == FITTING
    run.run_trial()
    verify = run.records[-1].verify
    assert verify is not None and (verify.verdict, verify.push_cycle) == ("better", lost.number)
    assert run.setting == FITTING


def test_a_push_that_never_arrived_is_not_in_force() -> None:
    run = rig(proposes(step_tokens=512), options=QUICK)
    run.run(2)
    honest, lost = run.port.push, []

    def lose_once(request: wire.PushRequest) -> wire.PushAnswer | wire.Refusal:
        if request.knobs.step_tokens and not lost:
            lost.append(request)
            raise PortError(PortFault.UNREACHABLE, "gone")
        return honest(request)

    run.port.push = lose_once  # type: ignore[method-assign]  # scripted
    run.run(3, until=lambda record: record.reason is Reason.UNREACHABLE)
    assert run.setting == BOOT
    run.run(2, until=pushed)
    assert "no verdict" in run.records[-2].detail + run.records[-1].detail
    assert run.setting == FITTING


def budgets_since(run: Rig) -> set[int]:
    """Budgets of the steps that the loop assigns to the setting in force."""
    observer = run.controller._observer
    steps = observer._window.steps
    return set(steps.budget_tokens[steps.start_s >= observer._since_s].tolist())


def test_a_trial_that_ended_unobserved_is_not_taken_for_the_previous_setting() -> None:
    going: list[bool] = []
    run = on_trial(deploying=lambda: bool(going))
    going.append(True)  # so that it is not pushed again at once
    run.port.script = failing(PortFault.UNREACHABLE, "state")
    run.run(6)
    run.port.script = None
    run.run(1)
    assert run.setting == BOOT and "no verdict" in run.records[-1].detail
    assert budgets_since(run) == {BOOT.step_tokens}


def test_another_actors_unobserved_push_is_not_taken_for_the_setting_in_force() -> None:
    run = rig(proposes(verdict="keep"), options=QUICK)
    run.run(3)
    run.port.script = failing(PortFault.UNAUTHORIZED, "state")
    run.run(5)
    revision = run.engine.running.tuning_state().revision
    theirs = wire.PushRequest(
        knobs=wire.Knobs(step_tokens=300), lease_s=25.0, expected_revision=revision, actor="bob", reason="tries"
    )
    assert isinstance(run.engine.running.push(theirs), wire.PushAnswer)
    run.run(4)
    run.port.script = None
    run.run(2)
    assert run.setting == BOOT and budgets_since(run) == {BOOT.step_tokens}


def test_a_lease_that_ended_at_the_boot_setting_costs_no_rows() -> None:
    run = rig(proposes(verdict="keep"), options=QUICK)
    run.run(3)
    run.port.script = failing(PortFault.UNREACHABLE, "state")
    run.run(6)
    run.port.script = None
    run.run(1)
    assert run.controller._observer._since_s == -math.inf and run.records[-1].lease_left_s is not None


def test_a_failed_revert_is_retried_until_it_succeeds() -> None:
    limits = replace(BOLD, max_inconclusive_s=15.0)
    run = on_trial(options=options(search_requests=20, limits=limits, min_requests=100))
    run.port.script = failing(PortFault.TIMEOUT, "revert")
    run.run(2)
    assert run.records[-1].reason is Reason.UNREACHABLE and run.setting == FITTING
    assert "not taken back" in run.records[-1].detail
    run.port.script = None
    run.run(1)
    assert (run.records[-1].action, run.records[-1].reason) == (Action.REVERT, Reason.INCONCLUSIVE_TOO_LONG)
    assert run.setting == BOOT


def test_a_revert_whose_answer_was_lost_keeps_its_verdict() -> None:
    """The engine reverted but its answer was lost: the reverted setting is not tried again."""
    limits = replace(BOLD, max_inconclusive_s=15.0)
    run = on_trial(options=options(search_requests=20, limits=limits, min_requests=100))
    honest = run.port.revert

    def lost(request: wire.RevertRequest) -> wire.PushAnswer | wire.Refusal:
        honest(request)
        raise PortError(PortFault.TIMEOUT, "no answer")

    run.port.revert = lost  # type: ignore[method-assign]  # scripted
    run.run(4, until=lambda record: run.setting == BOOT)
    assert run.records[-1].action is Action.HOLD and "not taken back" in run.records[-1].detail
    run.port.revert = honest  # type: ignore[method-assign]  # scripted
    run.run(6)
    memory = Memory.model_validate_json(run.store.values[KEY])
    assert [one.verdict for one in memory.tried] == ["inconclusive"] and memory.trial is None
    assert len(run.port.moving) == 1 and Reason.NULL_RESULT in [record.reason for record in run.records]
    run.clock.jump(90_000.0)
    run.run(8, until=pushed)
    assert pushed(run.records[-1]), "a day later it is worth another trial"


# --- refusals ----------------------------------------------------------------------------------


def refusing(code: str) -> Callable[[str], object]:
    """Every push is refused with this code."""

    def script(name: str) -> object:
        return wire.Refusal(code=code, revision=7, message="no") if name == "push" else None  # type: ignore[arg-type]  # a literal

    return script


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("conflict_revision", Reason.CONFLICT),
        ("outside_envelope", Reason.REFUSED),
        pytest.param("held_by_other", Reason.HELD_BY_OTHER, marks=SLOW),
        pytest.param("blocked_by_revert", Reason.BLOCKED_AFTER_REVERT, marks=SLOW),
        pytest.param("lease_length", Reason.REFUSED, marks=SLOW),
        pytest.param("needs_step_model", Reason.REFUSED, marks=SLOW),
        pytest.param("malformed", Reason.REFUSED, marks=SLOW),
        pytest.param("clock_unreadable", Reason.REFUSED, marks=SLOW),
    ],
)
def test_a_refused_push_changes_nothing_and_starts_no_trial(code: str, reason: Reason) -> None:
    run = rig(proposes(step_tokens=512), options=QUICK)
    run.run(2)
    run.port.script = refusing(code)
    run.run(2)
    assert run.records[-1].reason is reason and run.records[-1].pushed is None
    assert run.setting == BOOT and run.records[-1].verify is None
    run.port.script = None
    run.run(3, until=pushed)
    assert pushed(run.records[-1]), "the next cycle reads again and decides again"


def test_a_revision_that_moves_between_reading_and_pushing_is_a_conflict() -> None:
    run = rig(proposes(step_tokens=512), options=QUICK)
    run.run(2)

    def meddle(name: str) -> object:
        if name == "push":
            run.port.script = None
            run.engine.running.revert(wire.RevertRequest(actor="bob", reason="looks", block=False))
        return None

    run.port.script = meddle
    run.run(1)
    assert (run.records[-1].action, run.records[-1].reason) == (Action.HOLD, Reason.CONFLICT)
    run.run(2, until=pushed)
    assert run.setting == FITTING


# --- restarts, hangs, overruns -----------------------------------------------------------------


def test_an_engine_restarted_with_other_boot_values_starts_over() -> None:
    run = on_trial()
    run.engine.boot = Setting(step_tokens=1900, max_running=16)
    run.engine.start()
    run.run(1)
    record = run.records[-1]
    assert (record.action, record.reason) == (Action.HOLD, Reason.ENGINE_RESTARTED)
    assert record.in_force is not None and record.in_force["step_tokens"] == 1900
    assert "no verdict" in record.detail
    run.run(8, until=pushed)
    assert run.setting == Setting(step_tokens=512, max_running=16)
    assert run.searcher.jobs[-1].base.step_tokens == 1900
    assert run.searcher.jobs[-1].engine.sequence_ceiling == 16


def test_a_killed_engine_is_waited_for_until_it_returns() -> None:
    run = on_trial()
    run.port.script = failing(PortFault.UNREACHABLE, "state", "steps", "requests", "push", "revert")
    run.run(3)
    assert {r.reason for r in run.records[-3:]} == {Reason.UNREACHABLE}
    run.engine.start()
    run.port.script = None
    run.run(1)
    assert run.records[-1].reason is Reason.ENGINE_RESTARTED
    run.run(8, until=pushed)
    assert run.setting == FITTING


def test_a_controller_that_sees_nothing_does_not_renew_on_a_hung_engine() -> None:
    run = on_trial()
    run.engine.hung = True
    run.run(8)
    assert run.records[-1].action is Action.HOLD
    assert Reason.METRICS_STALE in [r.reason for r in run.records]
    assert run.setting == BOOT and run.records[-1].lease_left_s is None


def test_an_engine_that_slows_tenfold_in_a_trial_proves_nothing() -> None:
    """Both settings have their turns on the slow engine, so neither is to blame."""
    run = on_trial()
    run.engine.slow = 10.0
    run.run_trial()
    assert (run.records[-1].action, run.records[-1].reason) == (Action.REVERT, Reason.INCONCLUSIVE)
    assert run.setting == BOOT


def test_rows_that_were_overwritten_are_counted_and_the_rest_is_used() -> None:
    run = rig(proposes(step_tokens=512), engine=LiveEngine(ring_rows=100), options=QUICK)
    run.run(8, until=pushed)
    assert sum(r.lost_steps for r in run.records) > 0
    assert pushed(run.records[-1])


def test_nonsense_rows_are_discarded() -> None:
    run = rig(proposes(step_tokens=512), options=QUICK)
    run.run(1)
    honest = run.port.requests_after

    def before_their_arrival(after: int) -> wire.RequestColumns:
        page = honest(after)
        return page.model_copy(update={"finish_s": tuple(0.0 for _ in page.finish_s)})

    run.port.requests_after = before_their_arrival  # type: ignore[method-assign]  # scripted
    run.run(1)
    assert (run.records[-1].action, run.records[-1].reason) == (Action.HOLD, Reason.GARBAGE)
    run.port.requests_after = honest  # type: ignore[method-assign]  # scripted
    run.run(5, until=pushed)
    assert pushed(run.records[-1])


@pytest.mark.parametrize("late_s", [0.0, 50.0])
def test_a_first_token_at_the_last_is_valid_and_after_it_is_not(late_s: float) -> None:
    """All tokens in one step: the difference of the two instants may round to slightly below 0."""
    run = rig(proposes(step_tokens=512), options=QUICK)
    honest = run.port.requests_after

    def at_the_end(after: int) -> wire.RequestColumns:
        page = honest(after)
        ends = zip(page.finish_s, page.arrival_s, strict=True)
        ttft_s = [math.nextafter((end or 0.0) - begin, math.inf) + late_s for end, begin in ends]
        return page.model_copy(update={"ttft_s": tuple(ttft_s)})

    run.port.requests_after = at_the_end  # type: ignore[method-assign]  # scripted
    run.run(2)
    assert [r.reason is Reason.GARBAGE for r in run.records] == [late_s > 0.0] * 2
    if not late_s:
        assert run.records[-1].observed is not None and run.records[-1].observed.tpot_p95_s == 0.0


@pytest.mark.parametrize("live", [True, False])
def test_a_negative_knob_makes_the_state_invalid(live: bool) -> None:
    run = rig(proposes(step_tokens=512), options=replace(QUICK, live=live))
    whole = run.engine.running.tuning_state()
    knobs = (k.model_copy(update={"value": -1}) if k.name == "chunk_cap_tokens" else k for k in whole.knobs)
    below = whole.model_copy(update={"knobs": tuple(knobs)})
    run.port.script = lambda name: below if name == "state" else None
    run.run(1)
    assert (run.records[0].action, run.records[0].reason) == (Action.HOLD, Reason.GARBAGE)
    assert "chunk_cap_tokens" in run.records[0].detail and "revert" not in run.port.calls


def test_a_verdict_ignores_requests_from_before_discarded_rows() -> None:
    """Its quicker neighbours are gone: the rest would look slow."""
    run = on_trial()
    honest = run.port.requests_after
    run.run(3)

    def before_their_arrival(after: int) -> wire.RequestColumns:
        page = honest(after)
        return page.model_copy(update={"finish_s": tuple(0.0 for _ in page.finish_s)})

    run.port.requests_after = before_their_arrival  # type: ignore[method-assign]  # scripted
    run.run(1)
    assert run.records[-1].reason is Reason.GARBAGE
    run.port.requests_after = honest  # type: ignore[method-assign]  # scripted
    for _ in range(2):
        run.run(1)
        verify, window = run.records[-1].verify, run.controller._observer._window
        later = window.requests_since(window.complete_from_s)
        assert verify is not None and verify.requests <= len(later) < len(window.requests)


def test_after_discarded_rows_only_later_arrivals_are_complete() -> None:
    """Otherwise the next window would hold earlier long requests without their short neighbours."""
    run = rig(proposes(step_tokens=512), options=QUICK)
    run.run(1)
    whole = run.engine.running.tuning_state()
    nameless = whole.model_copy(update={"knobs": tuple(k for k in whole.knobs if k.name != "step_tokens")})
    run.port.script = lambda name: nameless if name == "state" else None
    run.run(1)
    assert run.records[-1].reason is Reason.GARBAGE
    forgotten_s = nameless.now_s
    run.port.script = None
    run.run(4, until=lambda record: bool(run.searcher.jobs))
    window = run.controller._observer._window
    assert window.complete_from_s >= forgotten_s and window.steps_from_s >= forgotten_s
    assert window.demand().arrival_s.min() >= forgotten_s


def test_a_search_about_the_previous_engine_is_dropped_even_if_its_restart_went_unread() -> None:
    """The cycle that saw the restart failed for another reason: the state file was locked at that moment."""
    run = rig(proposes(step_tokens=512), options=QUICK, delay=4)
    run.run(6, until=lambda record: bool(run.searcher.jobs))
    run.engine.start()
    run.store.broken = StoreError(StoreFault.LOCKED, "locked on purpose")
    number = run.store.next_number
    run.store.next_number = lambda: 99  # type: ignore[method-assign]  # scripted: locked a moment later
    run.run(1)
    assert run.records[-1].reason is Reason.STORE_FAILED
    run.store.broken, run.store.next_number = None, number  # type: ignore[method-assign]  # as it was
    jobs_before = len(run.searcher.jobs)
    run.run(6, until=pushed)
    assert len(run.searcher.jobs) > jobs_before, "this engine had its own search before the push"


def test_steps_of_two_boots_are_never_mixed_even_if_the_first_state_was_invalid() -> None:
    run = rig(proposes(verdict="keep"), options=QUICK)
    run.run(6)
    before = len(run.controller._observer._learner.samples())
    run.engine.start()
    whole = run.engine.running.tuning_state()
    nameless = whole.model_copy(update={"knobs": tuple(k for k in whole.knobs if k.name != "step_tokens")})
    run.port.script = lambda name: nameless if name == "state" else None
    run.run(1)
    assert run.records[-1].reason is Reason.GARBAGE
    run.port.script = None
    run.run(1)
    assert 0 < len(run.controller._observer._learner.samples()) < before / 2


def test_a_state_without_a_token_budget_cannot_be_tuned() -> None:
    run = rig(proposes(step_tokens=512), options=QUICK)
    whole = run.engine.running.tuning_state()
    nameless = whole.model_copy(update={"knobs": tuple(k for k in whole.knobs if k.name != "step_tokens")})
    run.port.script = lambda name: nameless if name == "state" else None
    run.run(1)
    assert (run.records[0].action, run.records[0].reason) == (Action.HOLD, Reason.GARBAGE)
    assert "step_tokens" in run.records[0].detail


# --- clocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "jump_s",
    [86_400.0, pytest.param(-86_400.0, marks=SLOW), pytest.param(-3e9, marks=SLOW), pytest.param(1e15, marks=SLOW)],
)
def test_a_wall_clock_jump_changes_only_the_date(jump_s: float) -> None:
    straight, jumped = (rig(proposes(step_tokens=512), options=QUICK) for _ in range(2))
    straight.run(3)
    jumped.run(3)
    jumped.clock.jump(jump_s)
    straight.run(4)
    jumped.run(4)
    assert [(r.action, r.reason) for r in jumped.records] == [(r.action, r.reason) for r in straight.records]
    assert jumped.setting == straight.setting


def test_a_trial_is_timed_by_the_engines_clock() -> None:
    """The controller's own clock stood still meanwhile (a machine that slept): a turn ends with the engine's time."""
    run = on_trial()
    run.engine.advance(25.0)
    run.run(1)
    assert run.records[-1].action is Action.SWITCH, "its first cycle, and the turn of 30 s is over"
