"""What the search has to beat, and where it starts: the engine's default, the formula, the knee, a budget sweep."""

import math
from collections.abc import Iterator

import numpy as np

from rooftune.policies.budget import within_time
from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo
from rooftune.policies.step_time import StepModel, knee_tokens
from rooftune.tuner.search.evaluation import Role
from rooftune.tuner.search.space import SearchSpace
from rooftune.tuner.sim.result import RunResult

SWEEP_BUDGETS = (*range(64, 257, 64), *range(384, 1025, 128), 1280, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)


def concurrency(result: RunResult) -> tuple[float, float]:
    """Mean running requests and their mean context tokens while the run lasted (Little's law)."""
    outcomes = result.outcomes
    done = outcomes.finished
    seconds = (outcomes.finish_s - outcomes.first_token_s)[done]
    context = (outcomes.prompt_tokens + outcomes.output_tokens / 2)[done]
    running = float(seconds.sum()) / result.span_s
    return running, float((seconds * context).sum()) / result.span_s


def formula_setting(space: SearchSpace, slo: Slo, model: StepModel, result: RunResult) -> Setting | None:
    """Largest budget whose predicted step stays under the tightest gap, stall or TPOT target at the run's mean load.

    None when no such target is given.
    """
    bound_s = slo.tightest_gap_s()
    if bound_s is None:
        return None
    running, context = concurrency(result)
    budget = within_time(model, bound_s, space.high_tokens, math.ceil(running), int(context), 0)
    return _on_grid(space, budget)


def knee_setting(space: SearchSpace, model: StepModel, result: RunResult) -> Setting | None:
    """The budget at the roofline knee under the run's mean context; None when the model has no knee."""
    knee = knee_tokens(model, concurrency(result)[1])
    return _on_grid(space, int(knee)) if math.isfinite(knee) and knee > 0 else None


def sweep_settings(space: SearchSpace) -> list[Setting]:
    """Budgets over the whole range without a chunk cap: the plot's backbone and a baseline of its own."""
    budgets = sorted({space.low_tokens, space.high_tokens, *SWEEP_BUDGETS})
    return [_on_grid(space, b) for b in budgets if space.low_tokens <= b <= space.high_tokens]


class _FromGenerator:
    """Suggest independent draws, on the scales that the sampler has."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def integer(self, name: str, low: int, high: int) -> int:
        return min(int(math.exp(self._rng.uniform(math.log(low), math.log(high + 1)))), high)

    def choice(self, name: str, options: tuple[int, ...]) -> int:
        return int(self._rng.choice(options))


def random_settings(space: SearchSpace, seed: int) -> Iterator[Setting]:
    """Independent draws from the space the sampler has, without end."""
    suggest = _FromGenerator(np.random.default_rng(seed))
    while True:
        yield space.draw(suggest)


def starting_points(space: SearchSpace, slo: Slo, model: StepModel, result: RunResult) -> list[tuple[Setting, Role]]:
    """Formula, knee and the budget sweep, each with its role. ``result``: the replay of the setting in force."""
    named = (
        (formula_setting(space, slo, model, result), Role.FORMULA),
        (knee_setting(space, model, result), Role.KNEE),
    )
    points = [(setting, role) for setting, role in named if setting is not None]
    return points + [(setting, Role.SWEEP) for setting in sweep_settings(space)]


def _on_grid(space: SearchSpace, budget: int) -> Setting:
    units = min(max(budget, space.low_tokens), space.high_tokens) // space.grid_tokens
    return space.base._replace(step_tokens=units * space.grid_tokens, chunk_cap_tokens=0)
