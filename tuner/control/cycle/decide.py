"""Decide: the guard's word on the situation, and what a cycle says when the guard has nothing to decide on. Pure."""

from dataclasses import dataclass

from rooftune.policies.guard import Action, Decision, GuardLimits, Reason, Situation, decide
from rooftune.policies.request import Setting
from rooftune.policies.verify import Verdict as Outcome
from rooftune.tuner.control.outcome import CycleReason, SignalPart
from rooftune.tuner.control.signals.find import FREEZING, Signal

Why = CycleReason | Reason

# The guard's words that stand whatever else is the matter: they say more than "nothing can be judged".
_FIRST = frozenset(
    {
        Reason.METRICS_STALE, Reason.ENGINE_RESTARTED, Reason.OPERATOR_THRESHOLD, Reason.ERRORS_RISING,
        Reason.VERDICT_WORSE, Reason.INCONCLUSIVE_TOO_LONG, Reason.BLOCKED_AFTER_REVERT, Reason.PAUSED, Reason.DEPLOY,
        Reason.KV_BOUND, Reason.VERIFYING,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What the cycle does and why; setting: to push, or what shadow mode (or a wait) keeps back."""

    action: Action
    reason: Why
    setting: Setting | None = None
    detail: str = ""


def freeze_of(signals: tuple[SignalPart, ...], abort_storm: bool, idle: bool) -> CycleReason | None:
    """Why no setting can be judged now; None: it can."""
    codes = {Signal(part.code) for part in signals} & FREEZING
    if codes & {Signal.HUNG, Signal.STALLED}:
        return CycleReason.STALLED
    if codes & {Signal.THROUGHPUT_NOT_RECOVERED, Signal.TWO_TPOT_LEVELS}:
        return CycleReason.FROZEN_BY_SIGNAL
    if abort_storm:
        return CycleReason.ABORT_STORM
    if Signal.NO_REQUEST_ENDED in codes:
        return CycleReason.NO_SIGNAL
    return CycleReason.IDLE if idle else None


def kv_bound(signals: tuple[SignalPart, ...]) -> bool:
    return any(part.code == Signal.KV_BOUND.value for part in signals)


def decide_cycle(
    now: Situation,
    limits: GuardLimits,
    *,
    freeze: CycleReason | None,
    why_none: Why,
    foreign: bool,
    other: bool,
    hung_up: bool = False,
    nobody_ends: bool = False,
) -> Verdict:
    """The guard decides; where it finds no proposal, the cycle says why there is none.

    freeze: why nothing can be judged. foreign: our lease holds what nobody here remembers. other: somebody else does.
    hung_up: under a trial so many more hang up than before it that nothing can be judged. nobody_ends: under it.
    """
    said = decide(now, limits)
    if said.reason in (Reason.METRICS_STALE, Reason.BLOCKED_AFTER_REVERT):
        return _verdict(said)
    if other and now.live:
        return Verdict(Action.HOLD, CycleReason.HELD_BY_OTHER)
    if foreign:
        return Verdict(Action.REVERT, CycleReason.FOUND_FOREIGN)
    stalled = freeze is CycleReason.STALLED
    on_trial = now.push_in_force and not now.verified
    # Also while paused or in a deploy.
    if on_trial and said.action is Action.HOLD and said.reason is not Reason.ENGINE_RESTARTED:
        if stalled or nobody_ends:
            return Verdict(Action.REVERT, CycleReason.STALLED)
        if hung_up:
            return Verdict(Action.REVERT, CycleReason.ABORT_STORM, detail="far more hang up than before the push")
        if now.verdict is not Outcome.BETTER and now.exploration_spent_slo_s > limits.exploration_slo_s_per_day:
            return Verdict(Action.REVERT, Reason.EXPLORATION_BUDGET, detail="with this trial, which goes back")
    if said.reason in _FIRST and not (stalled and said.reason is Reason.KV_BOUND):
        return _verdict(said)
    if freeze is not None:
        return Verdict(Action.HOLD, freeze)
    if said.reason is Reason.NO_PROPOSAL:
        return Verdict(Action.HOLD, why_none)
    return _verdict(said)


def _verdict(said: Decision) -> Verdict:
    broken = "; ".join(f"{v.knob}={v.value:g} {v.broken.value}" for v in said.violations)
    return Verdict(said.action, said.reason, said.setting, broken)
