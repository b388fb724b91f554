"""Robust non-linear least squares for the step-time formula, on plain arrays.

Residuals are logs of measured over predicted time, so that short and long steps count alike; Tukey's bisquare
ignores what lies beyond six spreads (compilation, garbage collection, preemption), and keeps 99 % of the
information of clean data. Coefficients stay at or above 0. ``softness`` is 1 / sharpness; 0 is the hard maximum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rooftune.policies.step_time import StepModel
from rooftune.tuner.model.samples import FloatArray, StepSamples


@dataclass(frozen=True)
class Problem:
    """log_time: shape (n,). outside, memory, compute: columns of the three groups, (n, k) each, scaled to about 1.

    mixing maps the free coefficients to those of all columns: ``theta = mixing @ free`` (the identity, or fewer
    columns when a relation is imposed). prior_log, prior_sd: logs of the free coefficients and their spreads;
    inf where there is no prior.
    """

    log_time: FloatArray
    outside: FloatArray
    memory: FloatArray
    compute: FloatArray
    mixing: FloatArray
    prior_log: FloatArray
    prior_sd: FloatArray

    def model(self, free: FloatArray, softness: float) -> tuple[FloatArray, FloatArray]:
        """Predicted times (n,) and their derivatives by the free coefficients (n, f)."""
        theta = self.mixing @ free
        k_out, k_mem = self.outside.shape[1], self.memory.shape[1]
        a = self.memory @ theta[k_out : k_out + k_mem]
        b = self.compute @ theta[k_out + k_mem :]
        high = np.maximum(np.maximum(a, b), 1e-300)
        if softness <= 0.0:
            top, by_a = high, (a >= b).astype(np.float64)
            by_b = 1.0 - by_a
        else:
            p = 1.0 / softness
            u = np.minimum(a, b) / high
            power = u**p
            root = (1.0 + power) ** softness
            top = high * root
            shrink = root / (1.0 + power)
            small = np.divide(power, u, out=np.zeros_like(u), where=u > 0.0) * shrink
            by_a = np.where(a >= b, shrink, small)
            by_b = np.where(a >= b, small, shrink)
        time = np.maximum(self.outside @ theta[:k_out] + top, 1e-300)
        by_theta = np.concatenate([self.outside, by_a[:, None] * self.memory, by_b[:, None] * self.compute], axis=1)
        return time, by_theta @ self.mixing

    def residual(self, free: FloatArray, softness: float) -> tuple[FloatArray, FloatArray]:
        """log(measured / predicted), shape (n,), and its Jacobian with the sign of the prediction, (n, f)."""
        time, by_free = self.model(free, softness)
        return self.log_time - np.log(time), by_free / time[:, None]

    def rows(self, rows: slice) -> "Problem":
        """The same problem on fewer rows."""
        return replace(
            self,
            log_time=self.log_time[rows],
            outside=self.outside[rows],
            memory=self.memory[rows],
            compute=self.compute[rows],
        )

    def prior_terms(self, free: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Standardised distances from the prior and their derivatives, shape (f,); 0 where there is none."""
        known = np.isfinite(self.prior_sd)
        safe = np.maximum(free, 1e-12)
        distance = np.where(known, (self.prior_log - np.log(safe)) / self.prior_sd, 0.0)
        return distance, np.where(known, 1.0 / (safe * self.prior_sd), 0.0)


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
    """Columns that vary. One that does not is indistinguishable from a constant, and its coefficient is left out."""
    used = tuple(
        name
        for name in NAMES
        if name in ("overhead_s", "floor_s", "slope_s_per_token") or np.ptp(column_of(samples, name)) > 0.0
    )
    unit = float(np.median(samples.duration_s))
    typical = np.array([float(np.mean(column_of(samples, name))) for name in used])
    return Columns(samples, used, unit / typical)


CUTOFF = 6.0
# No formula predicts a step better than this; a smaller spread would turn rounding into evidence.
MIN_SPREAD = 0.01


@dataclass(frozen=True)
class Solution:
    """free: coefficients; deviance: robust chi-square including the prior, comparable at one ``spread``."""

    free: FloatArray
    softness: float
    spread: float
    deviance: float


def spread_of(residual: FloatArray) -> float:
    """Robust standard deviation of residuals about 0."""
    return max(1.4826 * float(np.median(np.abs(residual))), MIN_SPREAD)


def bisquare(residual: FloatArray, spread: float) -> tuple[float, FloatArray]:
    """Sum of 2 rho (a chi-square for small residuals) and the weights psi(u) / u, shape (n,)."""
    u2 = np.minimum((residual / (CUTOFF * spread)) ** 2, 1.0)
    return float((CUTOFF**2 / 3.0) * np.sum(1.0 - (1.0 - u2) ** 3)), (1.0 - u2) ** 2


def robust_order(residuals: Sequence[FloatArray]) -> list[int]:
    """Places of these residuals, the best first, by what ``solve`` minimises at their smallest spread.

    Not by the spread itself: most steps are decodes, and a line that explains those to the last microsecond has the
    smallest spread although every long step is an outlier to it.
    """
    spread = min(map(spread_of, residuals))
    return sorted(range(len(residuals)), key=lambda place: bisquare(residuals[place], spread)[0])


def solve(problem: Problem, start: FloatArray, softness: float, spread: float, iterations: int = 20) -> Solution:
    """Levenberg-Marquardt with an active set at 0, at a fixed spread."""
    free, damping = np.maximum(start, 0.0), 1e-3
    residual, jacobian = problem.residual(free, softness)
    distance, slope = problem.prior_terms(free)
    value, weights = bisquare(residual, spread)
    value += float(distance @ distance)
    for _ in range(iterations):
        weighted = jacobian * weights[:, None]
        hessian = weighted.T @ jacobian / spread**2 + np.diag(slope**2)
        gradient = weighted.T @ residual / spread**2 + slope * distance
        step_taken = False
        for _ in range(6):
            trial = np.maximum(free + _bounded_step(hessian, gradient, free, damping), 0.0)
            new_residual, new_jacobian = problem.residual(trial, softness)
            new_distance, new_slope = problem.prior_terms(trial)
            new_value, new_weights = bisquare(new_residual, spread)
            new_value += float(new_distance @ new_distance)
            if new_value < value:
                step_taken = True
                break
            damping *= 8.0
        if not step_taken:
            break
        gained = value - new_value
        free, residual, jacobian, weights, value = trial, new_residual, new_jacobian, new_weights, new_value
        distance, slope = new_distance, new_slope
        damping = max(damping / 8.0, 1e-9)
        if gained < 1e-3:
            break
    return Solution(free, softness, spread, value)


def _bounded_step(hessian: FloatArray, gradient: FloatArray, free: FloatArray, damping: float) -> FloatArray:
    """Newton step; a coefficient that is at 0 and pushed below it stays there."""
    moving = (free > 0.0) | (gradient > 0.0)
    step = np.zeros_like(free)
    if moving.any():
        inner = hessian[np.ix_(moving, moving)]
        diagonal = np.diag(inner)
        ridge = damping * diagonal + 1e-12 * (diagonal.max() + 1e-300)
        step[moving] = np.linalg.solve(inner + np.diag(ridge), gradient[moving])
    return step


def covariance(problem: Problem, found: Solution) -> FloatArray:
    """Sandwich covariance of the free coefficients, (f, f); directions without information get a huge variance."""
    residual, jacobian = problem.residual(found.free, found.softness)
    _, weights = bisquare(residual, found.spread)
    u2 = np.minimum((residual / (CUTOFF * found.spread)) ** 2, 1.0)
    bending = np.where(u2 < 1.0, (1.0 - u2) * (1.0 - 5.0 * u2), 0.0)
    _, slope = problem.prior_terms(found.free)
    bread = (jacobian * max(float(bending.mean()), 0.1)).T @ jacobian / found.spread**2 + np.diag(slope**2)
    score = jacobian * (weights * residual)[:, None] / found.spread**2
    meat = score.T @ score + np.diag(slope**2)
    values, vectors = np.linalg.eigh(bread)
    values = np.maximum(values, 1e-9 * max(values.max(), 1e-300))
    inverse = (vectors / values) @ vectors.T
    result: FloatArray = inverse @ meat @ inverse
    # An uninformative direction has neither score nor curvature: say "unknown", not "exactly known".
    weak = vectors[:, values <= 1e-9 * values.max() * 1.001]
    return result + 1e12 * (weak @ weak.T) if weak.size else result


_TRIAL_KNEES = 7
_ROUNDS = 4


def starting_points(columns: Columns, problem: Problem, rows: slice, keep: int = 3) -> list[FloatArray]:
    """The ``keep`` best coefficient vectors (solver's units) among trial knees between the seen token counts.

    They differ: neighbouring knees that split the steps alike lead to the same line.
    rows: the rows of the samples that ``problem`` holds.
    """
    tokens = columns.samples.computed_tokens[rows]
    low, high = float(tokens.min()), float(tokens.max())
    knees = np.exp(np.linspace(np.log(low), np.log(high), _TRIAL_KNEES + 2))[1:]
    found: list[FloatArray] = []
    for knee in knees:
        theta = _linear(problem, tokens < knee)
        if not any(np.allclose(theta, other, rtol=1e-3, atol=1e-6) for other in found):
            found.append(theta)
    best = robust_order([problem.residual(theta, 0.0)[0] for theta in found])
    return [found[place] for place in best[:keep]]


def starting_point_of(columns: Columns, model: StepModel) -> FloatArray:
    """An earlier model in the solver's units."""
    return np.array([getattr(model, name) for name in columns.used]) / columns.scale


def _linear(problem: Problem, below: FloatArray) -> FloatArray:
    """Least absolute relative error by reweighting, the flat group below the knee and the growing one above it."""
    flat = below[:, None] * problem.memory
    growing = (1.0 - below)[:, None] * problem.compute
    design = np.concatenate([problem.outside, flat, growing], axis=1)
    relative = design / np.exp(problem.log_time)[:, None]
    weights = np.ones(len(relative))
    theta = np.zeros(design.shape[1])
    for _ in range(_ROUNDS):
        scaled = relative * weights[:, None]
        normal = scaled.T @ relative
        ridge = 1e-9 * max(float(np.trace(normal)), 1e-300)
        theta = nonnegative_solution(normal + ridge * np.eye(len(theta)), scaled.sum(axis=0))
        weights = 1.0 / np.maximum(np.abs(relative @ theta - 1.0), 0.02)
    return theta


def nonnegative_solution(normal: FloatArray, right: FloatArray) -> FloatArray:
    """Solve normal @ x = right, dropping the most negative coefficient until none is."""
    active = np.ones(len(right), dtype=np.bool_)
    x = np.zeros(len(right))
    while active.any():
        x[:] = 0.0
        x[active] = np.linalg.solve(normal[np.ix_(active, active)], right[active])
        if x.min() >= 0.0:
            break
        active[int(np.argmin(x))] = False
    return np.maximum(x, 0.0)
