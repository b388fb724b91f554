"""A step-time table: models real engines between the formula's two straight parts.

    step_time_s = table(computed_tokens) + sequence_s * sequences + kv_decode_s * decode_context_tokens
                + kv_prefill_s * prefill_context_tokens + attention_s * attention_work

The table never falls, is linear between its knots and beyond the last continues at the rate of its last two
doublings. Kernels run one after the other, so reading context and prefill attention add to the dense layers instead
of hiding behind them. Where hardly any step was seen the fitted formula is its prior. The loss is the mean
absolute relative error itself.
"""

import math
from dataclasses import dataclass

import numpy as np

from rooftune.policies.errors import InputError
from rooftune.policies.step_time import StepCost, StepModel, step_time
from rooftune.tuner.model.samples import FloatArray, StepSamples
from rooftune.tuner.model.solver import nonnegative_solution

KNOTS_PER_DOUBLING = 2
# The formula counts as this many steps at every knot.
FORMULA_STEPS = 100.0
_ROUNDS = 30
_SMALLEST_ERROR = 0.01


@dataclass(frozen=True)
class StepTable:
    """knot_tokens ascending, knot_s ascending seconds at the knots (no context, no request); prices in seconds."""

    knot_tokens: tuple[float, ...]
    knot_s: tuple[float, ...]
    sequence_s: float
    kv_decode_s: float
    kv_prefill_s: float
    attention_s: float

    def __post_init__(self) -> None:
        prices = (self.sequence_s, self.kv_decode_s, self.kv_prefill_s, self.attention_s)
        if len(self.knot_tokens) != len(self.knot_s) or len(self.knot_tokens) < 2:
            raise InputError("a step table needs at least 2 knots, and a time for each; fit it again")
        if not all(math.isfinite(value) and value >= 0.0 for value in (*self.knot_tokens, *self.knot_s, *prices)):
            raise InputError("a step table holds finite values of at least 0 only; fit it again")
        if any(np.diff(self.knot_tokens) <= 0.0) or any(np.diff(self.knot_s) < 0.0):
            raise InputError("knots of a step table must ascend and their times must not fall; fit it again")

    def base_s(self, computed_tokens: FloatArray) -> FloatArray:
        """The table's part of the step time in seconds, shape (n,)."""
        times: FloatArray = _interpolation(computed_tokens, np.array(self.knot_tokens)) @ np.array(self.knot_s)
        return times

    def tabulate(self, max_tokens: int) -> FloatArray:
        """``base_s`` of 0..max_tokens tokens, for a lookup by index, shape (max_tokens + 1,)."""
        return self.base_s(np.maximum(np.arange(max_tokens + 1, dtype=np.float64), 1.0))

    def cost(self, formula: StepModel, max_tokens: int) -> StepCost:
        """What the twin prices steps with: this table up to ``max_tokens``, and the formula for budget policies."""
        none = np.zeros(0, dtype=np.float64)
        return StepCost(
            formula,
            self.tabulate(max_tokens),
            none,
            self.sequence_s,
            self.kv_decode_s,
            self.kv_prefill_s,
            self.attention_s,
        )

    def predict(self, samples: StepSamples) -> FloatArray:
        """Step times in seconds, shape (n,)."""
        return (
            self.base_s(samples.computed_tokens)
            + self.sequence_s * samples.sequences
            + self.kv_decode_s * samples.decode_context_tokens
            + self.kv_prefill_s * samples.prefill_context_tokens
            + self.attention_s * samples.attention_work
        )

    def mape(self, samples: StepSamples) -> float:
        """Mean absolute error of the predicted durations as a fraction of the measured ones."""
        return float(np.abs(self.predict(samples) / samples.duration_s - 1.0).mean())


def fit_table(samples: StepSamples, formula: StepModel) -> StepTable:
    """Table from steps; ``formula`` fills in where they are few. O(n x knots^2): give a reservoir's samples or a day's.

    Raises InputError when the steps do not span two knots.
    """
    knots = _knots(samples.computed_tokens)
    rows = _interpolation(samples.computed_tokens, knots)
    # Increments instead of levels: non-negative increments are a table that never falls.
    increments = np.cumsum(rows[:, ::-1], axis=1)[:, ::-1]
    extra = (
        samples.sequences,
        samples.decode_context_tokens,
        samples.prefill_context_tokens,
        samples.attention_work,
    )
    design = np.concatenate([increments, np.stack(extra, axis=1)], axis=1) / samples.duration_s[:, None]
    scale = np.maximum(np.linalg.norm(design, axis=0), 1e-300)
    design /= scale
    levels = np.array([step_time(formula, float(n), 0.0, 0.0, 0.0) for n in knots])
    lean = np.zeros(len(scale))
    lean[: len(knots)] = FORMULA_STEPS / np.maximum(levels, 1e-300) ** 2 / scale[: len(knots)] ** 2
    expected = np.zeros(len(scale))
    expected[: len(knots)] = np.diff(levels, prepend=0.0) * scale[: len(knots)]
    solution = expected
    weights = np.ones(len(design))
    for _ in range(_ROUNDS):
        weighted = design * weights[:, None]
        # The formula's steps weigh as much as a typical real one, and a trace keeps unseen prices at 0.
        pull = lean * float(np.median(weights)) + 1e-9 * len(design)
        solution = nonnegative_solution(weighted.T @ design + np.diag(pull), weighted.sum(axis=0) + pull * expected)
        weights = 1.0 / np.maximum(np.abs(design @ solution - 1.0), _SMALLEST_ERROR)
    seconds = solution / scale
    times = np.cumsum(seconds[: len(knots)])
    return StepTable(tuple(knots.tolist()), tuple(times.tolist()), *(float(v) for v in seconds[len(knots) :]))


def _knots(tokens: FloatArray) -> FloatArray:
    """Two a doubling between the fewest and the most tokens seen."""
    low, high = float(tokens.min()), float(tokens.max())
    if high <= low:
        raise InputError(f"all steps computed {low:g} tokens, a table needs two counts; vary the budget")
    spaced = np.round(2.0 ** (np.arange(0, KNOTS_PER_DOUBLING * math.log2(high) + 1) / KNOTS_PER_DOUBLING))
    return np.array([low, *np.unique(spaced[(spaced > low) & (spaced < high)]), high])


def _interpolation(tokens: FloatArray, knots: FloatArray) -> FloatArray:
    """Weights of the knots' times for each step, (n, knots); below the first knot its time, above the last a line."""
    inside = np.clip(tokens, knots[0], knots[-1])
    right = np.clip(np.searchsorted(knots, inside, side="left"), 1, len(knots) - 1)
    share = (inside - knots[right - 1]) / (knots[right] - knots[right - 1])
    weights = np.zeros((len(tokens), len(knots)))
    rows = np.arange(len(tokens))
    weights[rows, right - 1] = 1.0 - share
    weights[rows, right] = share
    anchor = min(int(np.searchsorted(knots, knots[-1] / 4.0)), len(knots) - 2)
    beyond = np.maximum(tokens - knots[-1], 0.0) / (knots[-1] - knots[anchor])
    weights[:, -1] += beyond
    weights[:, anchor] -= beyond
    return weights
