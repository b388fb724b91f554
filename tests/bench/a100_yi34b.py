"""Bench ``a100-yi34b``: what sixteen whole-batch times of two A100 determine, and what they do not.

The data holds batches of decodes alone (1 to 128, context unknown) and of one prompt (128 to 16,384), one time each.
``fit_steps`` refuses that few. They allow the formula with four coefficients: a floor, a price per token and
per query-key pair, and a price per request, which for decodes stands for the unrecorded context. Errors are
those of each batch predicted by a fit to the fifteen others; the knee's interval is their jackknife. One batch
(256 prompt tokens, the first that ran) took more than twice what any form predicts, and counts in the errors.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rooftune.policies.commands import Figure
from rooftune.policies.errors import bad_value
from rooftune.policies.request import FloatArray
from rooftune.policies.step_time import StepModel, chunk_attention_work, knee_tokens, step_time
from rooftune.tuner.model.fit import fit_steps
from rooftune.tuner.model.profile import MAX_SHAPE, number_within, rows_of
from rooftune.tuner.model.roofline import FitRefused
from rooftune.tuner.model.samples import StepSamples, join
from rooftune.tuner.model.solver import nonnegative_solution
from tests.bench.shared_data import need_shared_data

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "profiles" / "sarathi-a100-yi-34b"
# Student's t for 15 degrees of freedom, 95 % two-sided.
T_95 = 2.131
_ROUNDS = 30
# Errors below this have equal weight.
_SMALLEST_ERROR = 0.01


def bench(short: bool) -> Iterator[Figure]:
    """Knee with its interval, held-out errors of decode and prefill batches, and whether ``fit_steps`` refused."""
    need_shared_data()
    steps = read_steps(FOLDER)
    model = fit_few(steps)
    others = [np.arange(len(steps)) != row for row in range(len(steps))]
    models = [fit_few(steps.select(rows)) for rows in others]
    errors = np.array([abs(_time(models[row], steps, row) / steps.duration_s[row] - 1.0) for row in range(len(steps))])
    decode = steps.prefill_tokens == 0.0
    low, high = knee_interval(knee_tokens(model), [knee_tokens(one) for one in models])
    yield Figure("knee_tokens", knee_tokens(model), "tokens")
    yield Figure("knee_low", low, "tokens")
    yield Figure("knee_high", high, "tokens")
    yield Figure("decode_held_out_mape", float(errors[decode].mean()), "fraction")
    yield Figure("prefill_held_out_mape", float(errors[~decode].mean()), "fraction")
    yield Figure("prefill_held_out_median", float(np.median(errors[~decode])), "fraction")
    yield Figure("worst_held_out_error", float(errors.max()), "fraction")
    yield Figure("decode_token_over_prompt_token", decode_ratio(model), "ratio")
    yield Figure("fit_steps_refused", float(refused(steps)), "0 or 1")


def read_steps(folder: Path) -> StepSamples:
    """The batches as steps; the context of decodes is unknown and set to 0. Raises InputError."""
    parts = []
    for name in ("decode.csv", "prefill.csv"):
        tokens, requests, seconds = read_batches(folder / name)
        nothing = np.zeros(len(tokens))
        if name == "decode.csv":
            parts.append(StepSamples(seconds, nothing, tokens, requests, nothing, nothing, nothing))
        else:
            work = np.array([chunk_attention_work(float(n), 0.0) for n in tokens])
            parts.append(StepSamples(seconds, tokens, nothing, requests, nothing, nothing, work))
    return join(parts)


def read_batches(path: Path) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Whole batches: tokens, requests and seconds of each, shape (n,), from batch_num_tokens, batch_size and time."""
    rows = []
    for where, row in rows_of(path, ("batch_num_tokens", "batch_size", "batch_execution_time")):
        tokens = number_within(row["batch_num_tokens"], f"{where}: batch_num_tokens", 1.0, MAX_SHAPE)
        requests = number_within(row["batch_size"], f"{where}: batch_size", 1.0, tokens)
        seconds = number_within(row["batch_execution_time"], f"{where}: batch_execution_time", 1e-9, 100.0)
        rows.append((tokens, requests, seconds))
    tokens_of, requests_of, seconds_of = np.array(rows, dtype=np.float64).T
    return tokens_of, requests_of, seconds_of


def fit_few(steps: StepSamples) -> StepModel:
    """Least absolute relative error of max(floor, slope x tokens + pairs) + price x requests, over every split."""
    tokens = steps.computed_tokens
    splits = np.unique(tokens)[1:-1]
    if len(splits) == 0:
        raise bad_value("different token counts", len(np.unique(tokens)), "at least 3", "give more batches")
    return min((_fit_split(steps, tokens < split) for split in splits), key=lambda model: _loss(model, steps))


def _fit_split(steps: StepSamples, flat: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> StepModel:
    """The linear problem that remains once the steps on the flat part are known."""
    growing = ~flat
    columns = (steps.sequences, flat * 1.0, growing * steps.computed_tokens, growing * steps.attention_work)
    design = np.stack(columns, axis=1) / steps.duration_s[:, None]
    scale = np.maximum(np.linalg.norm(design, axis=0), 1e-300)
    design /= scale
    weights = np.ones(len(design))
    solution = np.zeros(4)
    for _ in range(_ROUNDS):
        weighted = design * weights[:, None]
        solution = nonnegative_solution(weighted.T @ design + 1e-9 * np.eye(4), weighted.sum(axis=0))
        weights = 1.0 / np.maximum(np.abs(design @ solution - 1.0), _SMALLEST_ERROR)
    sequence_s, floor_s, slope_s, pair_s = (float(value) for value in solution / scale)
    return StepModel(0.0, sequence_s, floor_s, 0.0, slope_s, pair_s, 0.0)


def _time(model: StepModel, steps: StepSamples, row: int) -> float:
    sequences, work = float(steps.sequences[row]), float(steps.attention_work[row])
    return step_time(model, float(steps.computed_tokens[row]), sequences, 0.0, work)


def _loss(model: StepModel, steps: StepSamples) -> float:
    times = np.array([_time(model, steps, row) for row in range(len(steps))])
    return float(np.abs(times / steps.duration_s - 1.0).sum())


def knee_interval(knee: float, without_one: list[float]) -> tuple[float, float]:
    """95 % interval of the knee by the jackknife on its logarithm (tokens)."""
    logs: FloatArray = np.log(np.array(without_one))
    sd = math.sqrt((len(logs) - 1) / len(logs) * float(((logs - logs.mean()) ** 2).sum()))
    return knee * math.exp(-T_95 * sd), knee * math.exp(T_95 * sd)


def decode_ratio(model: StepModel) -> float:
    """How many prompt tokens beyond the knee cost what one more decode costs below it."""
    return model.sequence_s / model.slope_s_per_token


def refused(steps: StepSamples) -> bool:
    """Whether the fit of live steps refuses these."""
    try:
        fit_steps(steps)
    except FitRefused:
        return True
    return False
