"""Bench ``rtx4090``: predictions from a layer profile alone, for a real vLLM that runs out of KV memory and preempts.

The twin gets the card's layer profile, the engine's flags, and of each request its arrival at the engine and its two
lengths; no constant is fitted to the run. TTFT and TPOT of requests 100 to 299 are judged; the first 100, on which
one constant might have been fitted, are not. The twin cannot know which prompts share a prefix (the real
engine found some in its prefix cache), nor the first step of a cold engine.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rooftune.policies.commands import Figure
from rooftune.policies.request import FloatArray
from rooftune.policies.step_time import StepCost
from rooftune.tuner.model.profile import read_profile
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.sim.twin import simulate
from tests.bench.rtx4090_data import FOLDER, LAYERS, ServedRun, read_run
from tests.bench.shared_data import need_shared_data

JUDGED_FROM = 100
QUANTILES = (0.5, 0.9, 0.95, 0.99)
WANTED = 0.05
# A little more or less KV memory changes which requests are preempted: this shows the share of luck.
NUDGES_BLOCKS = tuple(range(-12, 13, 2))


def bench(short: bool) -> Iterator[Figure]:
    """Relative errors by quantile (signed), the worst of them, and the worst over nudged KV sizes (unless short)."""
    need_shared_data()
    run = read_run()
    profile = read_profile(FOLDER, LAYERS)
    result = replay(run, profile.cost)
    errors = quantile_errors(run, result)
    yield Figure("worst_quantile_error", worst(errors), "fraction", WANTED)
    for name, values in errors.items():
        for quantile, error in zip(QUANTILES, values, strict=True):
            yield Figure(f"{name}_p{round(100 * quantile)}_error", float(error), "fraction")
    yield Figure("preemptions", result.preempted, "preemptions")
    yield Figure("formula_mape", profile.formula_mape, "fraction")
    if not short:
        nudged = [worst(quantile_errors(run, replay(run, profile.cost, nudge))) for nudge in NUDGES_BLOCKS]
        yield Figure("nudged_worst_error_median", float(np.median(nudged)), "fraction", WANTED)
        yield Figure("nudged_worst_error_max", max(nudged), "fraction", WANTED)


def replay(run: ServedRun, cost: StepCost, more_blocks: int = 0) -> RunResult:
    """The twin's run of the same requests, with ``more_blocks`` KV blocks more than the engine had."""
    engine = replace(run.engine, kv_blocks=run.engine.kv_blocks + more_blocks)
    return simulate(run.traffic, engine, run.setting, cost)


def quantile_errors(run: ServedRun, result: RunResult) -> dict[str, FloatArray]:
    """Predicted over measured quantile, minus 1, of the judged requests: "ttft" and "tpot", in order of QUANTILES."""
    outcomes = result.outcomes
    predicted = {
        "ttft": outcomes.first_token_s - outcomes.arrival_s,
        "tpot": (outcomes.finish_s - outcomes.first_token_s) / (outcomes.output_tokens - 1),
    }
    measured = {"ttft": run.ttft_s, "tpot": run.tpot_s}
    return {
        name: np.quantile(predicted[name][JUDGED_FROM:], QUANTILES)
        / np.quantile(measured[name][JUDGED_FROM:], QUANTILES)
        - 1.0
        for name in predicted
    }


def worst(errors: dict[str, FloatArray]) -> float:
    """The largest absolute error of all quantiles."""
    return float(max(np.abs(values).max() for values in errors.values()))
