"""The drift alarm: as rare as it says while nothing changes, quick when something does."""

import math

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.model.drift import DriftAlarm, threshold_for

WINDOWS = 1500


def noise(kind: str, steps: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    if kind == "heavy":
        return 0.1 * random.standard_t(3, steps)
    values = 0.1 * random.standard_normal(steps)
    if kind == "outliers":
        values = values + np.where(random.random(steps) < 0.05, 2.3, 0.0)
    if kind == "neighbours":
        # Moving average of five: a step resembles those around it.
        values = np.convolve(values, np.ones(5) / math.sqrt(5.0), mode="same")
    return values


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "heavy", "outliers", "neighbours"])
@pytest.mark.parametrize("rate", [0.01, 0.002])
def test_false_alarms_are_no_more_frequent_than_stated(kind: str, rate: float) -> None:
    alarms, watched = 0, 0
    for seed in range(24):
        alarm = DriftAlarm(window_steps=50, false_alarms_per_window=rate)
        for chunk in noise(kind, 50 * WINDOWS, seed).reshape(WINDOWS, 50):
            alarms += alarm.add(chunk) is not None
        watched += WINDOWS - alarm.learn_windows
    # Two standard deviations of a count: the stated rate is a bound, and the simulation is finite.
    expected = rate * watched
    assert alarms <= expected + 2.0 * math.sqrt(expected)


@pytest.mark.parametrize(("shift", "within"), [(0.05, 12), (0.2, 4), (-0.1, 6)])
def test_a_shift_is_found_soon_with_its_direction_and_size(shift: float, within: int) -> None:
    late = 0
    for seed in range(20):
        alarm = DriftAlarm(false_alarms_per_window=1e-3)
        assert alarm.add(noise("normal", 3000, seed)) is None and alarm.ready
        for windows in range(1, 60):
            drift = alarm.add(shift + noise("normal", 100, 1000 * seed + windows))
            if drift is not None:
                break
        late += windows > within
        assert drift is not None and drift.slower == (shift > 0)
        assert math.log(drift.ratio) == pytest.approx(shift, abs=0.035)
    assert late <= 1


def test_one_outlier_window_raises_no_alarm_and_a_reset_starts_over() -> None:
    alarm = DriftAlarm()
    alarm.add(noise("normal", 5000, 1))
    assert alarm.add(np.full(100, 3.0)) is None
    alarm.reset()
    assert not alarm.ready
    alarm.add(0.5 + noise("normal", 5000, 2))
    assert alarm.add(0.5 + noise("normal", 500, 3)) is None


def test_batching_of_steps_does_not_matter() -> None:
    values = np.concatenate([noise("normal", 4000, 1), 0.2 + noise("normal", 2000, 2)])
    whole = DriftAlarm().add(values)
    parts, found = DriftAlarm(), None
    for place in range(0, 6000, 37):
        found = found or parts.add(values[place : place + 37])
    assert whole is not None and whole == found


def test_rarer_alarms_need_a_higher_threshold_and_bad_values_are_refused() -> None:
    assert threshold_for(1e-4) > threshold_for(1e-3) > threshold_for(1e-2)
    for bad in (0.0, 0.5, math.nan):
        with pytest.raises(InputError):
            threshold_for(bad)
    with pytest.raises(InputError):
        DriftAlarm(window_steps=3)
    with pytest.raises(InputError):
        DriftAlarm(learn_windows=3)
    with pytest.raises(InputError):
        DriftAlarm().add(np.array([0.0, math.nan]))
