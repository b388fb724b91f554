"""The twin's judge: good twins pass, wrong ones do not, small windows are reported; constants are recovered."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.policies.outcomes import Outcomes
from rooftune.policies.request import Boot, Setting
from rooftune.policies.slo import Slo, Target
from rooftune.policies.step_time import NAMED_MODELS, StepCost, StepModel, step_cost
from rooftune.tuner.sim.calibrate import (
    SHARE,
    SHOWN,
    Calibration,
    Fidelity,
    Quality,
    blocked_error,
    calibrate,
)
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.noise import StepNoise
from rooftune.tuner.traffic.generate import Poisson, generate, named_mix
from rooftune.tuner.traffic.workload import Traffic
from tests.bench.outside import Outside, RequestStamps, StepStamps, learn_outside, predict, with_host_time

MODEL = NAMED_MODELS["8b-2tbs"]
ENGINE = Engine(Boot(4_096, 16, chunking=1, reserve_whole_prompt=1, contents=0, keep_decodes_moving=1), 50_000, 64)
SETTING = Setting(1_024, max_running=64)
ROUGH = StepNoise(np.zeros(0), np.exp(0.05 * np.random.default_rng(0).normal(size=(1, 4_096))))


def traffic(seconds: float, seed: int = 1) -> Traffic:
    return generate(Poisson(3.0), named_mix("chat"), seconds, seed=seed)


def outcomes(of: Traffic, factor: float = 1.0, outside: Outside | None = None) -> Outcomes:
    """A run whose steps take ``factor`` times as long as the model says."""
    noise = ROUGH._replace(factors=factor * ROUGH.factors)
    return predict(of, ENGINE, SETTING, MODEL, outside or Outside(), noise)


def row(found: Calibration, metric: str, quantile: float) -> tuple[float, Fidelity]:
    (match,) = (each for each in found.rows if each.metric == metric and each.quantile == quantile)
    return match.error, match.verdict


def worst_error(found: Calibration) -> float:
    """Largest absolute relative error of the judged quantiles; NaN when none was judged."""
    return max((abs(each.error) for each in found.rows if each.verdict is not Fidelity.TOO_FEW), default=np.nan)


def test_a_good_twin_may_act() -> None:
    window = traffic(400.0)
    found = calibrate([outcomes(window)], outcomes(window, 1.05))
    assert found.verdict is Fidelity.GOOD and found.rows[0].samples == len(window)
    assert 0.0 < worst_error(found) < 0.25
    # A clock that runs 5 % slow: the time per token is 5 % too short.
    assert row(found, "tpot", 0.5)[0] == pytest.approx(1.0 / 1.05 - 1.0, abs=0.01)


def test_a_wrong_twin_may_not_act() -> None:
    window = traffic(400.0)
    found = calibrate([outcomes(window)], outcomes(window, 1.6))
    assert found.verdict is Fidelity.NOT_GOOD
    error, verdict = row(found, "tpot", 0.5)
    assert verdict is Fidelity.NOT_GOOD and error < -0.35


def test_one_wrong_quantile_is_enough() -> None:
    window = traffic(400.0)
    observed = outcomes(window)
    stalled = np.where(np.arange(len(window)) % 10 == 0, 5.0, observed.longest_gap_s)
    found = calibrate([outcomes(window)], replace(observed, longest_gap_s=stalled))
    wrong = [(each.metric, each.quantile) for each in found.rows if each.verdict is Fidelity.NOT_GOOD]
    assert ("longest_gap", 0.95) in wrong and all(metric == "longest_gap" for metric, _ in wrong)
    assert found.verdict is Fidelity.NOT_GOOD


def test_a_small_window_is_too_few_not_wrong() -> None:
    small = traffic(5.0)
    assert len(small) < 30
    found = calibrate([outcomes(small)], outcomes(small, 3.0))
    assert found.verdict is Fidelity.TOO_FEW and np.isnan(worst_error(found))
    medium = traffic(60.0)
    found = calibrate([outcomes(medium)], outcomes(medium))
    assert row(found, "ttft", 0.99)[1] is Fidelity.TOO_FEW
    assert row(found, "ttft", 0.95)[1] is Fidelity.GOOD and found.verdict is Fidelity.GOOD


def scattered(factor: float) -> Outcomes:
    """40 requests of 101 tokens whose latencies scatter by more than the bound."""
    random = np.random.default_rng(3)
    n = 40
    first_s = factor * random.lognormal(0.0, 1.0, n)
    gap_s = factor * random.lognormal(-3.0, 1.0, n)
    return Outcomes(
        arrival_s=np.zeros(n),
        first_token_s=first_s,
        finish_s=first_s + 100.0 * gap_s,
        prompt_tokens=np.full(n, 5),
        output_tokens=np.full(n, 101),
        longest_gap_s=gap_s,
        gap_count=np.full(n, 100),
    )


def test_an_error_that_chance_explains_is_too_few_not_wrong() -> None:
    found = calibrate([scattered(1.4)], scattered(1.0))
    for metric in SHOWN:
        error, verdict = row(found, metric, 0.5)
        assert error == pytest.approx(0.4) and verdict is Fidelity.TOO_FEW, metric
    assert row(calibrate([scattered(4.0)], scattered(1.0)), "tpot", 0.5)[1] is Fidelity.NOT_GOOD


def test_missing_figures_are_not_zero() -> None:
    window = traffic(400.0)
    observed = replace(outcomes(window), longest_gap_s=np.zeros(0))
    found = calibrate([outcomes(window)], observed)
    assert found.verdict is Fidelity.TOO_FEW
    none_finished = replace(outcomes(window), finish_s=np.full(len(window), np.nan))
    assert calibrate([outcomes(window)], none_finished).verdict is Fidelity.TOO_FEW


def test_requests_of_one_token_have_only_a_first_token_to_prove() -> None:
    window = traffic(400.0)
    single = replace(window, output_tokens=np.ones(len(window), dtype=np.int64))
    assert calibrate([outcomes(single)], outcomes(single)).verdict is Fidelity.GOOD


def test_a_request_that_the_twin_never_finishes_is_not_good() -> None:
    window = traffic(400.0)
    never = replace(outcomes(window), first_token_s=np.full(len(window), np.nan))
    found = calibrate([never], outcomes(window))
    assert found.verdict is Fidelity.NOT_GOOD and worst_error(found) == np.inf


def test_differences_below_the_floor_never_count() -> None:
    window = traffic(400.0)
    lenient = Quality(bound=0.01, floor_s=10.0)
    assert calibrate([outcomes(window)], outcomes(window, 1.6), lenient).verdict is Fidelity.GOOD
    strict = Quality(bound=0.01, floor_s=0.0)
    assert calibrate([outcomes(window)], outcomes(window, 1.6), strict).verdict is Fidelity.NOT_GOOD


def test_only_the_same_requests_are_compared() -> None:
    window = traffic(60.0)
    with pytest.raises(InputError, match="replay the window's own requests"):
        calibrate([outcomes(traffic(60.0, seed=2))], outcomes(window))
    with pytest.raises(InputError, match="at least once"):
        calibrate([], outcomes(window))


def stamps(seed: int = 0, idle_every: int = 10) -> tuple[RequestStamps, StepStamps]:
    """Steps of 10 ms with 0.1 ms + 0.02 ms a request between them; requests need 2 ms to reach the scheduler."""
    random = np.random.default_rng(seed)
    n = 600
    sequences = random.integers(1, 20, n)
    follows = np.arange(n) % idle_every != 0 if idle_every else np.ones(n, dtype=np.bool_)
    pause_s = np.where(follows, 1e-4 + 2e-5 * sequences + 1e-6 * random.normal(size=n), 1.0)
    pause_s[[101, 303]] += 0.5  # now and then the process pauses
    start_s = np.cumsum(pause_s + 0.010)
    arrival_s = np.sort(np.concatenate([start_s[~follows] - 0.0021, start_s[1:-1] + 0.001]))
    ready_s = arrival_s + 0.002
    # Handed over between steps: at once while idle, else when the step in the way has ended.
    inside = np.searchsorted(start_s, ready_s, side="right") - 1
    busy = (inside >= 0) & (ready_s < start_s[inside] + 0.010)
    handed_s = np.where(busy, start_s[inside] + 0.010, ready_s)
    # Some slip in between two steps: only quick ones can.
    slipped_s = start_s[follows][:: 2 if idle_every else 100] - 1e-5
    arrival_s, handed_s = np.concatenate([arrival_s, slipped_s - 4e-5]), np.concatenate([handed_s, slipped_s])
    first_s = handed_s + 0.02
    requests = RequestStamps(arrival_s, handed_s, first_s, first_s + 1.0, first_s + 0.003, first_s + 1.004)
    return requests, StepStamps(start_s, start_s + 0.010, sequences, follows)


def test_constants_outside_the_step_are_recovered() -> None:
    found = learn_outside(*stamps())
    assert found.idle_requests > 20 and found.before_s == pytest.approx(0.002, rel=1e-6)
    assert found.host_s + 10.0 * found.host_sequence_s == pytest.approx(3e-4, rel=0.15)
    assert found.host_sequence_s == pytest.approx(2e-5, rel=0.15)
    assert (found.after_first_s, found.after_last_s) == pytest.approx((0.003, 0.004))


def test_without_idle_time_the_quickest_requests_bound_the_time_to_the_scheduler() -> None:
    found = learn_outside(*stamps(idle_every=0))
    assert found.idle_requests == 0 and 0.002 <= found.before_s <= 0.0101


def test_missing_timestamps_stay_unknown_and_bad_ones_are_refused() -> None:
    requests, steps = stamps()
    found = learn_outside(replace(requests, client_first_s=np.zeros(0), client_last_s=np.zeros(0)), steps)
    assert found.after_first_s is None and found.after_last_s is None
    with pytest.raises(InputError, match="time to the scheduler"):
        learn_outside(replace(requests, handed_s=requests.arrival_s - 1.0), steps)
    with pytest.raises(InputError, match="to the client"):
        learn_outside(replace(requests, client_first_s=requests.first_token_s - 1.0), steps)
    few = StepStamps(steps.start_s[:20], steps.end_s[:20], steps.sequences[:20], steps.follows[:20])
    with pytest.raises(InputError, match="longer window"):
        learn_outside(requests, few)
    with pytest.raises(InputError, match="before_s"):
        Outside(before_s=-1.0)


def test_host_time_is_in_every_step_of_formula_and_tables() -> None:
    outside = Outside(host_s=1e-3, host_sequence_s=1e-4)
    formula = with_host_time(MODEL, outside)
    tables = StepCost(MODEL, np.linspace(0.01, 0.05, 100), np.zeros(0), 1e-5, 0.0, 0.0, 0.0)
    by_sequence = tables._replace(sequences_s=np.linspace(0.0, 1e-3, 11))
    for plain, more in (
        (with_host_time(MODEL, Outside()), formula),
        (tables, with_host_time(tables, outside)),
        (by_sequence, with_host_time(by_sequence, outside)),
    ):
        extra = step_cost(more, 50, 10, 0, 0.0, 0.0, 0.0) - step_cost(plain, 50, 10, 0, 0.0, 0.0, 0.0)
        assert extra == pytest.approx(2e-3)
    assert with_host_time(tables, outside).formula == MODEL


def test_the_time_before_the_scheduler_counts_in_the_latency() -> None:
    zero = np.zeros(1, dtype=np.int64)
    lone = Traffic(np.array([1.0]), np.array([50]), np.array([2]), zero, zero)
    model = StepModel(0.010, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    seen = predict(lone, ENGINE, SETTING, model, Outside(before_s=0.3))
    assert seen.arrival_s[0] == 1.0 and seen.first_token_s[0] == pytest.approx(1.310)


# --- by the targets ----------------------------------------------------------------------------


def answers(ttft_s: np.ndarray, gap_s: np.ndarray) -> Outcomes:
    """Requests of 101 tokens, one a second."""
    n = len(ttft_s)
    arrival_s = np.arange(n, dtype=float)
    return Outcomes(
        arrival_s=arrival_s,
        first_token_s=arrival_s + ttft_s,
        finish_s=arrival_s + ttft_s + 100.0 * 0.02,
        prompt_tokens=np.full(n, 80),
        output_tokens=np.full(n, 101),
        longest_gap_s=gap_s,
        gap_count=np.full(n, 100),
    )


def near_saturation(n: int) -> tuple[np.ndarray, np.ndarray]:
    """TTFT and longest gap where documents hold up 1 chat in 3: short waits by chance, long ones by the queue."""
    chance = np.random.default_rng(7)
    held_up = chance.random(n) < 0.32
    ttft_s = np.where(held_up, chance.uniform(2.0, 9.0, n), chance.lognormal(math.log(0.1), 0.8, n))
    return ttft_s, np.where(held_up, chance.uniform(0.45, 1.2, n), chance.uniform(0.1, 0.3, n))


TARGETS = Slo((Target("ttft", 3.0, 0.95), Target("longest_gap", 0.4, 0.95)))


def test_what_no_target_names_does_not_close_the_gate() -> None:
    """Share foretold within 3.2 points, TTFT p95 and p99 within 10 %, longest gap within 4 %, TTFT p50 38 % off."""
    ttft_s, gap_s = near_saturation(120)
    foretold = answers(np.where(ttft_s < 1.0, 0.62 * ttft_s, 1.08 * ttft_s), 1.03 * gap_s)
    observed = answers(ttft_s, gap_s)
    found = calibrate([foretold], observed, slo=TARGETS)
    assert found.verdict is Fidelity.GOOD and found.missing == 0
    by_name = {each.name: each for each in found.rows}
    assert abs(by_name[SHARE].error) < 0.032 and by_name["ttft p50"].error == pytest.approx(-0.38)
    assert 0.0 < by_name["ttft p95"].error < 0.1 and by_name["ttft p99"].error == pytest.approx(0.08)
    assert by_name["ttft p50"].verdict is not Fidelity.GOOD and not by_name["ttft p50"].decides
    assert {each.name for each in found.rows if each.decides} == {SHARE, "ttft p95", "longest gap p95"}
    # The same figures without targets: the median closes the gate.
    assert calibrate([foretold], observed).verdict is not Fidelity.GOOD


def test_a_good_median_does_not_open_the_gate_for_a_target_at_p99() -> None:
    ttft_s, gap_s = near_saturation(440)
    seen = answers(ttft_s, gap_s)
    at_p99 = Slo((Target("ttft", 3.0, 0.99),))
    # Too few for that quantile: the share of requests within its bound decides instead.
    found = calibrate([seen], seen, slo=at_p99)
    assert found.verdict is Fidelity.GOOD
    assert [each.name for each in found.rows if each.decides] == [SHARE, "ttft within 3 s"]
    assert row(found, "ttft", 0.99)[1] is Fidelity.TOO_FEW
    late = answers(np.where(ttft_s > np.quantile(ttft_s, 0.52), 9.0, ttft_s), gap_s)
    off = calibrate([late], seen, slo=at_p99)
    assert off.verdict is Fidelity.NOT_GOOD and row(off, "ttft", 0.5)[1] is Fidelity.GOOD
    enough = answers(*near_saturation(500))
    assert "ttft p99" in [each.name for each in calibrate([enough], enough, slo=at_p99).rows if each.decides]
    wrong = answers(np.where(ttft_s > 2.0, 3.0, 1.0) * ttft_s, gap_s)
    assert calibrate([wrong], seen, slo=TARGETS).verdict is Fidelity.NOT_GOOD


def test_a_wrong_share_closes_the_gate_however_good_the_quantiles() -> None:
    """Each request gets another's latency: every quantile is exact, and a bound between two groups is met."""
    ttft_s, gap_s = near_saturation(400)
    bound = Slo((Target("longest_gap", 0.4, 0.95), Target("ttft", 3.0, 0.95)))
    seen = answers(ttft_s, gap_s)
    crossed = answers(np.sort(ttft_s), np.sort(gap_s)[::-1])
    found = calibrate([crossed], seen, slo=bound)
    (share,) = (each for each in found.rows if each.name == SHARE)
    assert share.error < -0.1 and share.half_width > 0.0
    assert found.verdict is not Fidelity.GOOD


def test_the_sampling_error_counts_neighbours_that_share_their_fate() -> None:
    alternating, blocked = np.tile([0.0, 1.0], 200), np.repeat([0.0, 1.0], 200)
    assert blocked_error(alternating) == pytest.approx(0.5 / math.sqrt(400), rel=0.01)
    assert blocked_error(blocked) > 5.0 * blocked_error(alternating)
    assert blocked_error(np.zeros(400)) == 0.0 and math.isnan(blocked_error(np.zeros(0)))


def test_a_gap_target_is_judged_by_the_share_of_requests_that_meet_it() -> None:
    window = traffic(200.0)
    gaps = Slo((Target("gap", 0.03, 0.99),))
    counted = replace(outcomes(window), gap_bounds_s=np.array([0.03]), gap_over=np.zeros((len(window), 1), dtype=int))
    late = replace(counted, gap_over=counted.gap_count[:, None])
    assert calibrate([counted], counted, slo=gaps).verdict is Fidelity.GOOD
    found = calibrate([late], counted, slo=gaps)
    assert found.verdict is Fidelity.NOT_GOOD
    assert {each.name for each in found.rows if each.decides} == {SHARE, "gap within 0.03 s"}
