"""The result of a fit: coefficients, intervals, the knee, and typed codes for what the data does not determine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from rooftune.policies.errors import RefusedError, bad_value
from rooftune.policies.step_time import StepModel
from rooftune.tuner.model.samples import FloatArray, StepSamples


class FitCode(StrEnum):
    """Findings of a fit. The first group ends it (``FitRefused``), the second leaves a model with wide intervals."""

    TOO_FEW_STEPS = "too_few_steps"
    NO_TOKEN_VARIATION = "no_token_variation"
    COARSE_CLOCK = "coarse_clock"
    CONTRADICTORY = "contradictory"

    SLOPE_UNKNOWN = "slope_unknown"
    FLOOR_UNKNOWN = "floor_unknown"
    CONTEXT_UNKNOWN = "context_unknown"
    ATTENTION_UNKNOWN = "attention_unknown"
    SEQUENCE_UNKNOWN = "sequence_unknown"
    SHARPNESS_UNKNOWN = "sharpness_unknown"
    MISFIT = "misfit"
    PRIOR_USED = "prior_used"


REMEDIES: dict[FitCode, str] = {
    FitCode.TOO_FEW_STEPS: "collect more steps",
    FitCode.NO_TOKEN_VARIATION: "all steps computed a similar number of tokens: vary the budget or send probe steps",
    FitCode.COARSE_CLOCK: "measure steps with a clock of microseconds, and check that the column is not a constant",
    FitCode.CONTRADICTORY: "equal steps took very different times: check for two engines in one file, a busy machine "
    "or a wrong column",
    FitCode.SLOPE_UNKNOWN: "no step was seen above the knee: raise the budget for a few long prompts (probe steps), "
    "or give a hardware prior (--card, --parameters)",
    FitCode.FLOOR_UNKNOWN: "no flat part is seen: either steps of few tokens are missing (let some small decode-only "
    "steps run, or give a hardware prior: --card, --parameters), or this engine has none, as is usual on a CPU",
    FitCode.CONTEXT_UNKNOWN: "the context varied only with the tokens: long conversations show its price",
    FitCode.ATTENTION_UNKNOWN: "the attention work varied only with the tokens: long prompts show its price",
    FitCode.SEQUENCE_UNKNOWN: "the number of requests varied only with the tokens: mixed steps show its price",
    FitCode.SHARPNESS_UNKNOWN: "too few steps near the knee to see how sharp it is: probe steps around it",
    FitCode.MISFIT: "the formula leaves a pattern in the residuals, so the intervals are wider",
    FitCode.PRIOR_USED: "coefficients lean on the hardware prior where the data is silent",
}


class FitRefused(RefusedError):
    """No model from these steps. ``code`` says why, the message how to get one."""

    def __init__(self, code: FitCode, detail: str) -> None:
        super().__init__(f"no step model: {detail} ({code.value}); {REMEDIES[code]}")
        self.code = code


@dataclass(frozen=True)
class Interval:
    """Bounds that hold the truth with at least 90 % (nominal 95 %); ``math.inf`` where nothing bounds it."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise bad_value("interval", (self.low, self.high), "low <= high", "this is a defect, please report it")

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def bounded(self) -> bool:
        """Bounded away from 0 and from infinity."""
        return self.low > 0.0 and math.isfinite(self.high)


@dataclass(frozen=True)
class StepFit:
    """A fitted model and how far to trust it.

    knee_tokens: None unless the data (or the prior) bounds it on both sides; then ``knee_interval`` holds it.
    knee_at_context_tokens: the same at ``context_tokens``, the median context of the steps fitted.
    intervals: coefficient name -> Interval in that coefficient's unit.
    spread: robust relative spread of the steps about the model (0.1 = 10 %); outliers: share of steps that the
    fit ignores, 0..1; seen_tokens: smallest and largest computed tokens of a step in the data.
    """

    model: StepModel
    knee_tokens: float | None
    knee_interval: Interval
    knee_at_context_tokens: float | None
    knee_at_context_interval: Interval
    context_tokens: float
    intervals: Mapping[str, Interval]
    codes: tuple[FitCode, ...]
    steps: int
    spread: float
    outliers: float
    seen_tokens: tuple[float, float]

    def bounds(self) -> dict[str, tuple[float, float]]:
        """Every interval as a plain pair, the knees among them, as model.json holds them."""
        every = {
            **self.intervals,
            "knee_tokens": self.knee_interval,
            "knee_at_context_tokens": self.knee_at_context_interval,
        }
        return {name: (interval.low, interval.high) for name, interval in every.items()}

    def findings(self) -> tuple[str, ...]:
        """One line for each code: what is unknown and how to find out."""
        return tuple(f"{code.value}: {REMEDIES[code]}" for code in self.codes)


def predict(model: StepModel, samples: StepSamples) -> FloatArray:
    """Step times in seconds that the model gives these steps, shape (n,)."""
    memory_s = model.floor_s + model.kv_s_per_token * samples.context_tokens
    compute_s = model.slope_s_per_token * samples.computed_tokens + model.attention_s * samples.attention_work
    high, low = np.maximum(memory_s, compute_s), np.minimum(memory_s, compute_s)
    if model.sharpness != 0.0:
        ratio = np.divide(low, high, out=np.zeros_like(high), where=high > 0.0)
        high = high * (1.0 + ratio**model.sharpness) ** (1.0 / model.sharpness)
    total: FloatArray = model.overhead_s + model.sequence_s * samples.sequences + high
    return total


def mape(model: StepModel, samples: StepSamples) -> float:
    """Mean absolute error of the predicted durations as a fraction of the measured ones."""
    return float(abs(predict(model, samples) / samples.duration_s - 1.0).mean())
