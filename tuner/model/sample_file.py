"""The step-sample file: its schema, version, reader and writer; CSV or JSON lines, plain or gzip.

    # rooftune-steps 1
    duration_s,prefill_tokens,decode_tokens,sequences,context_decode_tokens,context_prefill_tokens,attention_work
    0.0121,0,8,8,9120,0,0

JSON lines hold the same names as keys, after a first object {"format": "rooftune-steps", "version": 1}. The
steps of a vLLM sweep (``dur_ms``, ``decode``, ``prefill`` ...) are recognised by their header and translated here:
milliseconds become seconds here and nowhere else.
"""

import csv
import gzip
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rooftune.policies.errors import InputError
from rooftune.tuner.files import read_text, write_whole
from rooftune.tuner.model.samples import COLUMNS, StepSamples

FORMAT = "rooftune-steps"
VERSION = 1
# Files keep the names of version 1, whatever the columns are called inside.
_NAMES = {"decode_context_tokens": "context_decode_tokens", "prefill_context_tokens": "context_prefill_tokens"}
FILE_COLUMNS = tuple(_NAMES.get(name, name) for name in COLUMNS)
_MARKER = f"# {FORMAT} {VERSION}"
_SWEEP_COLUMNS = ("dur_ms", "prefill", "decode", "prefill_reqs", "ctx_decode", "ctx_prefill", "att")


def read_steps(path: str | Path) -> StepSamples:
    """Samples of a step file. Raises InputError naming file, line, column and value."""
    where = str(path)
    text = read_text(path, "CSV or JSON lines with at least one step", unpack=True)
    if text.lstrip().startswith("{"):
        return _checked(_json_rows(text, where), where)
    return _parse_csv(text, where)


def write_steps(path: str | Path, samples: StepSamples) -> None:
    """Write the CSV form (gzip when the name ends in .gz), whole or not at all. Raises what ``write_whole`` raises."""
    rows = np.stack([getattr(samples, name) for name in COLUMNS], axis=1)
    lines = [_MARKER, ",".join(FILE_COLUMNS), *(",".join(f"{value:.12g}" for value in row) for row in rows)]
    data = ("\n".join(lines) + "\n").encode()
    write_whole(path, gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def _parse_csv(text: str, where: str) -> StepSamples:
    lines = csv.reader(io.StringIO(text))
    try:
        head = next(lines)
        if head and head[0].startswith("#"):
            if ",".join(head).strip() != _MARKER:
                raise InputError(f"{where} line 1: {head[0]!r} is not a marker; write '{_MARKER}' or drop the line")
            head = next(lines)
        names = [name.strip() for name in head]
        sweep = "dur_ms" in names
        wanted = _SWEEP_COLUMNS if sweep else FILE_COLUMNS
        missing = [name for name in wanted if name not in names]
        if missing:
            lacks = f"column {missing[0]!r} is" if len(missing) == 1 else f"columns {', '.join(missing)} are"
            raise InputError(f"{where}: {lacks} missing; the columns are {', '.join(wanted)}")
        if not sweep and len(names) != len(FILE_COLUMNS):
            extra = [name for name in names if name not in FILE_COLUMNS] or names
            raise InputError(f"{where}: column {extra[0]!r} is unknown or double; keep {', '.join(FILE_COLUMNS)}")
        places = [names.index(name) for name in wanted]
        rows = list(_csv_rows(lines, wanted, places, len(names), where))
    except StopIteration:
        raise InputError(f"{where} has no head line; the columns are {', '.join(FILE_COLUMNS)}") from None
    except csv.Error as error:
        raise InputError(f"{where} is not CSV: {error}; write one step a line") from error
    return _from_sweep(rows, where) if sweep else _checked(rows, where)


def _csv_rows(
    lines: Iterator[list[str]], wanted: tuple[str, ...], places: list[int], width: int, where: str
) -> Iterator[list[float]]:
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        if len(line) != width:
            raise InputError(f"{where}, row {number}: {len(line)} cells, must be {width}; the file may be cut off")
        yield [
            _number(line[place], f"{where}, row {number}, column {name}")
            for place, name in zip(places, wanted, strict=True)
        ]


def _json_rows(text: str, where: str) -> list[list[float]]:
    rows: list[list[float]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: also for a number of thousands of digits
            raise InputError(f"{where} line {number} is not JSON: {error}; write one object a line") from error
        if isinstance(item, dict) and "format" in item and not rows:
            if item != {"format": FORMAT, "version": VERSION}:
                raise InputError(f"{where} line {number}: format must be {FORMAT!r} and version {VERSION}")
            continue
        if not isinstance(item, dict) or set(item) != set(FILE_COLUMNS):
            raise InputError(f"{where} line {number}: keys must be exactly {', '.join(FILE_COLUMNS)}")
        rows.append([_number(item[name], f"{where} line {number}, {name}") for name in FILE_COLUMNS])
    return rows


def _number(value: object, what: str) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        raise InputError(f"{what}: {str(value)[:40]!r} is not a number; correct the cell") from None
    if not math.isfinite(number):
        raise InputError(f"{what}: {number} is not finite; drop the step (missing is not zero)")
    return number


def _checked(rows: list[list[float]], where: str) -> StepSamples:
    if not rows:
        raise InputError(f"{where} holds no steps; give a file with at least one")
    try:
        return StepSamples(*np.array(rows, dtype=np.float64).T)
    except InputError as error:
        problem = str(error)
        for name, in_file in _NAMES.items():
            problem = problem.replace(name, in_file)
        raise InputError(f"{where}: {problem}") from None


def _from_sweep(rows: list[list[float]], where: str) -> StepSamples:
    """Columns of ``_SWEEP_COLUMNS`` to ours; a decoding request computes one token a step."""
    ours = [[ms / 1000.0, p, d, d + chunks, cd, cp, work] for ms, p, d, chunks, cd, cp, work in rows]
    return _checked(ours, where)
