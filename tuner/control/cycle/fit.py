"""Fit: this engine's step model from a bounded sample of its steps, refitted when due or after drift."""

import math

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from rooftune.policies.errors import InputError
from rooftune.policies.step_time import StepModel
from rooftune.tuner.control.outcome import FitPart
from rooftune.tuner.control.ports import Store
from rooftune.tuner.model.drift import Drift, DriftAlarm
from rooftune.tuner.model.fit import MIN_STEPS, MIN_TOKEN_RATIO, fit_steps, token_range
from rooftune.tuner.model.model_file import check_step_model
from rooftune.tuner.model.reservoir import Reservoir, stratum_of
from rooftune.tuner.model.roofline import FitCode, StepFit, predict
from rooftune.tuner.model.samples import StepSamples, join
from rooftune.tuner.observe.rows import StepRows
from rooftune.tuner.record import Part, Words

KEY = "model"
# Steps kept for the fit (a refit takes 0.1 to 0.2 s of one core), and steps of sizes met for the first time. Few,
# because only a full sample is balanced, and most steps are decodes of a handful of sizes.
CAPACITY_STEPS, FIRST_SEEN_STEPS = 1024, 256
# A refit pays off after this growth in steps, and after this many more.
REFIT_GROWTH, REFIT_LEAST_STEPS = 1.5, 400
# While a side of the knee is open, growth alone is enough: the next steps often close it.
OPEN = frozenset({FitCode.SLOPE_UNKNOWN.value, FitCode.FLOOR_UNKNOWN.value})
# Steps of known sizes suffice when they reach this share of the largest size; otherwise first ones count too.
REACH = 0.7
# Steps of the commonest size class for each one of the others, where it alone would make a fit impossible.
MOST_ALIKE = 9
# A size class of at least CLASS_STEPS may be off by MOST_OFF, in logarithms, before a second fit is tried.
CLASS_STEPS, MOST_OFF = 8, 0.05


class AcceptedPart(Part):
    """The accepted step model in the store. model: the engine's language model."""

    model: Words
    fit: FitPart


class Learner:
    """Fits the step model; deterministic for one seed and one sequence of steps."""

    def __init__(self, seed: int = 0) -> None:
        self._reservoir = Reservoir(CAPACITY_STEPS, seed)
        self._first = Reservoir(FIRST_SEEN_STEPS, seed + 1)
        self._sizes: npt.NDArray[np.float64] = np.zeros(0)
        self._alarm = DriftAlarm()
        self._fitted_at_steps = 0
        self._seen_steps = 0
        self.drift: Drift | None = None
        self.accepted: FitPart | None = None
        self._store: Store | None = None
        self._model_name = ""

    def recall(self, store: Store, model: str) -> None:
        """Takes over what an earlier controller accepted for the same language model."""
        if self._model_name not in ("", model):
            self.accepted = None  # the engine serves another model now
        self._store, self._model_name = store, model
        text = store.value(KEY)
        if text is None or self.accepted is not None:
            return
        try:
            kept = AcceptedPart.model_validate_json(text)
            check_step_model(StepModel(**kept.fit.coefficients), "the kept step model")
        except (ValidationError, TypeError, InputError):
            return  # from another version: the next fit replaces it
        if kept.model == model:
            self.accepted = kept.fit

    def restart(self) -> None:
        """The engine restarted: drops its steps, keeps the accepted model until the next fit."""
        self._reservoir.clear()
        self._first.clear()
        self._sizes = np.zeros(0)
        self._alarm.reset()
        self._fitted_at_steps = self._seen_steps = 0
        self.drift = None

    @property
    def model(self) -> StepModel | None:
        return None if self.accepted is None else StepModel(**self.accepted.coefficients)

    def take(self, steps: StepRows) -> None:
        """Adds new steps, in order, and checks them against the accepted model for drift."""
        samples = steps.samples()
        if not len(samples):
            return
        known = self._known(samples)
        again = samples.select(known)
        self._reservoir.add(again)
        self._first.add(samples.select(~known))
        self._seen_steps += len(samples)
        model = self.model
        if model is not None and len(again):
            alarm = self._alarm.add(np.log(again.duration_s / predict(model, again)))
            if alarm is not None:
                self.drifted(alarm, again)

    def drifted(self, drift: Drift, since: StepSamples) -> None:
        """The engine's pace has changed: a refit is due, on the samples ``since`` then and later ones."""
        if self.drift is None:
            # The older samples show another timing. Clear them only at the first alarm: later ones must not drop the
            # steps sampled since.
            self._reservoir.clear()
            self._first.clear()
            self._reservoir.add(since)
            self._fitted_at_steps, self._seen_steps = 0, len(since)
        self.drift = drift

    def _known(self, samples: StepSamples) -> npt.NDArray[np.bool_]:
        """Which steps have a size met before; see ``rooftune.tuner.model.samples``."""
        tokens = samples.computed_tokens
        known = np.isin(tokens, self._sizes)
        first = np.zeros(len(tokens), dtype=np.bool_)
        first[np.unique(tokens, return_index=True)[1]] = True
        self._sizes = np.union1d(self._sizes, tokens)
        answer: npt.NDArray[np.bool_] = known | ~first
        return answer

    def samples(self) -> StepSamples:
        """The steps that a fit would use now."""
        again, first = self._reservoir.samples, self._first.samples
        if not len(first):
            return again
        reach = float(again.computed_tokens.max()) if len(again) else 0.0
        if reach >= REACH * float(first.computed_tokens.max()) and _varied(again):
            return again
        both = join([again, first])
        return both if _varied(both) else _thinned(both)

    @property
    def due(self) -> bool:
        """Whether a refit would improve on the accepted model."""
        if self._fitted_at_steps == 0:
            return True
        grown = REFIT_GROWTH * self._fitted_at_steps
        if self.accepted is not None and not OPEN.isdisjoint(self.accepted.codes):
            return self._seen_steps >= grown
        return self._seen_steps >= max(grown, self._fitted_at_steps + REFIT_LEAST_STEPS)

    def fit(self) -> FitPart:
        """Refits and accepts the result. Raises FitRefused and keeps the model before."""
        self._fitted_at_steps = max(self._seen_steps, 1)  # do not repeat a refusal on the same steps
        found = checked_fit(self.samples())
        self.accepted = fit_part(found)
        self.drift = None
        self._alarm.reset()
        if self._store is not None:
            self._store.keep(KEY, AcceptedPart(model=self._model_name, fit=self.accepted).model_dump_json())
        return self.accepted

    @property
    def enough(self) -> bool:
        return len(self.samples()) >= MIN_STEPS

    def part(self) -> FitPart | None:
        """The accepted model for the record, with a drift alarm if there is one."""
        if self.accepted is None or self.drift is None:
            return self.accepted
        return self.accepted.model_copy(update={"drift_ratio": self.drift.ratio})


def checked_fit(samples: StepSamples) -> StepFit:
    """A fit that covers every step size. Raises FitRefused.

    Most steps are decodes, and a fit that explains them to the microsecond may treat all longer steps as outliers. When
    a size class is off in its median, a second fit starts from the two ends of the data, and the better one stays. It
    never starts from the accepted model: one fitted before any long prompt has no slope, and the search stays there.
    """
    found = fit_steps(samples)
    if _off(found.model, samples) <= MOST_OFF:
        return found
    start = _from_both_ends(samples)
    other = fit_steps(samples, start=start) if start is not None else found
    return min((found, other), key=lambda fit: _off(fit.model, samples))


def _varied(samples: StepSamples) -> bool:
    low, high = token_range(samples)
    return high >= MIN_TOKEN_RATIO * low


def _thinned(samples: StepSamples) -> StepSamples:
    """With fewer of the commonest size class, so that the others tell something: under overload nearly every step is
    full from the start on, and without a model there would be no push."""
    strata = stratum_of(samples.computed_tokens)
    names, counts = np.unique(strata, return_counts=True)
    common = np.flatnonzero(strata == names[counts.argmax()])
    others = len(samples) - len(common)
    kept = min(len(common), MOST_ALIKE * others)
    if kept + others < MIN_STEPS:
        return samples
    picked = common[np.linspace(0, len(common) - 1, kept).astype(int)]
    return samples.select(np.union1d(picked, np.flatnonzero(strata != names[counts.argmax()])))


def _off(model: StepModel, samples: StepSamples) -> float:
    """Largest median deviation of a size class, in logarithms of step time."""
    residual = np.log(samples.duration_s / predict(model, samples))
    strata = stratum_of(samples.computed_tokens)
    names, counts = np.unique(strata, return_counts=True)
    return max((abs(float(np.median(residual[strata == s]))) for s in names[counts >= CLASS_STEPS]), default=0.0)


def _from_both_ends(samples: StepSamples) -> StepModel | None:
    """Flat at the shortest steps, then a straight line to the longest; None when their times are alike."""
    tokens, time_s = samples.computed_tokens, samples.duration_s
    low, high = tokens <= np.quantile(tokens, 0.5), tokens >= 0.7 * tokens.max()
    short_s, long_s = float(np.median(time_s[low])), float(np.median(time_s[high]))
    reach = float(np.median(tokens[high]))
    if long_s <= 1.5 * short_s:
        return None
    overhead_s = 0.15 * short_s
    return StepModel(overhead_s, 0.0, short_s - overhead_s, 0.0, (long_s - overhead_s) / reach, 0.0, 0.0)


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None


def _above_zero(bound: float) -> float | None:
    return _finite(bound) if bound > 0.0 else None


def fit_part(found: StepFit) -> FitPart:
    """The fit for the record; unknown bounds become null."""
    knee, between = found.knee_tokens, found.knee_interval
    return FitPart(
        coefficients=dict(found.model._asdict()),
        intervals={name: (_finite(one.low), _finite(one.high)) for name, one in found.intervals.items()},
        knee_tokens=None if knee is None else _finite(knee),
        knee_low_tokens=_above_zero(between.low),
        knee_high_tokens=_above_zero(between.high),
        steps=found.steps,
        spread=found.spread,
        seen_low_tokens=found.seen_tokens[0],
        seen_high_tokens=found.seen_tokens[1],
        codes=tuple(code.value for code in found.codes),
    )


def noise_pairs(model: StepModel, steps: StepRows, most: int = 2000) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Modelled and measured seconds of the newest steps, for the twin's step noise."""
    samples = steps.samples()
    newest = samples.select(np.arange(max(0, len(samples) - most), len(samples)))
    return tuple(predict(model, newest).tolist()), tuple(newest.duration_s.tolist())
