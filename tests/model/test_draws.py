"""Draws of a step model: inside its intervals, a small step as long as before, nothing invented."""

import math

import pytest

from rooftune.policies.step_time import NAMED_MODELS, step_time
from rooftune.tuner.model.intervals import DRAWS, model_draws

MODEL = NAMED_MODELS["8b-2tbs"]
INTERVALS = {
    "overhead_s": (0.001, 0.002),
    "floor_s": (0.0075, 0.0085),
    "slope_s_per_token": (3.5e-5, 4.5e-5),
    "attention_s": (1e-10, math.inf),
    "knee_tokens": (150.0, 250.0),
}


def test_draws_lie_in_their_intervals_and_differ() -> None:
    draws = model_draws(MODEL, INTERVALS, seed=3)
    assert len(draws) == DRAWS == len(set(draws)) and MODEL not in draws
    for draw in draws:
        assert 3.5e-5 <= draw.slope_s_per_token <= 4.5e-5 and 0.0075 <= draw.floor_s <= 0.0085
        assert draw.attention_s == MODEL.attention_s and draw.sharpness == MODEL.sharpness
        assert step_time(draw, 1, 1, 0, 0) == pytest.approx(step_time(MODEL, 1, 1, 0, 0))
    slopes = [draw.slope_s_per_token for draw in model_draws(MODEL, INTERVALS, count=400)]
    assert min(slopes) < MODEL.slope_s_per_token * 0.92 and max(slopes) > MODEL.slope_s_per_token * 1.08
    assert sum(slopes) / 400 == pytest.approx(MODEL.slope_s_per_token, rel=0.02)


def test_the_same_seed_draws_the_same_and_no_interval_draws_nothing() -> None:
    assert model_draws(MODEL, INTERVALS, seed=1) == model_draws(MODEL, INTERVALS, seed=1)
    assert model_draws(MODEL, INTERVALS, seed=1) != model_draws(MODEL, INTERVALS, seed=2)
    assert model_draws(MODEL, {}) == ()
    assert model_draws(MODEL, {"floor_s": (0.0, math.inf), "knee_tokens": (1.0, 2.0)}) == ()


def test_coefficients_stay_at_least_zero() -> None:
    loose = {"overhead_s": (-0.01, 0.01), "floor_s": (0.0, 0.2)}
    assert all(min(draw) >= 0.0 for draw in model_draws(MODEL, loose, count=50))
