"""Which steps say what a step costs: those of a size that the engine has met before.

Engines that prepare a kernel when they first meet a number of tokens (CPU engines, compiled graphs) pay for it in
that one step. Under one budget most sizes between the decodes and the full budget come once, so the sizes that
another budget would run all day look slower than they are.
"""

import numpy as np
import numpy.typing as npt

from tuner.model.samples import StepSamples


def seen_before(samples: StepSamples) -> npt.NDArray[np.bool_]:
    """True for each step (in order of time) whose number of computed tokens an earlier step had, shape (n,)."""
    again = np.ones(len(samples), dtype=np.bool_)
    again[np.unique(samples.computed_tokens, return_index=True)[1]] = False
    return again
