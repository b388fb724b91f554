"""Fit: the step model of this very engine, from a bounded sample of its steps, refitted when it is needed or drifts."""

import math

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from rooftune.policies.errors import InputError
from rooftune.policies.step_time import StepModel
from rooftune.tuner.control.outcome import FitPart
from rooftune.tuner.control.ports import Store
from rooftune.tuner.model.drift import Drift, DriftAlarm
from rooftune.tuner.model.fit import MIN_STEPS, fit_steps
from rooftune.tuner.model.model_file import check_step_model
from rooftune.tuner.model.reservoir import Reservoir, stratum_of
from rooftune.tuner.model.roofline import FitCode, StepFit, predict
from rooftune.tuner.model.samples import StepSamples, join
from rooftune.tuner.observe.rows import StepRows
from rooftune.tuner.record import Part, Words

KEY = "model"
# Steps kept for the fit (0.1 to 0.2 s of one core for each refit), and of sizes that were met for the first time.
# Few, because the sample is evened out only where it is full, and most steps are decodes of a handful of sizes.
CAPACITY_STEPS, FIRST_SEEN_STEPS = 1024, 256
# A refit is worth its time when so many more steps have been seen, relative to the last one.
REFIT_GROWTH, REFIT_LEAST_STEPS = 1.5, 400
# While a side of the knee is open, growth alone is enough: the steps that close it are often among the next ones.
OPEN = frozenset({FitCode.SLOPE_UNKNOWN.value, FitCode.FLOOR_UNKNOWN.value})
# Steps of known sizes reach far enough when they cover this share of the sizes seen; otherwise first ones count too.
REACH = 0.7
# Steps of one size class (at least so many) may be off this far, in logarithms, before another fit is tried.
CLASS_STEPS, MOST_OFF = 8, 0.05


class AcceptedPart(Part):
    """The accepted model as the store keeps it; of which model it speaks."""

    model: Words
    fit: FitPart


class Learner:
    """Steps in, model out. Two with the same seed and the same steps agree."""

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
        """Go on with the model that an earlier controller accepted, when it was of the same engine's model."""
        if self._model_name not in ("", model):
            self.accepted = None  # another model was started: what was fitted says nothing of it
        self._store, self._model_name = store, model
        text = store.value(KEY)
        if text is None or self.accepted is not None:
            return
        try:
            kept = AcceptedPart.model_validate_json(text)
            check_step_model(StepModel(**kept.fit.coefficients), "the kept step model")
        except (ValidationError, TypeError, InputError):
            return  # of another version: the next fit replaces it
        if kept.model == model:
            self.accepted = kept.fit

    def restart(self) -> None:
        """Another start of the engine: its steps so far say nothing of the new one but where a fit may begin."""
        self._reservoir.clear()
        self._first.clear()
        self._sizes = np.zeros(0)
        self._alarm.reset()
        self._fitted_at_steps = self._seen_steps = 0
        self.drift = None

    @property
    def model(self) -> StepModel | None:
        """The accepted coefficients."""
        return None if self.accepted is None else StepModel(**self.accepted.coefficients)

    def take(self, steps: StepRows) -> None:
        """New steps, in order: kept for the fit, and held against the accepted model."""
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
            if alarm is not None and self.drift is None:
                # What was sampled before is of another engine, as far as time goes. Once is enough: an alarm that
                # rings again until there is a refit must not take from it what has been sampled since.
                self._reservoir.clear()
                self._first.clear()
                self._reservoir.add(again)
                self._fitted_at_steps, self._seen_steps = 0, len(again)
            self.drift = alarm or self.drift

    def _known(self, samples: StepSamples) -> npt.NDArray[np.bool_]:
        """Which steps are of a size that was met before; see ``rooftune.tuner.model.samples``."""
        tokens = samples.computed_tokens
        known = np.isin(tokens, self._sizes)
        first = np.zeros(len(tokens), dtype=np.bool_)
        first[np.unique(tokens, return_index=True)[1]] = True
        self._sizes = np.union1d(self._sizes, tokens)
        answer: npt.NDArray[np.bool_] = known | ~first
        return answer

    def samples(self) -> StepSamples:
        """What a fit would read now."""
        again, first = self._reservoir.samples, self._first.samples
        if not len(first):
            return again
        reach = float(again.computed_tokens.max()) if len(again) else 0.0
        return again if reach >= REACH * float(first.computed_tokens.max()) else join([again, first])

    @property
    def due(self) -> bool:
        """Whether a refit would tell more than the accepted model does."""
        if self._fitted_at_steps == 0:
            return True
        grown = REFIT_GROWTH * self._fitted_at_steps
        if self.accepted is not None and not OPEN.isdisjoint(self.accepted.codes):
            return self._seen_steps >= grown
        return self._seen_steps >= max(grown, self._fitted_at_steps + REFIT_LEAST_STEPS)

    def fit(self) -> FitPart:
        """A refit; the accepted model from now on. Raises FitRefused, and then the one before stays."""
        self._fitted_at_steps = max(self._seen_steps, 1)  # a refusal, too, is not worth repeating on the same steps
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
        """The accepted model for the record, with the alarm when there is one."""
        if self.accepted is None or self.drift is None:
            return self.accepted
        return self.accepted.model_copy(update={"drift_ratio": self.drift.ratio})


def checked_fit(samples: StepSamples) -> StepFit:
    """A fit that leaves no size of step out. Raises FitRefused.

    Most steps are decodes, and a fit that explains them to the last microsecond may take all the longer steps for
    outliers. Where steps of some size are off in the middle, a second fit starts from the two ends of the data, and the
    one that is off less stays. (Never from the accepted model: one that was fitted before a long prompt came has no
    slope, and a search that starts there stays there.)
    """
    found = fit_steps(samples)
    if _off(found.model, samples) <= MOST_OFF:
        return found
    start = _from_both_ends(samples)
    other = fit_steps(samples, start=start) if start is not None else found
    return min((found, other), key=lambda fit: _off(fit.model, samples))


def _off(model: StepModel, samples: StepSamples) -> float:
    """Largest median deviation of the steps of one size class, in logarithms of step time."""
    residual = np.log(samples.duration_s / predict(model, samples))
    strata = stratum_of(samples.computed_tokens)
    names, counts = np.unique(strata, return_counts=True)
    return max((abs(float(np.median(residual[strata == s]))) for s in names[counts >= CLASS_STEPS]), default=0.0)


def _from_both_ends(samples: StepSamples) -> StepModel | None:
    """A straight line from the shortest steps to the longest, flat before it; None when they are of one size."""
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
    """A fit as the record holds it; bounds that are not known become null."""

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
