"""Rows of CSV or JSON lines as named columns, and the checks that turn a column into numbers.

Every refusal names file, line, column, value, bound and remedy. Cells of a CSV are text, cells of JSON lines
are JSON values; the column checks take both.
"""

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from rooftune.policies.errors import InputError, shown
from rooftune.tuner.traffic.workload import FloatArray, IntArray

_WHOLE = re.compile(r"[ \t]*[+-]?[0-9]{1,18}[ \t]*")
_DECIMAL = re.compile(r"[ \t]*[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[ \t]*")
ABSENT = object()
DEFAULT_REMEDY = "correct or drop that line"


@dataclass(frozen=True)
class Table:
    """Columns of equal length; ``lines`` holds the file's line number of each row, counted from 1."""

    where: str
    columns: dict[str, list[object]]
    lines: list[int]

    def take(self, rows: Sequence[int]) -> "Table":
        """The same columns with these rows, in this order."""
        columns = {name: [cells[row] for row in rows] for name, cells in self.columns.items()}
        return Table(self.where, columns, [self.lines[row] for row in rows])

    def refuse(self, row: int, column: str, bound: str, remedy: str = DEFAULT_REMEDY) -> NoReturn:
        """Raise the one line about a bad cell."""
        value = self.columns[column][row]
        seen = "is missing" if value is ABSENT else f"is {shown(value)}"
        raise InputError(f"{self.where} line {self.lines[row]}: {column} {seen}, must be {bound}; {remedy}")


def csv_table(text: str, where: str, required: Sequence[str], optional: Sequence[str], skip_lines: int = 0) -> Table:
    """Read a CSV with a header. It skips ``skip_lines`` physical lines at the top.

    Raises InputError for a missing, unknown or repeated column, a ragged row, broken quoting, or no rows.
    """
    stream = io.StringIO(text, newline="")
    for _ in range(skip_lines):
        stream.readline()
    reader = csv.reader(stream, strict=True)
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        for row in reader:
            if row:
                rows.append(row)
                lines.append(reader.line_num + skip_lines)
    except csv.Error as error:
        raise InputError(
            f"{where} line {reader.line_num + skip_lines}: not CSV ({error}); check the quotes of that line"
        ) from None
    if not rows:
        raise InputError(f"{where} has no header; its first line must name {', '.join(required)}")
    header = [cell.strip() for cell in rows[0]]
    _check_names(header, where, lines[0], required, optional)
    if len(rows) == 1:
        raise InputError(f"{where} holds a header and no requests; give a file with at least one")
    width = len(header)
    for row, line in zip(rows, lines, strict=True):
        if len(row) != width:
            raise InputError(f"{where} line {line}: {len(row)} values, the header names {width}; {DEFAULT_REMEDY}")
    columns = zip(*rows[1:], strict=True)
    return Table(where, {name: list(column) for name, column in zip(header, columns, strict=True)}, lines[1:])


def json_rows(text: str, where: str) -> tuple[list[dict[str, object]], list[int]]:
    """One JSON object per line, with the line numbers; skips blank lines.

    Raises InputError for broken JSON, anything but an object, repeated keys, NaN and Infinity.
    """
    rows: list[dict[str, object]] = []
    lines: list[int] = []
    for line, part in enumerate(text.split("\n"), start=1):
        if not part.strip():
            continue
        try:
            value: object = json.loads(part, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{where} line {line}: not JSON ({error.msg} at character {error.pos + 1}); write one object a line"
            ) from None
        except (ValueError, RecursionError) as error:  # a repeated key, a constant, endless digits or brackets
            reason = " ".join(str(error).split())[:100]
            raise InputError(f"{where} line {line}: not JSON ({reason}); write one object a line") from None
        if not isinstance(value, dict):
            raise InputError(f"{where} line {line}: {shown(value)} is not an object; write one object a line")
        rows.append(value)
        lines.append(line)
    return rows, lines


def json_table(
    rows: list[dict[str, object]], lines: list[int], where: str, required: Sequence[str], optional: Sequence[str]
) -> Table:
    """Rows as columns; an optional key that a row lacks becomes ABSENT, a column that all rows lack is left out."""
    if not rows:
        raise InputError(f"{where} holds no requests; give a file with at least one")
    known = {*required, *optional}
    wanted = set(required)
    present: set[str] = set()
    for row, line in zip(rows, lines, strict=True):
        if not (row.keys() <= known and wanted <= row.keys()):
            _check_names(list(row), where, line, required, optional)
        present.update(row)
    names = [name for name in (*required, *optional) if name in present]
    return Table(where, {name: [row.get(name, ABSENT) for row in rows] for name in names}, lines)


def whole_column(table: Table, column: str, low: int, high: int) -> IntArray:
    """Whole numbers within low..high, int64, shape (rows,)."""
    values: list[int] = []
    for row, cell in enumerate(table.columns[column]):
        value = int(cell) if type(cell) is str and _WHOLE.fullmatch(cell) else cell
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            table.refuse(row, column, f"a whole number within {low}..{high}")
        values.append(value)
    return np.array(values, dtype=np.int64)


def decimal_column(table: Table, column: str, low: float, high: float, remedy: str = DEFAULT_REMEDY) -> FloatArray:
    """Finite numbers within low..high, float64, shape (rows,)."""
    values: list[float] = []
    for row, cell in enumerate(table.columns[column]):
        value = float(cell) if type(cell) is str and _DECIMAL.fullmatch(cell) else cell
        # The comparison comes before the conversion: an integer of a thousand digits does not fit a float.
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            table.refuse(row, column, f"a finite number within {low:g}..{high:g}", remedy)
        values.append(float(value))
    return np.array(values, dtype=np.float64) + 0.0  # turns -0.0 into 0.0


def _check_names(names: list[str], where: str, line: int, required: Sequence[str], optional: Sequence[str]) -> None:
    for name in required:
        if name not in names:
            raise InputError(
                f"{where} line {line}: column {name} is missing (found {shown(', '.join(names))}); "
                f"needed are {', '.join(required)}"
            )
    for name in names:
        if name not in required and name not in optional:
            raise InputError(
                f"{where} line {line}: column {shown(name)} is unknown; "
                f"drop it, known are {', '.join((*required, *optional))}"
            )
        if names.count(name) > 1:
            raise InputError(f"{where} line {line}: column {name} appears {names.count(name)} times; keep one")


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {shown(next(name for name in names if names.count(name) > 1))} appears twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")
