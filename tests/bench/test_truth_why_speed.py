"""Steps are compared with like steps only; a perfect model errs by speed alone; a busy run allows few speeds."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.model.samples import StepSamples
from tests.bench.truth_why_speed import NAMES, SPEEDS, Grid, allowed_speeds, like_steps
from tests.bench.vllm_sweep import SEEDS
from tests.bench.vllm_sweep_data import Case
from tests.bench.vllm_sweep_judge import SHARES

CASE = Case("b", 64, 0)


def _steps(prefill: list[float], sequences: list[float], duration_s: list[float]) -> StepSamples:
    rows = len(prefill)
    nothing = np.zeros(rows)
    ones = np.ones(rows)
    return StepSamples(
        np.array(duration_s), np.array(prefill), ones, np.array(sequences), 500.0 * ones, nothing, nothing
    )


def test_only_mixed_steps_of_like_content_are_compared() -> None:
    # Alike twice, then other requests, then decodes alone, then a size the other run lacks.
    one = _steps([63, 63, 30, 30, 0, 0, 7, 7], [4, 4, 3, 3, 1, 1, 2, 2], [9, 9, 5, 5, 1, 1, 8, 8])
    other = _steps([63, 63, 30, 30, 0, 0], [4, 4, 2, 2, 1, 1], [10, 10, 50, 50, 7, 7])
    ratio, kinds = like_steps(one, other)
    assert ratio == pytest.approx(0.9) and kinds == 1
    farther = replace(other, decode_context_tokens=other.decode_context_tokens * 1.5)
    with pytest.raises(InputError, match="like content"):
        like_steps(one, farther)


def test_a_perfect_model_is_within_bounds_unless_runs_differ_in_speed() -> None:
    """Figures grow with the eighth power of the speed, alike for all seeds: only speed puts them out of bounds."""
    rows = [[[0.0 if name in SHARES else speed**8 for name in NAMES]] * SEEDS for speed in SPEEDS]
    grid = Grid({CASE: np.array(rows)})
    runs = {CASE: ["one"]}
    latencies, shares = grid.trials(0.0, runs)
    assert not latencies.any() and not shares.any()
    latencies, shares = grid.trials(0.03, runs)
    assert 0.2 < (latencies > 0).mean() < 0.8 and not shares.any()


@pytest.mark.slow
def test_a_busy_run_allows_few_speeds_of_its_own_model(shared_data: Path) -> None:
    allowed = allowed_speeds(Case("a", 64, 0), ["a_64_t0_r1"])
    assert 1.0 in allowed and max(allowed) - min(allowed) < 0.04
