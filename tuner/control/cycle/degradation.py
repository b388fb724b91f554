"""Degradation: the quantities of an operator's thresholds, stalls, more failures than before, a trial's cost. Pure."""

import math

import numpy as np

from rooftune.policies.quantiles import quantile, weighted_quantile
from rooftune.policies.verify import Observed
from rooftune.tuner.control.figures import judged, queue_s
from rooftune.tuner.observe.rows import FAILED, FINISHED, FloatArray, IntArray, StepRows
from rooftune.tuner.observe.window import Window

# Of fewer samples an operator's threshold is not judged: a p99 of three requests is the slowest of three.
THRESHOLD_GAPS, THRESHOLD_REQUESTS = 100, 20
# Fewer preemptions than that make no rate within a short span: one in the first second would be one a second.
THRESHOLD_PREEMPTIONS, THRESHOLD_SPAN_S = 3, 30.0
# Failed requests: the least number, and how much more than before.
ERRORS_LEAST, ERRORS_SHARE = 3, 0.02
# A stall: requests wait at every step and none ends for this long, although at the pace of before this many would have.
STALL_S, STALL_ENDS = 30.0, 10.0


def is_stalled(before: Window, after: Window, from_s: float, began_s: float) -> bool:
    """Whether no request makes progress since ``began_s``; before: the rows of then, known from ``from_s`` on.

    By the time that steps took, so that hours without traffic count for nothing; where none waits, all that run may
    be in the middle of long answers.
    """
    then = before.steps.select((before.steps.start_s >= from_s) & (before.steps.end_s <= began_s))
    ends_s = _finishes(before)
    latest_s = float(_finishes(after).max(initial=began_s))
    now = after.steps.select(after.steps.start_s >= latest_s)
    then_s, now_s = float(then.duration_s.sum()), float(now.duration_s.sum())
    if now_s < STALL_S or then_s <= 0.0 or not (now.waiting > 0).all():
        return False
    return float(((ends_s >= from_s) & (ends_s <= began_s)).sum()) / then_s * now_s >= STALL_ENDS


def _finishes(window: Window) -> FloatArray:
    ends_s: FloatArray = window.requests.finish_s[window.requests.ended == FINISHED]
    return ends_s


def rising(now: IntArray, before: IntArray, how: int = FAILED) -> bool:
    """Whether more requests end like this than before: several, and beyond what chance would do. now, before: how
    they ended."""
    failed = int((now == how).sum())
    if failed < ERRORS_LEAST:
        return False
    was = (int((before == how).sum()) + 0.5) / (len(before) + 1.0) if len(before) else 0.0
    noise = 2.0 * math.sqrt(max(was * (1.0 - was), 0.0) / len(now))
    return failed / len(now) > was + ERRORS_SHARE + noise


def observed(window: Window, start_s: float, end_s: float) -> Observed:
    """The quantities of operator's thresholds between two instants; NaN where there are too few samples.

    gap_p99_s: from the steps, each token of a decode waits from the end of the step before to the end of its own.
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
    told = span_s >= THRESHOLD_SPAN_S or (preemptions >= THRESHOLD_PREEMPTIONS and span_s > 0.0)
    return preemptions / span_s if told else math.nan


def _gap_p99_s(steps: StepRows) -> float:
    following = np.flatnonzero(np.diff(steps.step) == 1) + 1
    weights = np.minimum(steps.decode_tokens[following], steps.decode_tokens[following - 1]).astype(np.float64)
    if weights.sum() < THRESHOLD_GAPS:
        return math.nan
    return weighted_quantile(steps.end_s[following] - steps.end_s[following - 1], weights, 0.99)


def predicted_cost_slo_s(attainment_now: float, error: float, trial_s: float) -> float:
    """What a trial of ``trial_s`` may cost before its verdict: the share of requests that the twin's own error
    (and noise) puts at risk, at most the share that is served well now. Unknown shares count as everything."""
    at_risk = error if math.isfinite(error) else 1.0
    served = attainment_now if math.isfinite(attainment_now) else 1.0
    return max(0.0, min(at_risk, served, 1.0)) * max(trial_s, 0.0)


def measured_cost_slo_s(observed_gain: float, elapsed_s: float) -> float:
    """What a trial has cost so far: attainment lost against the window before, times how long. Unknown: nothing."""
    return max(0.0, -observed_gain) * max(elapsed_s, 0.0) if math.isfinite(observed_gain) else 0.0
