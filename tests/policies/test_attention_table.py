"""The attention table: grid points are exact, values between and beyond are linear, and shapes matter."""

import numpy as np
import pytest

from rooftune.policies.step_time import AttentionTable, StepCost, StepModel, attention_time, priced, step_cost

AXES = (np.array([0.0, 16, 64]), np.array([-32.0, 0, 128]), np.array([0.0, 4, 8]), np.array([0.0, 100, 400]))
FORMULA = StepModel(0.001, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def table(chunk: float, prior: float, decodes: float, context: float, mixed: float) -> AttentionTable:
    """A grid of chunk x prefill + prior x before + ... : linear in each, so interpolation must be exact."""
    grids = np.meshgrid(*AXES, indexing="ij")
    times = 0.001 + chunk * grids[0] + prior * grids[1] + decodes * grids[2] + context * grids[3]
    return AttentionTable(*AXES, times + mixed * grids[2] * grids[3])


@pytest.mark.parametrize("decodes", [1, 4, 6, 16])
@pytest.mark.parametrize("context", [50.0, 100.0, 900.0])
def test_decodes_alone_on_the_grid_between_and_beyond(decodes: int, context: float) -> None:
    got = attention_time(table(0.0, 0.0, 2e-6, 3e-7, 1e-8), 0, decodes, decodes * context, 0.0)
    assert got == pytest.approx(0.001 + 2e-6 * decodes + 3e-7 * context + 1e-8 * decodes * context)


@pytest.mark.parametrize(("chunks", "prior"), [([40], 20.0), ([64], 300.0), ([10, 30], 0.0), ([100], 0.0)])
def test_prefill_is_looked_up_by_its_tokens_and_its_work(chunks: list[int], prior: float) -> None:
    tokens = sum(chunks)
    work = sum(chunk * (prior + chunk / 2) for chunk in chunks)
    got = attention_time(table(1e-5, 1e-6, 0.0, 0.0, 0.0), tokens, 0, 0.0, work)
    assert got == pytest.approx(0.001 + 1e-5 * tokens + 1e-6 * (work / tokens - tokens / 2))


def test_short_chunks_together_cost_less_than_one_long_one() -> None:
    measured = table(1e-5, 1e-6, 0.0, 0.0, 0.0)
    assert attention_time(measured, 40, 0, 0.0, 2 * 20 * 10.0) < attention_time(measured, 40, 0, 0.0, 40 * 20.0)


def test_time_is_never_negative() -> None:
    assert attention_time(table(0.0, 0.0, -1.0, 0.0, 0.0), 0, 8, 800.0, 0.0) == 0.0
    assert attention_time(table(0.0, -1.0, 0.0, 0.0, 0.0), 16, 0, 0.0, 16 * 200.0) == 0.0


def test_step_cost_adds_the_table_only_where_there_is_one() -> None:
    base_s = np.array([0.0, 0.01, 0.02, 0.03])
    bare = StepCost(FORMULA, base_s, np.zeros(0), 0.5, 0.0, 0.0, 0.0)
    rich = bare._replace(attention=table(0.0, 0.0, 2e-6, 3e-7, 0.0))
    assert step_cost(bare, 2, 2, 2, 200.0, 0.0, 0.0) == pytest.approx(1.02)
    assert step_cost(rich, 2, 2, 2, 200.0, 0.0, 0.0) == pytest.approx(1.02 + 0.001 + 4e-6 + 3e-5)
    # Two of three tokens are prefill: one decode, and no table without the formula's base.
    assert step_cost(rich, 3, 2, 1, 100.0, 0.0, 2.0) == pytest.approx(1.03 + 0.001 + 2e-6 + 3e-5)
    assert step_cost(priced(FORMULA), 3, 2, 1, 100.0, 0.0, 2.0) == pytest.approx(0.001)


@pytest.mark.parametrize(("decodes", "expected_s"), [(2, 0.0005), (4, 0.001), (6, 0.0055), (8, 0.01), (10, 0.0145)])
@pytest.mark.parametrize("axis", [0, 2])
def test_a_bend_lies_where_it_was_measured(axis: int, decodes: int, expected_s: float) -> None:
    axes = [np.array([0.0, 1.0, 2.0])] * 4
    axes[axis] = np.array([0.0, 4.0, 8.0])
    bend = np.array([0.0, 0.001, 0.01]).reshape([3 if place == axis else 1 for place in range(4)])
    bent = AttentionTable(*axes, np.ascontiguousarray(np.broadcast_to(bend, (3, 3, 3, 3))))
    prefill = decodes if axis == 0 else 0
    got = attention_time(bent, prefill, decodes if axis == 2 else 0, 0.0, prefill * (1.0 + prefill / 2))
    assert got == pytest.approx(expected_s)
