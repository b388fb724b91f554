"""A job's values as the twin's: traffic, what was observed, and the noise of steps."""

import math

import numpy as np

from rooftune.policies.errors import InputError
from rooftune.policies.outcomes import BoolArray, FloatArray, Outcomes
from rooftune.policies.slo import Slo
from rooftune.tuner.control.figures import judgeable
from rooftune.tuner.control.job import Job, WindowPart
from rooftune.tuner.observe.rows import FINISHED, RequestRows
from rooftune.tuner.sim.noise import QUIET, StepNoise, noise_from_steps
from rooftune.tuner.traffic.workload import Traffic

LEAST_NOISE_STEPS = 20
# Neither end of a window is compared where it is cut: at most this share of its span, each.
MOST_CUT = 0.25
CUT_QUANTILE = 0.9


def slo_of(job: Job) -> Slo:
    """The targets as this window can show them."""
    return judgeable(job.slo, job.window.gap_bounds_s)


def noise_of(job: Job, seed: int) -> StepNoise:
    """Noise of single steps; none when the job brings too few of them."""
    modelled, measured = np.array(job.noise_modelled_s), np.array(job.noise_measured_s)
    if len(modelled) != len(measured):
        raise InputError(f"noise has {len(modelled)} modelled and {len(measured)} measured steps; give the same twice")
    kept = (modelled > 0.0) & (measured > 0.0)
    if int(kept.sum()) < LEAST_NOISE_STEPS:
        return QUIET
    return noise_from_steps(modelled[kept], measured[kept], seed=seed)


def traffic_of(window: WindowPart) -> Traffic:
    """The window's requests from the first arrival on (0 s). One that came before the window began keeps its place."""
    arrival_s = np.array(window.arrival_s)
    if not len(arrival_s):
        raise InputError("the window holds no finished request; wait for some")
    cached = np.minimum(np.array(window.cached_tokens, dtype=np.int64), np.array(window.prompt_tokens) - 1)
    return Traffic(
        arrival_s=arrival_s - arrival_s[0],
        prompt_tokens=np.array(window.prompt_tokens, dtype=np.int64),
        output_tokens=np.array(window.output_tokens, dtype=np.int64),
        cached_tokens=cached,
        tenant=np.zeros(len(arrival_s), dtype=np.int64),
        name="live window",
    )


def observed_of(window: WindowPart) -> Outcomes:
    """What became of them, on the traffic's clock."""
    arrival_s = np.array(window.arrival_s)
    over = np.array(window.gap_over, dtype=np.int64).reshape(len(window.gap_bounds_s), len(arrival_s))
    zero_s = arrival_s[0]
    return Outcomes(
        arrival_s=arrival_s - zero_s,
        first_token_s=arrival_s - zero_s + np.array(window.ttft_s),
        finish_s=np.array(window.finish_s) - zero_s,
        prompt_tokens=np.array(window.prompt_tokens, dtype=np.int64),
        output_tokens=np.array(window.output_tokens, dtype=np.int64),
        longest_gap_s=np.array(window.longest_gap_s),
        gap_count=np.array(window.gap_count, dtype=np.int64),
        cached_tokens=np.array(window.cached_tokens, dtype=np.int64),
        gap_bounds_s=np.array(window.gap_bounds_s),
        gap_over=over.T,
    )


def compared(observed: Outcomes) -> BoolArray:
    """Which requests the twin is judged on: not those at the two ends of the window, where it is cut.

    At its beginning requests were running that are not in it, so the twin is emptier than the engine was; at its end
    requests are missing that had not finished, and those that are there are the short ones. How long either lasts: as
    long as nine requests in ten take, at most a quarter of the window.
    """
    arrival_s: FloatArray = np.asarray(observed.arrival_s)
    end_s = float(np.max(observed.finish_s))
    cut_s = min(float(np.quantile(observed.finish_s - arrival_s, CUT_QUANTILE)), MOST_CUT * end_s)
    kept: BoolArray = (arrival_s >= cut_s) & (arrival_s <= end_s - cut_s)
    return kept if kept.any() and math.isfinite(cut_s) else np.ones(len(arrival_s), dtype=np.bool_)


def window_part(rows: RequestRows, start_s: float) -> WindowPart:
    """Finished requests by arrival, times counted from start_s (engine's clock); rows of another end are left out.

    So are requests without a token of prompt or output, which no twin can replay.
    """
    kept = (rows.ended == FINISHED) & np.isfinite(rows.ttft_s) & np.isfinite(rows.finish_s)
    kept &= (rows.prompt_tokens > 0) & (rows.output_tokens > 0)
    picked = rows.select(kept)
    picked = picked.select(np.lexsort((picked.sequence, picked.arrival_s)))
    return WindowPart(
        arrival_s=tuple((picked.arrival_s - start_s).tolist()),
        ttft_s=tuple(picked.ttft_s.tolist()),
        finish_s=tuple((picked.finish_s - start_s).tolist()),
        longest_gap_s=tuple(np.nan_to_num(picked.longest_gap_s).tolist()),
        prompt_tokens=tuple(picked.prompt_tokens.tolist()),
        cached_tokens=tuple(picked.cached_tokens.tolist()),
        output_tokens=tuple(picked.output_tokens.tolist()),
        gap_count=tuple(picked.gap_count.tolist()),
        gap_bounds_s=picked.gap_bounds_s,
        gap_over=tuple(tuple(row) for row in picked.gap_over.T.tolist()),
    )
