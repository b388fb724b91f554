"""What the loop does, on a live engine in this process: real scheduler, real tuning desk, a scripted searcher."""

import json
from dataclasses import replace
from typing import Any

import pytest

from rooftune.policies import wire
from rooftune.policies.guard import Action, GuardLimits, Reason
from rooftune.policies.request import Setting
from rooftune.policies.slo import Condition, Override, Slo, Target
from rooftune.policies.verify import RollbackThresholds
from rooftune.tuner.control.cycle.observe import beyond
from rooftune.tuner.control.job import Job, SearchAnswer, WorkerError, WorkerFault
from rooftune.tuner.control.memory import KEY, Memory, Trust, remember, setting_of
from rooftune.tuner.control.outcome import CycleRecord, Stage
from rooftune.tuner.control.searcher.window import slo_of
from rooftune.tuner.control.signals.codes import Signal
from rooftune.tuner.control.state import operator
from rooftune.tuner.model.drift import Drift
from rooftune.tuner.model.intervals import DRAWS
from tests.control.doubles import BOLD, SLO, MemoryStore, Rig, answer_of, options, proposes, rig
from tests.control.live import BOOT, LiveClock, LiveEngine, Traffic

FITTING = Setting(step_tokens=512, max_running=32)


def pushed(record: CycleRecord) -> bool:
    return record.action is Action.PUSH


def reverted(record: CycleRecord) -> bool:
    return record.action is Action.REVERT


def memory_of(run: Rig) -> Memory:
    return Memory.model_validate_json(run.store.values[KEY])


@pytest.fixture(scope="module")
def better() -> Rig:
    """A run in which the searcher knows the better setting."""
    run = rig(proposes(step_tokens=512, gain=0.2))
    run.run(4, until=pushed)
    run.run_trial()
    run.run(2)
    return run


def test_a_better_setting_is_found_proven_and_kept(better: Rig) -> None:
    push = next(record for record in better.records if pushed(record))
    assert push.pushed == {"step_tokens": 512} and push.reason is Reason.OK
    verdicts = [record.verify for record in better.records if record.verify is not None]
    assert verdicts[-1].verdict == "better" and verdicts[-1].push_cycle == push.number
    assert "worse" not in [v.verdict for v in verdicts] and verdicts[0].verdict == "inconclusive"
    assert verdicts[-1].observed_gain is not None and verdicts[-1].half_width is not None
    assert verdicts[-1].observed_gain > verdicts[-1].half_width > 0.0
    assert better.setting == FITTING
    switches = [r for r in better.records if r.action is Action.SWITCH]
    assert len(better.port.moving) == 1 + len(switches) >= 3
    assert {r.in_force["step_tokens"] for r in switches if r.in_force} == {512, 2048}


def test_the_gain_is_real(better: Rig) -> None:
    first, last = better.records[2].observed, better.records[-1].observed
    assert first is not None and last is not None
    assert (first.attainment or 0.0) < 0.93 < (last.attainment or 0.0)


def test_every_cycle_is_recorded_completely_and_in_order(better: Rig) -> None:
    assert [record.number for record in better.store.records] == list(range(1, len(better.records) + 1))
    for record in better.store.records:
        assert set(record.took_s) == set(Stage)
        assert CycleRecord.model_validate_json(record.model_dump_json(by_alias=True)) == record
        assert "\n" not in record.detail


def test_the_lease_is_held_and_renewed_in_every_cycle(better: Rig) -> None:
    assert all(record.lease_left_s == better.options.lease_s for record in better.records)
    assert better.port.calls.count("push") == len(better.records)
    assert {push.actor for push in better.port.pushes} == {"rooftune/one"}
    assert all(push.reason and len(push.reason) < 200 for push in better.port.pushes)


def test_the_trial_is_recorded_before_the_push(better: Rig) -> None:
    push = next(record for record in better.records if pushed(record))
    assert json.loads(better.store.noted[push.number]) == push.pushed


def test_the_search_gets_other_models_that_the_fit_allows(better: Rig) -> None:
    for job in better.searcher.jobs:
        fit = next(r.fit for r in reversed(better.records) if r.fit and r.fit.coefficients == job.model._asdict())
        names = ("slope_s_per_token", "floor_s")
        drawn = {name for draw in job.draws for name in names if getattr(draw, name) != getattr(job.model, name)}
        assert len(job.draws) == DRAWS and drawn
        for name in drawn:
            low, high = fit.intervals[name]
            assert low is not None and high is not None
            assert all(low <= getattr(draw, name) <= high for draw in job.draws)


def test_the_fits_interval_contains_the_engines_knee(better: Rig) -> None:
    fit = better.records[-1].fit
    assert fit is not None and fit.knee_low_tokens is not None and fit.knee_high_tokens is not None
    assert fit.knee_low_tokens <= 200.0 <= fit.knee_high_tokens


def test_a_correct_prediction_widens_the_trust_region_and_a_wrong_one_halves_it(better: Rig) -> None:
    assert better.records[-1].trust == pytest.approx(48.0)
    liar = rig(proposes(step_tokens=512, gain=0.9))
    liar.run(4, until=pushed)
    liar.run_trial()
    assert liar.records[-1].trust == pytest.approx(16.0)


def test_the_live_trial_reaches_the_next_search(better: Rig) -> None:
    trial = memory_of(better).tried[-1]
    assert trial.verdict == "better" and trial.setting["step_tokens"] == 512
    assert trial.attainment is not None and trial.attainment > 0.9
    # The next search, under similar traffic, gets it.
    run = rig(proposes(step_tokens=512, verdict="keep"), store=better.store)
    run.run(4)
    assert run.searcher.jobs and [one.setting for one in run.searcher.jobs[-1].live] == [setting_of(trial.setting)]


def test_known_traffic_restores_its_setting_at_once(better: Rig) -> None:
    """The engine restarted; before any search has answered, the proven setting is tried again."""
    store = MemoryStore()
    store.values = dict(better.store.values)
    run = rig(proposes(step_tokens=64), store=store, delay=1000)
    run.run(6, until=pushed)
    assert run.records[-1].pushed == {"step_tokens": 512}
    assert "earlier trial" in run.records[-1].detail


def test_proof_with_another_model_does_not_count(better: Rig) -> None:
    store = MemoryStore()
    store.values = dict(better.store.values)
    remember(store, memory_of(better).but(trust=Trust(4.0, failed=3)))
    run = rig(proposes(step_tokens=64), store=store, delay=1000)
    run.port.script = lambda name: (
        run.engine.running.tuning_state().model_copy(update={"model": "another"}) if name == "state" else None
    )
    run.run(6)
    assert not run.port.moving and run.records[-1].reason is Reason.SEARCHING
    assert memory_of(run).tried == () and run.records[-1].trust == 32.0
    assert not run.searcher.jobs[0].live


@pytest.mark.parametrize(("known", "kv_used", "asks"), [(True, 0.95, True), (False, 0.5, True), (False, 0.95, False)])
def test_a_full_pool_of_unknown_size_is_not_simulated(known: bool, kv_used: float, asks: bool) -> None:
    run = rig(proposes(verdict="keep"), options=options(search_requests=20))
    state, steps = run.engine.running.tuning_state, run.port.steps_after

    def silent() -> wire.State:
        seen = state()
        envelope = seen.envelope if known else seen.envelope.model_copy(update={"kv_blocks": None})
        return seen.model_copy(update={"envelope": envelope})

    def filled(after: int) -> wire.StepColumns:
        page = steps(after)
        return page.model_copy(update={"kv_used": tuple(kv_used for _ in page.step)})

    run.engine.running.tuning_state = silent  # type: ignore[method-assign]  # an engine that does not tell
    run.port.steps_after = filled  # type: ignore[method-assign]  # as above
    run.run(3)
    assert bool(run.searcher.jobs) is asks
    assert (run.records[-1].reason is Reason.KV_BOUND) is not asks


@pytest.mark.parametrize("ahead", [False, True])
def test_the_twin_plans_ahead_where_the_engine_does(ahead: bool) -> None:
    run = rig(proposes(verdict="keep"), options=options(search_requests=20))
    state = run.engine.running.tuning_state

    def reported() -> wire.State:
        seen = state()
        return seen.model_copy(update={"envelope": seen.envelope.model_copy(update={"plan_ahead": ahead})})

    assert state().envelope.plan_ahead is False, "our own engine plans a step when the one before it has ended"
    run.engine.running.tuning_state = reported  # type: ignore[method-assign]  # an engine that plans ahead
    run.run(3)
    assert run.searcher.jobs[0].engine.boot.plan_ahead == int(ahead)


@pytest.mark.parametrize(
    ("reported", "keeps"),
    [
        ({}, 1),  # our own engine, always
        ({"engine": "vllm"}, 0),  # the hook leaves vLLM alone until something is pushed
        ({"engine": "vllm", "revision": 3}, 1),
        ({"engine": "vllm", "revision": 4, "notes": ("hook off after a fault in before: KeyError: 1",)}, 0),
        ({"engine": "vllm", "revision": 3, "notes": ("no chunk cap in this version",)}, 1),
    ],
)
def test_the_twin_keeps_decodes_moving_where_the_engine_does(reported: dict[str, Any], keeps: int) -> None:
    run = rig(proposes(verdict="keep"), options=options(search_requests=20, live=False))
    state = run.engine.running.tuning_state
    run.engine.running.tuning_state = lambda: state().model_copy(update=reported)  # type: ignore[method-assign]  # another
    run.run(3)
    assert run.searcher.jobs[0].engine.boot.keep_decodes_moving == keeps


# --- bad proposals -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lied() -> Rig:
    """A searcher that insists on the budget under which every third prompt stops all others."""
    engine = LiveEngine(CROWD, boot=GOOD, options={"ceiling_tokens": 2048})
    run = rig(
        proposes(step_tokens=2048, gain=0.3),
        engine=engine,
        options=options(settle_s=1.0, slo=TIGHT, search_requests=200),
    )
    run.run(30, until=reverted)
    return run


GOOD = Setting(step_tokens=512, max_running=32)
CROWD = Traffic(documents=3, document_tokens=3000)
TIGHT = Slo((Target("ttft", 1.0, 0.99), Target("longest_gap", 0.2, 0.99)))


def test_a_bad_setting_is_reverted_after_its_first_turn(lied: Rig) -> None:
    push, revert = next(r for r in lied.records if pushed(r)), lied.records[-1]
    assert revert.reason is Reason.HARMFUL and revert.number - push.number <= 4
    assert revert.verify is not None and (revert.verify.verdict, revert.verify.reason) == ("inconclusive", "harmful")
    assert not revert.verify.prediction_held
    assert lied.setting == GOOD


def test_our_own_revert_does_not_block_and_the_lease_is_claimed_again(lied: Rig) -> None:
    state = lied.engine.running.tuning_state()
    assert not state.blocked and state.lease is None
    lied.run(1)
    lease = lied.engine.running.tuning_state().lease
    assert lease is not None and lease.actor == "rooftune/one"
    assert lied.setting == GOOD


def test_a_trials_cost_is_booked_and_the_trust_region_shrinks(lied: Rig) -> None:
    memory = memory_of(lied)
    assert sum(spent for _, spent in memory.days) > 0.3
    assert memory.trust.ratio == 16.0 and memory.trust.failed == 1
    assert lied.records[-1].spent_slo_s > 0.0
    assert memory.tried[-1].verdict == "inconclusive"


def test_the_same_bad_proposal_is_not_tried_twice(lied: Rig) -> None:
    run = lied.again()
    run.run(20)
    assert run.searcher.jobs, "it does search again"
    assert not run.port.moving and Reason.NULL_RESULT in [record.reason for record in run.records]


@pytest.mark.parametrize("looks", [0, 1])
def test_a_proposal_is_acted_on_once(looks: int) -> None:
    """Another actor reverts the push; without a new answer of the search it is not repeated."""
    run = rig(proposes(step_tokens=512), options=options(search_requests=20))
    run.run(6, until=pushed)
    run.run(looks)
    run.searcher.delay = 10**6
    run.engine.running.revert(wire.RevertRequest(actor="bob", reason="not now", block=False))
    run.run(5)
    assert len(run.port.moving) == 1 and run.records[-1].reason is Reason.SEARCHING


def test_a_proposal_outside_the_job_is_dropped() -> None:
    run = rig(proposes(step_tokens=512, max_running=4), options=options(search_requests=20))
    run.run(4)
    assert Reason.WORKER_FAILED in [r.reason for r in run.records] and not run.port.moving
    assert "max_running" in "".join(r.detail for r in run.records)


# --- no verdict --------------------------------------------------------------------------------


def test_an_idle_window_judges_nothing() -> None:
    run = rig(proposes(step_tokens=512), options=options(search_requests=20))
    run.run(6, until=pushed)
    run.engine.silence()
    run.run(4)
    last = run.records[-1]
    assert last.verify is not None and last.verify.verdict == "inconclusive"
    assert last.reason is Reason.VERIFYING and last.verify.requests == 0


def test_nothing_to_gain_is_a_good_answer() -> None:
    run = rig(proposes(verdict="keep"), options=options(search_requests=20))
    run.run(5)
    assert run.records[-1].reason is Reason.NULL_RESULT and not run.port.moving
    assert len(run.searcher.jobs) == 1, "no second search before it is due"


def test_if_all_targets_are_met_there_is_no_search() -> None:
    run = rig(proposes(step_tokens=512), engine=LiveEngine(Traffic(documents=0)), options=options(search_requests=20))
    run.run(3)
    assert run.records[-1].reason is Reason.NO_TARGETS_MISSED and not run.searcher.jobs


def test_a_twin_that_is_not_good_is_not_acted_on() -> None:
    run = rig(proposes(step_tokens=512, twin="not_good", verdict="none"), options=options(search_requests=20))
    run.run(4)
    assert run.records[-1].reason is Reason.TWIN_NOT_TRUSTED and not run.port.moving


def ended(job: Job) -> int:
    """Requests of the window that have ended."""
    window = job.window
    produced = window.produced_tokens or window.output_tokens
    return sum(so_far >= whole for so_far, whole in zip(produced, window.output_tokens, strict=True))


def test_a_twin_with_too_few_requests_is_asked_again_as_soon_as_they_are_there() -> None:
    missing = 30

    def reply(job: Job) -> SearchAnswer:
        few = answer_of(job, step_tokens=512, twin="too_few")
        twin = few.twin.model_copy(update={"missing_requests": missing})
        return few.model_copy(update={"twin": twin})

    run = rig(reply, options=options(search_requests=20, search_every_s=100_000.0, window_s=600.0))
    run.run(8, until=lambda record: record.reason is Reason.TWIN_TOO_FEW)
    first, last = run.searcher.jobs[0], run.records[-1]
    assert last.reason is Reason.TWIN_TOO_FEW and not run.port.moving and len(run.searcher.jobs) == 1
    (said,) = {r.detail for r in run.records if "more requests" in r.detail}
    assert f"needs about {missing} more requests than the {ended(first)}" in said
    run.run(20, until=lambda record: len(run.searcher.jobs) > 1)
    assert missing <= ended(run.searcher.jobs[1]) - ended(first) < 3 * missing


def test_an_unknown_gain_or_error_is_never_pushed() -> None:
    for unknown in ({"gain": None}, {"error": None}):
        run = rig(proposes(step_tokens=512, **unknown), options=options(search_requests=20))
        run.run(4)
        assert run.records[-1].reason is Reason.GAIN_UNKNOWN and not run.port.moving


def test_a_gain_within_the_twins_own_error_is_not_worth_a_push() -> None:
    run = rig(proposes(step_tokens=512, gain=0.05, error=-0.06), options=options(search_requests=20))
    run.run(4)
    assert run.records[-1].reason is Reason.WITHIN_NOISE and not run.port.moving


# --- who may push, and when --------------------------------------------------------------------


def test_shadow_mode_reports_what_it_would_push_and_changes_nothing() -> None:
    run = rig(proposes(step_tokens=512), options=options(live=False, search_requests=20))
    run.run(4)
    assert run.records[-1].reason is Reason.SHADOW and run.records[-1].would_push == {"step_tokens": 512}
    assert set(run.port.calls) == {"state", "steps", "requests"}
    assert run.setting == BOOT


def test_live_mode_waits_out_its_shadow_time_without_a_lease() -> None:
    limits = replace(BOLD, min_shadow_s=45.0)
    run = rig(proposes(step_tokens=512), options=options(limits=limits, search_requests=20))
    run.run(8, until=pushed)
    assert Reason.SHADOW_TOO_SHORT in [r.reason for r in run.records]
    early = [r for r in run.records if r.number <= 5]
    assert all(r.lease_left_s is None and r.pushed is None for r in early)
    assert pushed(run.records[-1]) and run.records[-1].number == 6, "four full cycles of observing are 40 s"


def test_of_two_controllers_exactly_one_acts() -> None:
    engine = LiveEngine()
    clock = LiveClock([engine])
    quick = options(search_requests=20)
    first = rig(proposes(step_tokens=512), engine=engine, clock=clock, options=quick)
    second = rig(proposes(step_tokens=1024), engine=engine, clock=clock, store=MemoryStore("two"), options=quick)
    for _ in range(6):
        first.run(1)
        second.records.append(second.controller.cycle())
    assert first.port.moving and not second.port.moving
    assert {r.reason for r in second.records} == {Reason.HELD_BY_OTHER}
    assert engine.running.tuning_state().setting() in (FITTING, BOOT)
    # The first one is killed: its lease ends, and the second one takes over.
    second.run(8)
    assert second.records[-1].lease_left_s is not None
    lease = engine.running.tuning_state().lease
    assert lease is not None and lease.actor == "rooftune/two"


def test_of_two_simultaneous_claims_one_gets_the_lease() -> None:
    engine = LiveEngine()
    clock = LiveClock([engine])
    first = rig(proposes(step_tokens=512), engine=engine, clock=clock)
    second = rig(proposes(step_tokens=1024), engine=engine, clock=clock, store=MemoryStore("two"))
    state = engine.running.tuning_state()
    clock.sleep(10.0)
    first.port.script = second.port.script = lambda name: state if name == "state" else None
    reasons = [first.controller.cycle().reason, second.controller.cycle().reason]
    assert reasons[0] is Reason.TOO_LITTLE_DATA
    assert reasons[1] in (Reason.CONFLICT, Reason.HELD_BY_OTHER)


@pytest.mark.slow
def test_dwell_keeps_pushes_apart() -> None:
    limits = replace(BOLD, dwell_s=100.0)
    turns = iter([512, 700, 700, 700, 700, 700, 700])
    run = rig(
        lambda job: answer_of(job, step_tokens=next(turns), gain=0.3),
        options=options(limits=limits, search_every_s=20.0, search_requests=20),
    )
    run.engine.carry(Traffic(document_tokens=6000, rate_rps=2.5))
    run.run(30, until=lambda r: r.reason is Reason.DWELL or len(run.port.moving) > 1)
    moving = [r for r in run.records if pushed(r)]
    assert len(moving) == 1, "no second push within the dwell time"


def test_the_exploration_budget_stops_trials() -> None:
    limits = replace(BOLD, exploration_slo_s_per_day=0.5)
    run = rig(proposes(step_tokens=512, error=0.04), options=options(limits=limits, search_requests=20))
    run.run(5)
    assert run.records[-1].reason is Reason.EXPLORATION_BUDGET and not run.port.moving


def test_todays_spending_counts_and_tomorrow_starts_at_zero(lied: Rig) -> None:
    spent = sum(amount for _, amount in memory_of(lied).days)
    limits = replace(BOLD, exploration_slo_s_per_day=spent + 0.1)
    store = MemoryStore()
    store.values = dict(lied.store.values)
    given = options(limits=limits, search_requests=20)
    run = rig(proposes(step_tokens=512, error=0.004, noise=0.004), store=store, options=given)
    run.run(5)
    assert run.records[-1].reason is Reason.EXPLORATION_BUDGET
    run.clock.jump(86_400.0)
    run.run(1)
    assert pushed(run.records[-1])


def test_operator_thresholds_override_statistics() -> None:
    thresholds = RollbackThresholds(gap_p99_s=0.05)
    run = rig(proposes(step_tokens=512), options=options(thresholds=thresholds, search_requests=20))
    run.run(7, until=reverted)
    revert = run.records[-1]
    assert revert.reason is Reason.OPERATOR_THRESHOLD
    assert revert.verify is not None and revert.verify.crossed == ("gap_p99_s",)
    assert run.setting == BOOT


def test_a_kept_setting_that_crossed_a_threshold_is_not_restored_as_proven() -> None:
    thresholds = RollbackThresholds(gap_p99_s=0.3)
    run = rig(proposes(step_tokens=512, gain=0.12), options=options(thresholds=thresholds))
    run.run(4, until=pushed)
    run.run_trial()
    assert memory_of(run).tried[-1].verdict == "better"
    run.engine.slow, run.searcher.delay = 4.0, 10**6
    run.run(6, until=reverted)
    assert run.records[-1].reason is Reason.OPERATOR_THRESHOLD and run.setting == BOOT
    run.engine.slow = 1.0
    run.run(12)
    assert not any(map(pushed, run.records[-12:]))
    assert Reason.SEARCHING in [record.reason for record in run.records[-12:]]


def test_a_threshold_that_the_engines_own_setting_crosses_does_not_stop_tuning() -> None:
    thresholds = RollbackThresholds(gap_p99_s=0.3)
    run = rig(proposes(step_tokens=512), options=options(thresholds=thresholds, search_requests=20))
    run.run(8, until=pushed)
    assert pushed(run.records[-1])


def test_maintenance_windows_are_in_the_operators_week() -> None:
    from rooftune.policies.guard import WeekSpan

    always = GuardLimits(**{**BOLD.__dict__, "no_push": (WeekSpan(0, 10_079),)})
    run = rig(proposes(step_tokens=512), options=options(limits=always, search_requests=20))
    run.run(4)
    assert run.records[-1].reason is Reason.MAINTENANCE_WINDOW and not run.port.moving
    assert run.records[-1].lease_left_s is not None, "the lease is still held"


# --- people ------------------------------------------------------------------------------------


def ask(run: Rig, what: Any) -> None:
    what(run.store, "ann", "a reason", 0.0)


def test_a_pause_keeps_what_is_in_force_and_stops_pushes() -> None:
    run = rig(proposes(step_tokens=512), options=options(search_requests=20))
    run.run(2)
    ask(run, operator.pause)
    run.run(3)
    assert run.records[-1].reason is Reason.PAUSED and not run.port.moving
    assert run.records[-1].lease_left_s is not None
    ask(run, operator.resume)
    run.run(2, until=pushed)
    assert pushed(run.records[-1])


@pytest.mark.parametrize(
    ("operation", "reason"), [(operator.pause, Reason.PAUSED), (operator.revert, Reason.BLOCKED_AFTER_REVERT)]
)
def test_a_stop_during_a_cycle_prevents_its_push(operation: Any, reason: Reason) -> None:
    armed: list[bool] = []

    def after(stage: Stage) -> None:
        if armed and stage is Stage.DECIDE:
            ask(run, operation)

    run = rig(proposes(step_tokens=512), options=options(search_requests=20), after_stage=after)
    run.run(2)
    armed.append(True)
    run.run(1)
    assert (run.records[-1].action, run.records[-1].reason) == (Action.HOLD, reason)
    assert not run.port.moving and run.setting == BOOT and memory_of(run).trial is None


def test_a_requested_revert_blocks_until_a_resume() -> None:
    run = rig(proposes(step_tokens=512), options=options(search_requests=20))
    run.run(6, until=pushed)
    ask(run, operator.revert)
    run.run(1)
    assert (run.records[-1].action, run.records[-1].reason) == (Action.REVERT, Reason.BLOCKED_AFTER_REVERT)
    state = run.engine.running.tuning_state()
    assert state.blocked and state.setting() == BOOT
    assert operator.pending(run.store) == (None, None)
    calls = run.port.calls.count("push")
    run.run(2)
    assert run.records[-1].reason is Reason.BLOCKED_AFTER_REVERT and run.port.calls.count("push") == calls
    ask(run, operator.resume)
    run.run(2)
    assert not run.engine.running.tuning_state().blocked
    assert run.records[-1].lease_left_s is not None


def test_a_revert_at_the_engine_is_respected() -> None:
    run = rig(proposes(step_tokens=512), options=options(search_requests=20))
    run.run(6, until=pushed)
    run.engine.running.revert(wire.RevertRequest(actor="bob", reason="no", block=True))
    run.run(2)
    assert {r.reason for r in run.records[-2:]} == {Reason.BLOCKED_AFTER_REVERT}
    assert "no verdict" in run.records[-2].detail and memory_of(run).trial is None


def test_a_deploy_stops_pushes() -> None:
    going = [True]
    run = rig(proposes(step_tokens=512), options=options(search_requests=20), deploying=lambda: going[0])
    run.run(4)
    assert run.records[-1].reason is Reason.DEPLOY and not run.port.moving
    going[0] = False
    run.run(1)
    assert pushed(run.records[-1])


def test_a_clean_exit_returns_the_lease() -> None:
    run = rig(proposes(step_tokens=512), options=options(search_requests=20))
    run.run(6, until=pushed)
    assert "boot setting" in run.controller.stop()
    state = run.engine.running.tuning_state()
    assert state.lease is None and not state.blocked and state.setting() == BOOT
    assert "no lease of ours" in run.controller.stop()


@pytest.mark.parametrize("bounds", [{"step_tokens": (1024.0, 4096.0)}, {"chunk_cap_tokens": (0.0, 4096.0)}])
@pytest.mark.parametrize("proven", [False, True])
def test_a_setting_of_an_earlier_run_outside_the_present_bounds_is_not_kept(
    proven: bool, bounds: dict[str, tuple[float, float]]
) -> None:
    """The controller was killed under a push, and restarts with other bounds before the lease expires."""
    run = rig(proposes(step_tokens=512, gain=0.12))
    run.run(4, until=pushed)
    if proven:
        run.run_trial()
    assert run.setting == FITTING and (memory_of(run).kept is not None) is proven
    after = rig(
        proposes(verdict="keep"),
        engine=run.engine,
        clock=run.clock,
        store=run.store,
        options=options(search_requests=20, bounds=bounds),
    )
    after.run(1)
    assert (after.records[-1].action, after.records[-1].reason) == (Action.REVERT, Reason.FOUND_FOREIGN)
    assert after.setting == BOOT and "step_tokens" in after.records[-1].detail
    after.run(3)
    assert after.setting == BOOT and after.records[-1].lease_left_s is not None


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        ({"step_tokens": 1024}, []),  # on the way from the boot setting into the bounds
        ({"step_tokens": 100}, ["step_tokens"]),
        ({"step_tokens": 4096}, ["step_tokens"]),
        ({"chunk_cap_tokens": 8192}, []),  # none is the boot setting
        ({"chunk_cap_tokens": 32}, ["chunk_cap_tokens"]),
        ({"max_running": 16}, ["max_running"]),
        ({"order_policy": 1, "aging_s": 5.0}, ["order_policy"]),
    ],
)
def test_the_operators_bounds_extend_to_the_path_from_the_boot_setting(
    changes: dict[str, float], wrong: list[str]
) -> None:
    bounds = {"step_tokens": (256.0, 512.0), "chunk_cap_tokens": (64.0, 256.0)}
    assert beyond(BOOT._replace(**changes), BOOT, bounds) == wrong  # type: ignore[arg-type]  # as in a record


# --- traffic -----------------------------------------------------------------------------------


def test_a_traffic_shift_starts_a_search_at_once() -> None:
    run = rig(proposes(verdict="keep"), options=options(search_every_s=100_000.0, window_s=40.0, search_requests=20))
    run.run(4)
    assert len(run.searcher.jobs) == 1
    run.engine.carry(Traffic(rate_rps=4.0, prompt_tokens=600, documents=6))
    run.run(6)
    assert len(run.searcher.jobs) >= 2


def test_an_answer_about_past_traffic_is_dropped_and_requested_again() -> None:
    quick = options(search_requests=20, window_s=40.0)
    run = rig(proposes(step_tokens=512), options=quick, delay=5)
    run.run(6, until=lambda record: bool(run.searcher.jobs))
    run.engine.carry(Traffic(rate_rps=6.0, prompt_tokens=800, documents=6, document_tokens=2000))
    run.run(6, until=lambda record: record.proposal is not None)
    assert run.records[-1].proposal is not None and run.records[-1].reason is Reason.SEARCHING
    assert not run.port.moving and len(run.searcher.jobs) == 2


def test_a_proposal_by_a_model_that_drifted_is_not_pushed_after_the_refit() -> None:
    """A deploy held the proposal back; then the engine's timing changed."""
    going = [True]
    run = rig(proposes(step_tokens=512), options=options(search_requests=20), deploying=lambda: going[0])
    run.run(4, until=lambda record: record.proposal is not None)
    learner = run.controller._observer._learner
    learner.drift, learner._fitted_at_steps = Drift(2.0, 3, True), 0  # as ``Learner.take`` does it
    jobs_before, run.searcher.delay, going[0] = len(run.searcher.jobs), 10**6, False
    run.run(2)
    assert learner.drift is None and len(run.searcher.jobs) == jobs_before + 1
    assert not run.port.moving and run.records[-1].reason is Reason.SEARCHING


def test_the_search_gets_targets_that_apply_to_some_requests_only() -> None:
    slo = Slo(SLO.targets, (Override(Condition(min_prompt_tokens=2000), (Target("ttft", 20.0, 0.99),)),))
    run = rig(proposes(verdict="keep"), options=options(slo=slo, search_requests=20))
    run.run(2)
    assert slo_of(run.searcher.jobs[0]) == slo


def test_a_failing_child_is_reported_and_retried_when_due() -> None:
    replies = iter([WorkerError(WorkerFault.DIED, "gone"), None])

    def reply(job: Job) -> SearchAnswer | WorkerError:
        found = next(replies)
        return answer_of(job, step_tokens=512) if found is None else found

    run = rig(reply, options=options(search_requests=20, search_every_s=20.0))
    run.run(8, until=pushed)
    failed = [r for r in run.records if r.reason is Reason.WORKER_FAILED]
    assert failed and "died" in failed[0].detail
    assert all(r.lease_left_s is not None for r in run.records)
    assert pushed(run.records[-1])


def test_a_child_that_does_not_start_is_not_retried_in_every_cycle() -> None:
    run = rig(proposes(step_tokens=512), options=options(search_requests=20, search_every_s=60.0))
    tries: list[int] = []

    def refused(job: Job) -> bool:
        tries.append(run.records[-1].number if run.records else 0)
        raise WorkerError(WorkerFault.DIED, "the child process does not start")

    run.searcher.ask = refused  # type: ignore[method-assign]  # scripted
    run.run(9)
    assert Reason.WORKER_FAILED in [record.reason for record in run.records]
    assert 1 <= len(tries) <= 2, "when it is due"


@pytest.mark.slow
def test_a_refit_after_a_drift_restores_the_search_region() -> None:
    """The failures were those of the model that has been replaced."""
    store = MemoryStore()
    remember(store, Memory().but(trust=Trust(4.0, failed=3)))
    run = rig(proposes(verdict="keep"), store=store)
    run.run(110)  # the alarm learns what is usual from thousands of steps
    assert run.records[-1].trust == 4.0
    run.engine.slow = 1.6
    run.run(40, until=lambda record: record.trust != 4.0)
    assert run.records[-1].trust == 32.0
    assert Signal.STEP_MODEL_DRIFTED.value in [signal.code for signal in run.records[-2].signals]


def test_a_push_that_no_window_could_judge_is_not_searched_for() -> None:
    """One request in ten seconds: a minute never sees the 40 that a verdict needs. Shadow mode may still propose."""
    slow, given = Traffic(rate_rps=0.1, documents=2), options(search_requests=10, window_s=600.0)
    live = rig(proposes(step_tokens=512, gain=0.12), engine=LiveEngine(slow), options=given)
    live.run(40)
    assert not live.searcher.jobs and live.records[-1].reason is Reason.TOO_LITTLE_DATA
    assert "lengthen cadence.verify_s" in live.records[-1].detail
    shadow = rig(proposes(step_tokens=512), engine=LiveEngine(slow), options=replace(given, live=False))
    shadow.run(40)
    assert shadow.searcher.jobs and "verify_s" not in shadow.records[-1].detail
