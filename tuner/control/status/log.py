"""One line per cycle, in logfmt or JSON; the level follows the reason. A push names its actor and its reason."""

import json
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import IntEnum
from typing import Literal, TextIO

from rooftune.policies.guard import Action, Reason
from rooftune.tuner.control.outcome import CycleRecord

Value = str | int | float | bool | None
LATEST_S = 9e10  # in the year 4822; a wall clock that is off by more must still give a date


class Level(IntEnum):
    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


# An operator has to correct these before the controller can work at all.
_ERRORS: frozenset[Reason] = frozenset({Reason.UNAUTHORIZED, Reason.NO_PROTOCOL, Reason.STORE_FAILED, Reason.STALLED})
_WARNINGS: frozenset[Reason] = frozenset(
    {
        Reason.UNREACHABLE, Reason.GARBAGE, Reason.WORKER_FAILED, Reason.HELD_BY_OTHER,
        Reason.CONFLICT, Reason.REFUSED, Reason.METRICS_STALE, Reason.ENGINE_RESTARTED,
        Reason.OPERATOR_THRESHOLD, Reason.ERRORS_RISING, Reason.VERDICT_WORSE, Reason.INCONCLUSIVE_TOO_LONG,
        Reason.KEPT_LOST, Reason.KV_BOUND, Reason.FROZEN_BY_SIGNAL, Reason.ABORT_STORM, Reason.FOUND_FOREIGN,
    }
)  # fmt: skip


def level_of(record: CycleRecord) -> Level:
    """The level of a cycle's line."""
    if record.reason in _ERRORS:
        return Level.ERROR
    if record.action is Action.REVERT or record.reason in _WARNINGS:
        return Level.WARNING
    return Level.INFO


def outcome_fields(record: CycleRecord, actor: str) -> dict[str, Value]:
    """The fields of a cycle's line; a value that is not known is left out."""
    found: dict[str, Value] = {
        "event": "cycle", "cycle": record.number, "action": record.action.value, "reason": record.reason.value,
        "mode": record.mode, "engine": record.engine, "took_s": round(sum(record.took_s.values()), 4),
    }  # fmt: skip
    if record.pushed is not None or record.action is Action.REVERT:
        found |= {"actor": actor, "event": "revert" if record.action is Action.REVERT else "push"}
    for name, knobs in (("pushed", record.pushed), ("would_push", record.would_push)):
        if knobs:
            found[name] = " ".join(f"{knob}={value:g}" for knob, value in knobs.items())
    if record.observed is not None:
        found |= {"attainment": record.observed.attainment, "goodput_rps": record.observed.goodput_rps}
    if record.fit is not None:
        found["knee_tokens"] = record.fit.knee_tokens
    if record.verify is not None:
        found |= {"verdict": record.verify.verdict, "verified_cycle": record.verify.push_cycle}
    found |= {"lease_left_s": record.lease_left_s if isinstance(record.lease_left_s, float) else None}
    found |= {"signals": ",".join(signal.code for signal in record.signals) or None, "detail": record.detail or None}
    return {key: value for key, value in found.items() if value is not None}


def render(at_s: float, level: Level, fields: Mapping[str, Value], form: Literal["logfmt", "json"]) -> str:
    """One line without its line break. at_s: wall clock, seconds since 1970."""
    at = datetime.fromtimestamp(min(max(at_s, 0.0), LATEST_S), UTC)
    stamp = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    whole: dict[str, Value] = {"at": stamp, "level": level.name.lower(), **fields}
    if form == "json":
        return json.dumps(whole)
    return " ".join(f"{key}={_logfmt(value)}" for key, value in whole.items())


def _logfmt(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, str):
        return json.dumps(value)
    plain = value and value.isprintable() and not any(mark in value for mark in ' "=\\')
    return value if plain else json.dumps(value)


class EventLog:
    """Writes lines of at least ``level`` to a stream. A stream that fails loses the line; the cycle goes on."""

    def __init__(self, stream: TextIO, level: str = "info", form: Literal["logfmt", "json"] = "logfmt") -> None:
        self._stream, self._form = stream, form
        self._level = Level[level.upper()]
        self._lock = threading.Lock()

    def write(self, at_s: float, level: Level, fields: Mapping[str, Value]) -> None:
        if level < self._level:
            return
        line = render(at_s, level, fields, self._form)
        try:
            with self._lock:
                self._stream.write(line + "\n")
                self._stream.flush()
        except (OSError, ValueError):  # the reader went away, the disk is full, the stream was closed
            pass
