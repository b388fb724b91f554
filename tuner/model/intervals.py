"""Intervals of a fit: what the data determines of each coefficient and of the knee, and what it does not."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rooftune.policies.step_time import StepModel
from rooftune.tuner.model.roofline import FitCode, Interval
from rooftune.tuner.model.samples import FloatArray
from rooftune.tuner.model.solver import NAMES, Columns, Problem, Solution, column_of, covariance, solve

CHI2_95 = 3.84
# Nominal 95 %, with a little more for what the linearisation leaves out.
Z = 2.1
MIN_STEPS_PER_SIDE = 20
# Below this many chi-square units for a side of the knee, or above this log width, the linearisation is not
# trusted and the interval is walked.
WEAK_EVIDENCE = 40.0
WIDE_LOG = 0.4
_WALK_FACTOR = 1.12
_MISFIT_INFLATION = 3.0
# A formula that is off by this much over whole ranges of tokens does not describe the engine: it gives no knee.
_MISFIT_PATTERN = 0.1
# A coefficient is unknown if its interval is this share of a typical step.
_UNKNOWN_SHARE = 0.5
# Below a knee steps grow by their requests and their context, and by less than this.
_GROWTH = 3.0


@dataclass(frozen=True)
class Evidence:
    """A chosen solution among those for each softness, all at one spread.

    inflation: variance factor of the pattern that the residuals leave over the tokens, at least 1; pattern: its size
    as a fraction of the step time.
    """

    columns: Columns
    problem: Problem
    best: Solution
    fits: list[Solution]
    inflation: float
    pattern: float

    @property
    def threshold(self) -> float:
        """Deviance up to which a model explains the steps as well as the chosen one."""
        return min(fit.deviance for fit in self.fits) + CHI2_95 * self.inflation

    @cached_property
    def near(self) -> list[tuple[Solution, FloatArray]]:
        """Solutions as good as the best, with their covariances."""
        chosen = [fit for fit in self.fits if fit.deviance <= self.threshold or fit is self.best]
        return [(fit, covariance(self.problem, fit) * self.inflation) for fit in chosen]

    def has_prior(self, name: str) -> bool:
        """Whether a prior bounds this coefficient."""
        return name in self.columns.used and bool(np.isfinite(self.problem.prior_sd[self.columns.place(name)]))


def coefficient_interval(evidence: Evidence, name: str, knee: Interval) -> Interval:
    """Bounds in the coefficient's unit, over every softness that explains the steps as well.

    Where a side of the knee is open, overhead and floor cannot be separated and only whole steps bound them.
    """
    cap = _cap(evidence, name)
    mixed = name in ("overhead_s", "floor_s") and not knee.bounded
    unseen = name in ("slope_s_per_token", "attention_s") and math.isinf(knee.high)
    if name not in evidence.columns.used or ((mixed or unseen) and not evidence.has_prior(name)):
        return Interval(0.0, cap)
    place = evidence.columns.place(name)
    unit = float(evidence.columns.scale[place])
    low, high = math.inf, 0.0
    for fit, cov in evidence.near:
        reach = Z * math.sqrt(max(float(cov[place, place]), 0.0))
        low, high = min(low, float(fit.free[place]) - reach), max(high, float(fit.free[place]) + reach)
    high = max(min(high * unit, cap), 0.0)
    return Interval(min(max(low * unit, 0.0), high), high)


def _cap(evidence: Evidence, name: str) -> float:
    """No coefficient can cost more than whole steps took; a low quantile stands for the minimum."""
    samples = evidence.columns.samples
    amount = column_of(samples, name)
    paid = amount > 0.0
    if not paid.any():
        return math.inf
    return float(np.quantile(samples.duration_s[paid] / amount[paid], 0.05)) * (1.0 + 3.0 * evidence.best.spread)


def sharpness_interval(evidence: Evidence) -> Interval:
    """Of the sharpness (>= 1); inf stands for the hard maximum."""
    softness = [fit.softness for fit, _ in evidence.near]
    low, high = (1.0 / value if value > 0.0 else math.inf for value in (max(softness), min(softness)))
    return Interval(low, high)


def knee_interval(evidence: Evidence) -> Interval:
    """Of floor / slope at zero context, in tokens; 0 or inf on a side that the data does not bound."""
    if evidence.pattern > _MISFIT_PATTERN:
        return Interval(0.0, math.inf)
    linear = _linear_knee(evidence, 0.0)
    held_low, held_high = evidence.has_prior("floor_s"), evidence.has_prior("slope_s_per_token")
    without_floor = math.inf if held_low else _without(evidence, "floor_s")
    without_slope = math.inf if held_high else _without(evidence, "slope_s_per_token")
    low_open, high_open = without_floor <= evidence.threshold, without_slope <= evidence.threshold
    least = evidence.threshold - CHI2_95 * evidence.inflation
    weak = min(without_floor, without_slope) - least < WEAK_EVIDENCE * evidence.inflation
    wide = not linear.bounded or math.log(linear.high / linear.low) > WIDE_LOG
    low, high = linear.low, linear.high
    if (weak or wide) and not (held_low or held_high):
        low = 0.0 if low_open else _walk(evidence, down=True)
        high = math.inf if high_open else _walk(evidence, down=False)
    tokens = evidence.columns.samples.computed_tokens
    if (low_open or _hardly_seen(tokens <= low)) and not held_low:
        low = 0.0
    if (high_open or _hardly_seen(tokens >= high)) and not held_high:
        high = math.inf
    return Interval(low, high)


def _hardly_seen(rows: npt.NDArray[np.bool_]) -> bool:
    """Whether too few steps lie beyond the interval's end: the flat (or growing) part itself was hardly seen."""
    return int(rows.sum()) < MIN_STEPS_PER_SIDE


def knee_interval_at(evidence: Evidence, context_tokens: float, at_zero: Interval) -> Interval:
    """Of the knee at a live context; open above where the knee at zero context is."""
    if math.isinf(at_zero.high):
        return Interval(0.0, math.inf)
    linear = _linear_knee(evidence, context_tokens)
    if linear.bounded and math.log(linear.high / linear.low) <= WIDE_LOG and at_zero.low > 0.0:
        return linear
    # The context only adds to the knee at zero context, and at most its own part.
    return Interval(at_zero.low, at_zero.high + _linear_knee(evidence, context_tokens, floor_weight=0.0).high)


def _linear_knee(evidence: Evidence, context_tokens: float, floor_weight: float = 1.0) -> Interval:
    """Delta method on the log of (floor + kv x context) / slope, joined over the near softnesses."""
    columns = evidence.columns
    floor, slope = columns.place("floor_s"), columns.place("slope_s_per_token")
    low, high = math.inf, 0.0
    for fit, cov in evidence.near:
        by = np.zeros(len(columns.used))
        by[floor] = columns.scale[floor] * floor_weight
        if "kv_s_per_token" in columns.used:
            by[columns.place("kv_s_per_token")] = columns.scale[columns.place("kv_s_per_token")] * context_tokens
        flat = float(by @ fit.free)
        growth = float(fit.free[slope])
        if growth <= 0.0:
            return Interval(0.0, math.inf)
        if flat <= 0.0:
            low = 0.0
            continue
        gradient = by / flat
        gradient[slope] -= 1.0 / growth
        reach = min(Z * math.sqrt(max(float(gradient @ cov @ gradient), 0.0)), 50.0)
        knee = flat / (growth * float(columns.scale[slope]))
        low, high = min(low, knee * math.exp(-reach)), max(high, knee * math.exp(reach))
    return Interval(min(low, high), high)


def _without(evidence: Evidence, name: str) -> float:
    """Least deviance of a model that lacks the coefficient."""
    place = evidence.columns.place(name)
    return _restricted(evidence, np.delete(np.eye(len(evidence.columns.used)), place, axis=1), place, math.inf)


def _at_knee(evidence: Evidence, knee: float) -> float:
    """Least deviance of a model whose knee (tokens, at zero context) is given."""
    columns = evidence.columns
    floor, slope = columns.place("floor_s"), columns.place("slope_s_per_token")
    mixing = np.eye(len(columns.used))
    mixing[floor, slope] = knee * columns.scale[slope] / columns.scale[floor]
    return _restricted(evidence, np.delete(mixing, floor, axis=1), floor, evidence.threshold)


def _restricted(evidence: Evidence, mixing: FloatArray, dropped: int, enough: float) -> float:
    """Least deviance over softness and starts of the problem with fewer free coefficients; stops below ``enough``."""
    problem = replace(
        evidence.problem,
        mixing=mixing,
        prior_log=np.delete(evidence.problem.prior_log, dropped),
        prior_sd=np.delete(evidence.problem.prior_sd, dropped),
    )
    best: float = math.inf
    ordered = sorted(evidence.fits, key=lambda fit: fit.deviance)
    for fit in [*ordered[:2], *(f for f in ordered[2:] if f.softness in (0.0, 0.25, 1.0))]:
        start = np.maximum(np.delete(fit.free, dropped), 1e-3)
        best = min(best, solve(problem, start, fit.softness, evidence.best.spread, 15).deviance)
        if best <= enough and math.isfinite(enough):
            break
    return best


def _walk(evidence: Evidence, down: bool) -> float:
    """End of the interval by profile: the farthest knee that still explains the steps; 0 or inf beyond the data."""
    tokens = evidence.columns.samples.computed_tokens
    floor, slope = evidence.columns.place("floor_s"), evidence.columns.place("slope_s_per_token")
    seconds = evidence.best.free * evidence.columns.scale
    first = float(seconds[floor] / seconds[slope]) if seconds[slope] > 0.0 else float(tokens.max())
    first = min(max(first, float(tokens.min())), float(tokens.max()))
    factor = 1.0 / _WALK_FACTOR if down else _WALK_FACTOR
    knee, gap = first, 1.0
    while tokens.min() / 2.0 < knee < tokens.max() * 2.0:
        knee *= factor**gap
        gap *= 1.25
        if _at_knee(evidence, knee) > evidence.threshold:
            return float(knee)
    return 0.0 if down else math.inf


def _grew(evidence: Evidence) -> bool:
    """Whether computing takes most of the longest steps: then they lie above any knee.

    The slope itself may still be open, if the attention of long prompts explains the growth as well.
    """
    model, samples = evidence.columns.model(evidence.best.free, evidence.best.softness), evidence.columns.samples
    tokens, time_s = samples.computed_tokens, samples.duration_s
    compute_s = model.slope_s_per_token * tokens + model.attention_s * samples.attention_work
    short, long = tokens <= np.quantile(tokens, 0.1), tokens >= np.quantile(tokens, 0.98)
    long_s = float(np.median(time_s[long]))
    return long_s > _GROWTH * float(np.median(time_s[short])) and float(np.median(compute_s[long])) > 0.5 * long_s


def unknowns(evidence: Evidence, knee: Interval, intervals: Mapping[str, Interval]) -> list[FitCode]:
    """What the steps do not determine, in a fixed order."""
    samples = evidence.columns.samples
    typical = float(np.median(samples.duration_s))
    found = []
    if evidence.pattern > _MISFIT_PATTERN:
        found.append(FitCode.MISFIT)
    elif math.isinf(knee.high) and not (knee.low <= 0.0 and _grew(evidence)):
        found.append(FitCode.SLOPE_UNKNOWN)
    elif knee.low <= 0.0:
        found.append(FitCode.FLOOR_UNKNOWN)
    for name, code in (
        ("kv_s_per_token", FitCode.CONTEXT_UNKNOWN),
        ("attention_s", FitCode.ATTENTION_UNKNOWN),
        ("sequence_s", FitCode.SEQUENCE_UNKNOWN),
    ):
        amount = float(np.quantile(column_of(samples, name), 0.9))
        width = (intervals[name].high - intervals[name].low) * amount if amount > 0.0 else math.inf
        if name not in evidence.columns.used or width > _UNKNOWN_SHARE * typical:
            found.append(code)
    softness = [fit.softness for fit, _ in evidence.near]
    if min(softness) == 0.0 and max(softness) >= 0.5:
        found.append(FitCode.SHARPNESS_UNKNOWN)
    if evidence.inflation > _MISFIT_INFLATION and FitCode.MISFIT not in found:
        found.append(FitCode.MISFIT)
    return found


DRAWS = 4
_Z95 = 1.96


def model_draws(
    model: StepModel, intervals: Mapping[str, tuple[float, float]], *, seed: int = 0, count: int = DRAWS
) -> tuple[StepModel, ...]:
    """``count`` models within the 95 % intervals of the coefficients; none when no interval says anything.

    A coefficient without a finite interval stays unchanged: its error is unknown. Overhead and
    floor trade against each other in a fit while their sum, the time of a small step, is well known: it is kept.
    """
    known = {
        name: intervals[name]
        for name in NAMES
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
