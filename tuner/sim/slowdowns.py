"""Slowdowns: stretches of time in which a machine did less of whatever it was doing.

A neighbour, a garbage collection, a clock that drops: such a second belongs to the time, not to the steps that happened
to fall into it. Ten decode steps of 10 ms that took twice as long say that 100 ms were lost; a prompt of 500 ms read
then would have lost the same 100 ms, not 500. So they leave the scatter of single steps and come back by the clock.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rooftune.policies.request import FloatArray
from rooftune.tuner.sim.noise import CELL_S

BoolArray = npt.NDArray[np.bool_]

# Steps of this much measured time together, and longer than expected by this factor, are one.
LEAST_S, LEAST_FACTOR = 0.1, 1.5
# The path repeats after so many cells (5.5 minutes).
CELLS = 1 << 15


class Slowdown(NamedTuple):
    """lasted_s: seconds by the clock. factor: how many times as long as expected its steps took, above 1."""

    lasted_s: float
    factor: float


def find_slowdowns(expected_s: FloatArray, measured_s: FloatArray) -> tuple[list[Slowdown], BoolArray]:
    """Slowdowns of a run and which steps were in one, shape (n,).

    expected_s, measured_s: durations of the same steps in order of time, above 0, shape (n,). Time between steps counts
    for nothing: nobody knows what the machine did then.
    """
    count = len(measured_s)
    work_s, clock_s = _running_sum(expected_s), _running_sum(measured_s)
    # The window of step i ends before step after[i]: the fewest steps, at least one, that fill it.
    after = np.searchsorted(clock_s, clock_s[:-1] + LEAST_S)
    after = np.clip(after, np.arange(count) + 1, count)
    lasted_s = clock_s[after] - clock_s[:-1]
    slowed = (lasted_s >= LEAST_S) & (lasted_s > LEAST_FACTOR * (work_s[after] - work_s[:-1]))
    inside = np.zeros(count, dtype=np.bool_)
    for begun in np.flatnonzero(slowed):
        inside[begun : after[begun]] = True
    # It goes on while steps are slow, and at its ends a window reaches into steps that were as quick as ever.
    slow = measured_s > 0.5 * (1.0 + LEAST_FACTOR) * expected_s
    found = []
    for first, last in _stretches(inside | slow):
        if not inside[first:last].any():
            continue
        mine = first + np.flatnonzero(slow[first:last])
        start, end = int(mine[0]), int(mine[-1]) + 1
        inside[first:last] = False
        inside[start:end] = True
        whole_s = float(clock_s[end] - clock_s[start])
        found.append(Slowdown(whole_s, whole_s / float(work_s[end] - work_s[start])))
    return found, inside


def pace_of(slowdowns: list[Slowdown], seen_s: float, seed: int) -> FloatArray:
    """How many times as long the machine takes in each cell of ``CELL_S`` seconds, shape (CELLS,); empty without any.

    Each slowdown comes back at random instants (Poisson) as often as it was seen: once in ``seen_s`` seconds of steps.
    """
    if not slowdowns:
        return np.zeros(0)
    chance = np.random.default_rng(seed)
    pace = np.ones(CELLS)
    for one in slowdowns:
        cells = np.arange(max(1, round(one.lasted_s / CELL_S)))
        for start in chance.integers(0, CELLS, chance.poisson(CELLS * CELL_S / seen_s)):
            mine = (start + cells) % CELLS
            pace[mine] = np.maximum(pace[mine], one.factor)
    return pace


def _running_sum(values: FloatArray) -> FloatArray:
    return np.concatenate([np.zeros(1), np.cumsum(values)])


def _stretches(inside: BoolArray) -> list[tuple[int, int]]:
    """First and one past the last of each unbroken run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]]).astype(np.int8)))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]
