"""The twin of one model on the RTX 5090: few coefficients, replays, and their least-squares fit to figures of runs.

No step was recorded, so nothing can be fitted to steps. Price of a step: a constant (more when it carries prompt
tokens), a price per prompt token (leaning on the card's datasheet), per query-key pair, per KV entry before a chunk,
and per KV entry of decodes that share a step with a chunk. What decodes alone read costs what the datasheet says.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from rooftune.policies.request import PRESSURE, Boot, FloatArray, Setting
from rooftune.policies.step_time import AttentionTable, StepCost, StepModel
from rooftune.tuner.model.prior import CARDS, card_prior
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.twin import simulate
from tests.bench.rtx5090_data import ADAPTIVE, Load, Served, traffic_of

CEILING = 16384
PRESSURE_TOKENS = 2048


class ModelSize(NamedTuple):
    """Published sizes: weights, and bytes of KV memory a token takes (16 bit)."""

    parameters: float
    kv_bytes_per_token: int


SIZES = {
    "qwen2.5-0.5b": ModelSize(0.494e9, 24 * 2 * 2 * 64 * 2),
    "qwen2.5-3b": ModelSize(3.09e9, 36 * 2 * 2 * 128 * 2),
    "smollm3-3b": ModelSize(3.08e9, 36 * 2 * 4 * 128 * 2),
}


class Coefficients(NamedTuple):
    """What is fitted, all in seconds.

    decode_s: a step of decodes alone; prefill_s: what a step with prompt tokens costs more; pair_s: per query-key pair;
    kv_prefill_s: per KV entry before a chunk; beside_s: per KV entry of a decode that shares its step with a chunk
    (their mean context counts, not their sum); slope_s: per prompt token; outside_s: client to scheduler and back.
    """

    decode_s: float
    prefill_s: float
    pair_s: float
    kv_prefill_s: float
    beside_s: float
    slope_s: float
    outside_s: float


# Orders of magnitude, from which the search starts; it leans on the two with a spread (of their log).
START = Coefficients(0.004, 0.005, 1e-9, 1e-7, 1e-7, 3e-5, 0.03)
SPREAD = Coefficients(inf, inf, inf, inf, inf, 0.5, 0.7)
SMALLEST = Coefficients(1e-5, 1e-6, 1e-13, 1e-12, 1e-12, 1e-7, 1e-4)
FIGURE_SPREAD = 0.03
MOST_DECODES = 64
_ROUNDS = 12
_NUDGE = 0.02
_TRIES = 6
_FARTHEST = 1.5


def step_cost(model: str, one: Coefficients) -> StepCost:
    """The price of a step. Steps of up to MOST_DECODES tokens count as decodes alone."""
    size = SIZES[model]
    tokens = np.arange(CEILING + 1, dtype=np.float64)
    base_s = one.decode_s + np.where(tokens > MOST_DECODES, one.prefill_s + one.slope_s * tokens, 0.0)
    kv_decode_s = size.kv_bytes_per_token / CARDS["rtx-5090"].bandwidth_bytes_per_s
    formula = StepModel(one.decode_s, 0.0, 0.0, kv_decode_s, one.slope_s, one.pair_s, 0.0)
    none: FloatArray = np.zeros(0)
    return StepCost(formula, base_s, none, 0.0, kv_decode_s, one.kv_prefill_s, one.pair_s, _beside(one.beside_s))


def _beside(per_token_s: float) -> AttentionTable:
    """Zero for decodes or prompts alone; together, a price by the decodes' mean context, for any counts."""
    few = np.array([0.0, 1.0, 2.0])
    both = np.minimum(few[:, None], 1.0) * np.minimum(few[None, :], 1.0)
    time_s = both[:, None, :, None] * np.array([0.0, 1e4 * per_token_s])[None, None, None, :] * np.ones((1, 2, 1, 1))
    return AttentionTable(few, np.array([0.0, 1.0]), few, np.array([0.0, 1e4]), time_s)


def engine_of(model: str, outside_s: float) -> Engine:
    """vLLM's defaults on this card: 0.9 of its memory, less the weights and 2 GB for activations, holds KV blocks."""
    size = SIZES[model]
    free = 0.9 * CARDS["rtx-5090"].memory_bytes - 2.0 * size.parameters - 2e9
    boot = Boot(CEILING, 16, chunking=1, reserve_whole_prompt=1, contents=0, keep_decodes_moving=0, plan_ahead=1)
    return Engine(boot, int(free / size.kv_bytes_per_token / 16), outside_first_s=outside_s, outside_token_s=outside_s)


def setting_of(budget: int) -> Setting:
    """A fixed budget, or the pressure policy as the runs had it: 2,048 from two prefills and a decode on."""
    if budget == ADAPTIVE:
        return Setting(CEILING, budget_policy=PRESSURE, pressure_tokens=PRESSURE_TOKENS, pressure_prefills=2)
    return Setting(budget)


def replay(one: Coefficients, load: Load, budget: int, seed: int) -> FloatArray:
    """The twin's METRICS of a run (s)."""
    traffic, engine = traffic_of(load, seed), engine_of(load.model, one.outside_s)
    outcomes = simulate(traffic, engine, setting_of(budget), step_cost(load.model, one)).outcomes
    ttft_s = outcomes.first_token_s - outcomes.arrival_s
    latency_s = outcomes.finish_s - outcomes.arrival_s
    tpot_s = (latency_s - ttft_s) / (load.output_tokens - 1)
    return np.array([f for v in (ttft_s, tpot_s, latency_s) for f in (v.mean(), np.quantile(v, 0.95))])


def fit(runs: Sequence[Served], beside: bool = True) -> Coefficients:
    """Robust least squares on the logs of the figures of runs of one model: damped Gauss-Newton on log coefficients.

    beside: False keeps ``beside_s`` at 0 (to see what it contributes).
    """
    slope_s = card_prior("rtx-5090", SIZES[runs[0].load.model].parameters, "bf16").slope_s_per_token
    start = np.log(np.array(START._replace(slope_s=slope_s)))
    smallest, axes = np.log(np.array(SMALLEST)), np.eye(len(start))
    if not beside:
        place = Coefficients._fields.index("beside_s")
        start[place], axes = smallest[place], np.delete(axes, place, axis=0)

    def residuals(point: FloatArray) -> FloatArray:
        return np.concatenate(
            [log_errors(Coefficients(*np.exp(point)), runs) / FIGURE_SPREAD, (point - start) / SPREAD]
        )

    point, damping = start, 100.0
    here = residuals(point)
    for _ in range(_ROUNDS):
        by = np.stack([(residuals(point + _NUDGE * axis) - here) / _NUDGE for axis in axes], axis=1)
        weighted = by / np.sqrt(1.0 + here**2)[:, None]
        for _ in range(_TRIES):
            move = np.linalg.solve(weighted.T @ by + damping * np.eye(len(axes)), weighted.T @ here)
            trial = np.maximum(point - np.clip(move, -_FARTHEST, _FARTHEST) @ axes, smallest)
            there = residuals(trial)
            if _loss(there) < _loss(here):
                point, here, damping = trial, there, damping / 5.0
                break
            damping *= 4.0
        else:
            break
    return Coefficients(*np.exp(point))


def log_errors(one: Coefficients, runs: Sequence[Served]) -> FloatArray:
    """Logs of predicted over measured METRICS of all runs."""
    predicted = np.concatenate([replay(one, run.load, run.budget, run.seed) for run in runs])
    errors: FloatArray = np.log(predicted / np.concatenate([run.values for run in runs]))
    return errors


def _loss(residuals: FloatArray) -> float:
    return float(np.sqrt(1.0 + residuals**2).sum())
