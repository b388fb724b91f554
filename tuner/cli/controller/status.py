"""``rooftune status``: what is in force, in which mode, what came last, the knee, and how long the lease holds."""

import argparse
import json
from typing import Any

from pydantic import ValidationError

from rooftune.policies.commands import Command
from rooftune.policies.errors import UnreachableError
from rooftune.policies.guard import Reason
from rooftune.tuner.cli.controller.client import add_face_flag, add_state_flags, ask, read_config, state_folder
from rooftune.tuner.clock import SystemClock
from rooftune.tuner.control.explain.explain import knee, knobs, seconds, share, turn_of
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.state import operator
from rooftune.tuner.control.state.operator import OperatorRequests
from rooftune.tuner.control.state.store import StateFile, holder

SCHEMA = "rooftune.status"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``status``."""
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_face_flag(parser, "ask a controller over HTTP instead of reading its folder")
    add_state_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print where the controller stands."""
    if arguments.face is not None:
        document = ask(arguments.face, "/status")
    else:
        document = _from_folder(arguments)
    if arguments.json:
        print(json.dumps(document))
        return 0
    print("\n".join(_lines(document)))
    return 0


def _from_folder(arguments: argparse.Namespace) -> dict[str, Any]:
    folder = state_folder(arguments, read_config(arguments))
    with StateFile.visit(folder) as state:
        latest = state.last(1)
        requests = operator.read(state)
        instance = state.instance
    record = latest[0] if latest else None
    # A wall clock may jump: an age is at least 0 and only a hint.
    since_s = None if record is None else max(0.0, SystemClock().wall_s() - record.started_at_s)
    return {
        "schema": SCHEMA, "version": 1, "instance": instance, "pid": holder(folder), "since_cycle_s": since_s,
        "wishes": requests.model_dump(mode="json"),
        "last": None if record is None else record.model_dump(mode="json", by_alias=True),
    }  # fmt: skip


def _lines(document: dict[str, Any]) -> list[str]:
    found = document.get("wishes") or {}
    unread = found.get("error") if isinstance(found, dict) else None  # the controller cannot read them either
    try:
        requests = OperatorRequests.model_validate_json(json.dumps({} if unread else found))
        last = document.get("last")
        record = None if last is None else CycleRecord.model_validate_json(json.dumps(last))
    except ValidationError:
        raise UnreachableError("the status cannot be read; use matching releases of rooftune") from None
    since_s = document.get("since_cycle_s")
    rows = [("controller", _who(document))]
    for word, request in (("paused", requests.paused), ("blocked", requests.blocked)):
        if request is not None:
            rows.append((word, f"by {request.actor}: {request.reason}"))
    rows += [("wishes", str(unread))] if unread else []
    if record is None:
        rows.append(("cycle", "none has been written down yet"))
    else:
        runs = "healthy" in document or bool(document.get("pid"))
        rows += _record(record, float(since_s) if isinstance(since_s, int | float) else 0.0, runs)
    width = max(len(word) for word, _ in rows)
    return [f"{word:<{width}}  {text}" for word, text in rows]


def _who(document: dict[str, Any]) -> str:
    if "healthy" in document:
        ready = "reads its engine" if document.get("ready") else "does not read its engine"
        return (
            f"{document.get('instance')} runs, {ready}" if document["healthy"] else f"{document.get('instance')} hangs"
        )
    pid = document.get("pid")
    return f"{document.get('instance')} runs (pid {pid})" if pid else f"{document.get('instance')} does not run"


def _record(record: CycleRecord, since_s: float, runs: bool) -> list[tuple[str, str]]:
    """runs: whether the controller does; what one that ended left in force, only the engine can say."""
    rows = [
        ("engine", f"{record.engine}, {record.mode} mode"),
        ("cycle", f"{record.number}, {seconds(since_s)} ago: {record.action.value}, {record.reason.value}"),
    ]
    if record.in_force is not None:
        rows.append(("in force" if runs else "was in force", knobs(record.in_force)))
    if isinstance(record.lease_left_s, float) and not runs:
        rows.append(("lease", "its end or a clean stop returns the engine to its boot setting; see: rooftune doctor"))
    elif isinstance(record.lease_left_s, float):
        left_s = record.lease_left_s - since_s
        rows.append(("lease", f"{seconds(left_s)} left" if left_s > 0 else "over by now, unless it was renewed"))
    if record.fit is not None and record.fit.knee_tokens is not None:
        rows.append(("knee", knee(record.fit)))
    if record.observed is not None and record.observed.attainment is not None:
        rows.append(("in targets", f"{share(record.observed.attainment)} of {record.observed.requests} requests"))
    verify = record.verify
    if verify is not None and verify.arm is not None and record.reason is Reason.VERIFYING:
        rows.append(("trial", turn_of(verify)))
    if record.would_push is not None:
        rows.append(("would push", knobs(record.would_push)))
    if record.signals:
        rows.append(("signals", ", ".join(signal.code for signal in record.signals)))
    if record.detail:
        rows.append(("detail", record.detail))
    return rows


COMMAND = Command("status", "show what is in force, the latest outcome, the knee and the lease", add_arguments, run)
