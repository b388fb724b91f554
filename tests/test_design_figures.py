"""The known figures of the step-time model and of chunked prefill come out of the code.

Illustrative constants from public teaching material: calculated, not measured. Tolerances are those of the rounding.
"""

import math

import numpy as np
import pytest

from rooftune.policies.budget import within_time
from rooftune.policies.request import Boot, Setting
from rooftune.policies.step_time import NAMED_MODELS, StepModel, chunk_attention_work, knee_tokens, step_time
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.traffic.workload import Traffic

EIGHT_B = NAMED_MODELS["8b-2tbs"]
LAB = NAMED_MODELS["teaching-lab"]
# Decode step of 12 ms, prefill 20 ms per 1,000 tokens on top: nothing flat, everything paid.
DECODE_12_PREFILL_20 = StepModel(0.012, 0.0, 0.0, 0.0, 20e-6, 0.0, 0.0)
ANY_BUDGET = 100_000


def prefill_step_s(model: StepModel, tokens: int, before: int = 0) -> float:
    return step_time(model, tokens, 1, before, chunk_attention_work(tokens, before))


def replay(rows: list[tuple[float, int, int]], setting: Setting, model: StepModel, cached: int = 0) -> RunResult:
    """Twin run of (arrival_s, prompt, output) rows with plenty of blocks; the last row has ``cached`` tokens cached."""
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    known = np.zeros(len(rows), dtype=np.int64)
    known[-1] = cached
    traffic = Traffic(arrival.astype(float), prompt, output, known, np.zeros(len(rows), dtype=np.int64))
    engine = Engine(Boot(ANY_BUDGET, 16, 1, 1, 0, 1), kv_blocks=1_000_000)
    return simulate(traffic, engine, setting, model, keep_log=True)


def steps_of(result: RunResult, request: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and durations (s) of the steps that computed prompt tokens of a request."""
    ends = {int(step): end for (step, _, _), end in zip(result.log, result.log_times_s, strict=True)}
    rows = result.log[(result.log[:, 1] == request) & (result.log[:, 2] > 1)]
    return rows[:, 2], np.array([ends[step] - ends.get(step - 1, 0.0) for step in rows[:, 0].tolist()])


def test_floor_slope_and_knee_of_an_8b_model() -> None:
    weights_bytes, flops_per_token = 8e9 * 2, 2 * 8e9
    assert EIGHT_B.floor_s == pytest.approx(weights_bytes / 2e12) == pytest.approx(0.008)
    assert EIGHT_B.slope_s_per_token == pytest.approx(flops_per_token / 400e12) == pytest.approx(40e-6)
    assert knee_tokens(EIGHT_B) == pytest.approx(200)
    flat, rising = prefill_step_s(EIGHT_B, 190), prefill_step_s(EIGHT_B, 210)
    assert flat == pytest.approx(0.0095) and rising > flat * 1.03
    assert knee_tokens(EIGHT_B, 1e5) == pytest.approx(350)
    assert knee_tokens(LAB) == 0 and math.isinf(knee_tokens(LAB._replace(slope_s_per_token=0.0)))


@pytest.mark.parametrize(("tokens", "milliseconds"), [(2_000, 72), (24_000, 899), (96_000, 4_283)])
def test_one_unchunked_step(tokens: int, milliseconds: int) -> None:
    assert prefill_step_s(LAB, tokens) == pytest.approx(1.5e-3 + 0.035e-3 * tokens + 2e-10 * tokens**2 / 2)
    assert round(1e3 * prefill_step_s(LAB, tokens)) == milliseconds


@pytest.mark.parametrize(("model", "budget"), [(LAB, 814), (EIGHT_B, 712)])
def test_budget_for_a_target_of_30_ms(model: StepModel, budget: int) -> None:
    assert within_time(model._replace(attention_s=0.0), 0.03, ANY_BUDGET, 0, 0, 0) == budget
    assert within_time(model, 0.03, ANY_BUDGET, 0, 0, 0) == pytest.approx(budget, abs=3)


def test_a_chunk_of_8192_tokens() -> None:
    assert prefill_step_s(LAB._replace(attention_s=0.0), 8_192) == pytest.approx(0.290, rel=0.01)
    assert prefill_step_s(LAB, 8_192) == pytest.approx(0.295, rel=0.001)


def test_what_a_prefix_hit_leaves() -> None:
    """20,000 of 24,000 prompt tokens cached: 8 chunks of 512 remain."""
    tokens, _ = steps_of(replay([(0.0, 24_000, 1)], Setting(512), LAB, cached=20_000), 0)
    assert tokens.sum() == 4_000 and len(tokens) == 8 and tokens[0] == 512


def test_a_long_prompt_beside_30_decodes() -> None:
    """24,000 tokens at budget 512: 50 steps of about 20 ms, about 1 s to the first token, no gap above 22 ms."""
    result = replay([(0.0, 1, 400)] * 30 + [(0.2, 24_000, 1)], Setting(512), LAB)
    tokens, seconds = steps_of(result, 30)
    assert len(tokens) == 50 and set(tokens[:-1].tolist()) == {512 - 30}
    assert seconds.mean() == pytest.approx(0.020, rel=0.05)
    assert result.outcomes.first_token_s[30] - 0.2 == pytest.approx(1.0, rel=0.05)
    assert 0.021 < result.outcomes.longest_gap_s[:30].max() < 0.022


@pytest.mark.parametrize(("prefill_s", "target_s", "budget"), [(20e-6, 0.080, 3_400), (60e-6, 0.100, 1_466)])
def test_budget_from_a_tolerable_step(prefill_s: float, target_s: float, budget: int) -> None:
    model = DECODE_12_PREFILL_20._replace(slope_s_per_token=prefill_s)
    # An integer budget just inside the target: floating point may take the very last token away.
    assert within_time(model, target_s, ANY_BUDGET, 0, 0, 0) in (budget - 1, budget)
    assert within_time(model, target_s + 1e-12, ANY_BUDGET, 0, 0, 0) == budget


@pytest.mark.parametrize(
    ("budget", "worst_step_ms", "ttft_s"),
    [(2_048, 53, 0.83), (8_192, 176, 0.69), (16_384, 340, 0.66), (32_768, 652, 0.65)],
)
def test_a_prompt_of_32000_tokens_under_four_budgets(budget: int, worst_step_ms: int, ttft_s: float) -> None:
    result = replay([(0.0, 32_000, 1)], Setting(budget), DECODE_12_PREFILL_20)
    tokens, seconds = steps_of(result, 0)
    assert len(tokens) == math.ceil(32_000 / budget)
    assert round(1e3 * seconds.max()) == worst_step_ms
    assert round(float(result.outcomes.first_token_s[0]), 2) == ttft_s
    exact_s = len(tokens) * 0.012 + 32_000 * 20e-6
    assert result.outcomes.first_token_s[0] == pytest.approx(exact_s, rel=1e-9)


def test_short_prompts_behind_a_prompt_of_60000_tokens() -> None:
    """Budget 8,192: without a cap they wait over a second, with 2,048 a fraction, and the long one loses little."""
    rows = [(0.0, 60_000, 1)] + [(0.001, 500, 1)] * 4
    without, capped = (
        replay(rows, Setting(8_192, cap), DECODE_12_PREFILL_20).outcomes.first_token_s for cap in (0, 2_048)
    )
    assert without[1:].min() > 1.0
    assert capped[1:].max() < without[1:].min() / 4
    assert without[0] < capped[0] < 1.03 * without[0]
