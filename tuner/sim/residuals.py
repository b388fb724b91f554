"""Step noise learned from real steps: what they took beyond or below what the model says of them."""

import numpy as np
from rooftune.policies.errors import InputError
from rooftune.policies.request import FloatArray, IntArray
from rooftune.tuner.sim.noise import StepNoise
from rooftune.tuner.sim.slowdowns import find_slowdowns, pace_of

_MIN_STEPS = 20


def noise_from_steps(
    modelled_s: FloatArray, measured_s: FloatArray, *, seed: int, draws: int = 16_384, classes: int = 6
) -> StepNoise:
    """Noise drawn from the residuals of real steps.

    modelled_s, measured_s: durations of the same steps in order of time, above 0, shape (n,). seed: which draws.
    classes: at most so many classes of modelled duration, of equal log width, each with at least 20 steps.
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
    """What a step of its class takes in the middle: no class that the model misjudges is one long slowdown."""
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
    # One uniform number a step, the same for every class: whatever a setting makes of step k, its luck is the same.
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
