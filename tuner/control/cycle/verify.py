"""Verify: compares a push with its prediction, on matched traffic. Pure.

The window after the push starts ``settle_s`` after it or later, ends at the newest reading and lasts at most
``verify_s``. Up to MOST_BEFORE windows of the same length precede the push. ``matched`` defines the comparison.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from rooftune.policies.slo import Slo, good
from rooftune.policies.step_time import StepModel
from rooftune.policies.verify import Comparison, Judgement, Verdict, VerdictReason, crossed, judge
from rooftune.tuner.control.cycle.degradation import is_stalled, rising
from rooftune.tuner.control.cycle.matched import Matched, Side, compare, overdue
from rooftune.tuner.control.cycle.observe import Seen, in_flight, storming, wait_bound_s, waiting_at
from rooftune.tuner.control.figures import judged
from rooftune.tuner.control.memory import Strides, Trial
from rooftune.tuner.control.options import LoopOptions
from rooftune.tuner.control.outcome import VerifyPart
from rooftune.tuner.model.roofline import predict
from rooftune.tuner.observe.rows import ABORTED, RequestRows
from rooftune.tuner.observe.window import Window

MOST_BEFORE = 4
# Beyond PACE_RATIO, at the same work, the engine has changed since the push and there is no verdict. Beyond PACE_HARM
# the push itself may be the cause, so the comparison counts again.
PACE_RATIO, PACE_HARM, PACE_STEPS = 1.2, 2.0, 50
# At a higher rate the window's bound on rows shortens it; from this share on it counts as full.
FULL_SHARE = 0.75
_LONG_AGO_S = -1e11  # below it a stored instant means "always": a record cannot hold an infinity


@dataclass(frozen=True)
class Checked:
    """The verdict so far. passed: a limited step did no harm, which is enough for it.

    elapsed_s: since the push. matched: None when there is nothing to compare, yet or because of an abort storm.
    hung_up: an abort storm that began with the push. stalled: no request has made progress since the push.
    lost_strides: the strides that end with this one, when their sum is a loss.
    """

    matched: Matched | None
    elapsed_s: float
    passed: bool
    pace_ratio: float
    hung_up: bool
    stalled: bool
    part: VerifyPart
    lost_strides: Strides | None = None

    @property
    def verdict(self) -> Verdict:
        return Verdict(self.part.verdict)

    @property
    def keeps(self) -> bool:
        """Whether the trial ends and its setting stays."""
        return self.passed or self.verdict is Verdict.BETTER

    def on(self, strides: Strides) -> "Checked":
        """Compares with the start of the strides too: worse when their total loss exceeds noise."""
        if not (self.keeps and strides.lost):
            return self
        worse = {"verdict": Verdict.WORSE.value, "reason": VerdictReason.LOSS_SHOWN.value, "prediction_held": False}
        part = self.part.model_copy(update=worse | {"observed_gain": strides.gain, "half_width": strides.half_width})
        return replace(self, passed=False, part=part, lost_strides=strides)


def side(window: Window, slo: Slo, wait_s: float, start_s: float, end_s: float) -> Side:
    """Requests that arrived and ended between two instants, without aborted ones. wait_s: a longer wait is overdue."""
    rows = _inside(window, start_s, end_s)
    ended = window.requests.finish_s
    arrived = int(((ended > start_s) & (ended <= end_s)).sum()) + in_flight(window, end_s) - in_flight(window, start_s)
    kept = judged(rows)
    span_s = end_s - start_s
    rate_rps = max(arrived, 0) / span_s if span_s > 0.0 else math.nan
    return Side(
        good=good(kept.outcomes(), slo).astype(float),
        prompt_tokens=kept.prompt_tokens,
        span_s=span_s,
        arrived=float(max(arrived, len(kept))),
        overdue=overdue(waiting_at(window, end_s), rate_rps, wait_s),
    )


def _inside(window: Window, start_s: float, end_s: float) -> RequestRows:
    rows = window.requests_since(start_s)
    return rows.select((rows.arrival_s <= end_s) & (rows.finish_s <= end_s))


def known_before_s(trial: Trial, before: Window) -> float:
    """Seconds before the push that are known and under the setting it replaced."""
    from_s = max(trial.since_s, before.complete_from_s, before.steps_from_s)
    if from_s < _LONG_AGO_S:  # no row was ever lost: the rows begin with the first request
        arrivals = before.requests.arrival_s
        from_s = float(arrivals.min()) if len(arrivals) else trial.began_s
    return max(0.0, trial.began_s - from_s)


def length_of(trial: Trial, before: Window, after: Window, settle_s: float, verify_s: float) -> float:
    """Length of both windows in seconds; 0: not yet. Lost rows move the window's start behind them: of the requests
    that arrived earlier only the long ones would be left."""
    from_s = max(trial.began_s + settle_s, after.complete_from_s)
    return max(0.0, min(after.now_s - from_s, known_before_s(trial, before), verify_s))


def _spans(trial: Trial, before: Window, length_s: float) -> list[tuple[float, float]]:
    """Up to MOST_BEFORE windows in a row that end at the push. Each cuts off the same kind of request; more of them
    make a steadier measure."""
    count = max(1, min(MOST_BEFORE, int(known_before_s(trial, before) / length_s + 1e-9)))
    ends_s = [trial.began_s - k * length_s for k in reversed(range(count))]
    return [(end_s - length_s, end_s) for end_s in ends_s]


def earlier(trial: Trial, before: Window, slo: Slo, wait_s: float, length_s: float) -> Side:
    """The windows before the push, joined."""
    sides = [side(before, slo, wait_s, start_s, end_s) for start_s, end_s in _spans(trial, before, length_s)]
    return Side(
        good=np.concatenate([one.good for one in sides]),
        prompt_tokens=np.concatenate([one.prompt_tokens for one in sides]),
        span_s=sum(one.span_s for one in sides),
        arrived=sum(one.arrived for one in sides),
        overdue=sum(one.overdue for one in sides),
    )


def more_hang_up(trial: Trial, before: Window, after: Window, length_s: float) -> bool:
    """Whether the abort rate rose so much since the push that the push may be the cause."""
    spans = _spans(trial, before, length_s)
    was = np.concatenate([_inside(before, start_s, end_s).ended for start_s, end_s in spans])
    return len(was) > 0 and rising(_inside(after, after.now_s - length_s, after.now_s).ended, was, ABORTED)


def pace(window: Window, model: StepModel, start_s: float, end_s: float, decodes_alone: bool) -> float:
    """Measured over modelled time of the steps between two instants; NaN below PACE_STEPS."""
    steps = window.steps.select((window.steps.start_s >= start_s) & (window.steps.end_s <= end_s))
    samples = (steps.select(steps.prefill_tokens == 0) if decodes_alone else steps).samples()
    if len(samples) < PACE_STEPS:
        return math.nan
    return float(samples.duration_s.sum() / predict(model, samples).sum())


def pace_ratio(
    trial: Trial, before: Window, seen: Seen, model: StepModel | None, start_s: float, length_s: float
) -> float:
    """Slowdown since the push at the same work, 1.0 as before; NaN when unknown.

    It shows a neighbour on the machine or a lowered clock. Steps of decodes alone come first: they are the same under
    both settings, while the model may know little about the step sizes that the push brought.
    """
    if model is None or length_s <= 0.0:
        return math.nan
    for decodes_alone in (True, False):
        was = pace(before, model, trial.began_s - MOST_BEFORE * length_s, trial.began_s, decodes_alone)
        ratio = pace(seen.window, model, start_s, seen.now_s, decodes_alone) / was
        if math.isfinite(ratio):
            return ratio
    return math.nan


def check(trial: Trial, before: Window, seen: Seen, options: LoopOptions, model: StepModel | None) -> Checked:
    """The verdict on a trial so far. before: the rows at the push, or those that are left."""
    settle_s, min_requests = options.settle_s, options.harm_requests
    length_s = length_of(trial, before, seen.window, settle_s, seen.verify_s)
    start_s = seen.now_s - length_s
    elapsed_s = seen.now_s - trial.began_s
    storm = storming(seen.window, max(trial.began_s, start_s))
    found: Matched | None = None
    requests = 0
    if length_s > 0.0 and not storm:
        wait_s = wait_bound_s(seen.slo, seen.verify_s)
        first = earlier(trial, before, seen.slo, wait_s, length_s)
        second = side(seen.window, seen.slo, wait_s, start_s, seen.now_s)
        # A request that must have missed its target while waiting counts like one that ended badly.
        found, requests = compare(first, second, seed=trial.push_cycle), len(second) + int(second.overdue)
    ratio = pace_ratio(trial, before, seen, model, start_s, length_s)
    if found is not None and PACE_RATIO < max(ratio, 1.0 / ratio) <= PACE_HARM:
        found = replace(found, matched=False)
    comparison = Comparison(
        predicted_gain=0.0 if trial.stride else trial.predicted_gain,
        twin_error=trial.twin_error,
        observed_gain=found.gain if found is not None else math.nan,
        half_width=found.half_width if found is not None else math.nan,
        matched=not storm and (found is None or found.matched or requests < min_requests),
        requests=requests,
        crossed=crossed(options.thresholds, seen.observed),
    )
    judgement = judge(comparison, min_requests)
    whole_s = min(known_before_s(trial, before), seen.verify_s)
    full = elapsed_s >= settle_s + whole_s and length_s >= FULL_SHARE * whole_s
    if judgement.verdict is Verdict.BETTER and requests < options.min_requests and not full:
        judgement = Judgement(Verdict.INCONCLUSIVE, VerdictReason.TOO_FEW_REQUESTS, judgement.prediction_held)
    passed = trial.stride and full and judgement.reason is VerdictReason.WITHIN_NOISE
    hung_up = storm and length_s > 0.0 and more_hang_up(trial, before, seen.window, length_s)
    stalled = is_stalled(before, seen.window, trial.began_s - known_before_s(trial, before), trial.began_s)
    part = _part(trial, comparison, judgement)
    return Checked(found, elapsed_s, passed, ratio, hung_up, stalled, part)


def _part(trial: Trial, comparison: Comparison, judgement: Judgement) -> VerifyPart:
    def known(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return VerifyPart(
        push_cycle=trial.push_cycle,
        verdict=judgement.verdict.value,
        reason=judgement.reason.value,
        predicted_gain=None if trial.stride else known(trial.predicted_gain),
        observed_gain=known(comparison.observed_gain),
        half_width=known(comparison.half_width),
        requests=comparison.requests,
        prediction_held=judgement.prediction_held and not trial.stride,
        crossed=comparison.crossed,
    )
