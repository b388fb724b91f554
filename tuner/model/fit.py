"""Fit the step model to step samples: coefficients, intervals, the knee, and what is unknown.

What the data can hold: below the knee only overhead + floor shows, above it overhead and slope; the floor alone is
the height of the flat part over the growing line's start, so it needs both sides. The knee is where both meet. Each
side is tested: when a model without a floor (or without a slope) explains the steps as well, that side of the
knee's interval stays open and there is no knee to print.
"""

import math

import numpy as np
import numpy.typing as npt

from rooftune.policies.step_time import StepModel, knee_tokens
from rooftune.tuner.model.intervals import (
    CHI2_95,
    Evidence,
    coefficient_interval,
    knee_interval,
    knee_interval_at,
    sharpness_interval,
    unknowns,
)
from rooftune.tuner.model.prior import prior_sd
from rooftune.tuner.model.reservoir import stratum_of
from rooftune.tuner.model.roofline import FitCode, FitRefused, StepFit, predict
from rooftune.tuner.model.samples import FloatArray, StepSamples
from rooftune.tuner.model.solver import (
    NAMES,
    Columns,
    Problem,
    Solution,
    bisquare,
    make_columns,
    robust_order,
    solve,
    spread_of,
    starting_point_of,
    starting_points,
)

MIN_STEPS = 40
MIN_TOKEN_RATIO = 1.5
# Beyond this robust relative spread "equal steps" are not equal.
MAX_SPREAD = 0.5
MAX_OUTLIERS = 0.35
MAX_REPEATED = 0.2
SOFTNESS = (0.0, 0.04, 0.08, 0.125, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0)
_MIDDLE = 0.125
_ROUGH_ROWS = 600
# A softness whose deviance exceeds the best by this much per step is dropped.
_HOPELESS = 0.03


def fit_steps(samples: StepSamples, prior: StepModel | None = None, start: StepModel | None = None) -> StepFit:
    """Robust fit; O(n) and below 0.1 s for 2,000 steps (give a reservoir's samples, not a day's).

    prior: leads where the data is silent. start: an earlier model, for an incremental refit.
    Raises FitRefused (too few steps, no variation in tokens, a coarse clock, contradictory steps).
    """
    _refuse_hopeless(samples)
    columns = make_columns(samples)
    problem = columns.problem(*_prior_of(columns, prior))
    fits = _over_softness(columns, problem, start)
    best = _choose(fits)
    residual, _ = problem.residual(best.free, best.softness)
    _refuse_contradiction(residual, best.spread)
    evidence = Evidence(columns, problem, best, fits, *_pattern(residual, best.spread, samples))
    silent = fit_steps(samples, None, start).codes if prior else ()
    return _report(evidence, residual, silent, prior is not None)


def _report(evidence: Evidence, residual: FloatArray, silent: tuple[FitCode, ...], leaning: bool) -> StepFit:
    """silent: what the data alone does not determine; leaning: a prior stood in for it."""
    samples, best = evidence.columns.samples, evidence.best
    context = float(np.median(samples.context_tokens))
    knee = knee_interval(evidence)
    intervals = {name: coefficient_interval(evidence, name, knee) for name in NAMES}
    intervals["sharpness"] = sharpness_interval(evidence)
    live = knee_interval_at(evidence, context, knee)
    model = evidence.columns.model(best.free, best.softness)
    codes = dict.fromkeys(unknowns(evidence, knee, intervals))
    codes.update(dict.fromkeys(silent))
    if leaning:
        codes[FitCode.PRIOR_USED] = None
    _, weights = bisquare(residual, best.spread)
    tokens = samples.computed_tokens
    return StepFit(
        model=model,
        knee_tokens=knee_tokens(model) if knee.bounded else None,
        knee_interval=knee,
        knee_at_context_tokens=knee_tokens(model, context) if live.bounded else None,
        knee_at_context_interval=live,
        context_tokens=context,
        intervals=intervals,
        codes=tuple(codes),
        steps=len(samples),
        spread=spread_of(residual),
        outliers=float((weights == 0.0).mean()),
        seen_tokens=(float(tokens.min()), float(tokens.max())),
    )


def token_range(samples: StepSamples) -> tuple[float, float]:
    """Computed tokens of the steps, without the 2 % at either end; a fit needs a factor of MIN_TOKEN_RATIO."""
    low, high = np.quantile(samples.computed_tokens, [0.02, 0.98])
    return float(low), float(high)


def _refuse_hopeless(samples: StepSamples) -> None:
    if len(samples) < MIN_STEPS:
        raise FitRefused(FitCode.TOO_FEW_STEPS, f"{len(samples)} steps, at least {MIN_STEPS} are needed")
    low, high = token_range(samples)
    if high < MIN_TOKEN_RATIO * low:
        raise FitRefused(
            FitCode.NO_TOKEN_VARIATION,
            f"steps computed {low:g} to {high:g} tokens, the range must span a factor of {MIN_TOKEN_RATIO:g}",
        )
    repeated = float(np.unique(samples.duration_s, return_counts=True)[1].max()) / len(samples)
    if repeated > MAX_REPEATED:
        raise FitRefused(
            FitCode.COARSE_CLOCK,
            f"{repeated:.0%} of {len(samples)} steps took exactly the same time, at most {MAX_REPEATED:.0%} may",
        )


def _refuse_contradiction(residual: FloatArray, spread: float) -> None:
    own = spread_of(residual)
    if own > MAX_SPREAD:
        raise FitRefused(
            FitCode.CONTRADICTORY,
            f"{len(residual)} steps spread by {own:.0%} about the best formula, at most {MAX_SPREAD:.0%} is usable",
        )
    outliers = float((bisquare(residual, spread)[1] == 0.0).mean())
    if outliers > MAX_OUTLIERS:
        raise FitRefused(
            FitCode.CONTRADICTORY,
            f"{outliers:.0%} of {len(residual)} steps lie far from the others, at most {MAX_OUTLIERS:.0%} may",
        )


def _prior_of(columns: Columns, prior: StepModel | None) -> tuple[list[float], list[float]]:
    if prior is None:
        return [0.0] * len(columns.used), [math.inf] * len(columns.used)
    return [getattr(prior, n) for n in columns.used], [prior_sd(prior, n) for n in columns.used]


def _over_softness(columns: Columns, problem: Problem, start: StepModel | None) -> list[Solution]:
    """The best solution for each softness worth a look, ascending, at one spread so that their deviances compare."""
    anchor = _anchor(columns, problem, start)
    spread = min(spread_of(problem.residual(anchor, s)[0]) for s in (0.0, _MIDDLE))
    found: dict[float, Solution] = {}
    least = math.inf
    for branch in ([s for s in SOFTNESS if s >= _MIDDLE], [s for s in reversed(SOFTNESS) if s < _MIDDLE]):
        free = anchor
        for softness in branch:
            found[softness] = solve(problem, free, softness, spread, 12)
            free = found[softness].free
            least = min(least, found[softness].deviance)
            if found[softness].deviance > least + _HOPELESS * len(columns.samples):
                break
    found.setdefault(0.0, solve(problem, anchor, 0.0, spread, 12))
    return [found[s] for s in sorted(found)]


def _anchor(columns: Columns, problem: Problem, start: StepModel | None) -> FloatArray:
    """A good point at a middling softness, found on few rows: shared by all the solutions that follow."""
    rows = slice(None, None, max(1, len(columns.samples) // _ROUGH_ROWS))
    rough = problem.rows(rows)
    few = [starting_point_of(columns, start)] if start else starting_points(columns, rough, rows)
    solved = []
    for theta in few:
        free = theta
        for _ in range(2):
            spread = spread_of(rough.residual(free, _MIDDLE)[0])
            free = solve(rough, free, _MIDDLE, spread, 8).free
        solved.append(free)
    free = solved[robust_order([rough.residual(free, _MIDDLE)[0] for free in solved])[0]]
    for _ in range(2):
        free = solve(problem, free, _MIDDLE, spread_of(problem.residual(free, _MIDDLE)[0]), 4).free
    return free


def _choose(fits: list[Solution]) -> Solution:
    """The hard maximum unless a soft one is better beyond chance: one coefficient fewer."""
    best = min(fits, key=lambda fit: fit.deviance)
    return fits[0] if fits[0].deviance - best.deviance <= CHI2_95 else best


def _pattern(residual: FloatArray, spread: float, samples: StepSamples) -> tuple[float, float]:
    """What is left over token strata: a variance factor against chance (at least 1), and its size beyond chance.

    The size is the root mean square of the strata's mean residuals, a fraction of the step time.
    """
    _, weights = bisquare(residual, spread)
    strata = stratum_of(samples.computed_tokens)
    squares, expected = [], []
    for stratum in np.unique(strata):
        rows = strata == stratum
        weight = float(weights[rows].sum())
        if weight >= 10.0:
            squares.append((float((weights[rows] * residual[rows]).sum()) / weight) ** 2)
            expected.append(spread**2 / weight)
    if not squares:
        return 1.0, 0.0
    ratio = sum(s / e for s, e in zip(squares, expected, strict=True)) / max(len(squares) - len(NAMES) / 2.0, 1.0)
    return max(1.0, ratio), math.sqrt(max(sum(squares) - sum(expected), 0.0) / len(squares))


# First steps count as dearer from this share on, when the difference is beyond these standard errors of it.
DEARER, STANDARD_ERRORS, LEAST = 0.05, 3.0, 20


def seen_before(samples: StepSamples) -> npt.NDArray[np.bool_]:
    """True for each step (in order of time) whose number of computed tokens an earlier step had, shape (n,)."""
    again = np.ones(len(samples), dtype=np.bool_)
    again[np.unique(samples.computed_tokens, return_index=True)[1]] = False
    return again


def first_steps_cost(samples: StepSamples, model: StepModel) -> float:
    """How much longer the first step of a size takes than later ones, relative to a model of all: 0.2 is 20 %.

    A difference of medians of log(measured / predicted). 0 when it is below DEARER or within STANDARD_ERRORS standard
    errors, or when there are fewer than LEAST steps of either kind: then there is no reason to leave any out.
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
