"""The demo's words: one changing line a cycle, a whole one for what happened, and how it ended. Pure."""

import json
import math
from collections.abc import Sequence

from rooftune.policies.guard import Action, Reason
from rooftune.policies.step_time import StepModel, step_time
from rooftune.tuner.bench.children import Event
from rooftune.tuner.cli.demo.plan import DOCUMENT_EVERY, UNSTEADY, Bounds, Plan, Speed
from rooftune.tuner.control.explain.explain import MEANING, explain, knee, knobs, share
from rooftune.tuner.control.outcome import CycleRecord, FitPart
from rooftune.tuner.model.roofline import REMEDIES, FitCode

# After a push that proved itself, one of these says that nothing better is in sight.
SETTLED = ("null_result", "within_noise", "no_targets_missed", "already_in_force", "no_proposal")
KEPT_CYCLES = 15  # half a minute of requests under the kept setting


def status(event: Event) -> str:
    """Where the controller stands, on one line."""
    parts = [f"cycle {event['cycle']}"]
    if (attainment := event.get("attainment")) is not None:
        parts.append(f"{attainment:.0%} of requests within the targets")
    if (knee := event.get("knee_tokens")) is not None:
        parts.append(f"knee {knee:.0f} tokens")
    parts.append(meaning(event["reason"]))
    return ", ".join(parts)


def meaning(reason: str) -> str:
    """The words for a reason's code."""
    return next((words for code, words in MEANING.items() if code.value == reason), reason)


def happened(event: Event) -> str | None:
    """A line that stays: a push, a verdict, something taken back; None for a cycle that only watched."""
    if event.get("pushed"):
        return f"cycle {event['cycle']}: pushed {event['pushed']}, under a lease"
    if event["action"] == "revert":
        return f"cycle {event['cycle']}: took the push back, {meaning(event['reason'])}"
    if event.get("verdict") == "better":
        return f"cycle {event['cycle']}: the push of cycle {event['verified_cycle']} is better, kept"
    return None


def opening(speed: Speed, plan: Plan, base: str, model: str) -> str:
    """What was measured, what is sent, and how to take part."""
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    ask = json.dumps({"model": model, "stream": True, "max_tokens": 60, "messages": messages})
    return "\n".join(
        [
            f"here a step of decodes takes {_ms(speed.decode_s)}, reading 1,000 prompt tokens "
            f"{_ms(1000 * speed.prompt_s)}",
            f"traffic: {plan.rate_rps:.2g} requests a second, 1 in {DOCUMENT_EVERY} a document of up to "
            f"{plan.document_tokens:,} tokens",
            "",
            "chat with it meanwhile, from another terminal:",
            f"  curl -N {base}/v1/chat/completions -H 'content-type: application/json' -d '{ask}'",
            "",
        ]
    )


def asked_for(bounds: Bounds) -> str:
    """The targets in words."""
    return (
        "targets, from what the default gives: nine requests in ten get their first token within "
        f"{_ms(bounds.ttft_s)}, and no stall above {_ms(bounds.gap_s)}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1.0 else f"{seconds * 1000:.3g} ms"


def settled(events: Sequence[Event]) -> bool:
    """A push has proved itself, and the latest cycle finds nothing better, or enough requests ran under it since."""
    proved = next((at for at, event in enumerate(events) if event.get("verdict") == "better"), None)
    if proved is None:
        return False
    return events[-1]["reason"] in SETTLED or len(events) - proved > KEPT_CYCLES


def closing(records: Sequence[CycleRecord], pace: float = math.nan) -> str:
    """What it came to. records: oldest first; pace: how far the machine's pace moved (``unsteadiness``)."""
    lines = [_knee(records)]
    pushes = [at for at, record in enumerate(records) if record.pushed is not None]
    if not pushes:
        last = records[-1].reason if records else Reason.TOO_LITTLE_DATA
        return "\n".join([*filter(None, lines), f"nothing was pushed: {meaning(last.value)}"])
    before = _measured(records[: pushes[0] + 1])
    if before is not None:
        lines.append(f"at the engine's default: {_figures(before)}")
    # Requests are counted for the setting that they ran under, so a revert's own cycle still tells of the push.
    undone = next((at for at in range(pushes[-1], len(records)) if records[at].action is Action.REVERT), None)
    after = _measured(records[pushes[-1] + 1 : None if undone is None else undone])
    if after is not None:
        lines.append(f"with {knobs(_in_force(after))}: {_figures(after)}")
    if undone is not None:
        lines.append(f"it was taken back: {meaning(records[undone].reason.value)}")
        if pace > UNSTEADY:
            lines.append(
                f"this machine was too busy with other work to judge it: the same steps took up to {pace:.1f} times as "
                "long as at other times; run the demo again when it is idle"
            )
    for record in [one for one in records if one.verify is not None and one.verify.verdict != "inconclusive"][-1:]:
        lines += ["", f"why (cycle {record.number}):", *(f"  {line}" for line in explain(record))]
    return "\n".join(filter(None, lines))


def _measured(records: Sequence[CycleRecord]) -> CycleRecord | None:
    """The latest that has figures."""
    found = [record for record in records if record.observed is not None and record.observed.attainment is not None]
    return found[-1] if found else None


def _knee(records: Sequence[CycleRecord]) -> str:
    fits = [record.fit for record in records if record.fit is not None]
    if not fits:
        return ""
    fit = next((one for one in reversed(fits) if one.knee_tokens is not None), fits[-1])
    held = "the knee is at " if fit.knee_tokens is not None else ""
    found = f"this machine with this model, from {fit.steps} live steps: {_price(fit)}; {held}{knee(fit)}"
    if fit.knee_tokens is not None:
        return found
    codes = [code for code in (FitCode.SLOPE_UNKNOWN, FitCode.FLOOR_UNKNOWN) if code.value in fit.codes]
    return found + "".join(f"\n  {REMEDIES[code]}" for code in codes)


def _price(fit: FitPart) -> str:
    model = StepModel(**fit.coefficients)
    least_s = step_time(model, 1, 1, 0.0, 0.5)
    more_s = step_time(model, 1000, 1, 0.0, 1000 * 500.0) - least_s
    return f"a step takes {_ms(least_s)} at least, 1,000 prompt tokens {_ms(more_s)} more"


def _in_force(record: CycleRecord) -> dict[str, int | float]:
    force = record.in_force or {}
    return {name: force[name] for name in ("step_tokens", "chunk_cap_tokens") if name in force}


def _figures(record: CycleRecord) -> str:
    seen = record.observed
    assert seen is not None and seen.attainment is not None
    text = f"{share(seen.attainment)} of {seen.requests} requests within the targets"
    if isinstance(seen.ttft_p95_s, float) and isinstance(seen.longest_gap_p99_s, float):
        text += f", TTFT p95 {_ms(seen.ttft_p95_s)}, longest stall p99 {_ms(seen.longest_gap_p99_s)}"
    return text
