"""Probation of a kept setting: rate of false alarms, delay, and what each rule decides."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftune.policies.errors import InputError
from rooftune.policies.proof.probation import (
    ALLOWANCE,
    DAY_S,
    FELL_BLOCKS,
    LOST_AT,
    LOST_BLOCKS,
    Block,
    Probation,
    Rates,
    Standing,
    cusum_threshold,
    deviation,
    pause_s,
    queue_grows,
    watch,
)

BLOCK_S = 30.0
WINDOWS_BLOCKS = 4  # two verify windows
KEPT = Probation(expected=0.9, boot=0.5, offered_rps=2.0)


def block(share: float, judged: float = 60.0, waiting: float = 0.0, offered_rps: float = 2.0) -> Block:
    return Block(round(share * judged), judged, waiting, offered_rps)


def told(state: Probation, blocks: Iterable[Block], alike: bool = True) -> tuple[Probation, list[Standing]]:
    found = []
    for one in blocks:
        state, standing = watch(state, one, BLOCK_S, alike)
        found.append(standing)
    return state, found


def drawn(seed: int, mean: float, spread: float, ar: float, count: int) -> tuple[list[Block], float]:
    """Blocks whose share is an AR(1) around ``mean``, and their true mean; requests come in bursts."""
    chance, off, blocks, shares = np.random.default_rng(seed), 0.0, [], []
    for _ in range(count):
        off = ar * off + chance.normal(0.0, spread * math.sqrt(1.0 - ar * ar))
        shares.append(min(1.0, max(0.0, mean + off)))
        judged = int(chance.poisson(40.0 * chance.gamma(2.0, 0.5)))
        blocks.append(Block(float(chance.binomial(judged, shares[-1])), float(judged), 0.0, 2.0))
    return blocks, float(np.mean(shares))


def alarms(make: Callable[[float], Probation], mean: float, spread: float, ar: float) -> float:
    """Alarms per block over a fortnight of blocks."""
    found = total = 0
    for seed in range(4):
        blocks, true = drawn(seed, mean, spread, ar, 2000)
        state = make(true)
        for one in blocks:
            state, standing = watch(state, one, BLOCK_S, True)
            total += 1
            if standing is not Standing.HOLDS:
                found, state = found + 1, make(true)
    return found / total


@pytest.mark.parametrize(
    ("mean", "spread", "ar"), [(0.95, 0.0, 0.0), (0.95, 0.05, 0.5), (0.8, 0.1, 0.5), (0.5, 0.1, 0.5), (0.3, 0.1, 0.3)]
)
def test_false_alarms_are_as_rare_as_stated_under_bursty_and_autocorrelated_shares(
    mean: float, spread: float, ar: float
) -> None:
    assert alarms(lambda true: Probation(expected=true), mean, spread, ar) <= 1.0 / FELL_BLOCKS
    assert alarms(lambda true: Probation(expected=true, boot=true), mean, spread, ar) <= 1.0 / LOST_BLOCKS


def test_the_threshold_gives_the_stated_run_length() -> None:
    chance, runs = np.random.default_rng(1), []
    for _ in range(300):
        height, count = 0.0, 0
        while height <= cusum_threshold(100.0):
            height, count = max(0.0, height + chance.normal() - ALLOWANCE), count + 1
        runs.append(count)
    assert float(np.mean(runs)) == pytest.approx(100.0, rel=0.2)


@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(5, 200)), min_size=4, max_size=40),
    st.floats(0.05, 0.95),
    st.one_of(st.none(), st.floats(0.0, 1.0)),
)
def test_never_worse_than_boot_beyond_noise_for_longer_than_two_verify_windows(
    shares: list[tuple[float, int]], boot: float, expected: float | None
) -> None:
    """Whatever came before; worse: by 1.4 of the deviations that the blocks until then show."""
    state, below = Probation(expected=expected, boot=boot, offered_rps=2.0), 0
    for share, judged in shares:
        one = block(share, float(judged))
        worse = one.share <= boot - 1.4 * deviation(boot, one.judged, state.blocks)
        below = below + 1 if worse else 0
        state, standing = watch(state, one, BLOCK_S, True)
        if standing is Standing.LOST:
            return
        assert below < WINDOWS_BLOCKS


def test_a_collapse_is_lost_within_one_verify_window() -> None:
    _, found = told(KEPT, [block(0.92), block(0.88), block(0.1), block(0.0)])
    assert found == [Standing.HOLDS, Standing.HOLDS, Standing.HOLDS, Standing.LOST]


def test_one_odd_block_is_no_alarm() -> None:
    _, found = told(replace(KEPT, boot=None), [block(0.9), block(0.0), *[block(0.9)] * 6])
    assert set(found) == {Standing.HOLDS}


def test_below_expectation_but_above_boot_it_stays_and_expects_less() -> None:
    state, found = told(replace(KEPT, boot=0.2), [block(0.62)] * 6)
    assert Standing.LOWER in found and Standing.LOST not in found
    assert state.expected == pytest.approx(0.62, abs=0.01)


def test_under_other_traffic_boot_counts_as_unknown_and_is_preferred() -> None:
    _, found = told(replace(KEPT, boot=0.2), [block(0.62)] * 6, alike=False)
    assert Standing.LOST in found


def test_if_the_load_rose_and_boot_carries_less_it_stays() -> None:
    heavy = [block(0.1, offered_rps=4.0)] * 4
    less, more = Rates(3.0, 2.5), Rates(3.0, 3.5)
    state, found = told(replace(KEPT, rates=less), heavy)
    assert Standing.OVERLOAD in found and Standing.LOST not in found and state.expected == pytest.approx(0.1)
    for rates in (more, Rates(), Rates(3.0, None)):
        assert Standing.LOST in told(replace(KEPT, rates=rates), heavy)[1], rates
    calm = [block(0.1)] * 4
    assert Standing.LOST in told(replace(KEPT, rates=less), calm)[1], "the load did not rise"


def growing(share: float) -> list[Block]:
    return [block(share, waiting=3.0 * at) for at in range(6)]


def test_a_growing_queue_goes_back_where_boot_carries_more_or_nothing_is_known() -> None:
    unknown = replace(KEPT, boot=None)
    assert Standing.LOST in told(unknown, growing(0.9))[1]
    assert Standing.LOST in told(replace(KEPT, rates=Rates(1.5, 2.5)), growing(0.9))[1]
    assert Standing.LOST not in told(replace(unknown, rates=Rates(2.5, 1.5)), growing(0.9))[1]
    assert Standing.LOST not in told(KEPT, growing(0.9))[1], "still far above what boot showed"
    assert Standing.LOST in told(replace(KEPT, expected=None), growing(0.5))[1], "as good as boot was"


def test_a_queue_grows_in_every_block_and_by_more_than_a_few() -> None:
    assert queue_grows(growing(0.9))
    assert not queue_grows(growing(0.9)[:4])
    assert not queue_grows([block(0.9, waiting=20.0 + at) for at in range(6)])
    assert not queue_grows([block(0.9, waiting=value) for value in (0.0, 9.0, 5.0, 12.0, 20.0)])


def test_what_boot_alone_carries_is_for_boot() -> None:
    state = replace(KEPT, rates=Rates(1.8, 2.2))
    assert watch(state, block(0.9), BLOCK_S, True)[1] is Standing.LOST
    assert watch(state, block(0.9, offered_rps=1.7), BLOCK_S, True)[1] is Standing.HOLDS
    assert watch(state, block(0.9, offered_rps=2.3), BLOCK_S, True)[1] is Standing.HOLDS, (
        "boot does not carry it either"
    )


def test_blocks_without_requests_say_nothing() -> None:
    state, found = told(replace(KEPT, fell=3.0, lost=LOST_AT), [Block(0.0, 0.0, 0.0, 0.0)] * 8)
    assert set(found) == {Standing.HOLDS} and (state.fell, state.lost) == (3.0, LOST_AT)


def test_another_expectation_begins_another_test() -> None:
    state = replace(KEPT, fell=3.0)
    assert state.expecting(0.905).fell == 3.0
    assert state.expecting(0.6) == replace(state, expected=0.6, fell=0.0)


def test_a_block_cannot_have_more_good_than_judged() -> None:
    with pytest.raises(InputError, match="good of judged"):
        Block(2.0, 1.0, 0.0, 1.0)


def test_the_pause_doubles_with_each_repeat_and_halves_after_each_good_day() -> None:
    assert pause_s(0.0, 0.0, 300.0) == 300.0
    assert pause_s(300.0, 700.0, 300.0) == 600.0
    assert pause_s(1200.0, DAY_S + 1.0, 300.0) == 1200.0
    assert pause_s(1200.0, 9 * DAY_S, 300.0) == 300.0
    assert pause_s(80_000.0, 1.0, 300.0) == DAY_S
