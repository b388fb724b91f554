"""Step noise: real steps of equal content differ, and a tail is made of the slow ones.

The twin may multiply the modelled duration of each step by a factor measured on real steps. Which factor a step gets
depends on its number in the run and on the class of its modelled duration (short steps scatter more than long ones),
so that two settings are tried under the same luck (common random numbers). Stretches in which the machine was slow as
a whole come back by the clock, at the same instants for every setting. Off unless asked for; ``tuner/sim/residuals.py``
learns it.
"""

from typing import NamedTuple

import numpy as np
from rooftune.policies.request import FloatArray

# Cells in which slow times are told.
CELL_S = 0.01
_NO_PACE = np.zeros(0)


class StepNoise(NamedTuple):
    """What makes steps longer or shorter than the model says.

    edges_s: ascending modelled durations between the classes, shape (classes - 1,).
    factors: factor (> 0) for each class and step number, repeated when a run is longer, shape (classes, draws).
    pace: how many times as long (> 0) it takes in each cell of ``cell_s`` seconds of the run, repeated; or empty.
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
