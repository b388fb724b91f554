"""Which steps say what a step costs: those of a size that the engine has met before.

Engines that prepare a kernel when they first meet a number of tokens (CPU engines, compiled graphs) pay for it in
that one step. Under one budget most sizes between the decodes and the full budget come once, so the sizes that
another budget would run all day look slower than they are.
"""

import math

import numpy as np
import numpy.typing as npt
from rooftune.policies.step_time import StepModel
from rooftune.tuner.model.roofline import predict
from rooftune.tuner.model.samples import StepSamples

# First steps count as dearer from this share on, when the difference is beyond so many of its standard errors.
DEARER = 0.05
STANDARD_ERRORS = 3.0
LEAST = 20


def seen_before(samples: StepSamples) -> npt.NDArray[np.bool_]:
    """True for each step (in order of time) whose number of computed tokens an earlier step had, shape (n,)."""
    again = np.ones(len(samples), dtype=np.bool_)
    again[np.unique(samples.computed_tokens, return_index=True)[1]] = False
    return again


def first_steps_cost(samples: StepSamples, model: StepModel) -> float:
    """How much longer the first step of a size takes than later ones, beside a model fitted to all: 0.2 is 20 %.

    A difference of medians of log(measured / predicted). 0 when it is below DEARER or within STANDARD_ERRORS standard
    errors, or when there are fewer than LEAST steps of either kind: then nothing speaks for leaving any out.
    """
    again = seen_before(samples)
    residual = np.log(samples.duration_s / predict(model, samples))
    first, later = residual[~again], residual[again]
    if min(len(first), len(later)) < LEAST:
        return 0.0
    dearer = float(np.median(first) - np.median(later))
    error = math.hypot(_median_error(first), _median_error(later))
    return math.expm1(dearer) if dearer > max(math.log1p(DEARER), STANDARD_ERRORS * error) else 0.0


def _median_error(values: npt.NDArray[np.float64]) -> float:
    """Standard error of a median, from the median distance to it (outliers do not widen it)."""
    spread = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    return 1.2533 * spread / math.sqrt(len(values))
