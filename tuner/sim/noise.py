"""Step noise: real steps of equal content differ, and the slow ones make the tail.

The twin may multiply the modelled duration of each step by a factor measured on real steps. Which factor a step gets
depends on its number in the run and on the class of its modelled duration (short steps scatter more than long ones),
so that two settings are tried under the same luck (common random numbers). Stretches in which the machine was slow as
a whole come back by the clock, at the same instants for every setting. Off unless asked for;
``noise_from_steps`` learns it.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rooftune.policies.errors import InputError
from rooftune.policies.request import FloatArray, IntArray

# Length of a cell of the pace, in seconds.
CELL_S = 0.01
_NO_PACE = np.zeros(0)


class StepNoise(NamedTuple):
    """What makes steps longer or shorter than the model says.

    edges_s: ascending modelled durations between the classes, shape (classes - 1,).
    factors: factor (> 0) for each class and step number, repeated when a run is longer, shape (classes, draws).
    pace: slowdown factor (> 0) in each cell of ``cell_s`` seconds of the run, repeated; or empty.
    """

    edges_s: FloatArray
    factors: FloatArray
    pace: FloatArray = _NO_PACE
    cell_s: float = CELL_S


QUIET = StepNoise(np.zeros(0), np.zeros((1, 0)))


def with_noise(noise: StepNoise, step: int, start_s: float, duration_s: float) -> float:
    """The duration (s) of step number ``step`` (from 0), begun at ``start_s``, whose model says ``duration_s``."""
    draws = noise.factors.shape[1]
    if draws == 0:
        return duration_s
    row = 0
    while row < len(noise.edges_s) and duration_s >= noise.edges_s[row]:
        row += 1
    left_s = duration_s * noise.factors[row, step % draws]
    cells = len(noise.pace)
    if cells == 0:
        return float(left_s)
    now_s = start_s
    cell = int(start_s / noise.cell_s)
    while True:
        factor = noise.pace[cell % cells]
        cell += 1
        done_s = max((cell * noise.cell_s - now_s) / factor, 0.0)
        if left_s <= done_s:
            return float(now_s - start_s + left_s * factor)
        left_s -= done_s
        now_s = cell * noise.cell_s


BoolArray = npt.NDArray[np.bool_]

# Steps with this much measured time together, longer than expected by this factor, are a slowdown.
LEAST_S, LEAST_FACTOR = 0.1, 1.5
# The pace repeats after this many cells (5.5 minutes).
CELLS = 1 << 15


class Slowdown(NamedTuple):
    """lasted_s: seconds by the clock. factor: measured over expected duration of its steps, above 1."""

    lasted_s: float
    factor: float


def find_slowdowns(expected_s: FloatArray, measured_s: FloatArray) -> tuple[list[Slowdown], BoolArray]:
    """Slowdowns of a run and which steps were in one, shape (n,).

    expected_s, measured_s: durations of the same steps in order of time, above 0, shape (n,). Time between steps is
    ignored: what the machine did then is unknown.
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
    # It lasts while steps are slow; at its ends a window reaches into steps of normal speed.
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
    """The machine's slowdown factor in each cell of ``CELL_S`` seconds, shape (CELLS,); empty without slowdowns.

    Each slowdown recurs at random instants (Poisson) as often as it was seen: once in ``seen_s`` seconds of steps.
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


_MIN_STEPS = 20


def noise_from_steps(
    modelled_s: FloatArray, measured_s: FloatArray, *, seed: int, draws: int = 16_384, classes: int = 6
) -> StepNoise:
    """Noise drawn from the residuals of real steps.

    modelled_s, measured_s: durations of the same steps in order of time, above 0, shape (n,). seed: which draws.
    classes: most classes of modelled duration, of equal log width, each with at least 20 steps.
    Every class has the same mean factor, that of all time measured to all time modelled outside slowdowns: a robust fit
    leaves out the slow steps and this puts them back, while the few steps of a rare size cannot shift a level.
    Raises InputError when there are too few steps or a duration is not above 0.
    """
    if len(modelled_s) != len(measured_s) or len(modelled_s) < _MIN_STEPS:
        raise InputError(
            f"noise from {len(modelled_s)} modelled and {len(measured_s)} measured steps; "
            f"give the same steps twice, at least {_MIN_STEPS}"
        )
    if not (np.all(modelled_s > 0.0) and np.all(measured_s > 0.0)):
        raise InputError("noise needs durations above 0 s only; drop the other steps")
    slowdowns, inside = find_slowdowns(_expected(modelled_s, measured_s, classes), measured_s)
    kept = ~inside
    if int(kept.sum()) < _MIN_STEPS:
        slowdowns, kept = [], np.ones(len(kept), dtype=np.bool_)
    edges_s, factors = _scatter(modelled_s[kept], measured_s[kept], seed, draws, classes)
    return StepNoise(edges_s, factors, pace_of(slowdowns, float(measured_s.sum()), seed))


def _expected(modelled_s: FloatArray, measured_s: FloatArray, classes: int) -> FloatArray:
    """The median step of its class, so that a class the model misjudges does not become one long slowdown."""
    _, row = _classed(modelled_s, classes)
    ratio = measured_s / modelled_s
    expected_s = np.empty(len(modelled_s))
    for index in np.unique(row):
        mine = row == index
        expected_s[mine] = modelled_s[mine] * np.median(ratio[mine])
    return expected_s


def _scatter(
    modelled_s: FloatArray, measured_s: FloatArray, seed: int, draws: int, classes: int
) -> tuple[FloatArray, FloatArray]:
    """Borders of the classes, and the factors of each."""
    edges_s, row = _classed(modelled_s, classes)
    ratio = measured_s / modelled_s
    level = float(measured_s.sum() / modelled_s.sum())
    # One uniform number per step, the same for every class: under any setting step k has the same luck.
    luck = np.random.default_rng(seed).random(draws)
    factors = np.empty((len(edges_s) + 1, draws))
    for index in range(len(edges_s) + 1):
        ordered = np.sort(ratio[row == index])
        drawn = ordered[(luck * len(ordered)).astype(np.int64)]
        factors[index] = drawn * (level / float(ordered.mean()))
    return edges_s, factors


def _classed(modelled_s: FloatArray, classes: int) -> tuple[FloatArray, IntArray]:
    """Borders of equal log width, and the class of each step; a border that would leave a class with too few steps is
    dropped."""
    low, high = float(np.log(modelled_s.min())), float(np.log(modelled_s.max()))
    kept: list[float] = []
    below = 0
    for edge in np.exp(np.linspace(low, high, classes + 1)[1:-1]):
        under = int((modelled_s < edge).sum())
        if under - below >= _MIN_STEPS and len(modelled_s) - under >= _MIN_STEPS:
            kept.append(float(edge))
            below = under
    edges_s = np.array(kept, dtype=np.float64)
    return edges_s, np.searchsorted(edges_s, modelled_s, side="right")
