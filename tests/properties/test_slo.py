"""Properties of quantiles, margins and goodput over random runs."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftune.policies.errors import InputError
from rooftune.policies.outcomes import Outcomes
from rooftune.policies.quantiles import quantile, weighted_quantile
from rooftune.policies.slo import Slo, Target, attainment, feasible, good, margins

SHARES = [Fraction(n, d) for d in (1, 2, 3, 7, 10, 100, 1000) for n in (1, d // 2, d - 1, d) if 0 < n <= d]


@given(
    pairs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=900),
    share=st.sampled_from(SHARES),
    scale=st.sampled_from([1, 1_000_000]),
)
def test_weighted_quantile_is_the_smallest_value_with_enough_weight_below(pairs, share, scale):
    values = [value for value, _ in pairs]
    weights = [weight * scale for _, weight in pairs]
    got = weighted_quantile(values, weights, float(share))
    total = sum(weights)
    if total == 0:
        assert math.isnan(got)
        return
    enough = [v for v in set(values) if sum(w for x, w in zip(values, weights, strict=True) if x <= v) >= share * total]
    assert got == min(enough)


@given(st.lists(st.floats(0, 1e6), min_size=300, max_size=900), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
@settings(max_examples=30)
def test_partitioning_agrees_with_a_full_sort(values, q):
    ordered = sorted(values)
    at = next(i for i in range(len(ordered)) if Fraction(i + 1) >= Fraction(str(q)) * len(ordered))
    assert quantile(values, q) == ordered[at]


@pytest.mark.parametrize(
    "values",
    [
        np.full(1000, -5.0),
        np.full(1000, np.inf),
        np.r_[np.full(500, -5.0), np.full(500, np.inf)],
        np.r_[np.arange(999.0), 1e308],
        np.r_[-1e308, np.arange(998.0), 1e308],
        np.r_[np.zeros(999), 5e-324],
        np.r_[np.linspace(0.01, 0.0100001, 990), np.full(10, 1e6)],
    ],
)
def test_crowded_and_extreme_values_are_still_exact(values):
    for per_mille in (1, 300, 500, 501, 990, 999, 1000):
        assert quantile(values[::-1], per_mille / 1000) == np.sort(values)[per_mille - 1]


def test_infinite_values_stay_infinite_and_nan_is_refused():
    assert quantile([1.0, math.inf], 0.5) == 1.0
    assert quantile([1.0, math.inf], 0.51) == math.inf
    assert quantile([math.inf] * 1000, 0.5) == math.inf
    for values, weights in (([math.nan], [1.0]), ([1.0], [-1.0]), ([1.0], [math.inf]), ([1.0], [1.0, 2.0])):
        with pytest.raises(InputError):
            weighted_quantile(values, weights, 0.5)


@st.composite
def runs(draw):
    """Runs whose gaps are drawn one by one, so that every summary of them can be checked."""
    n = draw(st.integers(1, 12))
    gaps = [draw(st.lists(st.sampled_from([0.01, 0.02, 0.03, 0.05, 0.5]), max_size=12)) for _ in range(n)]
    ttft = np.array(draw(st.lists(st.floats(0.0, 5.0), min_size=n, max_size=n)))
    done = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    failed = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    arrival = np.arange(n, dtype=float)
    bounds = np.array([0.02, 0.05])
    everything = [gap for own in gaps for gap in own]
    values, counts = np.unique(everything, return_counts=True) if everything else (np.zeros(0), np.zeros(0))
    finish = arrival + ttft + np.array([sum(own) for own in gaps])
    return gaps, Outcomes(
        arrival_s=arrival,
        first_token_s=arrival + ttft,
        finish_s=np.where(done, finish, np.nan),
        prompt_tokens=np.ones(n, dtype=np.int64),
        output_tokens=np.array([len(own) + 1 for own in gaps]),
        longest_gap_s=np.array([max(own, default=0.0) for own in gaps]),
        gap_count=np.array([len(own) for own in gaps]),
        failed=failed,
        gap_bounds_s=bounds,
        gap_over=np.array([[sum(gap > bound for gap in own) for bound in bounds] for own in gaps]),
        gap_values_s=values,
        gap_weights=counts.astype(float),
    )


TARGETS = st.builds(
    Target,
    st.sampled_from(["ttft", "gap", "tpot", "longest_gap", "e2e"]),
    st.sampled_from([0.02, 0.05]),
    st.sampled_from([0.25, 0.5, 0.9, 0.99, 1.0]),
)


@given(runs(), TARGETS)
def test_a_target_for_every_sample_is_met_by_the_run_exactly_when_every_request_is_good(run, target):
    _, outcomes = run
    every = Slo((Target(target.metric, target.bound_s, 1.0),))
    rows = margins(outcomes, every)
    if target.metric in ("ttft", "tpot", "e2e", "longest_gap") and rows[0].samples and outcomes.finished.all():
        assert feasible(rows) == (attainment(outcomes, every) == 1.0)


@given(runs(), st.sampled_from([0.02, 0.05]), st.sampled_from([Fraction(1, 4), Fraction(9, 10), Fraction(1)]))
def test_gap_rule_of_a_request_is_counted_over_its_own_gaps(run, bound, share):
    gaps, outcomes = run
    expected = [
        bool(done) and sum(gap > bound for gap in own) <= (1 - share) * len(own)
        for own, done in zip(gaps, outcomes.finished, strict=True)
    ]
    assert good(outcomes, Slo((Target("gap", bound, float(share)),))).tolist() == expected


@given(runs(), TARGETS, st.floats(1.0, 10.0))
def test_a_looser_bound_never_makes_a_request_worse(run, target, factor):
    _, outcomes = run
    if target.metric == "gap":
        looser = Target("gap", 0.05, target.quantile)
    else:
        looser = Target(target.metric, target.bound_s * factor, target.quantile)
    before, after = good(outcomes, Slo((target,))), good(outcomes, Slo((looser,)))
    assert not (before & ~after).any()


@given(runs(), TARGETS)
def test_margins_are_never_an_invented_zero(run, target):
    _, outcomes = run
    (row,) = margins(outcomes, Slo((target,)))
    assert math.isnan(row.margin) == (row.samples == 0)
    if row.samples:
        assert (row.margin <= 0) == (row.measured_s <= target.bound_s)
