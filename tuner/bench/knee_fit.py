"""Bench ``knee-fit``: how well the fit finds a knee that is known, and what no fit can beat."""

import time
from collections.abc import Iterator

import numpy as np

from rooftune.policies.commands import Figure
from rooftune.policies.step_time import NAMED_MODELS, StepModel, knee_tokens
from rooftune.tuner.model.fit import fit_steps
from rooftune.tuner.model.roofline import predict
from rooftune.tuner.model.samples import FloatArray, StepSamples
from rooftune.tuner.model.solver import NAMES, column_of

MAX_DECODES = 64


def make_steps(
    model: StepModel,
    seed: int,
    steps: int = 2000,
    *,
    tokens: tuple[int, int] = (1, 4096),
    noise: float = 0.1,
    outliers: float = 0.02,
) -> StepSamples:
    """Steps with tokens log-uniform over ``tokens``, decodes and one prefill chunk mixed.

    noise: relative standard deviation of the durations; outliers: share of steps that take ten times as long.
    """
    random = np.random.default_rng(seed)
    low, high = np.log(tokens[0]), np.log(tokens[1] + 1)
    total = np.floor(np.exp(random.uniform(low, high, steps)))
    decodes = np.minimum(total, random.integers(0, MAX_DECODES + 1, steps))
    decode_only = (total <= MAX_DECODES) & (random.random(steps) < 0.5)
    decodes = np.where(decode_only, total, decodes).astype(np.float64)
    chunk = total - decodes
    chunks = (chunk > 0).astype(np.float64)
    context = decodes * np.floor(random.uniform(100.0, 4000.0, steps))
    before = chunks * (random.random(steps) < 0.5) * np.floor(random.uniform(0.0, 8000.0, steps))
    columns = (chunk, decodes, decodes + chunks, context, before, chunk * (before + 0.5 * chunk))
    clean = predict(model, StepSamples(np.ones(steps), *columns))
    noisy = clean * np.maximum(1.0 + noise * random.standard_normal(steps), 0.05)
    return StepSamples(np.where(random.random(steps) < outliers, 10.0 * noisy, noisy), *columns)


def knee_log_sd_bound(model: StepModel, samples: StepSamples, noise: float, outliers: float) -> float:
    """Cramer-Rao bound of the standard deviation of log knee, all coefficients unknown and the maximum hard.

    An outlier tells nothing of the coefficients, so the information is that of the other steps.
    """
    memory = model.floor_s + model.kv_s_per_token * samples.context_tokens
    compute = model.slope_s_per_token * samples.computed_tokens + model.attention_s * samples.attention_work
    flat = (memory >= compute).astype(np.float64)
    weight = {"floor_s": flat, "kv_s_per_token": flat, "slope_s_per_token": 1.0 - flat, "attention_s": 1.0 - flat}
    derivative = np.stack([column_of(samples, name) * weight.get(name, 1.0) for name in NAMES], axis=1)
    relative: FloatArray = derivative / predict(model, samples)[:, None]
    scale = np.linalg.norm(relative, axis=0)
    information = (1.0 - outliers) * (relative / scale).T @ (relative / scale) / noise**2
    gradient = np.zeros(len(NAMES))
    floor, slope = NAMES.index("floor_s"), NAMES.index("slope_s_per_token")
    gradient[floor] = 1.0 / (model.floor_s * scale[floor])
    gradient[slope] = -1.0 / (model.slope_s_per_token * scale[slope])
    return float(np.sqrt(gradient @ np.linalg.solve(information, gradient)))


NOISE = 0.1
OUTLIERS = 0.02
SEEDS = 100
SHORT_SEEDS = 12
# 90 % of a normal error lie within this many standard deviations.
NORMAL_P90 = 1.6449


def bench(short: bool) -> Iterator[Figure]:
    """Figures over 100 seeds (12 when short) of 2,000 steps; baselines: the aims, and the Cramer-Rao bound.

    fit_ms is processor time of one fit, so that a busy machine does not show in it.
    """
    model = NAMED_MODELS["8b-2tbs"]
    truth = knee_tokens(model)
    errors, bounds, held, spent_ms = [], [], [], []
    for seed in range(SHORT_SEEDS if short else SEEDS):
        steps = make_steps(model, seed, noise=NOISE, outliers=OUTLIERS)
        started = time.process_time()
        fit = fit_steps(steps)
        spent_ms.append(1000.0 * (time.process_time() - started))
        # A knee that is not given counts as missed by all of it.
        errors.append(1.0 if fit.knee_tokens is None else abs(fit.knee_tokens / truth - 1.0))
        bounds.append(knee_log_sd_bound(model, steps, NOISE, OUTLIERS))
        held.append(truth in fit.knee_interval)
    bound_p90 = NORMAL_P90 * float(np.mean(bounds))
    error_p90 = float(np.quantile(errors, 0.9))
    yield Figure("knee_error_median", float(np.median(errors)), "fraction", 0.03)
    yield Figure("knee_error_p90", error_p90, "fraction", bound_p90)
    yield Figure("knee_error_p90_over_bound", error_p90 / bound_p90, "ratio", 1.3)
    yield Figure("coverage", float(np.mean(held)), "fraction", 0.9)
    yield Figure("fit_ms", float(np.median(spent_ms)), "ms", 100.0)
