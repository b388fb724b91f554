"""The sweep's judge on hand-computed cases, and the bench itself: its aims and its known misses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rooftune.policies.outcomes import Outcomes
from rooftune.tuner.sim.calibrate import Fidelity, calibrate
from tests.bench.vllm_sweep import FITTED_RUN, bench, learn, replays, speed_of
from tests.bench.vllm_sweep_data import Case, cases, outcomes_of, steps_of
from tests.bench.vllm_sweep_judge import LATENCIES, SHARES, Judged, figures_of, judge, ranking


def test_figures_of_two_requests_by_hand() -> None:
    outcomes = Outcomes(
        arrival_s=np.array([0.0, 1.0]),
        first_token_s=np.array([0.4, 4.0]),
        finish_s=np.array([1.0, 4.02]),
        prompt_tokens=np.array([5, 5]),
        output_tokens=np.array([3, 2]),
        longest_gap_s=np.array([0.09, 0.02]),
        gap_count=np.array([2, 1]),
        gap_values_s=np.array([0.09, 0.03, 0.02]),
        gap_weights=np.ones(3),
    )
    figures = figures_of(outcomes)
    assert list(figures) == [*LATENCIES, *SHARES]
    assert figures["ttft_p50"] == pytest.approx(0.4) and figures["ttft_p95"] == pytest.approx(3.0)
    assert figures["gap_p95"] == figures["longest_gap_p99"] == 0.09
    # S1 wants no gap above 40 ms and a first token within 2 s, S2 100 ms and 0.5 s.
    assert (figures["good_s1"], figures["good_s2"]) == (0.0, 50.0)


def test_repeats_count_as_their_mean_and_their_spread_is_the_floor() -> None:
    measured = [dict.fromkeys((*LATENCIES, *SHARES), value) for value in (8.0, 12.0)]
    predicted = [dict.fromkeys((*LATENCIES, *SHARES), value) for value in (15.0, 17.0)]
    rows = {row.name: row for row in judge("b", "b_64", predicted, measured)}
    latency, share = rows["gap_p95"], rows["good_s1"]
    assert (latency.predicted, latency.measured, latency.spread) == (16.0, 10.0, 4.0)
    assert latency.error == pytest.approx(0.6) and share.error == pytest.approx(6.0)
    # 6 is within 1.5 x 4, and within 6 points.
    assert not latency.out_of_bounds and not share.out_of_bounds
    assert replace(latency, predicted=16.1).out_of_bounds and replace(share, predicted=16.1).out_of_bounds
    assert not replace(latency, spread=0.0, predicted=12.4).out_of_bounds
    assert replace(latency, spread=0.0, predicted=12.6).out_of_bounds
    assert not replace(share, spread=8.0, predicted=17.9).out_of_bounds


def test_only_differences_beyond_the_noise_are_ranked() -> None:
    rows = [
        Judged("b", "small", "good_s2", predicted=50.0, measured=40.0, spread=0.0),
        Judged("b", "middle", "good_s2", predicted=45.0, measured=44.0, spread=5.0),
        Judged("b", "large", "good_s2", predicted=70.0, measured=60.0, spread=0.0),
        Judged("a", "other", "good_s2", predicted=10.0, measured=90.0, spread=0.0),
    ]
    assert ranking(rows, ["good_s2"]) == (0, 2)
    rows[2] = replace(rows[2], predicted=48.0)
    assert ranking(rows, ["good_s2"]) == (1, 2)


def test_parsed_runs_match_the_sweeps_own_summary(shared_data: Path) -> None:
    """The sweep's own summary of its fitted run: percentiles in ms, good shares in per cent."""
    found = cases()
    assert len(found) == 12 and sum(len(runs) for runs in found.values()) == 16
    figures = figures_of(outcomes_of(FITTED_RUN))
    stated = {"gap_p95": 50.1, "gap_p99": 68.4, "longest_gap_p99": 83.1, "ttft_p50": 112.4, "ttft_p95": 963.0}
    assert {name: 1e3 * figures[name] for name in stated} == pytest.approx(stated, rel=0.01)
    assert (figures["good_s1"], figures["good_s2"]) == pytest.approx((39.6, 82.5), abs=0.1)


def test_constants_outside_the_step_of_a_real_engine(shared_data: Path) -> None:
    """About a millisecond to the scheduler (later only because a step is in the way), tens of microseconds a step."""
    outside = learn(FITTED_RUN, 1).outside
    assert outside.idle_requests >= 10 and 0.0010 < outside.before_s < 0.0016
    assert 2e-5 < outside.host_s < 1.2e-4 and 5e-6 < outside.host_sequence_s < 2e-5
    assert outside.after_first_s is not None and 0.001 < outside.after_first_s < 0.004


def test_the_judge_separates_good_runs_from_bad_ones(shared_data: Path) -> None:
    """Another run of the fitted setting is good; a run 8 % faster than the prices say, 97 % busy, is not."""
    twin = learn(FITTED_RUN, 2)
    same, faster = Case("b", 512, 0), Case("a", 64, 0)
    assert calibrate(replays(twin, same), outcomes_of("b_512_t0_r2")).verdict is Fidelity.GOOD
    assert speed_of(twin, steps_of("a_64_t0_r1")) < 0.94
    assert calibrate(replays(twin, faster), outcomes_of("a_64_t0_r1")).verdict is Fidelity.NOT_GOOD


@pytest.mark.slow
def test_short_bench_predicts_a_real_engine(shared_data: Path) -> None:
    figures = {figure.name: figure.value for figure in bench(True)}
    assert figures["median_error"] <= 0.10
    assert figures["step_mape_a_from_b"] <= 0.08
    assert figures["latency_ranking_errors"] == 0 and figures["ranking_errors"] <= 1
    assert figures["runs_calibrated_good"] >= 13
    # One run was 8 % faster than the fitted one's prices say and 97 % busy: nearly all out of bounds is its own.
    assert figures["figures_out_of_bounds"] <= 2 and figures["goodput_out_of_bounds"] <= 1
    assert figures["least_speed_factor"] < 0.94 and figures["figures_out_of_bounds_at_own_speed"] <= 2
