"""What a setting carries: the estimate against long replays, and replays that end when their verdict cannot change."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftune.policies.errors import InputError
from rooftune.policies.request import DEADLINE, SHORTEST_FIRST, Boot, Setting
from rooftune.policies.slo import Slo, Target, good
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.search.arena import Arena, patience_s
from rooftune.tuner.search.evaluation import Advice, Case, Role
from rooftune.tuner.search.live import Question, research
from rooftune.tuner.search.load import estimated_rps, grows, horizon, offered_rps, sustainable_rps, work_left
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.twin import Ends, simulate
from rooftune.tuner.traffic.generate import document_mix
from rooftune.tuner.traffic.reshape import period_of, repeat, scale_rate

MODEL = NAMED_MODELS["8b-2tbs"]
ENGINE = Engine(Boot(8192, 16, 1, 1, 0, 1), 37_500, 128)
SLO = Slo((Target("ttft", 2.0, 0.99), Target("gap", 0.03, 0.99)))
TRAFFIC = document_mix(1, 4.0, 120.0, 8, (4_000, 8_000))
CASE = Case(TRAFFIC, ENGINE, MODEL, SLO)
BASE = Setting(2048, max_running=128)
SETTINGS = [
    BASE,
    Setting(256, max_running=128),
    Setting(4096, 256, max_running=64),
    Setting(8192, max_running=8),
    Setting(512, max_running=128, order_policy=DEADLINE, ttft_target_s=2.0, aging_s=30.0),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_estimate_and_bisection_agree_with_a_long_replay(setting: Setting) -> None:
    measured, replays = sustainable_rps(CASE, setting, 600.0)
    assert replays <= 8
    assert estimated_rps(CASE, setting) == pytest.approx(measured, rel=0.15)
    # Ten times as long, to either side: the queue drains below the rate and outgrows every bound above it.
    for factor, growing in ((0.93, False), (1.07, True)):
        case = CASE.at_rate(factor * measured / offered_rps(CASE))
        period_s = period_of(case.traffic)
        end_s = 40 * period_s
        run = simulate(repeat(case.traffic, 40), ENGINE, setting, MODEL, ends=Ends(at_s=end_s))
        gained = work_left(run.outcomes, end_s) - work_left(run.outcomes, end_s / 2.0)
        assert bool(gained > 0.03 * 20 * (TRAFFIC.prompt_tokens + TRAFFIC.output_tokens).sum()) is growing


@settings(max_examples=25, deadline=None)
@given(
    budget=st.integers(128, 8192),
    cap=st.sampled_from([0, 64, 512]),
    running=st.integers(4, 128),
    scales=st.tuples(st.floats(0.2, 4.0), st.floats(0.2, 4.0)),
)
def test_headroom_falls_as_the_rate_rises(budget: int, cap: int, running: int, scales: tuple[float, float]) -> None:
    setting = Setting(budget, cap, max_running=running)
    slow, fast = sorted(scales)
    carried = [estimated_rps(CASE.at_rate(scale), setting) for scale in (slow, fast)]
    assert carried[0] == pytest.approx(carried[1])  # what is carried does not depend on how much is offered
    spare = [rps / offered_rps(CASE.at_rate(scale)) for rps, scale in zip(carried, (slow, fast), strict=True)]
    assert spare[0] >= spare[1] * (1.0 - 1e-9)
    more = setting._replace(step_tokens=min(2 * budget, 8192), max_running=min(2 * running, 128))
    assert estimated_rps(CASE, more) >= 0.9 * estimated_rps(CASE, setting)  # within what the estimate is worth


@settings(max_examples=8, deadline=None)
@given(budget=st.integers(200, 4096), scales=st.tuples(st.floats(0.3, 5.0), st.floats(0.3, 5.0)))
def test_a_queue_that_grows_also_grows_at_a_higher_rate(budget: int, scales: tuple[float, float]) -> None:
    setting, rate = Setting(budget, max_running=128), 1.0
    slow, fast = sorted(scales)
    rate = estimated_rps(CASE, setting) / offered_rps(CASE)
    if abs(slow / rate - 1.0) < 0.08 or fast / slow < 1.02:
        return  # too near to the edge for a replay of ten minutes
    if grows(CASE.at_rate(slow), setting, 600.0):
        assert grows(CASE.at_rate(fast), setting, 600.0)


def test_traffic_without_a_rate_is_refused() -> None:
    at_once = replace(TRAFFIC, arrival_s=np.zeros(len(TRAFFIC)))
    with pytest.raises(InputError, match="all at once"):
        offered_rps(replace(CASE, traffic=at_once))
    # A search on it says nothing of a load.
    asked = {"engine": ENGINE, "model": MODEL, "slo": SLO, "base": BASE, "bounds": {}, "trials": 4}
    assert research(Question(traffic=at_once, **asked)).load is None  # type: ignore[arg-type]  # test shorthand


def test_horizon_repeats_short_traffic_and_cuts_long_one() -> None:
    long, short = horizon(CASE, 600.0).traffic, horizon(CASE, 30.0).traffic
    assert long.span_s >= 590.0 and len(long) % len(TRAFFIC) == 0
    assert short.span_s <= 30.0 and short.arrival_s[0] == 0.0
    assert len(long) / period_of(long) == pytest.approx(offered_rps(CASE))


@pytest.mark.parametrize("order", [0, SHORTEST_FIRST, DEADLINE])
def test_a_replay_until_all_is_decided_has_the_same_good_requests(order: int) -> None:
    case = horizon(CASE.at_rate(4.0), 60.0)
    setting = Setting(512, max_running=128, order_policy=order, ttft_target_s=2.0, aging_s=5.0)
    whole, full = evaluate(case, setting, Role.SEARCH)
    short, early = evaluate(case, setting, Role.SEARCH, Ends(patience_s=patience_s(SLO), decided=True))
    assert short.simulated_steps < 0.8 * whole.simulated_steps
    np.testing.assert_array_equal(good(early.outcomes, SLO), good(full.outcomes, SLO))


def test_a_replay_ends_once_too_many_are_late() -> None:
    arena = Arena(horizon(CASE.at_rate(4.0), 120.0))
    arena.least_share = 0.9
    (given_up,) = arena.run([(BASE, Role.SEARCH)])
    full, _ = evaluate(arena.case, BASE, Role.SEARCH)
    assert given_up.simulated_steps < 0.5 * full.simulated_steps
    assert given_up.attainment <= full.attainment < 0.9


def test_patience_is_the_mildest_bound_of_every_request() -> None:
    assert patience_s(SLO) == 2.0
    assert patience_s(Slo((Target("ttft", 2.0, 0.99), Target("ttft", 1.0, 0.5)))) == 2.0
    assert patience_s(Slo((Target("gap", 0.03, 0.99),))) == np.inf


def find(scale: float, **changes: object) -> object:
    asked: dict[str, object] = {
        "traffic": scale_rate(TRAFFIC, scale), "engine": ENGINE, "model": MODEL, "slo": SLO, "base": BASE, "boot": BASE,
        "bounds": {"step_tokens": (128.0, 8192.0), "chunk_cap_tokens": (16.0, 8192.0)}, "trials": 40,
    }  # fmt: skip
    return research(Question(**{**asked, **changes}))  # type: ignore[arg-type]  # test shorthand


def test_what_is_proposed_carries_the_load_with_headroom() -> None:
    """Small budgets have the calmest gaps; near capacity they carry less than what is offered."""
    carried, _ = sustainable_rps(CASE, BASE, 600.0)
    found = find(0.8 * carried / offered_rps(CASE))
    assert found.verdict is not Advice.KEEP and found.load is not None and not found.load.overload
    scale = 1.15 * found.load.offered_rps / offered_rps(CASE)
    assert not grows(CASE.at_rate(scale), found.best.setting, 600.0)
    assert found.load.proposed.sustainable_rps >= 0.95 * 1.15 * found.load.offered_rps
    assert found.load.in_force.sustainable_rps == pytest.approx(carried, rel=0.05)


def test_overload_is_said_and_the_most_good_requests_are_sought() -> None:
    carried, _ = sustainable_rps(CASE, BASE, 600.0)
    found = find(1.5 * carried / offered_rps(CASE), bounds={"step_tokens": (128.0, 8192.0), "order_policy": (0.0, 2.0)})
    assert found.load.overload and found.load.offered_rps > found.load.boot.sustainable_rps
    assert found.best.attainment > found.now.attainment + 0.3
    assert found.best.setting.order_policy in (SHORTEST_FIRST, DEADLINE)


def test_a_collapsed_setting_does_not_lead_under_overload() -> None:
    """In force serves a third of what others do: whatever its share now, it is not what the search ends with."""
    tiny = Setting(136, max_running=128)
    scale = 1.05 * sustainable_rps(CASE, tiny, 600.0)[0] / offered_rps(CASE)
    found = find(scale, base=tiny, boot=BASE)
    assert found.load.in_force.sustainable_rps < found.load.offered_rps < found.load.boot.sustainable_rps
    assert not found.load.overload and found.best.setting.step_tokens > 136


def test_limited_steps_towards_a_far_proposal_are_looked_at() -> None:
    found = find(1.0, base=Setting(8192, max_running=32), bounds={"step_tokens": (128.0, 512.0)}, largest_ratio=2.0)
    assert [step.step_tokens for step, _ in found.path][:2] == [4096, 2048]
    assert all(0.0 <= share <= 1.0 for _, share in found.path)
    assert find(1.0, largest_ratio=np.inf).path == ()
