"""Degradation: quantities for operator thresholds, stalls, rising failures, a trial's cost. Pure."""

import math

import numpy as np

from rooftune.policies.quantiles import quantile, weighted_quantile
from rooftune.policies.verify import Observed
from rooftune.tuner.control.figures import judged, queue_s
from rooftune.tuner.observe.rows import FAILED, FINISHED, FloatArray, IntArray, StepRows
from rooftune.tuner.observe.window import Window

# Least samples to judge an operator threshold: the p99 of three requests is the slowest of three.
THRESHOLD_GAPS, THRESHOLD_REQUESTS = 100, 20
# A rate needs this many preemptions or this span: one in the first second would read as one per second.
THRESHOLD_PREEMPTIONS, THRESHOLD_SPAN_S = 3, 30.0
# Rising failures: least number, and least rise of their share.
ERRORS_LEAST, ERRORS_SHARE = 3, 0.02
# A stall: requests wait at every step and none ends for STALL_S, in which STALL_ENDS would have at the earlier pace.
STALL_S, STALL_ENDS = 30.0, 10.0


def is_stalled(before: Window, after: Window, from_s: float, began_s: float, since_s: float) -> bool:
    """Whether no request has made progress since ``since_s``; before: rows of ``from_s`` to ``began_s``.

    Measured in step time, so that hours without traffic do not count. Without waiting requests it is no stall: those
    that run may all be in the middle of long answers.
    """
    then = before.steps.select((before.steps.start_s >= from_s) & (before.steps.end_s <= began_s))
    ends_s = _finishes(before)
    latest_s = float(_finishes(after).max(initial=since_s))
    now = after.steps.select(after.steps.start_s >= latest_s)
    then_s, now_s = float(then.duration_s.sum()), float(now.duration_s.sum())
    if now_s < STALL_S or then_s <= 0.0 or not (now.waiting > 0).all():
        return False
    return float(((ends_s >= from_s) & (ends_s <= began_s)).sum()) / then_s * now_s >= STALL_ENDS


def _finishes(window: Window) -> FloatArray:
    ends_s: FloatArray = window.requests.finish_s[window.requests.ended == FINISHED]
    return ends_s


def rising(now: IntArray, before: IntArray, how: int = FAILED) -> bool:
    """Whether the share of requests that ended as ``how`` rose beyond chance. now, before: how requests ended."""
    failed = int((now == how).sum())
    if failed < ERRORS_LEAST:
        return False
    was = (int((before == how).sum()) + 0.5) / (len(before) + 1.0) if len(before) else 0.0
    noise = 2.0 * math.sqrt(max(was * (1.0 - was), 0.0) / len(now))
    return failed / len(now) > was + ERRORS_SHARE + noise


def observed(window: Window, start_s: float, end_s: float) -> Observed:
    """Quantities for operator thresholds between two instants; NaN with too few samples.

    gap_p99_s: from the steps; a decode's token waits from the end of one step to the end of the next.
    """
    steps = window.steps.select((window.steps.start_s >= start_s) & (window.steps.end_s <= end_s))
    ended = (window.requests.finish_s > start_s) & (window.requests.finish_s <= end_s)
    rows = judged(window.requests.select(ended & (window.requests.arrival_s >= start_s)))
    span_s = end_s - max(start_s, window.steps_from_s, float(steps.start_s[0]) if len(steps) else end_s)
    enough = len(rows) >= THRESHOLD_REQUESTS
    finished = rows.ended == FINISHED
    return Observed(
        gap_p99_s=_gap_p99_s(steps),
        queue_p99_s=quantile(queue_s(rows.outcomes(), finished), 0.99) if enough else math.nan,
        preemptions_per_s=_rate(int(steps.preemptions.sum()), span_s),
        failed_share=float((~finished).mean()) if enough else math.nan,
    )


def _rate(preemptions: int, span_s: float) -> float:
    enough = span_s >= THRESHOLD_SPAN_S or (preemptions >= THRESHOLD_PREEMPTIONS and span_s > 0.0)
    return preemptions / span_s if enough else math.nan


def _gap_p99_s(steps: StepRows) -> float:
    following = np.flatnonzero(np.diff(steps.step) == 1) + 1
    weights = np.minimum(steps.decode_tokens[following], steps.decode_tokens[following - 1]).astype(np.float64)
    if weights.sum() < THRESHOLD_GAPS:
        return math.nan
    return weighted_quantile(steps.end_s[following] - steps.end_s[following - 1], weights, 0.99)


def predicted_cost_slo_s(attainment_now: float, error: float, trial_s: float) -> float:
    """Cost of a trial of ``trial_s`` in SLO-seconds: the share of requests that twin error and noise put at risk, at
    most the share that is good now. An unknown share counts as 1."""
    at_risk = error if math.isfinite(error) else 1.0
    served = attainment_now if math.isfinite(attainment_now) else 1.0
    return max(0.0, min(at_risk, served, 1.0)) * max(trial_s, 0.0)


def measured_cost_slo_s(observed_gain: float, elapsed_s: float) -> float:
    """Cost of a trial so far in SLO-seconds: lost attainment times elapsed time; 0 when unknown."""
    return max(0.0, -observed_gain) * max(elapsed_s, 0.0) if math.isfinite(observed_gain) else 0.0
