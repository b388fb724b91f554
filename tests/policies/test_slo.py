"""Targets, per-request and run-level meaning, by hand-computed cases."""

import math

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.policies.slo import (
    PROFILES,
    Condition,
    MarginReason,
    Outcomes,
    Override,
    Slo,
    Target,
    attainment,
    feasible,
    good,
    goodput_rps,
    longest_wait_s,
    margins,
    missed_shares,
)

NAN = math.nan


def outcomes(ttft, *, per_token=0.02, prompt=100, output=11, **parts):
    """Requests a second apart, each with output - 1 equal gaps of ``per_token`` seconds."""
    ttft = np.asarray(ttft, dtype=float)
    n = len(ttft)
    arrival = np.arange(n, dtype=float)
    output = np.broadcast_to(np.asarray(output, dtype=np.int64), (n,))
    first = arrival + ttft
    columns = {
        "arrival_s": arrival,
        "scheduled_s": first,
        "first_token_s": first,
        "finish_s": first + per_token * (output - 1),
        "longest_gap_s": np.full(n, per_token),
        "gap_count": output - 1,
        "prompt_tokens": np.broadcast_to(np.asarray(prompt, dtype=np.int64), (n,)),
        "output_tokens": output,
    }
    return Outcomes(**(columns | parts))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Target("latency", 1.0, 0.99),
        lambda: Target("ttft", 0.0, 0.99),
        lambda: Target("ttft", -1.0, 0.99),
        lambda: Target("ttft", math.inf, 0.99),
        lambda: Target("ttft", NAN, 0.99),
        lambda: Target("ttft", 1.0, 0.0),
        lambda: Target("ttft", 1.0, 1.01),
        lambda: Target("ttft", 1.0, NAN),
        lambda: Condition(),
        lambda: Condition(min_prompt_tokens=-1),
        lambda: Condition(min_prompt_tokens=10, max_prompt_tokens=9),
        lambda: Override(Condition(tenant="a"), ()),
        lambda: Slo(()),
        lambda: Slo((Target("ttft", 1.0, 0.9), Target("ttft", 2.0, 0.9))),
        lambda: Slo((), objective="cost"),
    ],
)
def test_bad_targets_are_refused(make):
    with pytest.raises(InputError):
        make()


def test_request_is_good_at_the_bound_and_bad_above_it():
    run = outcomes([1.0, 2.0, 2.0001])
    assert good(run, Slo((Target("ttft", 2.0, 0.99),))).tolist() == [True, True, False]


@pytest.mark.parametrize(("metric", "bound"), [("tpot", 0.0201), ("longest_gap", 0.02), ("e2e", 0.71), ("queue", 0.5)])
def test_each_metric_reads_its_own_columns(metric, bound):
    run = outcomes([0.5])
    assert good(run, Slo((Target(metric, bound, 1.0),))).all()
    assert not good(run, Slo((Target(metric, bound * 0.9, 1.0),))).any()


def test_gap_target_allows_exactly_its_share_of_a_requests_own_gaps():
    over = np.array([[1], [2], [10], [11]])
    run = outcomes([0.1] * 4, output=[101, 101, 101, 101], gap_bounds_s=np.array([0.03]), gap_over=over)
    assert good(run, Slo((Target("gap", 0.03, 0.99),))).tolist() == [True, False, False, False]
    assert good(run, Slo((Target("gap", 0.03, 0.9),))).tolist() == [True, True, True, False]


def test_a_share_that_is_not_exact_in_binary_is_met_at_its_edge():
    assert 0.07 * 100 > 7
    run = outcomes([0.1, 0.1], output=101, gap_bounds_s=np.array([0.03]), gap_over=np.array([[93], [94]]))
    assert good(run, Slo((Target("gap", 0.03, 0.07),))).tolist() == [True, False]


def test_gap_target_for_every_gap_is_the_longest_gap():
    run = outcomes([0.1, 0.1], longest_gap_s=np.array([0.03, 0.031]))
    assert good(run, Slo((Target("gap", 0.03, 1.0),))).tolist() == [True, False]


def test_one_token_requests_hold_gap_and_tpot_targets_vacuously_and_add_no_sample():
    run = outcomes(
        [0.1, 0.1], output=[1, 11], per_token=9.0, gap_bounds_s=np.array([1.0]), gap_over=np.array([[0], [10]])
    )
    for metric in ("gap", "tpot", "longest_gap"):
        slo = Slo((Target(metric, 1.0, 0.99),))
        assert good(run, slo).tolist() == [True, False]
        assert margins(run, slo)[0].samples == (10 if metric == "gap" else 1)


def test_failed_and_unfinished_requests_are_never_good():
    run = outcomes([0.1] * 3, failed=np.array([False, True, False]), finish_s=np.array([5.0, 5.0, NAN]))
    assert good(run, Slo((Target("ttft", 2.0, 0.5),))).tolist() == [True, False, False]
    assert good(run, PROFILES["batch"]).tolist() == [True, False, False]


def test_failed_requests_count_as_endless_in_the_run():
    run = outcomes([0.1] * 4, failed=np.array([False, False, False, True]))
    half, all_of_it = margins(run, Slo((Target("ttft", 2.0, 0.5), Target("ttft", 2.0, 0.99))))
    assert half.measured_s == pytest.approx(0.1)
    assert all_of_it.measured_s == math.inf
    assert all_of_it.margin == math.inf
    assert feasible((half,))
    assert not feasible((half, all_of_it))


@pytest.mark.parametrize("metric", ["tpot", "longest_gap", "gap", "e2e"])
@pytest.mark.parametrize("broken", [{"failed": np.array([False, True])}, {"finish_s": np.array([5.0, NAN])}])
@pytest.mark.parametrize("output", [11, 1])
def test_an_unfinished_request_has_infinite_latencies(metric, broken, output):
    gaps = np.array([10, 10]) if output == 11 else np.array([0, 0])
    whole = {"gap_values_s": np.array([0.02]), "gap_weights": np.array([float(gaps.sum())]), "gap_count": gaps}
    run = outcomes([0.1, 0.1], output=output, **whole, **broken)
    (row,) = margins(run, Slo((Target(metric, 60.0, 1.0),)))
    assert row.measured_s == math.inf
    counted = {"gap_bounds_s": np.array([60.0]), "gap_over": np.zeros((2, 1), dtype=int), "gap_count": gaps}
    (row,) = margins(outcomes([0.1, 0.1], output=output, **counted, **broken), Slo((Target(metric, 60.0, 0.99),)))
    assert row.margin > 0.0


def test_an_unfinished_request_keeps_the_first_token_it_got():
    run = outcomes([0.1, 0.3], finish_s=np.array([5.0, NAN]))
    ttft, e2e = margins(run, Slo((Target("ttft", 2.0, 1.0), Target("e2e", 9.0, 1.0))))
    assert ttft.measured_s == pytest.approx(0.3)
    assert e2e.measured_s == math.inf


def test_no_samples_give_no_margin_and_are_not_feasible_by_default():
    run = outcomes([0.1, 0.2], output=1)
    (row,) = margins(run, Slo((Target("tpot", 1.0, 0.99),)))
    assert row.reason is MarginReason.NO_SAMPLES
    assert math.isnan(row.measured_s)
    assert math.isnan(row.margin)
    assert not feasible((row,))
    ttft_row, _ = margins(run, Slo((Target("ttft", 1.0, 0.99), Target("tpot", 1.0, 0.99))))
    assert feasible((ttft_row, row))
    assert feasible(())


def test_an_empty_run_has_no_attainment_and_no_goodput():
    run = outcomes([])
    slo = PROFILES["documents-with-chat"]
    assert math.isnan(attainment(run, slo))
    assert math.isnan(goodput_rps(run, slo, 10.0))
    assert {row.reason for row in margins(run, slo)} == {MarginReason.NO_SAMPLES}
    assert math.isnan(longest_wait_s(run))


def test_goodput_is_good_requests_over_the_span():
    run = outcomes([0.1, 0.1, 5.0, 0.1])
    slo = Slo((Target("ttft", 2.0, 0.99),))
    assert goodput_rps(run, slo, 6.0) == pytest.approx(0.5)
    assert attainment(run, slo) == pytest.approx(0.75)
    for span in (0.0, -1.0, NAN, math.inf):
        with pytest.raises(InputError):
            goodput_rps(run, slo, span)


def test_margin_is_the_measured_quantile_over_the_bound():
    run = outcomes(np.arange(1, 101) / 100)
    (row,) = margins(run, Slo((Target("ttft", 0.5, 0.99),)))
    assert row.measured_s == pytest.approx(0.99)
    assert row.margin == pytest.approx(0.98)
    assert row.samples == 100


def test_run_level_gap_is_the_exact_weighted_quantile_of_all_gaps():
    run = outcomes([0.1], gap_values_s=np.array([0.5, 0.01, 0.02]), gap_weights=np.array([1.0, 90.0, 9.0]))
    rows = margins(run, Slo((Target("gap", 0.02, 0.9), Target("gap", 0.02, 0.99), Target("gap", 0.02, 1.0))))
    assert [row.measured_s for row in rows] == [0.01, 0.02, 0.5]
    assert [row.margin <= 0 for row in rows] == [True, True, False]


def test_override_replaces_only_its_metric_and_only_the_first_match_counts():
    slo = Slo(
        (Target("ttft", 1.0, 0.99), Target("e2e", 9.0, 0.99)),
        (
            Override(Condition(min_prompt_tokens=1000), (Target("ttft", 5.0, 0.99),)),
            Override(Condition(min_prompt_tokens=500), (Target("ttft", 0.1, 0.99),)),
        ),
    )
    run = outcomes([0.5, 0.5, 3.0, 3.0], prompt=[100, 600, 2000, 2000], finish_s=np.array([4.0, 4.0, 6.0, 60.0]))
    assert good(run, slo).tolist() == [True, False, True, False]
    base_ttft, base_e2e, long_ttft, middle_ttft = margins(run, slo)
    assert (base_ttft.override_index, long_ttft.override_index, middle_ttft.override_index) == (None, 0, 1)
    assert [row.samples for row in (base_ttft, base_e2e, long_ttft, middle_ttft)] == [1, 4, 2, 1]
    assert long_ttft.measured_s == 3.0
    assert base_ttft.measured_s == 0.5


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (Condition(tenant="gold"), [False, True, False]),
        (Condition(tenant="unknown"), [False, False, False]),
        (Condition(cached=True), [False, True, True]),
        (Condition(cached=False), [True, False, False]),
        (Condition(max_output_tokens=10), [True, False, False]),
        (Condition(min_output_tokens=20, cached=True), [False, False, True]),
    ],
)
def test_conditions(condition, expected):
    run = outcomes(
        [0.1] * 3,
        output=[10, 11, 20],
        tenant=np.array([0, 1, 0]),
        tenant_names=("free", "gold"),
        cached_tokens=np.array([0, 1, 99]),
    )
    assert condition.matches(run).tolist() == expected


def test_gap_margin_of_a_group_is_by_share_and_agrees_with_the_rule_for_requests():
    slo = Slo(
        (Target("gap", 0.03, 0.9),),
        (Override(Condition(min_prompt_tokens=1000), (Target("gap", 0.1, 0.9), Target("gap", 0.1, 1.0))),),
    )
    assert slo.gap_bounds() == (0.03, 0.1)
    run = outcomes(
        [0.1, 0.1],
        prompt=[10, 2000],
        gap_bounds_s=np.array(slo.gap_bounds()),
        gap_over=np.array([[1, 0], [10, 2]]),
        longest_gap_s=np.array([0.04, 0.2]),
    )
    short, long_share, long_all = margins(run, slo)
    assert short.reason is MarginReason.BY_SHARE
    assert short.margin <= 0.0
    assert math.isnan(short.measured_s)
    assert long_share.margin == pytest.approx(1.0)
    assert (long_all.measured_s, long_all.margin) == (0.2, pytest.approx(1.0))


def test_a_missing_part_is_an_error_when_a_target_needs_it():
    bare = Outcomes(
        arrival_s=np.array([0.0]),
        first_token_s=np.array([1.0]),
        finish_s=np.array([2.0]),
        prompt_tokens=np.array([5]),
        output_tokens=np.array([5]),
    )
    assert good(bare, Slo((Target("ttft", 1.0, 0.9), Target("tpot", 1.0, 0.9), Target("e2e", 2.0, 0.9)))).all()
    needing = [
        Slo((Target("queue", 1.0, 0.9),)),
        Slo((Target("gap", 1.0, 0.9),)),
        Slo((Target("longest_gap", 1.0, 0.9),)),
        Slo((Target("ttft", 1.0, 0.9),), (Override(Condition(tenant="a"), (Target("ttft", 2.0, 0.9),)),)),
        Slo((Target("ttft", 1.0, 0.9),), (Override(Condition(cached=True), (Target("ttft", 2.0, 0.9),)),)),
    ]
    for slo in needing:
        with pytest.raises(InputError):
            good(bare, slo)
        with pytest.raises(InputError):
            margins(bare, slo)


@pytest.mark.parametrize(
    "parts",
    [
        {"first_token_s": np.array([1.0])},
        {"first_token_s": np.array([-1.0, 5.0])},
        {"finish_s": np.array([math.inf, 5.0])},
        {"failed": np.array([True])},
        {"tenant": np.array([0, 1])},
        {"gap_values_s": np.array([1.0])},
        {"gap_values_s": np.array([NAN]), "gap_weights": np.array([1.0])},
        {"gap_bounds_s": np.array([0.1]), "gap_over": np.array([[1, 1]])},
        {"gap_bounds_s": np.array([0.1]), "gap_over": np.array([[1], [99]])},
        {"output_tokens": np.array([-1, 2])},
    ],
)
def test_bad_outcomes_are_refused(parts):
    with pytest.raises(InputError):
        outcomes([0.1, 0.1], **parts)


def test_outcomes_are_frozen_and_leave_the_callers_arrays_writable():
    failed = np.array([False, False])
    run = outcomes([0.1, 0.1], failed=failed)
    with pytest.raises(ValueError, match="read-only"):
        run.failed[0] = True
    assert failed.flags.writeable


def test_longest_wait_is_to_the_first_token():
    assert longest_wait_s(outcomes([0.1, 7.0, 0.2])) == 7.0


def test_the_longest_wait_of_a_run_is_the_time_to_first_token_that_no_target_can_beat():
    """A request without a first token still waits, as under every target."""
    run = outcomes([0.1, 7.0, 0.2], first_token_s=np.array([0.1, 8.0, NAN]))
    (row,) = margins(run, Slo((Target("ttft", 1.0, 1.0),)))
    assert longest_wait_s(run) == row.measured_s == math.inf
    failed = outcomes([0.1, 7.0], failed=np.array([False, True]))
    assert longest_wait_s(failed) == margins(failed, Slo((Target("ttft", 1.0, 1.0),)))[0].measured_s == math.inf


def test_profiles_say_what_they_maximise():
    assert set(PROFILES) == {"chat", "documents-with-chat", "multi-tenant", "batch"}
    assert PROFILES["batch"].objective == "tokens_per_s"
    assert PROFILES["batch"].targets == ()
    run = outcomes(
        [10.0, 10.0], prompt=[100, 50_000], gap_bounds_s=np.array([0.05]), gap_over=np.zeros((2, 1), dtype=int)
    )
    assert good(run, PROFILES["documents-with-chat"]).tolist() == [False, True]


def test_missed_shares_count_each_target_by_itself() -> None:
    outcomes = Outcomes(
        arrival_s=np.zeros(4),
        first_token_s=np.array([1.0, 3.0, 1.0, np.nan]),
        finish_s=np.array([2.0, 4.0, 9.0, np.nan]),
        prompt_tokens=np.array([10, 10, 10, 10]),
        output_tokens=np.array([2, 2, 2, 2]),
    )
    slo = Slo((Target("ttft", 2.0, 0.99), Target("e2e", 5.0, 0.5)))
    # The second misses TTFT alone, the third the end alone, the fourth never came and misses both.
    assert missed_shares(outcomes, slo) == (0.5, 0.5)
    assert attainment(outcomes, slo) == 0.25
