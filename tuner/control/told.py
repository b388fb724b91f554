"""Progress for a person at a terminal: a line when something has changed, none when a cycle was like the one before."""

from rooftune.policies.guard import Action
from rooftune.tuner.control.explain import knobs, points, share
from rooftune.tuner.control.explain_words import MEANING
from rooftune.tuner.control.outcome import CycleRecord, VerifyPart

# Worth a line of its own when the share of good requests has moved by so much.
MOVED_SHARE = 0.02


def line_of(record: CycleRecord, before: CycleRecord | None) -> str:
    """One line on what this cycle brought; empty when nothing that matters changed since ``before``."""
    said = _event(record, before)
    if said is None:
        return ""
    return f"cycle {record.number}: {said}" + (f"; {_served(record)}" if record.observed else "")


def _event(record: CycleRecord, before: CycleRecord | None) -> str | None:
    meaning = MEANING.get(record.reason, record.reason.value)
    if record.action is Action.PUSH and record.pushed is not None:
        return f"pushed {knobs(record.pushed)}{_foretold(record)}"
    if record.action is Action.REVERT:
        return f"took the push back: {meaning}{_verdict(record.verify)}"
    if record.verify is not None and record.verify.verdict == "better":
        return f"keeps the push of cycle {record.verify.push_cycle}{_verdict(record.verify)}"
    if record.would_push is not None and (before is None or before.would_push != record.would_push):
        return f"would push {knobs(record.would_push)} in live mode{_foretold(record)}"
    if before is None or before.reason is not record.reason:
        return f"{meaning}" + (f" ({record.detail})" if record.detail else "")
    moved = _moved(record, before)
    return meaning if moved >= MOVED_SHARE else None


def _moved(record: CycleRecord, before: CycleRecord) -> float:
    now, then = record.observed, before.observed
    if now is None or then is None or now.attainment is None or then.attainment is None:
        return 0.0
    return abs(now.attainment - then.attainment)


def _served(record: CycleRecord) -> str:
    seen = record.observed
    if seen is None or seen.attainment is None:
        return "no request has ended"
    knee = record.fit.knee_tokens if record.fit is not None else None
    return f"{share(seen.attainment)} of {seen.requests} requests within the targets" + (
        f", knee {knee:.0f} tokens" if knee is not None else ""
    )


def _foretold(record: CycleRecord) -> str:
    gain = record.proposal.gain if record.proposal is not None else None
    return "" if gain is None else f" (foretold: {points(gain)} points)"


def _verdict(verify: VerifyPart | None) -> str:
    if verify is None or verify.observed_gain is None:
        return ""
    width = "" if verify.half_width is None else f" +/- {verify.half_width * 100:.1f}"
    return f", {points(verify.observed_gain)}{width} points on {verify.requests} requests"
