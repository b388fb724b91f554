"""The arithmetic of bench live-gain: order of rounds, unbiased shares, paired intervals, the cost of trials."""

from typing import Any

import numpy as np
import pytest

from rooftune.policies.errors import RefusedError
from rooftune.policies.guard import Action, Reason
from rooftune.tuner.bench.live_gain import rounds_with_trials
from rooftune.tuner.bench.live_gain_rounds import (
    LONG_EVERY,
    Sizes,
    at_once,
    best_of,
    listed,
    ratio_interval,
    round_of,
    share_of_best,
    trial_cost,
)
from rooftune.tuner.observe.rows import RequestRows
from rooftune.tuner.traffic.workload import Traffic
from tests.control.cycle_records import hold, push

SIZES = Sizes((10, 50), (1000, 2000), (5, 9))


def rows(requests: Traffic, start_s: float, **columns: Any) -> RequestRows:
    """An engine's rows of one round, in its own order."""
    n = len(requests)
    given: dict[str, Any] = {
        "sequence": np.arange(n),
        "arrival_s": start_s + requests.arrival_s,
        "scheduled_s": start_s + requests.arrival_s,
        "ttft_s": np.arange(n) / 10.0,
        "finish_s": start_s + requests.arrival_s + 1.0,
        "prompt_tokens": requests.prompt_tokens,
        "cached_tokens": np.zeros(n, dtype=np.int64),
        "output_tokens": requests.output_tokens,
        "gap_count": np.ones(n, dtype=np.int64),
        "longest_gap_s": np.full(n, 0.02),
        "preemptions": np.zeros(n, dtype=np.int64),
        "ended": np.zeros(n, dtype=np.int64),
        "gap_over": np.zeros((n, 0), dtype=np.int64),
    }
    made = RequestRows(**(given | columns))
    return made.select(np.random.default_rng(3).permutation(n))


def test_the_list_has_the_requested_rate_and_every_eighth_is_long() -> None:
    made = listed(SIZES, 7.0, 10.0, seed=1)
    assert len(made) == 70 and made.arrival_s[0] == 0.0
    assert (len(made) - 1) / made.arrival_s[-1] == pytest.approx(7.0, rel=0.05)
    long = made.prompt_tokens >= 1000
    assert np.flatnonzero(long).tolist() == list(range(LONG_EVERY - 1, 70, LONG_EVERY))
    assert at_once(made).arrival_s.max() == 0.0


def test_a_round_is_put_in_the_order_of_the_list() -> None:
    made = listed(SIZES, 7.0, 10.0, seed=1)
    found = round_of(rows(made, 500.0), made)
    assert found.ttft_s.tolist() == (np.arange(70) / 10.0).tolist()
    assert found.good(1.05, 0.03).tolist() == [at <= 10 for at in range(70)]
    assert not found.good(1.05, 0.01).any()


def test_an_unfinished_request_is_not_good_and_a_missing_one_stops_the_bench() -> None:
    made = listed(SIZES, 7.0, 3.0, seed=1)
    unfinished = np.arange(len(made)) / 10.0
    unfinished[4] = np.nan
    assert not round_of(rows(made, 0.0, ttft_s=unfinished), made).good(99.0, 99.0)[4]
    some = rows(made, 0.0)
    with pytest.raises(RefusedError, match="left no"):
        round_of(some.select(np.arange(len(made) - 1)), made)


def test_the_luckiest_of_many_noisy_numbers_is_not_the_best_setting() -> None:
    """All settings are equal, so reaching their mean is reaching the best of them."""
    rng = np.random.default_rng(1)
    best = [best_of(0.7 + 0.03 * rng.standard_normal((2, 32))) for _ in range(200)]
    assert np.mean(best) == pytest.approx(0.7, abs=0.005)
    assert best_of([[0.5, 0.8]]) == 0.8 and share_of_best([[0.5, 0.8]], 0.4) == 0.5
    assert best_of([[0.5, 0.8], [0.6, 0.7]]) == pytest.approx(0.75)


def test_pairs_make_the_interval_narrow() -> None:
    """The tuned setting is good wherever the default is, and for one more request in ten."""
    rng = np.random.default_rng(2)
    default = (rng.random(200) < 0.5).astype(float)
    tuned = np.maximum(default, (np.arange(200) % 10 == 0).astype(float))
    ratio, low, high = ratio_interval(tuned, default)
    assert low < ratio < high and low > 1.0 and high - low < 0.2
    alone = ratio_interval(rng.permutation(tuned), default)
    assert alone[2] - alone[1] > 1.5 * (high - low)


def test_a_trial_that_wins_costs_nothing_and_one_that_loses_costs_what_it_lost() -> None:
    default = np.array([1.0, 1.0, 0.0, 0.0])
    assert trial_cost([np.array([True, True, True, False])], default, 100) == 0.0
    assert trial_cost([np.array([True, False, False, False])] * 2, default, 100) == 0.02
    assert trial_cost([], default, 100) == 0.0


def test_rounds_with_a_trial_are_those_between_a_push_and_its_verdict() -> None:
    times = [(10.0 * at, 10.0 * at + 9.0) for at in range(6)]
    records = [
        push(1, started_at_s=12.0),
        hold(2, Reason.VERDICT_WORSE, started_at_s=25.0, action=Action.REVERT),
        push(3, started_at_s=55.0),
    ]
    assert rounds_with_trials(times, records) == (1, 2, 5)
    assert rounds_with_trials(times, []) == ()
