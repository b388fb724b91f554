"""Records as rows: which values of a cycle have columns of their own, and how a record is packed."""

import json
import sqlite3
import zlib
from dataclasses import dataclass, fields
from typing import Any

from pydantic import ValidationError

from rooftune.tuner.control.outcome import CycleRecord, Knobs
from rooftune.tuner.control.state.file import StoreError, StoreFault

MAX_RECORD_BYTES = 4_000_000


@dataclass(frozen=True)
class PushRow:
    """One push: predicted and observed. Gains in attainment, -1..1; None: not known (yet).

    ended: None when the cycle was never written down (the controller ended in between), else its reason.
    verified_in: the cycle that judged it; requests: those of the window after the push.
    """

    number: int
    noted_at_s: float
    changes: Knobs
    ended: str | None
    predicted_gain: float | None
    verified_in: int | None
    verdict: str | None
    verdict_reason: str | None
    observed_gain: float | None
    half_width: float | None
    requests: int | None
    prediction_held: bool | None


PUSH_COLUMNS = ", ".join(column.name for column in fields(PushRow))


def pack(record: CycleRecord) -> bytes:
    """The record as compressed JSON."""
    return zlib.compress(record.model_dump_json(by_alias=True).encode(), 6)


def unpack(number: int, blob: bytes) -> CycleRecord:
    """Raises StoreError when the row does not hold a record."""
    try:
        text = zlib.decompressobj().decompress(blob, MAX_RECORD_BYTES)
        return CycleRecord.model_validate_json(text)
    except (zlib.error, ValidationError) as error:
        why = " ".join(str(error).split())[:120]
        message = f"cycle {number} cannot be read from the state file ({why}); skip it with --last"
        raise StoreError(StoreFault.DAMAGED, message) from None


def insert_cycle(connection: sqlite3.Connection, record: CycleRecord) -> None:
    """The record and what it says of pushes; inside a transaction of the caller."""
    row = (record.number, record.started_at_s, record.mode, record.action.value, record.reason.value, pack(record))
    connection.execute("INSERT OR REPLACE INTO cycles VALUES (?, ?, ?, ?, ?, ?)", row)
    if record.pushed is not None:
        changes = json.dumps(record.pushed)
        connection.execute(
            "INSERT OR IGNORE INTO pushes (number, noted_at_s, changes) VALUES (?, ?, ?)",
            (record.number, record.started_at_s, changes),
        )
    gain = record.predicted_gain
    noted = connection.execute("SELECT changes FROM pushes WHERE number = ?", (record.number,)).fetchone()
    if noted is not None and record.pushed is None:  # its answer was lost: the record knows of no push
        gain = record.model_copy(update={"pushed": json.loads(noted[0])}).predicted_gain
    connection.execute(
        "UPDATE pushes SET ended = ?, predicted_gain = ? WHERE number = ?", (record.reason.value, gain, record.number)
    )
    if record.verify is not None:
        seen = record.verify
        held = int(seen.prediction_held)
        connection.execute(
            "UPDATE pushes SET verified_in = ?, verdict = ?, verdict_reason = ?, observed_gain = ?, half_width = ?, "
            "requests = ?, prediction_held = ?, predicted_gain = coalesce(?, predicted_gain) WHERE number = ?",
            (
                record.number, seen.verdict, seen.reason, seen.observed_gain, seen.half_width, seen.requests, held,
                seen.predicted_gain, seen.push_cycle,
            ),
        )  # fmt: skip


def push_row(row: tuple[Any, ...]) -> PushRow:
    """From PUSH_COLUMNS."""
    number, noted_at_s, changes, *middle, held = row
    cells: list[Any] = [number, noted_at_s, _knobs(changes), *middle, None if held is None else bool(held)]
    return PushRow(*cells)


def _knobs(text: str) -> Knobs:
    """Empty for text that a damaged row may hold."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
