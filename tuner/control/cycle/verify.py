"""Verify: a trial's blocks, its verdict so far, and what else may end it. Pure.

A block holds the requests that arrived in its first ``block_s`` seconds, without those of its first ``settle_s`` and
without those that queued behind requests from before it (at most half of the block). It counts once all of them have
ended or, at the latest, a block later: those that must have missed their target while waiting then count as missed, and
the rest is left out. A fault or a pause lengthens a turn: what arrives after its first ``block_s`` does not count.
While the twin aids the trial (``Trial.aided``), a block also waits for what the twin says of its arrivals, a block
longer at most; then the trial goes on without. What counts never changes, so no look is decided on two sets of figures.
A queue that one setting leaves to the next is left out as far as above; what is left of it, and a queue that grows or
drains all the time, hits the second block of a pair whichever setting has it, and the order is random.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat

from rooftune.policies.proof.switchback import PAIRS, Block, Outcome, harmful, judge_pairs, slope_of
from rooftune.policies.slo import Slo, good
from rooftune.policies.step_time import StepModel
from rooftune.policies.verify import Comparison, Judgement, Verdict, VerdictReason, crossed, judge
from rooftune.tuner.control.cycle.degradation import is_stalled, rising
from rooftune.tuner.control.cycle.observe import (
    Seen,
    arrivals,
    carried_until,
    overdue,
    storming,
    wait_bound_s,
)
from rooftune.tuner.control.figures import judged
from rooftune.tuner.control.job import Span
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
    from_s = _from_s(window, start_s, end_s, settle_s)
    rows = window.requests_since(from_s)
    rows = rows.select(rows.arrival_s < end_s)
    kept = judged(rows)
    arrived = arrivals(window, from_s, end_s)
    rate_rps = arrived / (end_s - from_s) if end_s > from_s else math.nan
    missed = overdue(window, slo, wait_s, rate_rps, from_s, end_s)
    if window.in_flight is None:
        missed = min(max(0.0, arrived - len(rows)), missed)
    return float(good(kept.outcomes(), slo).sum()), len(kept) + missed


def _from_s(window: Window, start_s: float, end_s: float, settle_s: float) -> float:
    """From when on arrivals count in a block."""
    return max(carried_until(window, start_s, end_s), start_s + settle_s, window.complete_from_s)


def history(seen: Seen, options: LoopOptions) -> tuple[Row, ...]:
    """Blocks of the time before a push, newest last: under the setting in force, as far as rows are known."""
    wait_s = wait_bound_s(seen.slo, options.verify_s / 2.0)
    spans = _before(seen.window, seen.since_s, options)
    return tuple((False, *tally(seen.window, seen.slo, wait_s, *span, options.settle_s)) for span in spans)


def _before(window: Window, since_s: float, options: LoopOptions) -> list[tuple[float, float]]:
    """Start and end of the blocks before a push, whose setting is in force since ``since_s``."""
    block_s = options.verify_s / 2.0
    end_s = settled(window.requests, window.now_s, window.in_system, block_s)
    oldest_s = max(_known_from(window, since_s), window.now_s - MOST_BEFORE * options.verify_s)
    if not (math.isfinite(end_s) and math.isfinite(oldest_s)):
        return []
    whole = int(max(end_s - oldest_s, 0.0) / block_s + 1e-9)
    return [(end_s - k * block_s, end_s - (k - 1) * block_s) for k in range(whole, 0, -1)]


def to_foretell(trial: Trial, before: Window, seen: Seen, options: LoopOptions) -> tuple[Window, list[Span]]:
    """Blocks whose good share the twin has yet to say, on the engine's clock, and the window with their rows."""
    window = seen.window
    if trial.foretold_blocks < 0:
        window, spans = before, _before(before, trial.since_s, options)
    else:
        ended = list(_ended(trial, seen))[trial.foretold_blocks - len(trial.blocks) :]
        spans = [(trial.turns[number].at_s, trial.end_s(number)) for number in ended]
    return window, [(at_s, _from_s(window, at_s, end_s, options.settle_s), end_s) for at_s, end_s in spans]


def heard(trial: Trial, shares: tuple[float | None, ...]) -> Trial:
    """The trial with the twin's answer. Where the time before does not follow the twin it is not asked again."""
    trial = trial.but(foretold=(*trial.foretold, *shares))
    return trial.but(aided=slope_of((), _past(trial)) > 0.0)


def _ended(trial: Trial, seen: Seen) -> Iterator[int]:
    """Turns of the pairs beyond the counted ones that are over and whose requests have ended, or a block later."""
    known_s = settled(seen.window.requests, seen.now_s, seen.window.in_system, trial.block_s)
    for number in range(len(trial.ramp) + len(trial.blocks), len(trial.turns)):
        if trial.turns[number].pair is None or max(known_s, seen.now_s - trial.block_s) < trial.end_s(number):
            return
        yield number


def _known_from(window: Window, since_s: float) -> float:
    """From when on rows are known under the setting that came into force at ``since_s``; +inf: none are."""
    from_s = max(since_s, window.complete_from_s, window.steps_from_s)
    if from_s < _LONG_AGO_S:  # no row was ever lost: the rows begin with the first request
        return float(window.requests.arrival_s.min(initial=math.inf))
    return from_s


def counted(trial: Trial, seen: Seen, options: LoopOptions) -> Trial:
    """The trial with the blocks that count by now."""
    wait_s = wait_bound_s(seen.slo, options.verify_s / 2.0)
    for number in () if trial.won else tuple(_ended(trial, seen)):
        turn, end_s = trial.turns[number], trial.end_s(number)
        if trial.aided and trial.foretold_blocks <= len(trial.blocks):
            if seen.now_s <= end_s + 2.0 * trial.block_s:
                break
            trial = trial.but(aided=False)
        found = tally(seen.window, seen.slo, wait_s, turn.at_s, end_s, options.settle_s)
        trial = trial.but(blocks=(*trial.blocks, (turn.setting == trial.after, *found)))
    return trial


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
    return harmful(_blocks(rows, ()), _past(trial))


def _blocks(rows: Iterable[Row], foretold: Iterable[float | None]) -> list[Block]:
    known = chain((math.nan if share is None else share for share in foretold), repeat(math.nan))
    return [Block(*row, expected) for row, expected in zip(rows, known, strict=False)]


def _past(trial: Trial) -> list[Block]:
    return _blocks(trial.history, trial.foretold[: len(trial.history)])


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
    blocks = _blocks(trial.blocks, trial.foretold[len(trial.history) :])
    found = judge_pairs(blocks, _past(trial))
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
        part=_part(trial, comparison, judgement, seen.now_s, found.slope),
    )


def _part(trial: Trial, comparison: Comparison, judgement: Judgement, now_s: float, slope: float) -> VerifyPart:
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
        twin_slope=slope or None,
    )
