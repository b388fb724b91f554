"""The guard: push, hold or revert, with one reason. Pure; the first rule that applies decides.

Order: stale metrics, a block, another's lease, a restart, harm, hopeless trials, pauses and unfinished trials, too
little gain, the envelope, too early. A push in force may always be reverted, also while paused, in a deploy or outside
a window.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from rooftune.policies.envelope import RATIO_KNOBS, Broken, Envelope, Violation
from rooftune.policies.errors import bad_value
from rooftune.policies.request import Setting
from rooftune.policies.verify import Verdict

WEEK_MINUTES = 7 * 24 * 60


@dataclass(frozen=True)
class WeekSpan:
    """Minutes of the week (0 = Monday 00:00 in the operator's zone), end exclusive; may run over the week's end."""

    start_minute: int
    end_minute: int

    def __post_init__(self) -> None:
        for what, minute in (("start_minute", self.start_minute), ("end_minute", self.end_minute)):
            if not 0 <= minute < WEEK_MINUTES:
                raise bad_value(what, minute, f"within 0..{WEEK_MINUTES - 1}", "count from Monday 00:00")

    def holds(self, minute: int) -> bool:
        if self.start_minute <= self.end_minute:
            return self.start_minute <= minute < self.end_minute
        return minute >= self.start_minute or minute < self.end_minute


@dataclass(frozen=True)
class GuardLimits:
    """The operator's limits. Gains are shares of requests; exploration costs SLO-seconds.

    One SLO-second is a second in which every request misses its targets (or two in which half do).
    headroom: share of the offered rate that a setting must carry beyond it. no_push: spans without pushes.
    push_only: if given, the only spans with pushes.
    """

    largest_ratio: float = 2.0
    dwell_s: float = 300.0
    min_gain: float = 0.01
    exploration_slo_s_per_day: float = 600.0
    max_metrics_age_s: float = 30.0
    max_inconclusive_s: float = 2700.0
    kv_full: float = 0.98
    min_shadow_s: float = 86_400.0
    headroom: float = 0.15
    no_push: tuple[WeekSpan, ...] = ()
    push_only: tuple[WeekSpan, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.largest_ratio) and self.largest_ratio > 1.0):
            raise bad_value("largest_ratio", self.largest_ratio, "above 1 and finite", "give 2 to halve or double")
        if not 0.0 < self.kv_full <= 1.0:
            raise bad_value("kv_full", self.kv_full, "above 0 and at most 1", "give a fraction")
        amounts = ("dwell_s", "min_gain", "exploration_slo_s_per_day", "max_metrics_age_s", "max_inconclusive_s")
        for name in (*amounts, "min_shadow_s", "headroom"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise bad_value(name, value, "at least 0 and finite", "correct the guard limits")


class Action(StrEnum):
    PUSH = "push"
    SWITCH = "switch"  # a trial's other setting takes its turn
    HOLD = "hold"
    REVERT = "revert"


class Reason(StrEnum):
    """Why a cycle ended as it did: the guard's own reasons in its order, then those of its inputs (nothing to judge,
    no proposal) and of a failed request to the engine."""

    METRICS_STALE = "metrics_stale"
    ENGINE_RESTARTED = "engine_restarted"
    OPERATOR_THRESHOLD = "operator_threshold"
    ERRORS_RISING = "errors_rising"
    VERDICT_WORSE = "verdict_worse"
    HARMFUL = "harmful"
    INCONCLUSIVE = "inconclusive"
    KEPT_LOST = "kept_lost"  # on probation, a kept setting fell behind
    INCONCLUSIVE_TOO_LONG = "inconclusive_too_long"
    BLOCKED_AFTER_REVERT = "blocked_after_revert"
    PAUSED = "paused"
    DEPLOY = "deploy"
    KV_BOUND = "kv_bound"
    VERIFYING = "verifying"
    NO_PROPOSAL = "no_proposal"
    ALREADY_IN_FORCE = "already_in_force"
    TWIN_NOT_TRUSTED = "twin_not_trusted"
    TWIN_TOO_FEW = "twin_too_few"  # the window is too small to judge the twin by
    GAIN_UNKNOWN = "gain_unknown"
    WITHIN_NOISE = "within_noise"
    KNOB_ABSENT = "knob_absent"
    NEEDS_RESTART = "needs_restart"
    OUTSIDE_ENVELOPE = "outside_envelope"
    MAINTENANCE_WINDOW = "maintenance_window"
    AFTER_LOSS = "after_loss"
    DWELL = "dwell"
    EXPLORATION_BUDGET = "exploration_budget"
    SHADOW_TOO_SHORT = "shadow_too_short"
    SHADOW = "shadow"
    STEP_LIMITED = "step_limited"
    OK = "ok"

    UNREACHABLE = "unreachable"  # any PortFault but the next three; the lease protects the engine
    UNAUTHORIZED = "unauthorized"
    NO_PROTOCOL = "no_protocol"  # 404, redirect, another protocol version
    GARBAGE = "garbage"
    NO_SIGNAL = "no_signal"  # steps run, but no request has ended
    IDLE = "idle"  # nothing runs
    STALLED = "stalled"  # requests wait or run, no step or no progress
    TOO_LITTLE_DATA = "too_little_data"  # the window is not full yet
    SEARCHING = "searching"  # the child process has not answered yet
    FIT_REFUSED = "fit_refused"  # detail holds the FitCode
    WORKER_FAILED = "worker_failed"  # the child process died, ran out of memory or timed out
    HELD_BY_OTHER = "held_by_other"  # another controller holds the lease
    CONFLICT = "conflict"  # 409: the revision moved under us
    REFUSED = "refused"  # 422: outside the engine's envelope, or 403: read-only
    STORE_FAILED = "store_failed"  # the cycle could not be recorded, so nothing was pushed
    NULL_RESULT = "null_result"  # the setting in force is within noise of the best
    NO_TARGETS_MISSED = "no_targets_missed"  # every request already meets the targets
    FROZEN_BY_SIGNAL = "frozen_by_signal"  # under one of the signals no setting can be judged
    ABORT_STORM = "abort_storm"  # too many aborts to judge the window
    FOUND_FOREIGN = "found_foreign"  # our lease held a setting unknown to this controller: taken back


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The guard's facts. NaN: unknown, never a good sign.

    metrics_age_s, since_push_s (+inf: never pushed), shadow_s (time spent in shadow so far): seconds.
    predicted_gain, twin_error: in attainment; exploration_*_slo_s: SLO-seconds of the current day.
    push_in_force: a setting of ours holds a lease; verdict: on that push, None while none is due.
    unjudgeable: why no setting can be judged now. why_no_proposal: the search's reason without a proposal.
    held_by_other: another controller holds the lease. foreign: our lease holds a setting that we do not know.
    hung_up, none_finish: under this trial far more requests abort than before, or none finishes any more.
    harmful: the trial ends for caution; undecided: its last look gave no verdict. switch: what its next turn puts in
    force, None while none is due.
    kept_lost: the probation of the kept setting in force failed; pause_left_s: without pushes after such a loss.
    """

    live: bool
    envelope: Envelope
    in_force: Setting
    proposal: Setting | None
    predicted_gain: float
    twin_error: float
    twin_trusted: bool
    metrics_age_s: float
    since_push_s: float
    shadow_s: float
    minute_of_week: int
    push_in_force: bool = False
    verified: bool = True
    verdict: Verdict | None = None
    thresholds_crossed: tuple[str, ...] = ()
    engine_restarted: bool = False
    errors_rising: bool = False
    blocked: bool = False
    paused: bool = False
    deploying: bool = False
    kv_used: float = math.nan
    preempting: bool = False
    exploration_spent_slo_s: float = 0.0
    exploration_cost_slo_s: float = 0.0
    unjudgeable: Reason | None = None
    why_no_proposal: Reason = Reason.NO_PROPOSAL
    held_by_other: bool = False
    foreign: bool = False
    hung_up: bool = False
    none_finish: bool = False
    harmful: bool = False
    undecided: bool = False
    switch: Setting | None = None
    kept_lost: bool = False
    pause_left_s: float = 0.0

    @property
    def on_trial(self) -> bool:
        """Whether our push in force still awaits its verdict."""
        return self.push_in_force and not self.verified


@dataclass(frozen=True)
class Decision:
    """A cycle's action and reason. setting: to push, or held back by shadow mode or a wait; None otherwise.

    detail: for people, one line. violations: of a refused proposal.
    """

    action: Action
    reason: Reason
    setting: Setting | None = None
    detail: str = ""
    violations: tuple[Violation, ...] = ()


def _hold(reason: Reason, setting: Setting | None = None) -> Decision:
    return Decision(Action.HOLD, reason, setting)


def _stale(now: Situation, limits: GuardLimits) -> Decision | None:
    """Without fresh metrics the lease protects the engine."""
    return None if now.metrics_age_s <= limits.max_metrics_age_s else _hold(Reason.METRICS_STALE)


def _blocked(now: Situation, limits: GuardLimits) -> Decision | None:
    """An operator's revert blocks pushes; a harmful push still goes back."""
    if now.blocked and not now.engine_restarted and _hurt(now, limits) is None:
        return _hold(Reason.BLOCKED_AFTER_REVERT)
    return None


def _not_ours(now: Situation, limits: GuardLimits) -> Decision | None:
    if now.held_by_other and now.live:
        return _hold(Reason.HELD_BY_OTHER)
    return Decision(Action.REVERT, Reason.FOUND_FOREIGN) if now.foreign else None


def _restarted(now: Situation, limits: GuardLimits) -> Decision | None:
    return _hold(Reason.ENGINE_RESTARTED) if now.engine_restarted else None


def _hurt(now: Situation, limits: GuardLimits) -> Decision | None:
    """Harm ends our push and forbids a new one."""
    back = Action.REVERT if now.push_in_force else Action.HOLD
    if now.thresholds_crossed:
        return Decision(back, Reason.OPERATOR_THRESHOLD)
    if now.errors_rising:
        return Decision(back, Reason.ERRORS_RISING)
    if now.on_trial:
        if now.verdict is Verdict.WORSE:
            return Decision(Action.REVERT, Reason.VERDICT_WORSE)
        if now.harmful:
            return Decision(Action.REVERT, Reason.HARMFUL)
        if now.undecided:
            return Decision(Action.REVERT, Reason.INCONCLUSIVE)
        # An unknown time since the push counts as too long.
        if now.verdict is not Verdict.BETTER and not now.since_push_s <= limits.max_inconclusive_s:
            return Decision(Action.REVERT, Reason.INCONCLUSIVE_TOO_LONG)
    elif now.kept_lost and now.push_in_force:
        return Decision(Action.REVERT, Reason.KEPT_LOST)
    return None


def _hopeless(now: Situation, limits: GuardLimits) -> Decision | None:
    """A trial that cannot reach a verdict, or costs too much, goes back; also while paused or in a deploy."""
    if not now.on_trial:
        return None
    if now.unjudgeable is Reason.STALLED or now.none_finish:
        return Decision(Action.REVERT, Reason.STALLED)
    if now.hung_up:
        return Decision(Action.REVERT, Reason.ABORT_STORM, detail="far more requests abort than before the push")
    spent_slo_s = now.exploration_spent_slo_s
    if now.verdict is not Verdict.BETTER and spent_slo_s > limits.exploration_slo_s_per_day:
        return Decision(Action.REVERT, Reason.EXPLORATION_BUDGET, detail="this trial used up the budget and goes back")
    return None


def _frozen(now: Situation, limits: GuardLimits) -> Decision | None:
    if now.paused:
        return _hold(Reason.PAUSED)
    if now.deploying:
        return _hold(Reason.DEPLOY)
    if now.preempting and not now.kv_used < limits.kv_full and now.unjudgeable is not Reason.STALLED:
        return _hold(Reason.KV_BOUND)
    if now.on_trial:
        if _outside_window(now, limits):
            # Nothing unproven stays in force where nothing may be pushed.
            return Decision(Action.REVERT, Reason.MAINTENANCE_WINDOW, detail="the trial is given up")
        return _hold(Reason.VERIFYING) if now.switch is None else Decision(Action.SWITCH, Reason.VERIFYING, now.switch)
    return None if now.unjudgeable is None else _hold(now.unjudgeable)


def _worthless(now: Situation, limits: GuardLimits) -> Decision | None:
    if now.proposal is None:
        return _hold(now.why_no_proposal)
    if now.proposal == now.in_force:
        return _hold(Reason.ALREADY_IN_FORCE)
    if not now.twin_trusted:
        return _hold(Reason.TWIN_NOT_TRUSTED)
    if not (math.isfinite(now.predicted_gain) and math.isfinite(now.twin_error)):
        return _hold(Reason.GAIN_UNKNOWN)
    if now.predicted_gain <= max(now.twin_error, limits.min_gain):
        return _hold(Reason.WITHIN_NOISE)
    return None


def _forbidden(now: Situation, wanted: Setting) -> Decision | None:
    found = now.envelope.violations(changes(now.in_force, wanted), now.in_force)
    if not found:
        return None
    kinds = {violation.broken for violation in found}
    reason = Reason.NEEDS_RESTART if kinds == {Broken.NEEDS_RESTART} else Reason.OUTSIDE_ENVELOPE
    if Broken.ABSENT in kinds:
        reason = Reason.KNOB_ABSENT
    detail = "; ".join(f"{one.knob}={one.value:g} {one.broken.value}" for one in found)
    return Decision(Action.HOLD, reason, detail=detail, violations=found)


def _outside_window(now: Situation, limits: GuardLimits) -> bool:
    minute = now.minute_of_week
    inside = not limits.push_only or any(span.holds(minute) for span in limits.push_only)
    return not inside or any(span.holds(minute) for span in limits.no_push)


def _too_soon(now: Situation, limits: GuardLimits) -> Reason | None:
    if _outside_window(now, limits):
        return Reason.MAINTENANCE_WINDOW
    if not now.pause_left_s <= 0.0:
        return Reason.AFTER_LOSS
    if not now.since_push_s >= limits.dwell_s:
        return Reason.DWELL
    if not now.exploration_spent_slo_s + now.exploration_cost_slo_s <= limits.exploration_slo_s_per_day:
        return Reason.EXPLORATION_BUDGET
    if now.live and not now.shadow_s >= limits.min_shadow_s:
        return Reason.SHADOW_TOO_SHORT
    return None


def changes(before: Setting, after: Setting) -> dict[str, int | float]:
    """The knobs that differ, with their new values."""
    return {name: new for name, old, new in zip(Setting._fields, before, after, strict=True) if new != old}


def limit_step(in_force: Setting, wanted: Setting, largest_ratio: float) -> Setting:
    """``wanted``, with each of RATIO_KNOBS within a factor of ``largest_ratio`` of its value in force.

    A chunk cap of 0 (none) counts as the token budget, above which no cap binds. A step is at least 1.
    """
    limited: dict[str, int] = {"step_tokens": wanted.step_tokens}
    for name in RATIO_KNOBS:
        old, new = getattr(in_force, name), getattr(wanted, name)
        if old == new:
            continue
        start, goal = old, new
        if name == "chunk_cap_tokens":
            start = old or in_force.step_tokens
            goal = new or max(limited["step_tokens"], start)
        low = min(math.ceil(start / largest_ratio), start - 1)
        high = max(math.floor(start * largest_ratio), start + 1)
        reached = min(max(goal, low), high)
        limited[name] = new if reached == goal else reached
    return wanted._replace(**limited)


# The first that applies decides.
_RULES = (_stale, _blocked, _not_ours, _restarted, _hurt, _hopeless, _frozen, _worthless)


def decide(now: Situation, limits: GuardLimits) -> Decision:
    """Push, hold or revert, and the reason. Shadow mode decides the same and moves nothing."""
    found = next((found for rule in _RULES if (found := rule(now, limits)) is not None), None) or _push(now, limits)
    return found if now.live or found.action is Action.HOLD else _hold(Reason.SHADOW, found.setting)


def ramp(in_force: Setting, wanted: Setting, largest_ratio: float) -> tuple[Setting, ...]:
    """The limited steps from what is in force to ``wanted``, which is the last one."""
    steps = [limit_step(in_force, wanted, largest_ratio)]
    while steps[-1] != wanted:
        steps.append(limit_step(steps[-1], wanted, largest_ratio))
    return tuple(steps)


def _push(now: Situation, limits: GuardLimits) -> Decision:
    """The proposal, or the first step towards it, if envelope, week and budget allow it."""
    assert now.proposal is not None  # _worthless has decided otherwise
    forbidden = _forbidden(now, now.proposal)
    if forbidden is not None:
        return forbidden
    setting = limit_step(now.in_force, now.proposal, limits.largest_ratio)
    stepped = _forbidden(now, setting)
    if stepped is not None:  # possible when what is in force lies outside the envelope
        return stepped
    soon = _too_soon(now, limits)
    if soon is not None:
        return _hold(soon, setting)
    return Decision(Action.PUSH, Reason.OK if setting == now.proposal else Reason.STEP_LIMITED, setting)
