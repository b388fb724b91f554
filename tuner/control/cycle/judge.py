"""Judges the push in force and decides what to do next, on one view."""

import math
from dataclasses import replace

from rooftune.policies.guard import Decision, Reason, Situation, changes, decide
from rooftune.policies.proof.switchback import PAIRS
from rooftune.policies.verify import crossed
from rooftune.tuner.control.cycle.book import Book
from rooftune.tuner.control.cycle.degradation import measured_cost_slo_s, predicted_cost_slo_s
from rooftune.tuner.control.cycle.draft import Draft
from rooftune.tuner.control.cycle.fit import Learner
from rooftune.tuner.control.cycle.observe import Holder
from rooftune.tuner.control.cycle.observer import CycleView
from rooftune.tuner.control.cycle.propose import Found
from rooftune.tuner.control.cycle.verify import PACE_RATIO, Checked, check
from rooftune.tuner.control.memory import setting_of
from rooftune.tuner.control.options import LoopOptions
from rooftune.tuner.control.signals.codes import Signal

# One cycle sees and takes back a bad trial; the next one confirms it.
REVERT_CYCLES = 2.0


class Judge:
    def __init__(self, book: Book, learner: Learner, options: LoopOptions) -> None:
        self._book, self._learner, self._options = book, learner, options

    def check(self, view: CycleView, draft: Draft) -> CycleView:
        """The view with the verdict on the trial in force; a good verdict ends the trial."""
        trial, seen, book = view.standing.trial, view.seen, self._book
        if trial is not None:
            before = book.rows_before(trial, seen.window)
            checked = check(trial, before, seen, self._options, self._learner.model)
            trial = checked.trial
            book.change(trial=trial, running_slo_s=self._cost_slo_s(checked, seen.now_s))
            draft.put(verify=checked.part)
            if max(checked.pace_ratio, 1.0 / checked.pace_ratio) > PACE_RATIO:
                draft.note(
                    f"at the same work the engine takes {checked.pace_ratio:.2f} times as long as before the push"
                )
            view = replace(view, checked=checked, standing=replace(view.standing, trial=trial))
            if checked.keeps:
                book.keep(trial, checked, view.day, view.wall_s)
                view = replace(view, standing=replace(view.standing, trial=None, kept=book.memory.kept))
        draft.put(spent_slo_s=book.memory.spent_slo_s(view.day), trust=book.memory.trust.ratio)
        return view

    def _cost_slo_s(self, checked: Checked, now_s: float) -> float:
        """Cost of the trial so far in SLO-seconds, only of the time under the new setting: measured, or what was at
        risk while nothing can be compared."""
        new_s = checked.trial.new_s(now_s)
        if math.isfinite(checked.found.gain):
            return measured_cost_slo_s(checked.found.gain, new_s)
        return predicted_cost_slo_s(math.nan, checked.trial.twin_error, new_s)

    def decide(self, view: CycleView, found: Found, draft: Draft) -> Decision:
        """The guard's decision on this cycle."""
        decision = decide(self.situation(view, found), self._options.limits)
        if decision.setting is not None and decision.reason in (Reason.SHADOW, Reason.SHADOW_TOO_SHORT):
            draft.put(would_push=changes(view.seen.setting, decision.setting))
        return decision

    def situation(self, view: CycleView, found: Found) -> Situation:
        """The facts that the guard reads."""
        seen, standing, options, proposal = view.seen, view.standing, self._options, found.proposal
        gain = proposal.gain if proposal is not None else math.nan
        error = proposal.error if proposal is not None else math.nan
        ours, share, trial, checked = standing.ours_in_force, view.figures.attainment, standing.trial, view.checked
        turn = trial.following(seen.now_s) if trial is not None else None
        bound = any(part.code == Signal.KV_BOUND.value for part in seen.signals)
        return Situation(
            live=options.live,
            envelope=seen.envelope,
            in_force=seen.setting,
            proposal=proposal.setting if proposal is not None else None,
            predicted_gain=gain,
            twin_error=error,
            twin_trusted=proposal is not None and proposal.trusted,
            metrics_age_s=seen.reading.metrics_age_s,
            since_push_s=view.since_push_s,
            shadow_s=self._book.memory.shadow_s,
            minute_of_week=view.minute_of_week,
            push_in_force=ours,
            verified=standing.trial is None,
            verdict=checked.verdict if checked is not None and trial is not None else None,
            # A threshold crossed under the engine's own setting is a reason to tune, not to stop.
            thresholds_crossed=crossed(options.thresholds, seen.observed) if ours and seen.setting != seen.boot else (),
            engine_restarted=seen.reading.restarted,
            errors_rising=seen.errors_rising,
            blocked=view.blocked,
            paused=view.paused,
            deploying=view.deploying,
            kv_used=1.0 if bound else seen.kv_used,
            preempting=bound or seen.preempting,
            exploration_spent_slo_s=self._book.memory.spent_slo_s(view.day),
            exploration_cost_slo_s=predicted_cost_slo_s(math.nan if share is None else share, error, self._trial_s()),
            unjudgeable=view.freeze,
            why_no_proposal=found.why,
            held_by_other=standing.holder is Holder.OTHER,
            foreign=standing.foreign,
            hung_up=checked is not None and checked.hung_up,
            none_finish=checked is not None and checked.stalled,
            harmful=checked is not None and checked.harmful,
            undecided=checked is not None and checked.undecided,
            switch=setting_of(turn.setting) if turn is not None else None,
            kept_lost=view.kept_lost,
            pause_left_s=self._book.memory.pause.left_s(view.wall_s) if self._book.memory.pause is not None else 0.0,
        )

    def _trial_s(self) -> float:
        """Seconds under a new setting up to the first look, and until a bad one is back."""
        return (PAIRS[0] + 1) * self._options.verify_s / 2.0 + REVERT_CYCLES * self._options.cycle_s
