"""Act: the one request that a cycle sends: a push, a rollback, or the renewal of the lease.

A live controller that may push holds the lease even under the boot setting (an empty push claims it), so that only one
of several controllers acts. A lease that is not renewed expires.
"""

import json
from contextlib import suppress
from dataclasses import replace

from rooftune.policies import wire
from rooftune.policies.errors import printable
from rooftune.policies.guard import Action, Decision, Reason, changes, ramp
from rooftune.policies.proof.switchback import LEAST_DEGREES, schedule
from rooftune.policies.request import STEP_TIME_TARGET, Setting
from rooftune.policies.verify import Verdict
from rooftune.tuner.control.cycle.book import Book
from rooftune.tuner.control.cycle.draft import Draft
from rooftune.tuner.control.cycle.fit import Learner
from rooftune.tuner.control.cycle.observe import Holder
from rooftune.tuner.control.cycle.observer import CycleView, actor_of
from rooftune.tuner.control.cycle.propose import Found
from rooftune.tuner.control.cycle.push import Sent, push_request, send
from rooftune.tuner.control.cycle.verify import history
from rooftune.tuner.control.memory import Trial, Turn, knobs_of, setting_of
from rooftune.tuner.control.options import LoopOptions
from rooftune.tuner.control.outcome import RecordParts
from rooftune.tuner.control.ports import Store
from rooftune.tuner.control.state import operator
from rooftune.tuner.control.state.file import StoreError
from rooftune.tuner.ports.base import Port, PortError


def _text(words: str) -> str:
    """Operator's words as the protocol allows them: one line, at most 200 characters, not empty."""
    return printable(" ".join(words.split()), "")[:200] or "not stated"


# For these reasons the controller lets its lease expire: it cannot see the engine or must not hold it.
_BLIND = frozenset({Reason.METRICS_STALE, Reason.BLOCKED_AFTER_REVERT, Reason.HELD_BY_OTHER})

# Rollbacks for these reasons do not show that the trial was worse.
_NO_VERDICT = frozenset(
    {
        Reason.HARMFUL, Reason.INCONCLUSIVE, Reason.INCONCLUSIVE_TOO_LONG, Reason.EXPLORATION_BUDGET,
        Reason.ABORT_STORM,
    }
)  # fmt: skip

# A kept setting that goes back for these reasons counts as worse from now on.
_CONDEMN = frozenset({Reason.OPERATOR_THRESHOLD, Reason.KEPT_LOST})

# A record's "always": JSON has no infinity.
SINCE_EVER_S = -1e12


class Actor:
    """Sends the cycle's request; books a push before it leaves."""

    def __init__(self, port: Port, store: Store, book: Book, learner: Learner, options: LoopOptions) -> None:
        self._port, self._store, self._book, self._learner, self._options = port, store, book, learner, options
        self._name = actor_of(store)

    def act(self, view: CycleView, found: Found, decision: Decision, draft: Draft) -> Decision:
        """Carries out the decision; a refusal or fault becomes the cycle's reason. Raises StoreError."""
        done = self._requested(view, draft)
        if done is not None:
            return done
        if not self._options.live:
            return decision
        if decision.action is Action.PUSH:
            return self._push(view, found, decision, draft)
        if decision.action is Action.SWITCH:
            return self._switch(view, decision, draft)
        if decision.action is Action.REVERT:
            return self._go_back(view, decision, draft)
        return self._hold(view, decision, draft)

    # --- operator's requests ---

    def _requested(self, view: CycleView, draft: Draft) -> Decision | None:
        """Carries out the pending request; returns the cycle's end for a revert, done or failed."""
        if view.revert is not None:
            request = view.revert
            sent = self._revert(request)
            if sent.reason is not None:
                return Decision(Action.HOLD, sent.reason, detail=f"the requested revert was not done: {sent.detail}")
            self._book.stopped(view.seen.reading, view.day)
            if sent.revision is not None and not view.seen.state.blocked:
                operator.note_own_block(self._store, view.seen.state.boot_id, sent.revision, request)
            operator.mark_done(self._store, request)
            draft.put(in_force=knobs_of(view.seen.boot), lease_left_s=None, revision=sent.revision)
            return Decision(Action.REVERT, Reason.BLOCKED_AFTER_REVERT, detail=f"requested by {request.actor}")
        if view.resume is not None:
            draft.note(self._resumed(view, view.resume))
        return None

    def _resumed(self, view: CycleView, request: operator.OperatorRequest) -> str:
        """Carries out a resume; returns the result in words. Lifts only a block that was seen: a newer one stands."""
        state = view.seen.state
        if operator.pending(self._store) != (None, request):
            return ""  # a newer request has replaced it since this cycle looked
        if state.blocked:
            if not operator.lifts(self._store, request, state.boot_id, state.revision):
                return f"{request.actor} requested a resume before this block was known; it stands, request it again"
            sent = send(self._port, wire.ResumeRequest(actor=_text(request.actor), reason=_text(request.reason)))
            if sent.reason is not None:
                return f"resume: {sent.detail}"
        operator.mark_done(self._store, request)
        return f"resumed for {request.actor}"

    def revert_requested(self, draft: Draft) -> Decision | None:
        """A requested revert in a cycle that failed before it got there: it needs no rows and no model. None when there
        is no request, or it failed too."""
        try:
            request, _ = operator.pending(self._store)
        except StoreError:
            return None
        if request is None:
            return None
        sent = self._revert(request)
        if sent.reason is not None:
            draft.note(f"the requested revert was not done: {sent.detail}")
            return None
        draft.put(in_force=None, lease_left_s=None, revision=sent.revision)
        with suppress(StoreError):  # the next cycle then repeats it, which changes nothing
            operator.mark_done(self._store, request)
        return Decision(Action.REVERT, Reason.BLOCKED_AFTER_REVERT, detail=f"requested by {request.actor}")

    def _revert(self, request: operator.OperatorRequest) -> Sent:
        actor, reason = _text(request.actor), _text(request.reason)
        return send(self._port, wire.RevertRequest(actor=actor, reason=reason, block=True))

    # --- push ---

    def _push(self, view: CycleView, found: Found, decision: Decision, draft: Draft) -> Decision:
        seen, setting, options = view.seen, decision.setting, self._options
        assert setting is not None and found.proposal is not None
        before, after = seen.setting, found.proposal.setting
        moved, past = changes(before, setting), history(seen, options)
        request = self._request(view, before, setting, f"cycle {draft.number}: {decision.reason.value}")
        trial = Trial(
            push_cycle=draft.number,
            boot_id=seen.state.boot_id,
            began_s=seen.now_s,
            since_s=max(seen.since_s, SINCE_EVER_S),
            before=knobs_of(before),
            after=knobs_of(after),
            predicted_gain=found.proposal.gain,
            twin_error=found.proposal.error,
            predicted_attainment=found.proposal.predicted_attainment,
            traffic=seen.traffic,
            ramp=tuple(map(knobs_of, ramp(before, after, options.limits.largest_ratio))),
            arms=schedule(options.seed + draft.number),
            block_s=options.verify_s / 2.0,
            turns=(Turn(at_s=seen.now_s, setting=knobs_of(setting)),),
            history=past,
            aided=len(past) > LEAST_DEGREES,
        )
        self._book.begin(trial, seen.window)
        try:
            self._store.note_push(draft.number, json.dumps(moved))
            self._book.save()
            sent = self._stopped(seen.state.revision) or send(self._port, request)
        except StoreError:
            self._book.never_left()
            raise
        if sent.reason is None:
            draft.put(**self._leased(sent))
            draft.put(pushed=moved, in_force=knobs_of(setting))
            return decision
        if not sent.unknown:
            self._book.never_left()
            return Decision(Action.HOLD, sent.reason, setting, sent.detail)
        # The push may have arrived: the next reading shows it, and the book holds its trial.
        return Decision(Action.HOLD, sent.reason, setting, f"the push may have arrived: {sent.detail}")

    def _switch(self, view: CycleView, decision: Decision, draft: Draft) -> Decision:
        """Begins the trial's next turn. Noted first: when the answer is lost, the next reading shows whose turn it is,
        and a turn that never began is due again."""
        seen, trial, setting = view.seen, view.standing.trial, decision.setting
        assert setting is not None and trial is not None
        turn = trial.following(seen.now_s)
        assert turn is not None
        try:
            self._book.change(trial=trial.but(turns=(*trial.turns, turn)))
            self._book.save()
            request = self._request(view, seen.setting, setting, f"cycle {draft.number}: turn of a trial")
            sent = self._stopped(seen.state.revision) or send(self._port, request)
        except StoreError:
            self._book.change(trial=trial)
            raise
        if sent.reason is None:
            draft.put(**self._leased(sent))
            draft.put(in_force=knobs_of(setting))
            return Decision(Action.HOLD if setting == seen.setting else Action.SWITCH, decision.reason)
        if not sent.unknown:
            self._book.change(trial=trial)
        return Decision(Action.HOLD, sent.reason, detail=sent.detail)

    def _stopped(self, revision: int) -> Sent | None:
        """A pause or revert requested since this cycle looked: the operator has seen "nothing is pushed"."""
        requested = operator.read(self._store)
        if requested.blocked is None and requested.paused is None:
            return None
        reason = Reason.PAUSED if requested.blocked is None else Reason.BLOCKED_AFTER_REVERT
        return Sent(revision, reason, "requested just before the push")

    # --- back ---

    def _go_back(self, view: CycleView, decision: Decision, draft: Draft) -> Decision:
        """Takes a trial back to the setting before it; a kept or unknown setting to the boot setting."""
        seen, trial = view.seen, view.standing.trial
        if view.standing.holder is not Holder.OURS:
            return Decision(Action.HOLD, decision.reason, detail="nothing of ours is in force")
        target = setting_of(trial.before) if trial is not None else seen.boot
        if target.budget_policy == STEP_TIME_TARGET and self._learner.model is None:
            target = seen.boot  # that policy needs a step model
        why = f"cycle {draft.number}: {decision.reason.value}"
        verdict: Verdict | None = Verdict.INCONCLUSIVE if decision.reason in _NO_VERDICT else Verdict.WORSE
        if trial is not None and decision.reason is not Reason.VERDICT_WORSE and not trial.is_new:
            verdict = Verdict.INCONCLUSIVE  # harm under the setting before says nothing about the new one
        if decision.reason is Reason.MAINTENANCE_WINDOW:
            verdict = None
        condemned = view.standing.kept if decision.reason in _CONDEMN else None
        self._book.take_back(trial, condemned, view.checked, verdict)
        if target == seen.boot:
            sent = send(self._port, wire.RevertRequest(actor=self._name, reason=why, block=False))
        else:
            sent = send(self._port, self._request(view, seen.setting, target, why))
        if sent.reason is not None:
            return Decision(
                Action.HOLD, sent.reason, detail=f"{decision.reason.value}, but not taken back: {sent.detail}"
            )
        left: RecordParts = (
            {"lease_left_s": None, "revision": sent.revision} if target == seen.boot else self._leased(sent)
        )
        draft.put(**left)
        draft.put(in_force=knobs_of(target))
        self._book.taken_back(seen.reading, view.day, view.wall_s)
        return replace(decision, setting=None)

    # --- hold ---

    def _hold(self, view: CycleView, decision: Decision, draft: Draft) -> Decision:
        """Renews or claims the lease; a refusal or fault becomes the cycle's reason."""
        if not self._may_hold(view, decision):
            return decision
        seen = view.seen
        sent = send(self._port, self._request(view, seen.setting, seen.setting, f"cycle {draft.number}: holds"))
        if sent.reason is None:
            draft.put(**self._leased(sent))
            return decision
        return Decision(Action.HOLD, sent.reason, decision.setting, sent.detail)

    def _may_hold(self, view: CycleView, decision: Decision) -> bool:
        if decision.reason in _BLIND or view.blocked:
            return False
        if view.standing.holder is Holder.OURS:
            return True
        allowed = self._book.memory.shadow_s >= self._options.limits.min_shadow_s
        return view.standing.holder is Holder.NONE and allowed and not (view.paused or view.deploying)

    def _request(self, view: CycleView, before: Setting, after: Setting, why: str) -> wire.PushRequest:
        return push_request(
            before,
            after,
            lease_s=self._options.lease_s,
            revision=view.seen.state.revision,
            actor=self._name,
            why=why,
            model=self._learner.model,
        )

    def _leased(self, sent: Sent) -> RecordParts:
        return {"lease_left_s": self._options.lease_s, "revision": sent.revision}

    def let_go(self) -> str:
        """Gives the lease back at once, so that no push stays unwatched; returns the result in words."""
        if not self._options.live:
            return "shadow mode: nothing of ours was in force"
        try:
            lease = self._port.state().lease
        except PortError as error:
            return f"the engine does not answer ({error.fault.value}); it goes back by itself when the lease expires"
        if lease is None or lease.actor != self._name:
            return "no lease of ours was in force"
        sent = send(self._port, wire.RevertRequest(actor=self._name, reason="the controller stops", block=False))
        if sent.reason is not None:
            return f"not taken back ({sent.detail}); the engine goes back by itself within {lease.left_s:.0f} s"
        return "the engine is at its boot setting again"
