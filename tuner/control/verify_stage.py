"""Verify: a push held against its prediction, on matched traffic. Pure.

Both windows have one length, at most ``verify_s``: the one before ends with the push, the one after with the newest
reading and begins ``settle_s`` after the push. See ``matched`` for what is compared and when it counts.
"""

import math
from dataclasses import dataclass

from policies.targets import Slo
from policies.verify import Comparison, Judgement, RollbackThresholds, Verdict, VerdictReason, crossed, judge
from tuner.control.figures import good_mask, judged
from tuner.control.matched import Matched, Side, compare, overdue
from tuner.control.memory import Trial
from tuner.control.observe_stage import Seen, in_flight, storming, waiting_at
from tuner.control.outcome import VerifyPart
from tuner.observe.window import Window

_LONG_AGO_S = -1e11  # stands for "since ever" where a record cannot hold an infinity


@dataclass(frozen=True)
class Checked:
    """What came out. passed: a limited step was shown not to be worse, which is enough for it.

    elapsed_s: since the push; matched: None when there was nothing to compare (yet, or because so many hung up).
    """

    judgement: Judgement
    matched: Matched | None
    requests: int
    elapsed_s: float
    passed: bool
    part: VerifyPart

    @property
    def keeps(self) -> bool:
        """Whether the setting stays and the trial is over."""
        return self.passed or self.judgement.verdict is Verdict.BETTER


@dataclass(frozen=True)
class Terms:
    """settle_s: of the time after a push that does not count. harm_requests: that a loss needs, for which its own
    interval does the rest; min_requests: that a gain needs, unless the window is full."""

    settle_s: float
    harm_requests: int
    min_requests: int


def side(window: Window, slo: Slo, start_s: float, end_s: float) -> Side:
    """The requests that arrived and ended between two instants, those that hung up left out."""
    rows = window.requests_since(start_s)
    rows = rows.select((rows.arrival_s <= end_s) & (rows.finish_s <= end_s))
    ended = window.requests.finish_s
    arrived = int(((ended > start_s) & (ended <= end_s)).sum()) + in_flight(window, end_s) - in_flight(window, start_s)
    kept = judged(rows)
    span_s = end_s - start_s
    rate_rps = max(arrived, 0) / span_s if span_s > 0.0 else math.nan
    return Side(
        good=good_mask(kept, slo).astype(float),
        prompt_tokens=kept.prompt_tokens,
        span_s=span_s,
        arrived=float(max(arrived, len(kept))),
        overdue=overdue(waiting_at(window, end_s), rate_rps, ttft_bound_s(slo)),
    )


def ttft_bound_s(slo: Slo) -> float:
    """The mildest bound on a wait for a first token that holds for everybody; +inf without one."""
    bounds = [target.bound_s for target, _ in slo.all_targets() if target.metric in ("ttft", "queue")]
    base = [target for target in slo.targets if target.metric in ("ttft", "queue")]
    return max(bounds) if base else math.inf


def windows(trial: Trial, before: Window, now_s: float, settle_s: float, verify_s: float) -> tuple[float, float]:
    """Length of both windows and start of the one after, in seconds; length 0: not yet."""
    from_s = max(trial.since_s, before.complete_from_s, before.steps_from_s)
    if from_s < _LONG_AGO_S:  # nothing was ever lost: what is known begins with the first request
        arrivals = before.requests.arrival_s
        from_s = float(arrivals.min()) if len(arrivals) else trial.began_s
    known_s = trial.began_s - from_s
    length_s = max(0.0, min(now_s - trial.began_s - settle_s, known_s, verify_s))
    return length_s, now_s - length_s


def check(trial: Trial, before: Window, seen: Seen, thresholds: RollbackThresholds, terms: Terms) -> Checked:
    """The verdict on a trial so far. before: the rows as they stood at the push (or as far as they are still there)."""
    settle_s, min_requests = terms.settle_s, terms.harm_requests
    length_s, start_s = windows(trial, before, seen.now_s, settle_s, seen.verify_s)
    elapsed_s = seen.now_s - trial.began_s
    storm = storming(seen.window, max(trial.began_s, start_s))
    found: Matched | None = None
    requests = 0
    if length_s > 0.0 and not storm:
        first = side(before, seen.slo, trial.began_s - length_s, trial.began_s)
        second = side(seen.window, seen.slo, start_s, seen.now_s)
        # Whoever must have missed while waiting counts like one that ended badly.
        found, requests = compare(first, second, seed=trial.push_cycle), len(second) + int(second.overdue)
    comparison = Comparison(
        predicted_gain=0.0 if trial.stride else trial.predicted_gain,
        twin_error=trial.twin_error,
        observed_gain=found.gain if found is not None else math.nan,
        half_width=found.half_width if found is not None else math.nan,
        matched=not storm and (found is None or found.matched or requests < min_requests),
        requests=requests,
        crossed=crossed(thresholds, seen.observed),
    )
    judgement = judge(comparison, min_requests)
    full = elapsed_s >= settle_s + windows_due(trial, before, seen.verify_s)
    if judgement.verdict is Verdict.BETTER and requests < terms.min_requests and not full:
        judgement = Judgement(Verdict.INCONCLUSIVE, VerdictReason.TOO_FEW_REQUESTS, judgement.prediction_held)
    passed = trial.stride and full and judgement.reason is VerdictReason.WITHIN_NOISE
    return Checked(judgement, found, requests, elapsed_s, passed, _part(trial, comparison, judgement))


def windows_due(trial: Trial, before: Window, verify_s: float) -> float:
    """How long a window can become at most: what is known of the time before the push."""
    return windows(trial, before, math.inf, 0.0, verify_s)[0]


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
