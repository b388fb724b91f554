"""Step noise: real steps of equal content differ, and a tail is made of the slow ones.

The twin may multiply the modelled duration of each step by a factor measured on real steps. Which factor a step gets
depends on its number in the run and on the class of its modelled duration (short steps scatter more than long ones),
so that two settings are tried under the same luck (common random numbers). Off unless asked for.
"""

from typing import NamedTuple

import numpy as np

from policies.errors import InputError
from policies.request import FloatArray

_MIN_STEPS = 20


class StepNoise(NamedTuple):
    """Factors on modelled step durations.

    edges_s: ascending modelled durations between the classes, shape (classes - 1,).
    factors: factor (> 0) for each class and step number, repeated when a run is longer, shape (classes, draws).
    """

    edges_s: FloatArray
    factors: FloatArray


QUIET = StepNoise(np.zeros(0), np.zeros((1, 0)))


def with_noise(noise: StepNoise, step: int, duration_s: float) -> float:
    """The duration (s) of step number ``step`` (from 0) whose model says ``duration_s``."""
    draws = noise.factors.shape[1]
    if draws == 0:
        return duration_s
    row = 0
    while row < len(noise.edges_s) and duration_s >= noise.edges_s[row]:
        row += 1
    return float(duration_s * noise.factors[row, step % draws])


def noise_from_steps(
    modelled_s: FloatArray, measured_s: FloatArray, *, seed: int, draws: int = 16_384, classes: int = 6
) -> StepNoise:
    """Noise drawn from the residuals of real steps.

    modelled_s, measured_s: durations of the same steps, above 0, shape (n,). seed: which draws.
    classes: at most so many classes of modelled duration, of equal log width, each with at least 20 steps.
    Every class has the same mean factor, that of all time measured to all time modelled: a robust fit leaves out
    the slow steps and this puts them back, while the few steps of a rare size cannot shift a level.
    Raises InputError when there are too few steps or a duration is not above 0.
    """
    if len(modelled_s) != len(measured_s) or len(modelled_s) < _MIN_STEPS:
        raise InputError(
            f"noise from {len(modelled_s)} modelled and {len(measured_s)} measured steps; "
            f"give the same steps twice, at least {_MIN_STEPS}"
        )
    if not (np.all(modelled_s > 0.0) and np.all(measured_s > 0.0)):
        raise InputError("noise needs durations above 0 s only; drop the other steps")
    edges_s = _edges(modelled_s, classes)
    row = np.searchsorted(edges_s, modelled_s, side="right")
    ratio = measured_s / modelled_s
    level = float(measured_s.sum() / modelled_s.sum())
    # One uniform number a step, the same for every class: whatever a setting makes of step k, its luck is the same.
    luck = np.random.default_rng(seed).random(draws)
    factors = np.empty((len(edges_s) + 1, draws))
    for index in range(len(edges_s) + 1):
        ordered = np.sort(ratio[row == index])
        drawn = ordered[(luck * len(ordered)).astype(np.int64)]
        factors[index] = drawn * (level / float(ordered.mean()))
    return StepNoise(edges_s, factors)


def _edges(modelled_s: FloatArray, classes: int) -> FloatArray:
    """Borders of equal log width; one that would leave a class with too few steps is dropped."""
    low, high = float(np.log(modelled_s.min())), float(np.log(modelled_s.max()))
    kept: list[float] = []
    below = 0
    for edge in np.exp(np.linspace(low, high, classes + 1)[1:-1]):
        under = int((modelled_s < edge).sum())
        if under - below >= _MIN_STEPS and len(modelled_s) - under >= _MIN_STEPS:
            kept.append(float(edge))
            below = under
    return np.array(kept, dtype=np.float64)
