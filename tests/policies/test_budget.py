"""Budget policies: their budgets, and that they starve no request."""

from hypothesis import given
from hypothesis import strategies as st

from rooftune.policies.budget import step_budget, within_time
from rooftune.policies.request import PRESSURE, STEP_TIME_TARGET, Setting
from rooftune.policies.step_time import StepModel, chunk_attention_work, step_time
from tests.policies.scheduler import BOOT, MODEL

models = st.builds(
    StepModel,
    st.floats(0, 0.005),
    st.sampled_from([0.0, 1e-5]),
    st.floats(0, 0.02),
    st.sampled_from([0.0, 6e-8]),
    st.floats(1e-6, 1e-3),
    st.sampled_from([0.0, 2e-10]),
    st.sampled_from([0.0, 1.0, 4.0]),
)


def predicted_s(model: StepModel, tokens: int, decodes: int, context: int, before: int) -> float:
    chunk = max(tokens - decodes, 0)
    started = 1 if chunk else 0
    return step_time(model, tokens, decodes + started, context + started * before, chunk_attention_work(chunk, before))


@given(
    models,
    st.floats(0.0, 0.3),
    st.integers(0, 4_000),
    st.integers(0, 64),
    st.integers(0, 100_000),
    st.integers(0, 9_000),
)
def test_within_time_is_the_inverse_of_the_step_time(
    model: StepModel, target_s: float, most: int, decodes: int, context: int, before: int
) -> None:
    tokens = within_time(model, target_s, most, decodes, context, before)
    assert 0 <= tokens <= most
    if tokens > 0:
        assert predicted_s(model, tokens, decodes, context, before) <= target_s
    if tokens < most:
        assert predicted_s(model, tokens + 1, decodes, context, before) > target_s


def test_fixed_is_the_setting_below_the_ceiling() -> None:
    assert step_budget(Setting(300), BOOT, MODEL, 5, 100, 3, 0) == 300
    assert step_budget(Setting(5_000), BOOT, MODEL, 5, 100, 3, 0) == BOOT.ceiling_tokens


def test_pressure_needs_prefills_and_a_decode() -> None:
    setting = Setting(800, budget_policy=PRESSURE, pressure_tokens=100, pressure_prefills=2)
    assert step_budget(setting, BOOT, MODEL, 1, 0, 2, 0) == 100
    assert step_budget(setting, BOOT, MODEL, 0, 0, 2, 0) == 800
    assert step_budget(setting, BOOT, MODEL, 1, 0, 1, 0) == 800
    assert step_budget(setting._replace(pressure_tokens=900), BOOT, MODEL, 1, 0, 2, 0) == 800
    assert step_budget(setting, BOOT, MODEL, 150, 0, 2, 0) == 151


def test_step_time_target_stays_under_the_target_but_not_under_the_floor() -> None:
    """10 ms a step and 1 ms a token: 30 ms is 20 tokens."""
    setting = Setting(800, budget_policy=STEP_TIME_TARGET, budget_target_s=0.0301)
    assert step_budget(setting, BOOT, MODEL, 5, 0, 1, 0) == 20
    assert step_budget(setting, BOOT, MODEL, 5, 0, 0, 0) == 800
    assert step_budget(setting._replace(budget_floor_tokens=50), BOOT, MODEL, 5, 0, 1, 0) == 55
    assert step_budget(setting._replace(budget_floor_tokens=50, step_tokens=40), BOOT, MODEL, 5, 0, 1, 0) == 40
    assert step_budget(setting, BOOT, MODEL, 30, 0, 1, 0) == 31


@given(
    st.integers(0, 2),
    st.integers(1, 1_000),
    st.integers(0, 900),
    st.integers(0, 5),
    st.integers(0, 500),
    st.floats(0, 0.5),
)
def test_a_computed_budget_starves_no_decode(
    policy: int, most: int, decodes: int, prefills: int, floor: int, target_s: float
) -> None:
    setting = Setting(
        most, budget_policy=policy, budget_target_s=target_s, budget_floor_tokens=floor, pressure_tokens=floor
    )
    budget = step_budget(setting, BOOT, MODEL, decodes, 10 * decodes, prefills, 0)
    assert budget <= BOOT.ceiling_tokens
    if policy != 0:
        assert budget > decodes
        assert budget <= max(most, decodes + 1)
