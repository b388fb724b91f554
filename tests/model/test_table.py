"""The step-time table: exact on steps it can describe, careful where there are none, and right on real traffic."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.policies.step_time import NAMED_MODELS, step_cost
from rooftune.tuner.bench.knee_fit import make_steps
from rooftune.tuner.model.fit import fit_steps
from rooftune.tuner.model.reservoir import Reservoir
from rooftune.tuner.model.roofline import mape
from rooftune.tuner.model.sample_file import read_steps
from rooftune.tuner.model.samples import StepSamples, join
from tests.bench.step_table import StepTable, fit_table

TRUTH = NAMED_MODELS["8b-2tbs"]
STAIRS = StepTable(
    (1.0, 16.0, 17.0, 256.0, 257.0, 4096.0), (0.01, 0.01, 0.012, 0.02, 0.03, 0.3), 2e-5, 1e-7, 2e-7, 1e-9
)


def steps_of(table: StepTable, seed: int, noise: float) -> StepSamples:
    steps = make_steps(TRUTH, seed, steps=6000)
    return replace(
        steps, duration_s=table.predict(steps) * np.exp(noise * np.random.default_rng(seed).normal(size=6000))
    )


def test_a_table_is_recovered_from_its_own_steps() -> None:
    steps = steps_of(STAIRS, 1, 0.05)
    formula = fit_steps(steps.select(np.arange(0, 6000, 3))).model
    found = fit_table(steps, formula)
    unseen = steps_of(STAIRS, 2, 0.0)
    assert found.mape(unseen) < 0.03 < mape(formula, unseen)
    assert found.kv_decode_s == pytest.approx(STAIRS.kv_decode_s, rel=0.1)
    assert found.kv_prefill_s == pytest.approx(STAIRS.kv_prefill_s, rel=0.5)
    # The formula behind the table has no stairs and attributes some of them to attention.
    assert found.attention_s == pytest.approx(STAIRS.attention_s, rel=0.25)


def test_where_no_step_was_seen_it_follows_the_formula() -> None:
    steps = make_steps(TRUTH, 3, steps=4000, outliers=0.0)
    gap = steps.select((steps.computed_tokens < 100) | (steps.computed_tokens > 1000))
    tokens = np.arange(150.0, 900.0)
    table = fit_table(gap, TRUTH).base_s(tokens)
    formula = 0.0015 + np.maximum(0.008, 4e-5 * tokens)
    assert np.abs(table / formula - 1.0).max() < 0.25


def test_beyond_the_last_knot_the_line_continues() -> None:
    table = StepTable((1.0, 512.0, 1024.0, 2048.0), (0.01, 0.03, 0.05, 0.09), 0.0, 0.0, 0.0, 0.0)
    assert table.base_s(np.array([4096.0]))[0] == pytest.approx(0.09 + 2048 * (0.06 / 1536))
    assert table.base_s(np.array([1.0, 512.0, 768.0])) == pytest.approx([0.01, 0.03, 0.04])
    lookup = table.tabulate(3000)
    assert len(lookup) == 3001 and lookup[768] == pytest.approx(0.04) and (np.diff(lookup) >= 0.0).all()


@pytest.mark.parametrize(
    "change",
    [
        {"knot_s": (0.01, 0.009)},
        {"knot_tokens": (5.0, 5.0)},
        {"knot_tokens": (5.0,)},
        {"sequence_s": -1.0},
        {"attention_s": float("nan")},
    ],
)
def test_a_table_that_falls_or_is_not_finite_is_refused(change: dict[str, object]) -> None:
    good = StepTable((1.0, 2.0), (0.01, 0.02), 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(InputError):
        replace(good, **change)  # type: ignore[arg-type]  # values of several types on purpose


def test_one_token_count_is_not_a_table() -> None:
    steps = make_steps(TRUTH, 1)
    with pytest.raises(InputError, match="vary"):
        fit_table(steps.select(np.zeros(100, dtype=np.int64)), TRUTH)


def sweep(folder: Path, start: str) -> StepSamples:
    files = sorted((folder / "vllm-cpu-sweep").glob(f"{start}_*.steps.csv.gz"))
    assert files
    return join([read_steps(path) for path in files])


@pytest.mark.slow
def test_step_times_of_a_real_engine_on_traffic_not_fitted(shared_data: Path) -> None:
    mixed, chat = sweep(shared_data, "b"), sweep(shared_data, "a")
    reservoir = Reservoir(2048)
    reservoir.add(mixed)
    fit = fit_steps(reservoir.samples)
    table = fit_table(mixed, fit.model)
    assert table.mape(chat) <= 0.08
    assert table.mape(chat) < mape(fit.model, chat) < 0.10
    # This engine has no flat part: no knee may be invented, and the interval must end below a few dozen tokens.
    assert fit.knee_tokens is None and fit.knee_interval.low == 0.0 and fit.knee_interval.high < 200.0


def test_the_twin_prices_a_step_as_the_table_predicts_it() -> None:
    steps = steps_of(STAIRS, 4, 0.0)
    cost = STAIRS.cost(TRUTH, 8192)
    assert cost.formula == TRUTH and len(cost.base_s) == 8193
    for row in range(0, 6000, 50):
        priced_s = step_cost(
            cost,
            int(steps.computed_tokens[row]),
            int(steps.sequences[row]),
            int(steps.decode_tokens[row]),
            float(steps.decode_context_tokens[row]),
            float(steps.prefill_context_tokens[row]),
            float(steps.attention_work[row]),
        )
        assert priced_s == pytest.approx(float(steps.duration_s[row]), rel=1e-9)
