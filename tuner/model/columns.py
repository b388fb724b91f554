"""From step samples to the scaled columns that the solver sees, and back from its numbers to coefficients."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rooftune.policies.step_time import StepModel
from rooftune.tuner.model.samples import FloatArray, StepSamples
from rooftune.tuner.model.solver import Problem

# Coefficients in the order of the columns, by group.
OUTSIDE = ("overhead_s", "sequence_s")
MEMORY = ("floor_s", "kv_s_per_token")
COMPUTE = ("slope_s_per_token", "attention_s")
NAMES = OUTSIDE + MEMORY + COMPUTE


@dataclass(frozen=True)
class Columns:
    """The columns of the coefficients in ``used``; scale: seconds per unit of the solver's number, one for each."""

    samples: StepSamples
    used: tuple[str, ...]
    scale: FloatArray

    def place(self, name: str) -> int:
        """Position of a used coefficient."""
        return self.used.index(name)

    def problem(self, prior: Sequence[float], prior_sd: Sequence[float], mixing: FloatArray | None = None) -> Problem:
        """The solver's problem. prior: coefficients in ``used`` order; prior_sd: spreads of their logs, inf for none.

        With a ``mixing`` the priors are those of the free coefficients it starts from.
        """
        unit = self.unit_s
        raw = {name: column_of(self.samples, name) for name in self.used}
        groups = [
            np.stack([raw[n] * self.scale[self.place(n)] / unit for n in group if n in self.used], axis=1)
            if any(n in self.used for n in group)
            else np.zeros((len(self.samples), 0))
            for group in (OUTSIDE, MEMORY, COMPUTE)
        ]
        with np.errstate(divide="ignore"):
            logs = np.log(np.asarray(prior, dtype=np.float64) / self.scale)
        sd = np.asarray(prior_sd, dtype=np.float64)
        return Problem(
            np.log(self.samples.duration_s / unit),
            groups[0],
            groups[1],
            groups[2],
            np.eye(len(self.used)) if mixing is None else mixing,
            np.where(np.isfinite(sd), logs, 0.0),
            sd,
        )

    @property
    def unit_s(self) -> float:
        """The time that the solver calls 1."""
        return float(np.median(self.samples.duration_s))

    def model(self, theta: FloatArray, softness: float) -> StepModel:
        """Coefficients in seconds; those not used are 0."""
        values = dict.fromkeys(NAMES, 0.0)
        values.update({name: float(t * s) for name, t, s in zip(self.used, theta, self.scale, strict=True)})
        return StepModel(**values, sharpness=1.0 / softness if softness > 0.0 else 0.0)


def column_of(samples: StepSamples, name: str) -> FloatArray:
    """What the coefficient multiplies in each step, shape (n,)."""
    if name in ("overhead_s", "floor_s"):
        return np.ones(len(samples))
    if name == "sequence_s":
        return samples.sequences
    if name == "kv_s_per_token":
        return samples.context_tokens
    if name == "slope_s_per_token":
        return samples.computed_tokens
    return samples.attention_work


def make_columns(samples: StepSamples) -> Columns:
    """Columns that vary. One that does not cannot be told from a constant, and its coefficient is left out."""
    used = tuple(
        name
        for name in NAMES
        if name in ("overhead_s", "floor_s", "slope_s_per_token") or np.ptp(column_of(samples, name)) > 0.0
    )
    unit = float(np.median(samples.duration_s))
    typical = np.array([float(np.mean(column_of(samples, name))) for name in used])
    return Columns(samples, used, unit / typical)
