"""Bench ``knee-fit``: how well the fit finds a knee that is known, and what no fit can beat."""

import time
from collections.abc import Iterator

import numpy as np
from rooftune.policies.commands import Figure
from rooftune.policies.step_time import NAMED_MODELS, knee_tokens
from rooftune.tuner.bench.knee_synthetic import knee_log_sd_bound, make_steps
from rooftune.tuner.model.fit import fit_steps

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
