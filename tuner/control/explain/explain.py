"""``explain``: why a cycle did what it did, in exactly five plain lines, from its record alone. Pure."""

from rooftune.policies.envelope import KNOB, KNOB_LABELS, SEARCHED
from rooftune.policies.guard import Action, Reason
from rooftune.policies.request import Setting
from rooftune.tuner.control.outcome import (
    CycleRecord,
    FigurePart,
    Figures,
    FitPart,
    Knobs,
    LoadPart,
    ProbationPart,
    ProposalPart,
    TwinPart,
    VerifyPart,
)

# What the guard (or the cycle before it) decided: completes "held: ..." or "reverted: ...".
MEANING: dict[Reason, str] = {
    Reason.METRICS_STALE: "the newest step is too old to judge anything by",
    Reason.ENGINE_RESTARTED: "the engine restarted and runs its boot setting; learning starts over",
    Reason.OPERATOR_THRESHOLD: "an operator's rollback threshold was crossed; it overrides the statistics",
    Reason.ERRORS_RISING: "more requests fail than before",
    Reason.VERDICT_WORSE: "the latest push did measurably worse than what was in force before it",
    Reason.HARMFUL: "the latest push lost so much that its trial ends for caution, before a verdict",
    Reason.INCONCLUSIVE: "both settings had all their turns, and chance explains the difference",
    Reason.KEPT_LOST: "the kept setting no longer does what its trial showed, and the boot setting is likely better",
    Reason.INCONCLUSIVE_TOO_LONG: "the latest push could not be judged in the time allowed",
    Reason.BLOCKED_AFTER_REVERT: "an operator reverted; pushes are blocked until resume",
    Reason.PAUSED: "an operator paused the controller",
    Reason.DEPLOY: "a deploy is in progress (the freeze file exists)",
    Reason.KV_BOUND: "the KV cache is full and requests are preempted; no token budget can fix that",
    Reason.VERIFYING: "the latest push is still being judged",
    Reason.NO_PROPOSAL: "there was no proposal to decide on",
    Reason.ALREADY_IN_FORCE: "the proposal is already in force",
    Reason.TWIN_NOT_TRUSTED: "the twin did not predict this window well enough to act on",
    Reason.TWIN_TOO_FEW: "the window is too small to judge the twin by",
    Reason.GAIN_UNKNOWN: "the gain or the twin's error is unknown",
    Reason.WITHIN_NOISE: "the predicted gain is within the twin's error, or below the smallest gain that counts",
    Reason.KNOB_ABSENT: "the proposal moves a knob that this engine does not have",
    Reason.NEEDS_RESTART: "the proposal moves a knob that this engine takes only at start",
    Reason.OUTSIDE_ENVELOPE: "the proposal lies outside what the engine allows",
    Reason.MAINTENANCE_WINDOW: "no push is allowed at this time of the week",
    Reason.AFTER_LOSS: "a kept setting was lost a short while ago; each repeat doubles the pause",
    Reason.DWELL: "the latest push is too recent",
    Reason.EXPLORATION_BUDGET: "trials have used up today's exploration budget",
    Reason.SHADOW_TOO_SHORT: "the controller has not spent enough time in shadow to go live",
    Reason.SHADOW: "shadow mode pushes nothing; live mode would have pushed",
    Reason.STEP_LIMITED: "the proposal is further away than one push may go; this push goes part of the way",
    Reason.OK: "no rule objected",
    Reason.UNREACHABLE: "the engine did not answer",
    Reason.UNAUTHORIZED: "the engine refused the tuning token",
    Reason.NO_PROTOCOL: "there is no tuning protocol of this version at the engine's address",
    Reason.GARBAGE: "the engine's answer was invalid",
    Reason.NO_SIGNAL: "steps ran but no request finished: nothing to judge",
    Reason.IDLE: "no requests ran",
    Reason.STALLED: "requests are present but none makes progress",
    Reason.TOO_LITTLE_DATA: "too few requests have finished to judge",
    Reason.SEARCHING: "the search is still running",
    Reason.FIT_REFUSED: "the steps do not determine a step model",
    Reason.WORKER_FAILED: "the search process failed",
    Reason.HELD_BY_OTHER: "another controller holds the lease of this engine",
    Reason.CONFLICT: "another revision was in force when the push arrived",
    Reason.REFUSED: "the engine refused the push",
    Reason.STORE_FAILED: "the state file could not be written, so nothing was pushed",
    Reason.NULL_RESULT: "the setting in force is within noise of the best",
    Reason.NO_TARGETS_MISSED: "every request already meets the targets",
    Reason.FROZEN_BY_SIGNAL: "a signal says that no setting can be judged now",
    Reason.ABORT_STORM: "too many clients hung up: the window says nothing about the setting",
    Reason.FOUND_FOREIGN: "this controller's lease held a setting that it does not know",
}

_WAITS = "it looks again in the next cycle"
_LEASE = "if it stays silent the lease ends and the engine returns to its boot setting"
NEXT: dict[Reason, str] = {
    Reason.METRICS_STALE: "it waits for new steps; " + _LEASE,
    Reason.ENGINE_RESTARTED: "it watches from scratch and searches once there is enough traffic",
    Reason.OPERATOR_THRESHOLD: "it pushes nothing while the threshold is crossed",
    Reason.ERRORS_RISING: "it pushes nothing while requests fail; look at the engine's log",
    Reason.VERDICT_WORSE: "the setting before is back, and the next search takes this loss into account",
    Reason.HARMFUL: "the setting before is back; the same push is not tried again under such traffic for a day",
    Reason.INCONCLUSIVE: "the setting before is back, and it searches again",
    Reason.KEPT_LOST: "the boot setting is back, and after a pause it searches again",
    Reason.INCONCLUSIVE_TOO_LONG: "the setting before is back, and it searches again",
    Reason.BLOCKED_AFTER_REVERT: "it watches only, until: rooftune resume",
    Reason.PAUSED: "it watches only, until: rooftune resume",
    Reason.DEPLOY: "it pushes again once the freeze file is gone",
    Reason.KV_BOUND: "it pushes nothing meanwhile; fewer or shorter requests, or more KV memory, help",
    Reason.VERIFYING: "it looks at the difference after whole pairs of turns, then keeps the push or goes back",
    Reason.NO_PROPOSAL: _WAITS,
    Reason.ALREADY_IN_FORCE: "it keeps the lease and searches again when traffic shifts or the time comes",
    Reason.TWIN_NOT_TRUSTED: "it refits the step model on newer steps and asks the twin again",
    Reason.TWIN_TOO_FEW: "it asks the twin again as soon as those requests are there",
    Reason.GAIN_UNKNOWN: _WAITS,
    Reason.WITHIN_NOISE: "it leaves the setting alone and searches again when traffic shifts or the time comes",
    Reason.KNOB_ABSENT: "take the knob out of knobs in the configuration",
    Reason.NEEDS_RESTART: "an operator may start the engine with that value; the controller leaves it alone",
    Reason.OUTSIDE_ENVELOPE: "it searches again inside the engine's bounds",
    Reason.MAINTENANCE_WINDOW: "it decides again once a window allows it",
    Reason.AFTER_LOSS: "it decides again once the pause is over",
    Reason.DWELL: "it decides again once the dwell time is over",
    Reason.EXPLORATION_BUDGET: "it pushes again tomorrow, or with a larger guard.exploration_slo_s_per_day",
    Reason.SHADOW_TOO_SHORT: "it pushes once it has watched for guard.min_shadow_s",
    Reason.SHADOW: "run it with --mode live to let it push",
    Reason.STEP_LIMITED: "it goes on by such steps, then both settings take turns",
    Reason.OK: "it lets both settings take turns, then keeps the push or goes back",
    Reason.UNREACHABLE: "it tries again in the next cycle; " + _LEASE,
    Reason.UNAUTHORIZED: "correct the token in engine.token_file; it is read again for each request",
    Reason.NO_PROTOCOL: "correct engine.url, or start the engine with its tuning routes",
    Reason.GARBAGE: "it tries again in the next cycle; " + _LEASE,
    Reason.NO_SIGNAL: _WAITS,
    Reason.IDLE: "it waits for traffic",
    Reason.STALLED: "it tunes nothing meanwhile; look at the engine",
    Reason.TOO_LITTLE_DATA: "it waits until more requests have finished",
    Reason.SEARCHING: "it takes the answer in one of the next cycles",
    Reason.FIT_REFUSED: "it fits again on newer steps",
    Reason.WORKER_FAILED: "it starts another search process",
    Reason.HELD_BY_OTHER: "it watches only until that lease ends; end one of the two controllers",
    Reason.CONFLICT: "it reads the state and decides again",
    Reason.REFUSED: "it reads the engine's bounds again; the detail says what was refused",
    Reason.STORE_FAILED: "it tries again in the next cycle; free some disk space or correct the state folder",
    Reason.NULL_RESULT: "it leaves the setting alone and searches again when traffic shifts or the time comes",
    Reason.NO_TARGETS_MISSED: "it leaves the setting alone as long as that is so",
    Reason.FROZEN_BY_SIGNAL: "it pushes nothing while the signal is seen; the runbook has a section for each",
    Reason.ABORT_STORM: "it judges the next window; look at why clients hang up",
    Reason.FOUND_FOREIGN: "it starts from the boot setting",
}

# Reasons from before the guard could decide: the fourth line says so.
BEFORE_GUARD = frozenset(
    {
        Reason.UNREACHABLE, Reason.UNAUTHORIZED, Reason.NO_PROTOCOL, Reason.GARBAGE, Reason.NO_SIGNAL, Reason.IDLE,
        Reason.STALLED, Reason.TOO_LITTLE_DATA, Reason.SEARCHING, Reason.FIT_REFUSED, Reason.WORKER_FAILED,
        Reason.NULL_RESULT, Reason.NO_TARGETS_MISSED, Reason.FROZEN_BY_SIGNAL, Reason.ABORT_STORM, Reason.TWIN_TOO_FEW,
    }
)  # fmt: skip


_MAIN = ("step_tokens", "chunk_cap_tokens", "max_running")
_TOKENS = ("step_tokens", "chunk_cap_tokens")
_NONE_AT_ZERO = ("chunk_cap_tokens", "max_partial_prefills", "max_long_partial_prefills")


def explain(record: CycleRecord) -> tuple[str, str, str, str, str]:
    """Seen, believed, proposed, decided, next: one line each, without line breaks."""
    lines = (
        f"Seen: {_seen(record)}.",
        f"Believed: {_fit(record.fit)}; {_twin(record.twin)}.",
        f"Proposed: {_proposal(record.proposal)}.",
        f"Guard: {_decided(record)}.",
        f"Next: {_next(record)}.",
    )
    seen, believed, proposed, decided, after = (" ".join(line.split()) for line in lines)
    return seen, believed, proposed, decided, after


def _seen(record: CycleRecord) -> str:
    parts = [_figures(record.observed)]
    if record.lost_steps or record.lost_requests:
        parts.append(f"{record.lost_steps} step and {record.lost_requests} request records were lost")
    if record.load is not None and (words := load(record.load)):
        parts.append(words)
    if record.signals:
        parts.append("signals: " + ", ".join(signal.code for signal in record.signals))
    return "; ".join(parts)


def _figures(seen: Figures | None) -> str:
    if seen is None:
        return "no requests of this window"
    parts = [f"{seen.requests} requests in {seconds(seen.span_s)}"]
    if seen.attainment is not None:
        parts.append(f"{share(seen.attainment)} within the targets")
    if isinstance(seen.ttft_p95_s, float):
        parts.append(f"TTFT p95 {seconds(seen.ttft_p95_s)}")
    if isinstance(seen.longest_gap_p99_s, float):
        parts.append(f"longest gap p99 {seconds(seen.longest_gap_p99_s)}")
    if seen.failed:
        parts.append(f"{seen.failed} failed")
    if seen.preemptions:
        parts.append(f"{seen.preemptions} preemptions")
    return ", ".join(parts)


def load(part: LoadPart) -> str:
    """What arrives beside what is carried, in one sentence without its full stop; empty when that is not known."""
    here = part.in_force.sustainable_rps
    best = max((one.sustainable_rps or 0.0 for one in (part.in_force, part.boot, part.proposed)), default=0.0)
    if part.offered_rps is None or best == 0.0:
        return ""
    offered = f"offered {part.offered_rps:.3g} requests/s"
    if part.overload and best <= part.offered_rps:
        return f"{offered}, this server carries {best:.3g}; add a replica or move a target"
    if part.overload and here is not None and here <= part.offered_rps:
        return f"{offered}, the setting in force carries {here:.3g} and another one {best:.3g}"
    if part.overload:
        return f"{offered}, this server carries {best:.3g}, which leaves too little headroom; add a replica"
    return offered if here is None else f"{offered}, the setting in force carries {here:.3g}"


def _fit(fit: FitPart | None) -> str:
    if fit is None:
        return "no step model in this cycle"
    drift = "" if fit.drift_ratio is None else f", steps now {fit.drift_ratio:.2f} times as long as it says"
    if fit.knee_tokens is None:
        codes = f" ({', '.join(fit.codes)})" if fit.codes else ""
        return f"a step model with {knee(fit)}{codes}{drift}"
    return f"the knee is at {knee(fit)} by {fit.steps} steps{drift}"


def knee(fit: FitPart) -> str:
    """The knee with its interval, or what the steps say of it when they do not hold one."""
    low, high = fit.knee_low_tokens, fit.knee_high_tokens
    if fit.knee_tokens is not None:
        between = f" ({low:.0f} to {high:.0f})" if low is not None and high is not None else ""
        return f"{fit.knee_tokens:.0f} tokens{between}"
    sides = [f"{side} {bound:.0f} tokens" for side, bound in (("above", low), ("below", high)) if bound is not None]
    return "no knee that the steps would hold" + (f" ({' and '.join(sides)} if there is one)" if sides else "")


def _twin(twin: TwinPart | None) -> str:
    if twin is None:
        return "the twin was not asked"
    figures = "; ".join(_figure(name, part) for name, part in twin.figures.items())
    shown = f" ({figures})" if figures else ""
    if twin.verdict == "too_few":
        more = "" if twin.missing_requests is None else f", about {twin.missing_requests} more are needed"
        return f"too few requests to judge the twin by{more}{shown}"
    worst = "" if twin.worst_error is None else f", worst error {share(abs(twin.worst_error))}"
    quality = "predicts this window well" if twin.verdict == "good" else "does not predict this window well enough"
    return f"the twin {quality}{shown or worst}"


def _figure(name: str, part: FigurePart) -> str:
    """good share 68 % foretold, 65 % observed."""
    words = seconds if part.unit == "s" else share
    foretold, observed = ("unknown" if v is None else words(v) for v in (part.foretold, part.observed))
    verdict = {"good": "", "not_good": ", not good", "too_few": ", too few"}[part.verdict]
    return f"{name} {foretold} foretold, {observed} observed{verdict}"


def _proposal(found: ProposalPart | None) -> str:
    if found is None:
        return "nothing"
    now, then = found.attainment_now, found.attainment_proposed
    gain = f" ({share(now)} within the targets now, {share(then)} then)" if now is not None and then is not None else ""
    limit = f"; the limit is {found.binding}" if found.binding else ""
    if now is not None and (worse := [step for _, step in found.path if step < now]):
        limit += f"; on the way a step would show {share(min(worse))}"
    if found.verdict == "keep":
        return f"keep what is in force, nothing of {found.trials} settings is better beyond noise{limit}"
    if found.verdict == "infeasible":
        return f"no setting meets every target; the nearest of {found.trials} is {knobs(found.setting)}{gain}{limit}"
    return f"{knobs(found.setting)}{gain}, the best of {found.trials} settings{limit}"


def _decided(record: CycleRecord) -> str:
    meaning = MEANING[record.reason]
    detail = f" ({record.detail})" if record.detail else ""
    if record.action is Action.PUSH and record.pushed is not None:
        decision = f"pushed {knobs(record.pushed)}: {meaning}"
    elif record.action is Action.SWITCH and record.in_force is not None:
        decision = f"switched to {knobs(record.in_force)}: {meaning}"
    elif record.action is Action.REVERT:
        # An operator may revert when nothing of ours is in force.
        asked = record.reason is Reason.BLOCKED_AFTER_REVERT
        decision = f"{'set the engine back to its boot setting' if asked else 'took the push back'}: {meaning}"
    elif record.would_push is not None:
        decision = f"held; live mode would push {knobs(record.would_push)}: {meaning}"
    elif record.reason in BEFORE_GUARD:
        decision = f"held before the guard had anything to decide: {meaning}"
    else:
        decision = f"held: {meaning}"
    return f"{decision}{detail}{_verdict(record.verify)}{_probation(record.probation)}"


_STANDINGS = {
    "holds": "as expected",
    "lower": "less than expected, but above the boot setting",
    "overload": "the load has risen, and the boot setting would carry less of it",
    "lost": "not what was expected",
}


def _probation(kept: ProbationPart | None) -> str:
    if kept is None or kept.observed is None:
        return ""
    was = "" if kept.expected is None else f", expected {share(kept.expected)}"
    boot = "" if kept.boot is None else f", the boot setting had {share(kept.boot)}"
    words = f"{share(kept.observed)} within the targets{was}{boot}"
    return f"; the setting kept since cycle {kept.push_cycle}: {words}: {_STANDINGS[kept.standing]}"


def _verdict(verify: VerifyPart | None) -> str:
    if verify is None:
        return ""
    numbers = ""
    if verify.observed_gain is not None:
        predicted = "" if verify.predicted_gain is None else f", predicted {points(verify.predicted_gain)}"
        twin = "" if verify.twin_slope is None else f", adjusted by the twin (slope {verify.twin_slope:.2f})"
        numbers = f": gain {points(verify.observed_gain, verify.half_width)} points{predicted}{twin}"
    crossed = f", crossed {', '.join(verify.crossed)}" if verify.crossed else ""
    turn = f", {turn_of(verify)}" if verify.verdict == "inconclusive" and verify.arm is not None else ""
    return f"; the push of cycle {verify.push_cycle} was {verify.verdict}{numbers}{crossed}{turn}"


def turn_of(verify: VerifyPart) -> str:
    """Where a trial stands: "block 3 of 58, old setting in force for another 40 s, 1 pair counted, a look after 2"."""
    left = f" for another {seconds(verify.turn_left_s)}" if isinstance(verify.turn_left_s, float) else ""
    if verify.arm == "ramp":
        return f"the new setting runs in before its turns{left}"
    look = "" if verify.look_pairs is None else f", a look after {verify.look_pairs}"
    counted = f"{verify.pairs} {'pair' if verify.pairs == 1 else 'pairs'} counted{look}"
    return f"block {verify.block} of {verify.blocks}, {verify.arm} setting in force{left}, {counted}"


def _next(record: CycleRecord) -> str:
    left = record.lease_left_s
    lease = f" with {seconds(left)} of the lease left" if isinstance(left, float) else ""
    force = "" if record.in_force is None else f"; in force is {knobs(record.in_force)}{lease}"
    return f"{NEXT[record.reason]}{force}"


# --- words that other pages use too ------------------------------------------------------------


def knobs(setting: Knobs) -> str:
    """Knobs in words, the main ones first; of a whole setting the rest only where it is not at its default."""
    whole = len(setting) == len(Setting._fields)
    shown = {k: v for k, v in setting.items() if not whole or k in _MAIN or v != Setting._field_defaults[k]}
    order = [*_MAIN, *(name for name in Setting._fields if name not in _MAIN)]
    return ", ".join(_knob(name, shown[name]) for name in order if name in shown) or "no knob"


def _knob(name: str, value: float) -> str:
    word = KNOB_LABELS[name] if name in SEARCHED else name
    unit = " tokens" if name in _TOKENS else ""
    if choices := KNOB[name].choices:
        return f"{word} {choices[int(value)].words if int(value) < len(choices) else value}"
    return f"{word} none" if name in _NONE_AT_ZERO and value == 0 else f"{word} {value:g}{unit}"


def share(value: float) -> str:
    """A share 0..1 in per cent, three digits at most: 97.3 %."""
    return f"{value * 100:.3g} %" if value < 0.999 or value >= 1.0 else f"{value * 100:.2f} %"


def points(value: float, half_width: float | None = None) -> str:
    """A difference of shares in percentage points with its sign, and its interval where known: +1.2 +/- 0.4."""
    return f"{value * 100:+.1f}" + ("" if half_width is None else f" +/- {half_width * 100:.1f}")


def seconds(value: float) -> str:
    """A time in the unit that reads best: 12 ms, 1.25 s, 5 min, 3.2 h, 12 d."""
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    for most_s, unit_s, unit in ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172_800.0, 3600.0, "h")):
        if value < most_s:
            return f"{value / unit_s:.3g} {unit}"
    return f"{value / 86_400.0:.0f} d"
