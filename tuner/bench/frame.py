"""Runs benchmarks and renders their figures: one JSON line for each figure, or one aligned table."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rooftune.policies.commands import Figure

_HEAD = ("figure", "value", "unit", "baseline", "ratio")
_TEXT_COLUMNS = (0, 2)


def json_line(figure: Figure) -> str:
    """``{"name", "value", "unit", "baseline", "ratio"}`` on one line; null where there is nothing to compare with."""
    return json.dumps(asdict(figure), allow_nan=False)


def table(figures: Iterable[Figure]) -> str:
    """Figures under one head, names to the left and numbers to the right."""
    rows = [_HEAD, *(_cells(figure) for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return "\n".join(_line(row, widths) for row in rows)


def _cells(figure: Figure) -> tuple[str, str, str, str, str]:
    return (figure.name, _number(figure.value), figure.unit, _number(figure.baseline), _number(figure.ratio))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(width) if column in _TEXT_COLUMNS else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()
