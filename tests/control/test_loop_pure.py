"""The loop's pure parts: trust region, exploration account, lessons of trials, push requests."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rooftune.policies import wire
from rooftune.policies.envelope import Envelope, KnobBound, Mode, canonical, full_bounds
from rooftune.policies.errors import InputError
from rooftune.policies.guard import Action, Decision, Reason
from rooftune.policies.request import DEADLINE, FIXED_BUDGET, PRESSURE, SHORTEST_FIRST, STEP_TIME_TARGET, Setting
from rooftune.policies.slo import Condition, Override, Slo, Target
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.clock import ManualClock
from rooftune.tuner.control.cycle.degradation import measured_cost_slo_s, predicted_cost_slo_s
from rooftune.tuner.control.cycle.draft import Draft
from rooftune.tuner.control.cycle.learned import near, proven, refuted, still_valid, without_effect
from rooftune.tuner.control.cycle.observe import Seen, overdue
from rooftune.tuner.control.cycle.propose import draws_of, effective, searched
from rooftune.tuner.control.cycle.push import push_request
from rooftune.tuner.control.figures import judgeable
from rooftune.tuner.control.memory import (
    LEAST_RATIO,
    MOST_RATIO,
    Kept,
    Memory,
    Traffic,
    Tried,
    Trust,
    alike,
    knobs_of,
    recall,
    region,
    remember,
    traffic_of,
)
from rooftune.tuner.model.intervals import DRAWS
from rooftune.tuner.observe.protocol import ProtocolReader
from rooftune.tuner.observe.rows import RequestRows
from rooftune.tuner.observe.window import Window
from tests.control.cycle_records import fit
from tests.control.doubles import MemoryStore
from tests.control.live import Traffic as LiveTraffic
from tests.observe.fake_port import FakePort

BOOT = Setting(step_tokens=2048, max_running=64)
ENVELOPE = Envelope((KnobBound("step_tokens", 1, 8192), KnobBound("chunk_cap_tokens", 0, 8192)))
ANY = {"step_tokens": (1.0, math.inf), "chunk_cap_tokens": (0.0, math.inf)}


# --- trust region ------------------------------------------------------------------------------


def test_trust_grows_when_predictions_hold_and_shrinks_faster_when_they_fail() -> None:
    trust = Trust(8.0)
    assert trust.after(True).ratio == pytest.approx(12.0)
    assert trust.after(False).ratio == pytest.approx(4.0)
    assert trust.after(True).after(False).ratio < trust.ratio


@given(st.lists(st.booleans(), max_size=60))
def test_trust_stays_inside_its_bounds(outcomes: list[bool]) -> None:
    trust = Trust()
    for held in outcomes:
        trust = trust.after(held)
        assert LEAST_RATIO <= trust.ratio <= MOST_RATIO


def test_the_region_is_the_intersection_of_envelope_operator_and_trust() -> None:
    found = region(BOOT, ENVELOPE, {"step_tokens": (600.0, 9999.0)}, Trust(2.0))
    assert found == {"step_tokens": (1024.0, 4096.0)}
    assert region(BOOT, ENVELOPE, {"step_tokens": (600.0, 9999.0)}, Trust(8.0)) == {"step_tokens": (600.0, 8192.0)}


def test_a_chunk_cap_of_none_counts_as_the_budget() -> None:
    assert region(BOOT, ENVELOPE, ANY, Trust(4.0))["chunk_cap_tokens"] == (512.0, 8192.0)


def test_knobs_that_are_absent_need_a_restart_or_showed_no_effect_are_not_searched() -> None:
    envelope = Envelope((KnobBound("step_tokens", 1, 8192), KnobBound("max_running", 1, 64, Mode.RESTART)))
    bounds = ANY | {"max_running": (1.0, 64.0)}
    assert set(region(BOOT, envelope, bounds, Trust())) == {"step_tokens"}
    assert set(region(BOOT, ENVELOPE, ANY, Trust(), without={"chunk_cap_tokens"})) == {"step_tokens"}


@given(st.integers(1, 8192), st.integers(0, 8192), st.floats(LEAST_RATIO, MOST_RATIO))
def test_the_setting_in_force_lies_inside_the_region(budget: int, cap: int, ratio: float) -> None:
    in_force = BOOT._replace(step_tokens=budget, chunk_cap_tokens=cap)
    low, high = region(in_force, ENVELOPE, ANY, Trust(ratio)).get("step_tokens", (budget, budget))
    assert low <= budget <= high


def test_an_unserialisable_part_is_left_out_of_the_record() -> None:
    draft = Draft(ManualClock(), 7, "live", "test", lambda stage: None)
    draft.put(in_force={"step_tokens": -3}, revision=4, lease_left_s=math.nan)
    record = draft.record(Decision(Action.REVERT, Reason.VERDICT_WORSE, detail="why"))
    assert (record.action, record.reason, record.revision) == (Action.REVERT, Reason.VERDICT_WORSE, 4)
    assert record.in_force is None and record.lease_left_s is None
    assert record.detail == "why; left out as invalid: in_force, lease_left_s"


# --- exploration -------------------------------------------------------------------------------


def test_a_trial_is_predicted_to_cost_what_the_twins_own_error_puts_at_risk() -> None:
    assert predicted_cost_slo_s(0.9, 0.05, 100.0) == pytest.approx(5.0)
    assert predicted_cost_slo_s(0.02, 0.05, 100.0) == pytest.approx(2.0), "at most the share that is good now"
    assert predicted_cost_slo_s(math.nan, math.nan, 100.0) == 100.0, "an unknown gain counts as total loss"


def test_only_a_loss_costs() -> None:
    assert measured_cost_slo_s(0.2, 50.0) == 0.0
    assert measured_cost_slo_s(-0.2, 50.0) == pytest.approx(10.0)
    assert measured_cost_slo_s(math.nan, 50.0) == 0.0


def test_the_account_is_by_day_and_survives_a_clock_that_jumps_back() -> None:
    account = Memory().with_spent("2026-03-01", 30.0).with_spent("2027-08-09", 5.0).with_spent("2026-03-01", 10.0)
    assert account.spent_slo_s("2026-03-01") == 40.0
    assert account.spent_slo_s("2026-03-02") == 0.0
    for day in range(20):
        account = account.with_spent(f"2030-01-{day + 1:02d}", 1.0).with_spent("2026-03-01", 0.0)
    assert account.spent_slo_s("2026-03-01") == 40.0 and len(account.days) <= 4


def test_a_nan_account_is_refused() -> None:
    with pytest.raises(ValidationError):
        Memory(days=(("2026-03-01", math.nan),))


# --- waiting requests --------------------------------------------------------------------------


def window(*arrivals: float, waiting: int = 0, tells: bool = True, **columns: float) -> Window:
    """At 100 s, with these arrivals in flight."""
    port = FakePort(now_s=100.0 - 0.01)
    for at_s in arrivals:
        port.flies(arrival_s=at_s, **columns)
    if not tells:
        port.flights = None
    port.step(waiting=waiting, running=1)
    return Window(60.0).add(ProtocolReader(port).read(flights=True))


def test_requests_that_wait_beyond_the_bound_are_overdue() -> None:
    """Where the engine tells no more than their number."""
    slo = Slo((Target("ttft", 2.0, 0.9),))
    many, few = window(waiting=50, tells=False), window(waiting=5, tells=False)
    assert overdue(many, slo, 2.0, 4.0, 0.0) == 42.0
    assert overdue(few, slo, 2.0, 4.0, 0.0) == overdue(many, slo, 2.0, math.nan, 0.0) == 0.0
    assert overdue(many, slo, math.inf, 4.0, 0.0) == 0.0


def test_where_the_requests_in_flight_are_known_exactly_those_of_the_block_are_overdue() -> None:
    slo = Slo((Target("ttft", 2.0, 0.9),))
    waits = window(80.0, 95.0, 97.0, 98.5, 99.0, waiting=5)
    assert overdue(waits, slo, 2.0, 4.0, 0.0) == 3.0
    assert overdue(waits, slo, 2.0, 4.0, 90.0, 97.0) == 1.0, "the block of one arrival"
    assert overdue(waits, slo, math.inf, 4.0, 0.0) == 0.0
    late = window(90.0, 95.0, scheduled_s=96.0, first_token_s=96.5, last_token_s=96.5, output_tokens=1)
    assert overdue(late, slo, 2.0, 4.0, 0.0) == 1.0, "its first token came too late"
    assert overdue(late, Slo((Target("queue", 2.0, 0.9),)), 2.0, 4.0, 0.0) == 1.0
    assert overdue(late, Slo((Target("gap", 0.1, 0.9),)), 2.0, 4.0, 0.0) == 0.0, "no target on the wait"
    assert overdue(waits, Slo((Target("gap", 0.1, 0.9),)), 2.0, 4.0, 0.0) == 3.0, "but nothing came yet"


# --- what trials teach -------------------------------------------------------------------------

CALM = Traffic(
    requests=400,
    rate_rps=2.0,
    prompt_p50_tokens=300.0,
    prompt_mean_tokens=700.0,
    prompt_spread=1.8,
    output_p50_tokens=50.0,
)
RUSH = CALM.model_copy(update={"rate_rps": 9.0})


def tried(verdict: str = "worse", traffic: Traffic = CALM, **changes: Any) -> Tried:
    knobs: dict[str, int] = changes.pop("knobs", {"step_tokens": 512})
    values: dict[str, Any] = {
        "before": knobs_of(BOOT),
        "setting": knobs_of(BOOT._replace(**knobs)),
        "traffic": traffic,
        "verdict": verdict,
        "predicted_gain": 0.3,
        "observed_gain": -0.2,
        "half_width": 0.05,
        "attainment": 0.5,
        "goodput_rps": 1.0,
        "requests": 100,
        "predicted_attainment": 0.9,
        "wall_s": 0.0,
    }
    return Tried(**(values | changes))


def test_a_failed_setting_is_not_retried_under_similar_traffic() -> None:
    wanted = BOOT._replace(step_tokens=520)
    assert refuted(wanted, [tried()], CALM)
    assert refuted(wanted, [tried("inconclusive")], CALM)
    assert not refuted(wanted, [tried("better")], CALM)
    assert not refuted(wanted, [tried()], RUSH)
    assert not refuted(BOOT._replace(step_tokens=1024), [tried()], CALM)
    assert not refuted(wanted, [tried(), tried("better")], CALM), "the latest counts"


def test_an_inconclusive_trial_blocks_a_retry_for_a_day_and_a_loss_for_good() -> None:
    wanted = BOOT._replace(step_tokens=520)
    for verdict, days, stands in (("inconclusive", 0.9, True), ("inconclusive", 1.1, False), ("worse", 400.0, True)):
        assert refuted(wanted, still_valid([tried(verdict)], days * 86_400.0), CALM) is stands
    assert len(still_valid([tried("inconclusive")], -1e9)) == 0, "a clock set back does not prolong it"


def test_a_proven_setting_is_restored_for_its_traffic_and_boot() -> None:
    found = proven(BOOT, [tried("better", observed_gain=0.2)], CALM)
    assert found is not None and found.setting["step_tokens"] == 512
    assert proven(BOOT, [tried("better")], RUSH) is None
    assert proven(BOOT._replace(step_tokens=1024), [tried("better")], CALM) is None
    assert proven(BOOT, [tried("better"), tried("worse")], CALM) is None


@pytest.mark.parametrize("place", ["tried", "kept"])
def test_a_memory_with_knobs_of_another_release_starts_over(place: str) -> None:
    strange = knobs_of(BOOT) | {"warp_factor": 9}
    kept = Kept(boot_id="b", setting=strange, push_cycle=1)
    other = tried().model_copy(update={"before": strange})
    memory = Memory(shadow_s=5.0, kept=kept) if place == "kept" else Memory(shadow_s=5.0, tried=(tried(), other))
    store = MemoryStore()
    remember(store, memory)
    assert recall(store) == Memory()
    for wrong in ({"trust_ratio": 1e6}, {"days": (("2030-01-01", -1.0),)}):
        remember(store, Memory(shadow_s=5.0).model_copy(update=wrong))
        assert recall(store) == Memory()
    remember(store, Memory(shadow_s=5.0, tried=(tried(),), kept=kept.model_copy(update={"setting": knobs_of(BOOT)})))
    assert recall(store).shadow_s == 5.0


def test_near_settings_count_as_one_and_switches_never_do() -> None:
    assert near(BOOT, BOOT._replace(step_tokens=2100))
    assert not near(BOOT, BOOT._replace(step_tokens=4096))
    assert not near(BOOT, BOOT._replace(order_policy=DEADLINE))
    assert not near(BOOT, BOOT._replace(chunk_cap_tokens=2000))


def test_a_knob_needs_several_trials_without_effect_to_be_dropped_and_one_effect_clears_it() -> None:
    silent = tried("inconclusive", knobs={"chunk_cap_tokens": 256}, observed_gain=0.01, half_width=0.05)
    assert without_effect([silent], CALM) == frozenset()
    assert without_effect([silent, silent], CALM) == {"chunk_cap_tokens"}
    assert without_effect([silent, silent], RUSH) == frozenset()
    loud = tried("worse", knobs={"chunk_cap_tokens": 512}, observed_gain=-0.3, half_width=0.05)
    assert without_effect([silent, silent, loud], CALM) == frozenset()
    both = tried("inconclusive", knobs={"chunk_cap_tokens": 256, "step_tokens": 512}, observed_gain=0.0)
    assert without_effect([both, both], CALM) == frozenset(), "two knobs at once show nothing about either"


def test_windows_match_only_for_the_same_traffic() -> None:
    def window(seed: int, documents: int, rate_rps: float, requests: int = 60) -> Traffic:
        source = LiveTraffic(rate_rps=rate_rps, documents=documents).requests(seed)
        rows = [next(source) for _ in range(requests)]
        found = traffic_of(replace(RequestRows.from_wire(), **columns(rows)), rows[-1][0])
        assert found is not None
        return found

    same = [alike(window(seed, 8, 2.0), window(100 + seed, 8, 2.0)) for seed in range(60)]
    assert sum(same) >= 57
    assert not any(alike(window(seed, 8, 2.0), window(seed, 8, 6.0)) for seed in range(20))
    other = [alike(window(seed, 0, 2.0, 300), window(seed, 2, 2.0, 300)) for seed in range(20)]
    assert not any(other)


def columns(rows: list[tuple[float, int, int]]) -> dict[str, Any]:
    """Request rows of arrivals alone."""
    arrival_s, prompts, outputs = (np.array(column) for column in zip(*rows, strict=True))
    nothing = np.zeros(len(rows))
    names = ("scheduled_s", "ttft_s", "finish_s", "longest_gap_s")
    counts = ("sequence", "cached_tokens", "gap_count", "preemptions", "ended")
    filled = dict.fromkeys(names, nothing) | dict.fromkeys(counts, nothing.astype(np.int64))
    over = np.zeros((len(rows), 0), dtype=np.int64)
    return filled | {"arrival_s": arrival_s, "prompt_tokens": prompts, "output_tokens": outputs, "gap_over": over}


# --- pushes and targets ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "after",
    [
        BOOT,
        BOOT._replace(step_tokens=512, chunk_cap_tokens=128, adaptive_chunk_cap=1, max_running=8),
        BOOT._replace(budget_policy=STEP_TIME_TARGET, budget_target_s=0.03, budget_floor_tokens=16),
        BOOT._replace(budget_policy=PRESSURE, pressure_tokens=256, pressure_prefills=1),
        BOOT._replace(order_policy=SHORTEST_FIRST, aging_s=4.0),
        BOOT._replace(order_policy=DEADLINE, ttft_target_s=2.0, prefill_s_per_token=1e-4),
    ],
)
def test_a_push_names_exactly_what_differs(after: Setting) -> None:
    model = NAMED_MODELS["8b-2tbs"]
    request = push_request(BOOT, after, lease_s=30.0, revision=3, actor="a", why="b", model=model)
    sent = wire.parse(wire.PushRequest, request.model_dump_json().encode()).to_push()
    assert BOOT._replace(**sent.changes) == after  # type: ignore[arg-type]  # names are knobs
    assert (after.budget_policy == STEP_TIME_TARGET) == (sent.step_model == model)
    assert sent.changes.get("budget_policy", FIXED_BUDGET) == after.budget_policy


def test_the_way_back_from_a_policy_is_a_push_too() -> None:
    model = NAMED_MODELS["8b-2tbs"]
    tuned = BOOT._replace(budget_policy=PRESSURE, pressure_tokens=256, order_policy=SHORTEST_FIRST)
    sent = push_request(tuned, BOOT, lease_s=30.0, revision=3, actor="a", why="b", model=model).to_push()
    assert sent.changes["budget_policy"] == FIXED_BUDGET and sent.changes["order_policy"] == 0


def test_equivalent_settings_count_as_one() -> None:
    left_over = BOOT._replace(pressure_tokens=256, budget_target_s=0.03, ttft_target_s=2.0, aging_s=3.0)
    assert canonical(left_over) == BOOT
    for used in (
        BOOT._replace(budget_policy=PRESSURE, pressure_tokens=256),
        BOOT._replace(budget_policy=STEP_TIME_TARGET, budget_target_s=0.03),
        BOOT._replace(order_policy=SHORTEST_FIRST, aging_s=3.0),
        BOOT._replace(order_policy=DEADLINE, aging_s=3.0, ttft_target_s=2.0, prefill_s_per_token=1e-5),
    ):
        assert canonical(used) == used


def test_a_value_that_the_protocol_cannot_carry_is_an_input_error() -> None:
    with pytest.raises(InputError):
        push_request(BOOT, BOOT._replace(step_tokens=0), lease_s=30.0, revision=0, actor="a", why="b")


def test_a_step_time_policy_is_always_sent_with_its_constants() -> None:
    """Constants of 0 would mean that no step ever takes too long."""
    wanted = BOOT._replace(budget_policy=STEP_TIME_TARGET, budget_target_s=0.03)
    with pytest.raises(InputError, match="step model"):
        push_request(BOOT, wanted, lease_s=30.0, revision=0, actor="a", why="b")
    assert push_request(wanted, wanted, lease_s=30.0, revision=0, actor="a", why="b").budget_policy is None, "a renewal"


def test_gap_targets_at_bounds_that_the_engine_does_not_count_are_judged_by_the_longest_gap() -> None:
    slo = Slo(
        (Target("gap", 0.05, 0.99), Target("gap", 0.07, 0.95), Target("ttft", 2.0, 0.99)),
        (Override(Condition(min_prompt_tokens=8000), (Target("gap", 0.09, 0.99),)),),
    )
    seen = judgeable(slo, (0.05, 0.1))
    assert [(t.metric, t.bound_s) for t in seen.targets] == [("gap", 0.05), ("longest_gap", 0.07), ("ttft", 2.0)]
    assert seen.overrides[0].targets[0].metric == "longest_gap"
    both = judgeable(Slo((Target("gap", 0.05, 0.99), Target("longest_gap", 0.2, 0.99))), ())
    assert [(t.metric, t.bound_s) for t in both.targets] == [("longest_gap", 0.05)], "the tighter of two stays"


@pytest.mark.parametrize(("shown", "taken"), [(None, 512), (600, 512), (256, 256), (24, 32)])
def test_an_observed_budget_is_used_but_never_below_the_sequence_cap(shown: int | None, taken: int) -> None:
    """A twin cannot run 32 requests in steps of 24 tokens; an engine that seems to holds some of them back."""
    seen = cast(Seen, SimpleNamespace(ceiling_tokens=shown, setting=Setting(step_tokens=512, max_running=32)))
    assert effective(seen).step_tokens == taken


@pytest.mark.parametrize("known", [True, False])
def test_an_engine_that_lacks_the_knobs_of_the_aged_is_searched_with_what_it_does(known: bool) -> None:
    names = {"step_tokens", "order_policy", "aging_s"} | ({"aged_share", "wait_tokens_per_s"} if known else set())
    envelope = Envelope(tuple(bound for bound in full_bounds(8192, 64) if bound.name in names))
    seen = cast(Seen, SimpleNamespace(ceiling_tokens=None, setting=BOOT, envelope=envelope))
    bounds = searched(seen, {"step_tokens": (1.0, 8192.0), "order_policy": (0.0, 2.0)}, Trust(), ())
    fixed = {} if known else {"aged_share": (1.0, 1.0), "wait_tokens_per_s": (0.0, 0.0)}
    assert {name: bounds[name] for name in bounds if name in ("aged_share", "wait_tokens_per_s")} == fixed
    assert "order_policy" in bounds


def test_the_draws_of_a_fit_lie_within_its_intervals_and_an_open_one_moves_nothing() -> None:
    model = NAMED_MODELS["8b-2tbs"]
    known: dict[str, Any] = {"slope_s_per_token": (3e-5, 5e-5), "kv_s_per_token": (0.0, None)}
    draws = draws_of(fit(coefficients=model._asdict(), intervals=known), seed=3)
    assert len(draws) == DRAWS and len(set(draws)) == DRAWS
    assert all(3e-5 <= draw.slope_s_per_token <= 5e-5 for draw in draws)
    for draw in draws:
        assert tuple(draw._replace(slope_s_per_token=4e-5)) == pytest.approx(tuple(model), rel=1e-12)
    assert draws == draws_of(fit(coefficients=model._asdict(), intervals=known), seed=3)
    assert draws_of(fit(coefficients=model._asdict()), seed=3) == ()  # a record of an earlier release
