"""``explain``: why a cycle did what it did, in exactly five plain lines, from its record alone. Pure."""

from policies.guard import Action
from tuner.control.explain_words import BEFORE_GUARD, MEANING, NEXT
from tuner.control.outcome import CycleRecord, Figures, FitPart, Knobs, ProposalPart, TwinPart, VerifyPart

LINES = 5
KNOB_WORDS = {
    "step_tokens": ("token budget", " tokens"),
    "chunk_cap_tokens": ("chunk cap", " tokens"),
    "max_running": ("sequence cap", ""),
    "max_partial_prefills": ("partial-prefill cap", ""),
    "max_long_partial_prefills": ("long partial-prefill cap", ""),
}
_POLICIES = {
    "budget_policy": ("budget policy", ("fixed", "step-time target", "pressure")),
    "order_policy": ("order policy", ("fcfs", "shortest first", "deadline")),
}


def explain(record: CycleRecord) -> tuple[str, str, str, str, str]:
    """Seen, believed, proposed, decided, next: one line each, without line breaks."""
    lines = (_seen(record), _believed(record), _proposed(record), _decided(record), _next(record))
    seen, believed, proposed, decided, after = (" ".join(line.split()) for line in lines)
    return seen, believed, proposed, decided, after


def _seen(record: CycleRecord) -> str:
    parts = [_figures(record.observed)]
    if record.in_force is not None:
        parts.append(f"in force {knobs(record.in_force)}")
    if record.lost_steps or record.lost_requests:
        parts.append(f"{record.lost_steps} step and {record.lost_requests} request records were lost")
    if record.signals:
        parts.append("signals: " + ", ".join(signal.code for signal in record.signals))
    return "Seen: " + "; ".join(parts) + "."


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


def _believed(record: CycleRecord) -> str:
    return f"Believed: {_fit(record.fit)}; {_twin(record.twin)}."


def _fit(fit: FitPart | None) -> str:
    if fit is None:
        return "no step model in this cycle"
    if fit.knee_tokens is None:
        codes = f" ({', '.join(fit.codes)})" if fit.codes else ""
        return f"a step model without a knee that the data would hold{codes}"
    low, high = fit.knee_low_tokens, fit.knee_high_tokens
    between = f" ({low:.0f} to {high:.0f})" if low is not None and high is not None else ""
    drift = "" if fit.drift_ratio is None else f", steps now {fit.drift_ratio:.2f} times as long as it says"
    return f"the knee is at {fit.knee_tokens:.0f} tokens{between} by {fit.steps} steps{drift}"


def _twin(twin: TwinPart | None) -> str:
    if twin is None:
        return "the twin was not asked"
    if twin.verdict == "too_few":
        return "too few requests to judge the twin by"
    worst = "" if twin.worst_error is None else f", worst error {share(abs(twin.worst_error))}"
    quality = "predicts this window well" if twin.verdict == "good" else "does not predict this window well enough"
    return f"the twin {quality}{worst}"


def _proposed(record: CycleRecord) -> str:
    return f"Proposed: {_proposal(record.proposal)}."


def _proposal(found: ProposalPart | None) -> str:
    if found is None:
        return "nothing"
    now, then = found.attainment_now, found.attainment_proposed
    gain = f" ({share(now)} within the targets now, {share(then)} then)" if now is not None and then is not None else ""
    limit = f"; the limit is {found.binding}" if found.binding else ""
    if found.verdict == "keep":
        return f"keep what is in force, nothing of {found.trials} settings is better beyond noise{limit}"
    if found.verdict == "infeasible":
        return f"no setting meets every target; the nearest of {found.trials} is {knobs(found.setting)}{gain}{limit}"
    return f"{knobs(found.setting)}{gain}, the best of {found.trials} settings{limit}"


def _decided(record: CycleRecord) -> str:
    meaning = MEANING[record.reason]
    detail = f" ({record.detail})" if record.detail else ""
    if record.action is Action.PUSH and record.pushed is not None:
        said = f"pushed {knobs(record.pushed)}: {meaning}"
    elif record.action is Action.REVERT:
        said = f"reverted to the boot setting: {meaning}"
    elif record.would_push is not None:
        said = f"held; live mode would push {knobs(record.would_push)}: {meaning}"
    elif record.reason in BEFORE_GUARD:
        said = f"held before the guard had anything to decide: {meaning}"
    else:
        said = f"held: {meaning}"
    return f"Guard: {said}{detail}{_verdict(record.verify)}."


def _verdict(verify: VerifyPart | None) -> str:
    if verify is None:
        return ""
    gain, predicted, width = verify.observed_gain, verify.predicted_gain, verify.half_width
    numbers = ""
    if gain is not None:
        band = "" if width is None else f" +/- {points(width)[1:]}"
        foretold = "" if predicted is None else f", foretold {points(predicted)}"
        numbers = f": gain {points(gain)}{band} points{foretold}"
    crossed = f", crossed {', '.join(verify.crossed)}" if verify.crossed else ""
    return f"; the push of cycle {verify.push_cycle} was {verify.verdict}{numbers}{crossed}"


def _next(record: CycleRecord) -> str:
    left = record.lease_left_s
    lease = f"; the lease has {seconds(left)} left" if isinstance(left, float) else ""
    return f"Next: {NEXT[record.reason]}{lease}."


# --- words that other pages use too ------------------------------------------------------------


def knobs(setting: Knobs) -> str:
    """A setting, or some of its knobs, in words: the main ones first, policies by their names."""
    parts = []
    for name, (word, unit) in KNOB_WORDS.items():
        if name in setting:
            none = name != "step_tokens" and setting[name] == 0
            # Only the budget and the chunk cap are always worth a word; other caps when they bind.
            if not none or name == "chunk_cap_tokens" or len(setting) <= len(KNOB_WORDS):
                parts.append(f"{word} {'none' if none else f'{setting[name]:g}{unit}'}")
    for name, (word, kinds) in _POLICIES.items():
        value = setting.get(name)
        if value is not None and (value or len(setting) <= len(KNOB_WORDS)):
            index = int(value)
            parts.append(f"{word} {kinds[index] if index < len(kinds) else index}")
    others = set(setting) - set(KNOB_WORDS) - set(_POLICIES)
    if len(setting) <= len(KNOB_WORDS):
        parts.extend(f"{name} {setting[name]:g}" for name in sorted(others))
    return ", ".join(parts) or "no knob"


def share(value: float) -> str:
    """A share 0..1 in per cent, three digits at most: 97.3 %."""
    return f"{value * 100:.3g} %" if value < 0.999 or value >= 1.0 else f"{value * 100:.2f} %"


def points(value: float) -> str:
    """A difference of shares in percentage points with its sign: +1.2."""
    return f"{value * 100:+.2g}"


def seconds(value: float) -> str:
    """A time as people write it: 12 ms, 1.25 s, 5.0 min."""
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 120.0 else f"{value / 60.0:.3g} min"
