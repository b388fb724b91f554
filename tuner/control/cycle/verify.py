"""Verify: a trial's blocks, its verdict so far, and what else may end it. Pure.

A block holds the requests that arrived in its first ``block_s`` seconds, without those of its first ``settle_s`` and
without those that queued behind requests from before it (at most half of the block). It counts once all of them have
ended or, at the latest, a block later: those that must have missed their target while waiting then count as missed, and
the rest is left out. A fault or a pause lengthens a turn: what arrives after its first ``block_s`` does not count.
A queue that one setting leaves to the next is left out as far as above; what is left of it, and a queue that grows or
drains all the time, hits the second block of a pair whichever setting has it, and the order is random.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rooftune.policies.proof.switchback import PAIRS, Block, Outcome, harmful, judge_pairs
from rooftune.policies.slo import Slo, good
from rooftune.policies.step_time import StepModel
from rooftune.policies.verify import Comparison, Judgement, Verdict, VerdictReason, crossed, judge
from rooftune.tuner.control.cycle.degradation import is_stalled, rising
from rooftune.tuner.control.cycle.observe import (
    Seen,
    carried_until,
    in_flight,
    overdue,
    storming,
    wait_bound_s,
)
from rooftune.tuner.control.figures import judged
from rooftune.tuner.control.memory import Row, Trial
from rooftune.tuner.control.options import LoopOptions
from rooftune.tuner.control.outcome import VerifyPart
from rooftune.tuner.model.roofline import predict
from rooftune.tuner.observe.rows import ABORTED
from rooftune.tuner.observe.window import Window, settled

# Blocks before the push go back this many times ``verify_s``.
MOST_BEFORE = 4
# Beyond it, at the same work, the engine has changed since the push: people are told. The turns share such a change.
PACE_RATIO, PACE_STEPS = 1.2, 50
COUNTING_Z = 3.0
_LONG_AGO_S = -1e11  # below it a stored instant means "always": a record cannot hold an infinity


@dataclass(frozen=True)
class Checked:
    """The trial so far, with the blocks that count by now, and its verdict.

    found: the test's result on whole pairs. harmful: it ends for caution; undecided: its last look gave no verdict.
    hung_up: an abort storm that began with the new setting. stalled: no request has made progress under it.
    """

    trial: Trial
    found: Outcome
    pace_ratio: float
    harmful: bool
    undecided: bool
    hung_up: bool
    stalled: bool
    part: VerifyPart

    @property
    def verdict(self) -> Verdict:
        return Verdict(self.part.verdict)

    @property
    def keeps(self) -> bool:
        """Whether the trial ends and its setting, which is in force, stays."""
        return self.verdict is Verdict.BETTER and self.trial.turn.setting == self.trial.after


def tally(
    window: Window, slo: Slo, wait_s: float, start_s: float, end_s: float, settle_s: float
) -> tuple[float, float]:
    """Good and judged requests of a block. wait_s: a longer wait is a miss. (0, 0) when nothing is known of it."""
    from_s = max(carried_until(window, start_s, end_s), start_s + settle_s, window.complete_from_s)
    rows = window.requests_since(from_s)
    rows = rows.select(rows.arrival_s < end_s)
    kept = judged(rows)
    ended = window.requests.finish_s
    left = int(((ended > from_s) & (ended <= end_s)).sum()) + in_flight(window, end_s) - in_flight(window, from_s)
    rate_rps = max(left, 0) / (end_s - from_s) if end_s > from_s else math.nan
    missed = overdue(window, slo, wait_s, rate_rps, from_s, end_s)
    if window.in_flight is None:
        missed = min(max(0.0, left - len(rows)), missed)
    return float(good(kept.outcomes(), slo).sum()), len(kept) + missed


def history(seen: Seen, options: LoopOptions) -> tuple[Row, ...]:
    """Blocks of the time before a push, newest last: under the setting in force, as far as rows are known."""
    window, block_s = seen.window, options.verify_s / 2.0
    end_s = settled(window.requests, seen.now_s, window.in_system, block_s)
    oldest_s = max(_known_from(window, seen.since_s), seen.now_s - MOST_BEFORE * options.verify_s)
    if not (math.isfinite(end_s) and math.isfinite(oldest_s)):
        return ()
    starts_s = [end_s - k * block_s for k in range(1, int(max(end_s - oldest_s, 0.0) / block_s + 1e-9) + 1)]
    wait_s = wait_bound_s(seen.slo, options.verify_s / 2.0)
    found = [tally(window, seen.slo, wait_s, at_s, at_s + block_s, options.settle_s) for at_s in reversed(starts_s)]
    return tuple((False, *one) for one in found if one[1] > 0.0)


def _known_from(window: Window, since_s: float) -> float:
    """From when on rows are known under the setting that came into force at ``since_s``; +inf: none are."""
    from_s = max(since_s, window.complete_from_s, window.steps_from_s)
    if from_s < _LONG_AGO_S:  # no row was ever lost: the rows begin with the first request
        return float(window.requests.arrival_s.min(initial=math.inf))
    return from_s


def counted(trial: Trial, seen: Seen, options: LoopOptions) -> Trial:
    """The trial with the blocks that count by now."""
    rows, done = list(trial.blocks), len(trial.blocks)
    skip = len(trial.ramp)
    wait_s = wait_bound_s(seen.slo, options.verify_s / 2.0)
    known_s = settled(seen.window.requests, seen.now_s, seen.window.in_system, trial.block_s)
    for number, turn in list(enumerate(trial.turns))[skip + done :]:
        end_s = trial.end_s(number)
        if turn.pair is None or trial.won or max(known_s, seen.now_s - trial.block_s) < end_s:
            break
        found = tally(seen.window, seen.slo, wait_s, turn.at_s, end_s, options.settle_s)
        rows.append((turn.setting == trial.after, *found))
    return trial if len(rows) == done else trial.but(blocks=tuple(rows))


def _hurts(trial: Trial, seen: Seen, options: LoopOptions) -> bool:
    """Whether the trial ends for caution: by every block that is over, also one that does not count yet."""
    wait_s = wait_bound_s(seen.slo, options.verify_s / 2.0)
    rows: list[Row] = []
    over = [(k, turn) for k, turn in enumerate(trial.turns) if trial.end_s(k) <= seen.now_s + 1e-9]
    for number, turn in over:
        block = number - len(trial.ramp)
        if 0 <= block < len(trial.blocks):
            rows.append(trial.blocks[block])
        else:
            found = tally(seen.window, seen.slo, wait_s, turn.at_s, trial.end_s(number), options.settle_s)
            rows.append((turn.setting != trial.before, *found))
    blocks, past = _blocks(rows), _blocks(trial.history)
    return _more_than_counting([*past, *blocks]) and harmful(blocks, past)


def _more_than_counting(blocks: list[Block]) -> bool:
    """Whether the new setting loses beyond the chance of independent requests: few blocks may look calm by chance."""
    counts = [
        (sum(b.good for b in blocks if b.new is arm), sum(b.judged for b in blocks if b.new is arm))
        for arm in (False, True)
    ]
    (was_good, was), (good, judged_now) = counts
    if min(was, judged_now) <= 0.0:
        return False
    both = (was_good + good + 1.0) / (was + judged_now + 2.0)
    chance = math.sqrt(both * (1.0 - both) * (1.0 / was + 1.0 / judged_now))
    return was_good / was - good / judged_now > COUNTING_Z * chance


def _blocks(rows: Iterable[Row]) -> list[Block]:
    return [Block(*row) for row in rows]


def _more_hang_up(trial: Trial, before: Window, seen: Seen) -> bool:
    """Whether the abort rate rose so much under the new setting that it may be the cause."""
    from_s = trial.in_force_from_s
    if not (trial.is_new and storming(seen.window, from_s)):
        return False
    was = before.requests_since(_known_from(before, trial.since_s)).ended
    return len(was) > 0 and rising(seen.window.requests_since(from_s).ended, was, ABORTED)


def pace(window: Window, model: StepModel, start_s: float, end_s: float, decodes_alone: bool) -> float:
    """Measured over modelled time of the steps between two instants; NaN below PACE_STEPS."""
    steps = window.steps.select((window.steps.start_s >= start_s) & (window.steps.end_s <= end_s))
    samples = (steps.select(steps.prefill_tokens == 0) if decodes_alone else steps).samples()
    if len(samples) < PACE_STEPS:
        return math.nan
    return float(samples.duration_s.sum() / predict(model, samples).sum())


def pace_ratio(trial: Trial, before: Window, seen: Seen, model: StepModel | None) -> float:
    """Slowdown since the push at the same work, 1.0 as before; NaN when unknown.

    It shows a neighbour on the machine or a lowered clock. Steps of decodes alone come first: they are the same under
    both settings, while the model may know little about the step sizes that the push brought.
    """
    if model is None:
        return math.nan
    for decodes_alone in (True, False):
        was = pace(before, model, -math.inf, trial.began_s, decodes_alone)
        start_s = max(trial.began_s, seen.now_s - trial.block_s)
        ratio = pace(seen.window, model, start_s, seen.now_s, decodes_alone) / was
        if math.isfinite(ratio):
            return ratio
    return math.nan


def check(trial: Trial, before: Window, seen: Seen, options: LoopOptions, model: StepModel | None) -> Checked:
    """The verdict on a trial so far. before: the rows at the push, or those that are left."""
    trial = counted(trial, seen, options)
    found = judge_pairs(_blocks(trial.blocks), _blocks(trial.history))
    comparison = Comparison(
        predicted_gain=trial.predicted_gain,
        twin_error=trial.twin_error,
        observed_gain=found.gain,
        half_width=found.half_width,
        verdict=Verdict.BETTER if trial.won else found.verdict,
        requests=int(sum(row[2] for row in trial.blocks)),
        crossed=crossed(options.thresholds, seen.observed) if trial.is_new else (),
    )
    judgement = judge(comparison, options.min_requests)
    hurts = judgement.verdict is Verdict.INCONCLUSIVE and _hurts(trial, seen, options)
    if hurts:
        judgement = Judgement(Verdict.INCONCLUSIVE, VerdictReason.HARMFUL, judgement.prediction_held)
    if judgement.verdict is Verdict.BETTER:
        trial = trial.but(won=True)
    known_s = _known_from(before, trial.since_s)
    return Checked(
        trial=trial,
        found=found,
        pace_ratio=pace_ratio(trial, before, seen, model),
        harmful=hurts,
        undecided=judgement.verdict is Verdict.INCONCLUSIVE and len(trial.blocks) >= len(trial.arms),
        hung_up=_more_hang_up(trial, before, seen),
        stalled=trial.is_new and is_stalled(before, seen.window, known_s, trial.began_s, trial.in_force_from_s),
        part=_part(trial, comparison, judgement, seen.now_s),
    )


def _part(trial: Trial, comparison: Comparison, judgement: Judgement, now_s: float) -> VerifyPart:
    def known(value: float) -> float | None:
        return value if math.isfinite(value) else None

    block = max(0, len(trial.turns) - len(trial.ramp))
    over = trial.won or block >= len(trial.arms)
    return VerifyPart(
        push_cycle=trial.push_cycle,
        verdict=judgement.verdict.value,
        reason=judgement.reason.value,
        predicted_gain=known(trial.predicted_gain),
        observed_gain=known(comparison.observed_gain),
        half_width=known(comparison.half_width),
        requests=comparison.requests,
        prediction_held=judgement.prediction_held,
        crossed=comparison.crossed,
        pairs=len(trial.blocks) // 2,
        look_pairs=next((count for count in PAIRS if count > len(trial.blocks) // 2), None),
        arm="ramp" if not block else "new" if trial.is_new else "old",
        block=min(block, len(trial.arms)),
        blocks=len(trial.arms),
        turn_left_s=None if over else max(0.0, trial.turn.at_s + trial.block_s - now_s),
    )
