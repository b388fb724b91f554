"""The step-time formula: its parts, its limits, its shape."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftune.policies.step_time import StepModel, chunk_attention_work, knee_tokens, soft_max, step_time

TIMES = st.floats(0.0, 10.0)
MODEL = StepModel(0.001, 1e-5, 0.008, 6e-8, 4e-5, 2e-10, 4.0)


def test_every_part_counts() -> None:
    hard = MODEL._replace(sharpness=0.0)
    assert step_time(hard, 10, 2, 1_000, 0) == pytest.approx(0.001 + 2e-5 + 0.008 + 6e-5)
    assert step_time(hard, 1_000, 2, 1_000, 5e6) == pytest.approx(0.001 + 2e-5 + 0.04 + 1e-3)


@given(TIMES, TIMES, st.floats(1.0, 64.0))
def test_soft_maximum_lies_above_the_hard_one_and_below_the_sum(a: float, b: float, sharpness: float) -> None:
    soft = soft_max(a, b, sharpness)
    assert soft == soft_max(b, a, sharpness)
    assert max(a, b) <= soft * (1 + 1e-12) and soft <= (a + b) * (1 + 1e-12)
    assert soft_max(a, b, 0.0) == max(a, b)


def test_the_hard_maximum_is_the_limit_and_the_meeting_point_is_the_softest() -> None:
    assert soft_max(1.0, 2.0, 64.0) == pytest.approx(2.0, rel=1e-9)
    assert soft_max(1.0, 1.0, 4.0) == pytest.approx(2 ** (1 / 4))
    assert soft_max(3.0, 4.0, 2.0) == pytest.approx(5.0)
    assert soft_max(0.0, 0.0, 4.0) == 0.0


@given(st.integers(1, 5_000), st.integers(0, 100_000), st.integers(1, 1_000), st.sampled_from([0.0, 1.0, 4.0]))
def test_more_work_never_takes_less_time(tokens: int, context: int, more: int, sharpness: float) -> None:
    model = MODEL._replace(sharpness=sharpness)
    base = step_time(model, tokens, 3, context, 0.0)
    assert step_time(model, tokens + more, 3, context, 0.0) >= base
    assert step_time(model, tokens, 3, context + more, 0.0) >= base
    assert step_time(model, tokens, 3 + more, context, 0.0) > base


@given(st.integers(0, 50_000), st.integers(1, 5_000), st.integers(1, 5_000))
def test_attention_work_does_not_depend_on_how_a_prompt_is_cut(before: int, first: int, second: int) -> None:
    cut = chunk_attention_work(first, before) + chunk_attention_work(second, before + first)
    assert cut == pytest.approx(chunk_attention_work(first + second, before))


def test_knee() -> None:
    assert knee_tokens(MODEL) == pytest.approx(200.0)
    assert knee_tokens(MODEL, 1e5) == pytest.approx((0.008 + 0.006) / 4e-5)
    assert math.isinf(knee_tokens(MODEL._replace(slope_s_per_token=0.0)))
