"""Other step models that a fit's intervals allow, so that a setting may be asked to do well under all of them."""

import math
from collections.abc import Mapping

import numpy as np
from rooftune.policies.step_time import StepModel

DRAWS = 4
_Z95 = 1.96
_DRAWN = ("overhead_s", "sequence_s", "floor_s", "kv_s_per_token", "slope_s_per_token", "attention_s")


def model_draws(
    model: StepModel, intervals: Mapping[str, tuple[float, float]], *, seed: int = 0, count: int = DRAWS
) -> tuple[StepModel, ...]:
    """``count`` models within the 95 % intervals of the coefficients; none when no interval says anything.

    A coefficient without a finite interval stays as it is: nothing is known of how far it could be off. Overhead and
    floor trade against each other in a fit while their sum, the time of a small step, is well known: it is kept.
    """
    known = {
        name: intervals[name]
        for name in _DRAWN
        if name in intervals and all(map(math.isfinite, intervals[name])) and intervals[name][1] > intervals[name][0]
    }
    if not known:
        return ()
    rng = np.random.default_rng(seed)
    return tuple(_draw(model, known, rng) for _ in range(count))


def _draw(model: StepModel, known: Mapping[str, tuple[float, float]], rng: np.random.Generator) -> StepModel:
    changed: dict[str, float] = {}
    for name, (low, high) in known.items():
        wanted = getattr(model, name) + float(rng.normal()) * (high - low) / (2.0 * _Z95)
        changed[name] = min(max(wanted, low, 0.0), high)
    drawn = model._replace(**changed)
    small_s = model.overhead_s + model.floor_s
    return drawn._replace(overhead_s=min(max(small_s - drawn.floor_s, 0.0), small_s))
