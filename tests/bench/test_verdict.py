"""The bench of the verdict: its runs are what they claim to be, and a large gain is found by every test."""

import math
from itertools import pairwise

import numpy as np
import pytest

from rooftune.policies.proof.switchback import PAIRS, schedule
from rooftune.policies.verify import Verdict
from tests.bench.verdict import (
    BLOCK_S,
    GOOD_SHARE,
    KINDS,
    POOR,
    PUSH_S,
    QUIET_SHARE,
    RESTLESS,
    RIGHT,
    SETTLE_S,
    TESTS,
    blocks_of,
    given_up,
    run_of,
)

KIND = "documents_3"


def test_a_raised_run_differs_in_the_share_of_good_requests_alone() -> None:
    run = run_of(KIND, 0)
    was, raised = run.good(0.0), run.good(0.15)
    assert was.mean(axis=1) == pytest.approx(GOOD_SHARE, abs=0.01)
    assert raised.mean(axis=1) == pytest.approx(GOOD_SHARE + 0.15, abs=0.01)
    assert (raised >= was).all()


def test_blocks_count_what_arrived_in_them_behind_the_settling_time() -> None:
    run = run_of(KIND, 0)
    blocks, history = blocks_of(run, 0.15, 5, RIGHT)
    assert tuple(block.new for block in blocks) == schedule(5) and not any(block.new for block in history)
    start_s = PUSH_S + 7 * BLOCK_S
    mine = (run.arrival_s >= start_s + SETTLE_S) & (run.arrival_s < start_s + BLOCK_S)
    assert blocks[7].judged == mine.sum()
    assert blocks[7].good == run.good(0.15 * blocks[7].new)[0][mine].sum()
    both = (run.good(0.0) + run.good(0.15))[RIGHT][mine].mean() / 2.0
    assert blocks[7].expected == pytest.approx(both)
    assert all(math.isnan(block.expected) for block in blocks_of(run, 0.15, 5)[0])


def test_the_right_twin_follows_the_blocks_more_closely_than_the_poor_one() -> None:
    def follows(twin: int) -> float:
        every = [blocks_of(run_of(KIND, seed), 0.0, seed, twin)[0] for seed in range(3)]
        shares = [[(block.good / block.judged, block.expected) for block in blocks] for blocks in every]
        return float(np.corrcoef(np.concatenate([np.diff(one, axis=0) for one in shares]).T)[0, 1])

    assert follows(RIGHT) > 0.9 > follows(POOR) > 0.5


def test_load_steps_where_a_restless_kind_says() -> None:
    rates = {}
    for kind in RESTLESS:
        arrival_s = run_of(kind, 0).arrival_s
        assert all(one <= other for one, other in pairwise(arrival_s))
        spans = ((0.0, PUSH_S), (1200.0, 2700.0))
        rates[kind] = [((arrival_s >= a) & (arrival_s < b)).sum() / (b - a) for a, b in spans]
    assert rates["step_up"] == pytest.approx([3.0, 6.0], rel=0.1)
    assert rates["step_down"] == pytest.approx([6.0, 3.0], rel=0.1)
    assert rates["overload"] == pytest.approx([6.0, 10.4], rel=0.1)
    overload = run_of("overload", 0)
    good, late = overload.good(0.0)[0], overload.arrival_s > PUSH_S + 600.0
    assert good[overload.arrival_s < PUSH_S].mean() == pytest.approx(QUIET_SHARE, abs=0.01)
    assert good[late].mean() < 0.5


@pytest.mark.parametrize("name", TESTS)
def test_forty_points_are_found(name: str) -> None:
    assert [TESTS[name](run_of(KIND, seed), 0.4, seed)[0] for seed in range(3)] == [Verdict.BETTER] * 3


def test_a_loss_of_thirty_points_is_given_up_at_once_and_nothing_is_not() -> None:
    assert all(given_up(*blocks_of(run_of(KIND, seed), -0.3, seed)) <= 2 for seed in range(3))
    assert [given_up(*blocks_of(run_of(KIND, seed), 0.4, seed)) for seed in range(3)] == [math.inf] * 3


def test_there_are_ten_kinds_and_the_trial_fits_into_the_run() -> None:
    assert len(KINDS) == 10
    assert 2 * PAIRS[-1] * BLOCK_S <= 1800.0
