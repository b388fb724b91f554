"""Detects that the engine is slower or faster than its model: a two-sided CUSUM with a stated rate of false alarms.

Steps come in windows; each window counts by the median of log(measured / predicted), which outliers cannot move.
The first windows after a fit teach the level and the spread of these medians, so that steps that resemble their
neighbours (their noise is not independent) raise no alarm. Threshold by Siegmund's approximation of the mean
run length of a CUSUM on normal increments (Siegmund, Sequential Analysis, 1985).
"""

import math
from dataclasses import dataclass

import numpy as np

from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.proof.probation import ALLOWANCE, cusum_threshold
from rooftune.tuner.model.samples import FloatArray

# The spread is learned from few windows; this factor still keeps the stated rate an upper bound.
LEARNING_MARGIN = 1.4
MIN_WINDOW_SD = 1e-3
# A window counts for at most this many spreads: one odd window alone never raises an alarm.
CLIP = 4.0


@dataclass(frozen=True)
class Drift:
    """An alarm. ratio: measured over predicted step time now against the taught level (1.1 = 10 % slower);
    windows: how many windows ago it began; slower: the direction."""

    ratio: float
    windows: int
    slower: bool


def threshold_for(false_alarms_per_window: float) -> float:
    """CUSUM threshold, in spreads, whose two sides together raise false alarms at most this often (0 < rate <= 0.1)."""
    if not 0.0 < false_alarms_per_window <= 0.1:
        raise bad_value("false alarms per window", false_alarms_per_window, "within (0, 0.1]", "give 0.001 or so")
    return cusum_threshold(2.0 / false_alarms_per_window)


class DriftAlarm:
    """Takes log(measured / predicted) of every step in order of time; returns an alarm when the level has moved.

    window_steps: steps of one window (>= 10); learn_windows: windows that teach level and spread (>= 20);
    false_alarms_per_window: upper bound of the rate of alarms while nothing changes.
    """

    def __init__(self, window_steps: int = 100, learn_windows: int = 30, false_alarms_per_window: float = 1e-3) -> None:
        if window_steps < 10:
            raise bad_value("drift window", window_steps, "at least 10 steps", "give 100")
        if learn_windows < 20:
            raise bad_value("drift learning windows", learn_windows, "at least 20", "give 30")
        self.window_steps = window_steps
        self.learn_windows = learn_windows
        self.threshold = threshold_for(false_alarms_per_window)
        self.reset()

    def reset(self) -> None:
        """Forget everything (after a refit): the next windows teach the level again."""
        self._pending: FloatArray = np.zeros(0)
        self._learned: list[float] = []
        self._level, self._sd = 0.0, 0.0
        self._up, self._down = _Side(), _Side()

    @property
    def ready(self) -> bool:
        """Whether level and spread are known; before that there is no alarm."""
        return len(self._learned) >= self.learn_windows

    def add(self, log_residuals: FloatArray) -> Drift | None:
        """The first alarm among the windows that these steps complete, or None. Raises InputError when not finite."""
        values = np.asarray(log_residuals, dtype=np.float64)
        if values.ndim != 1 or not np.isfinite(values).all():
            raise InputError("log residuals must be one row of finite numbers; drop missing steps first")
        self._pending = np.concatenate([self._pending, values])
        found: Drift | None = None
        whole = len(self._pending) // self.window_steps
        for window in self._pending[: whole * self.window_steps].reshape(whole, self.window_steps):
            answer = self._window(float(np.median(window)))
            found = found or answer
        self._pending = self._pending[whole * self.window_steps :]
        return found

    def _window(self, median: float) -> Drift | None:
        if not self.ready:
            self._learned.append(median)
            if self.ready:
                self._level = float(np.mean(self._learned))
                self._sd = max(LEARNING_MARGIN * float(np.std(self._learned, ddof=1)), MIN_WINDOW_SD)
            return None
        distance = median - self._level
        score = max(-CLIP, min(CLIP, distance / self._sd))
        for side, sign in ((self._up, 1.0), (self._down, -1.0)):
            if side.add(sign * score, distance) > self.threshold:
                alarm = Drift(math.exp(side.mean), side.windows, sign > 0.0)
                self._up, self._down = _Side(), _Side()
                return alarm
        return None


class _Side:
    """One side of the CUSUM: its height, and the windows since it last stood at 0."""

    def __init__(self) -> None:
        self.height, self.windows, self._sum = 0.0, 0, 0.0

    def add(self, score: float, distance: float) -> float:
        self.height = self.height + score - ALLOWANCE
        self.windows += 1
        self._sum += distance
        if self.height <= 0.0:
            self.height, self.windows, self._sum = 0.0, 0, 0.0
        return self.height

    @property
    def mean(self) -> float:
        return self._sum / max(self.windows, 1)
