"""The doctor at an engine: is it there, may we, what moves, and does what we read arrive. Changes nothing."""

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rooftune.policies import wire
from rooftune.tuner.address import parse_address
from rooftune.tuner.cli.doctor.finding import Check, Finding, bad, note, ok
from rooftune.tuner.clock import Clock
from rooftune.tuner.control.signals.find import FREEZING, find_signals
from rooftune.tuner.observe.protocol import ProtocolReader, Reading
from rooftune.tuner.ports.base import PortError, PortFault
from rooftune.tuner.ports.http import HttpPort, Timeouts
from rooftune.tuner.ports.vllm.port import Access, Found, discover
from rooftune.tuner.ports.vllm.versions import Hook

STALE_S = 30.0
BETWEEN_S = 0.5
_NOT_THERE = 2**53  # a revision that no engine reaches


@dataclass(frozen=True)
class Place:
    """Where to look. cycle_s: how often a controller reads."""

    url: str
    token_file: Path | None
    ca_file: Path | None
    timeouts: Timeouts
    cycle_s: float


def engine_findings(place: Place, clock: Clock) -> Iterator[Finding]:
    """One engine, looked at in the order in which things fail."""
    yield from _encryption(place)
    try:
        found = discover(place.url, place.token_file, place.timeouts, ca_file=place.ca_file)
    except PortError as error:
        yield _failed(error)
        return
    if found.state is None:
        yield from _no_protocol(found, place)
        return
    state = found.state
    yield ok(Check.REACHABLE, f"{place.url} answers")
    yield ok(Check.PROTOCOL, f"version {state.protocol_version}: {state.engine} {state.engine_version}, {state.model}")
    yield from _version(found)
    with closing(HttpPort(place.url, place.token_file, place.timeouts, ca_file=place.ca_file)) as port:
        try:
            yield from _writes(port, place)
            yield from _standing(state)
            yield from _knobs(state)
            yield from _rows(port, place, clock)
        except PortError as error:
            yield _failed(error)


def _encryption(place: Place) -> Iterator[Finding]:
    where = parse_address(place.url, "engine address")
    if place.token_file is not None and not (where.encrypted or where.local):
        yield note(Check.ENCRYPTION, "the token travels unencrypted", "use https, or a tunnel or mesh that encrypts")


def _failed(error: PortError) -> Finding:
    check = {
        PortFault.UNAUTHORIZED: Check.TOKEN,
        PortFault.READ_ONLY: Check.WRITES,
        PortFault.NO_PROTOCOL: Check.PROTOCOL,
        PortFault.PROTOCOL_MISMATCH: Check.PROTOCOL,
    }.get(error.fault, Check.REACHABLE)
    return bad(check, str(error), exit_code=error.exit_code)


def _no_protocol(found: Found, place: Place) -> Iterator[Finding]:
    yield ok(Check.REACHABLE, f"{place.url} answers")
    if found.access is Access.UNKNOWN_SERVER:
        remedy = "give the address of the engine; ours serves it with --tuning-token-file or --tuning-port"
        yield bad(Check.PROTOCOL, "neither a tuning protocol nor vLLM's metrics here", remedy)
        return
    yield from _version(found)
    version = f"vLLM {found.version}" if found.version else "vLLM of an unknown version"
    yield bad(
        Check.HOOK,
        f"{version} without the hook: it can be watched, nothing can be pushed",
        "rooftune doctor --vllm-env DIR tells what its environment needs",
    )
    yield note(Check.USES, "possible from its metrics: " + ", ".join(sorted(found.uses)))
    for use, lacks in sorted((found.missing or {}).items()):
        yield note(Check.USES, f"not possible: {use.value}, for the page lacks {', '.join(lacks)}")
    yield note(Check.UNSEEN, "its metrics do not tell: " + ", ".join(sorted(found.unseen)))
    if found.engines > 1:
        yield note(
            Check.HOOK, f"{found.engines} data-parallel engines behind one address", "the hook is read-only there"
        )


def _version(found: Found) -> Iterator[Finding]:
    if found.able is None:
        return
    version = str(found.version or "of an unknown version")
    if found.able.hook is Hook.NONE:
        yield bad(Check.VERSION, f"vLLM {version} has no endpoint plugins: no hook is possible", "use 0.27 or later")
    elif found.able.hook is Hook.READ_ONLY:
        yield note(Check.VERSION, f"vLLM {version} is unchecked: the hook is read-only there", "use 0.27 to 0.32")
    elif not found.able.tried:
        yield note(Check.VERSION, f"vLLM {version}: source checked; only 0.32 is tested")
    else:
        yield ok(Check.VERSION, f"vLLM {version} is one that was run")


def _writes(port: HttpPort, place: Place) -> Iterator[Finding]:
    """Asks with a push that names a revision which is not in force, so it cannot be taken."""
    question = wire.PushRequest(
        lease_s=1.0, expected_revision=_NOT_THERE, actor="rooftune doctor", reason="asks whether pushes are taken"
    )
    try:
        port.push(question)
    except PortError as error:
        if error.fault is not PortFault.READ_ONLY:
            raise
        yield bad(Check.WRITES, "read-only: it takes no pushes", "start it with a token file for tuning")
    else:
        with_what = "with this token" if place.token_file else "without a token, to any client that reaches it"
        yield ok(Check.WRITES, f"it takes pushes {with_what}")


def _standing(state: wire.State) -> Iterator[Finding]:
    if state.blocked:
        yield bad(Check.BLOCKED, "a person reverted: pushes are blocked", "rooftune resume, once the reason is gone")
    else:
        yield ok(Check.BLOCKED, f"pushes are not blocked (revision {state.revision})")
    if state.lease is None:
        yield ok(Check.LEASE, "no lease: the boot setting is in force")
    else:
        held = state.lease
        yield note(Check.LEASE, f"held by {held.actor} for another {held.left_s:.0f} s: {held.reason}")
    for line in state.notes:
        yield note(Check.ENGINE_NOTE, line)


def _knobs(state: wire.State) -> Iterator[Finding]:
    by_mode: dict[str, list[str]] = {"live": [], "restart": [], "absent": []}
    for knob in state.knobs:
        by_mode[knob.mode].append(knob.name)
    text = "; ".join(f"{mode}: {', '.join(names)}" for mode, names in by_mode.items() if names)
    if by_mode["live"]:
        yield ok(Check.KNOBS, text)
    else:
        yield bad(Check.KNOBS, f"none moves: {text or 'it names none'}", "see its notes; nothing can be tuned live")
    budget = next((knob for knob in state.knobs if knob.name == "step_tokens" and knob.mode == "live"), None)
    if budget is not None and budget.boot == budget.max:
        yield note(
            Check.HEADROOM,
            f"the budget starts at its ceiling of {budget.max}: it can only be lowered",
            "start with a larger ceiling (vLLM: --max-num-batched-tokens beside --max-num-scheduled-tokens)",
        )


def _rows(port: HttpPort, place: Place, clock: Clock) -> Iterator[Finding]:
    reader = ProtocolReader(port)
    first = reader.read()
    clock.sleep(BETWEEN_S)
    second = reader.read()
    yield _alive(second)
    yield _pace(first, second, place.cycle_s)
    if len(first.steps):
        for part in find_signals(first.steps, first.requests, first.state):
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in part.evidence.items())
            text = part.code + (f" ({numbers})" if numbers else "")
            remedy = f"see {part.code} in the runbook"
            freezing = part.code in {signal.value for signal in FREEZING}
            yield bad(Check.SIGNAL, text, remedy) if freezing else note(Check.SIGNAL, text, remedy)


def _alive(reading: Reading) -> Finding:
    if not reading.busy:
        return ok(Check.ALIVE, "idle: nothing runs or waits")
    if reading.metrics_age_s <= STALE_S:
        return ok(
            Check.ALIVE, f"at work: {reading.in_system} requests, the last step ended {reading.metrics_age_s:.1f} s ago"
        )
    if math.isnan(reading.metrics_age_s):
        return note(Check.ALIVE, "a step is in flight; since when is not known yet")
    return bad(
        Check.ALIVE, f"it has work and ended no step for {reading.metrics_age_s:.0f} s", "see the engine and its card"
    )


def _pace(first: Reading, second: Reading, cycle_s: float) -> Finding:
    """Whether a controller that reads every ``cycle_s`` gets every row. Known once the rings have run over."""
    if second.lost_steps or second.lost_requests:
        text = f"{second.lost_steps} steps and {second.lost_requests} requests were overwritten within {BETWEEN_S:g} s"
        return bad(Check.ROWS, text, "a controller must read more often: lower cadence.cycle_s")
    spans_s = [
        float(np.nanmax(ends) - np.nanmin(ends))
        for lost, ends in ((first.lost_steps, first.steps.end_s), (first.lost_requests, first.requests.finish_s))
        if lost and len(ends)
    ]
    if not spans_s:
        return ok(
            Check.ROWS, f"{len(first.steps)} steps and {len(first.requests)} requests read, none overwritten so far"
        )
    if min(spans_s) <= cycle_s:
        text = f"the engine keeps the last {min(spans_s):.1f} s, a controller reads every {cycle_s:g} s: rows are lost"
        return bad(Check.ROWS, text, "lower cadence.cycle_s")
    return ok(Check.ROWS, f"the engine keeps the last {min(spans_s):.0f} s, a controller reads every {cycle_s:g} s")
