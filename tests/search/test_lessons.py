"""Corrections by live results: only beyond chance, only nearby, and only errors not common to all settings."""

import pytest

from rooftune.policies.request import DEADLINE, Setting
from rooftune.tuner.search.lessons import Lesson, LiveResult, correction, distance_octaves, lesson

HERE = Setting(1024, max_running=64)


def test_a_miss_within_sampling_error_is_no_lesson_and_one_beyond_it_counts_by_the_excess() -> None:
    few, many = (lesson(LiveResult(HERE, 0.7, n, 0.75), 0.0, 0.0) for n in (30, 3000))
    assert few.miss == 0.0
    assert -0.05 < many.miss < -0.03
    assert lesson(LiveResult(HERE, 1.0, 10, 0.99), 0.0, 0.0).miss == 0.0  # ten good ones do not prove 100 %


def test_an_error_at_every_setting_is_no_lesson_about_one() -> None:
    live = LiveResult(HERE, 0.6, 10_000, 0.8)
    assert lesson(live, 0.0, -0.2).miss == 0.0
    assert lesson(live, 0.0, 0.0).miss == pytest.approx(-0.2, abs=0.01)


def test_without_a_prediction_for_that_stretch_the_present_one_counts() -> None:
    live = LiveResult(HERE, 0.6, 10_000)
    assert lesson(live, 0.9, 0.0).miss == pytest.approx(-0.3, abs=0.01)


def test_a_correction_is_full_at_the_setting_and_zero_two_octaves_away() -> None:
    lessons = [Lesson(HERE, -0.3, 500)]
    assert correction(HERE, lessons) == pytest.approx(-0.3)
    steps = [correction(HERE._replace(step_tokens=1024 * 2**k // 4), lessons) for k in range(2, 5)]
    assert steps == sorted(steps) and -0.02 < steps[1] < 0.0 and abs(steps[2]) < 1e-6
    assert correction(HERE, []) == 0.0


def test_results_of_one_setting_are_averaged_by_requests() -> None:
    lessons = [Lesson(HERE, -0.4, 100), Lesson(HERE, 0.0, 300)]
    assert correction(HERE, lessons) == pytest.approx(-0.1)


def test_no_cap_is_as_far_as_the_budget_and_a_switch_is_an_octave() -> None:
    assert distance_octaves(HERE, HERE._replace(chunk_cap_tokens=1024)) == 0.0
    assert distance_octaves(HERE, HERE._replace(chunk_cap_tokens=256)) == pytest.approx(2.0)
    assert distance_octaves(HERE, HERE._replace(order_policy=DEADLINE)) == pytest.approx(1.0)
    far = HERE._replace(step_tokens=2048, max_running=32, chunk_cap_tokens=1024)
    assert distance_octaves(HERE, far) == pytest.approx(2**0.5)
