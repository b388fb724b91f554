"""Writes docs/truth.md: the twin's predictions of real engines, from the figures that the benches print.

    python -m tests.bench.truth docs/truth.md       runs the benches in full and writes the page
    python -m tests.bench.truth FILE --from FOLDER
        takes FOLDER/NAME.jsonl (``rooftune bench NAME --json``) instead

The text is in truth_page.md; ``[[bench:figure:format]]`` stands for a figure. A figure that no bench prints ends the
run. No figure is a timing, and all are rounded: the same measurements and the same code give the same page.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rooftune.policies.commands import Bench, Figure
from rooftune.policies.errors import InputError, RooftuneError
from tests.bench import a100_yi34b, rtx4090, rtx5090, truth_why, vllm_sweep

PAGE = Path(__file__).with_name("truth_page.md")
BENCHES: dict[str, Bench] = {
    "rtx4090": rtx4090.bench,
    "vllm-sweep": vllm_sweep.bench,
    "a100-yi34b": a100_yi34b.bench,
    "rtx5090": rtx5090.bench,
    "why": truth_why.bench,
}
OUT_OF_BOUNDS = "out of bounds"
WORST_CELLS = 8
_PLACE = re.compile(r"\[\[([a-z0-9-]+):([^:\]]+)(?::([a-z]+))?\]\]")

Figures = Mapping[str, Sequence[Figure]]

_FORMATS: dict[str, Callable[[float], str]] = {
    "pct": lambda value: f"{100 * value:.1f} %",
    "signed": lambda value: f"{100 * value:+.1f} %",
    "whole": lambda value: f"{value:,.0f}",
    "points": lambda value: f"{value:.1f}",
    "spoints": lambda value: f"{value:+.1f}",
    "ratio": lambda value: f"{value:.2f}",
    "time": lambda value: f"{value:.2f} s" if value >= 1.0 else f"{1e3 * value:.3g} ms",
    "fine": lambda value: f"{100 * value:.2f} %",
    "rate": lambda value: f"{value:g}",
}


def page(figures: Figures, template: str) -> str:
    """The page with every place filled in. Raises InputError for a figure or a format that does not exist."""
    by_name = {bench: {figure.name: figure for figure in each} for bench, each in figures.items()}
    lists = {"out-of-bounds": _out_of_bounds, "worst-cells": _worst_cells}

    def fill(place: re.Match[str]) -> str:
        bench, name, how = place.groups()
        if bench not in by_name:
            raise InputError(f"the page names bench {bench!r}, there are {', '.join(sorted(by_name))}; correct it")
        if how is None and name in lists:
            return lists[name](figures[bench])
        if name not in by_name[bench]:
            raise InputError(f"bench {bench} prints no figure {name!r}; correct the page or run the bench in full")
        return _shown(by_name[bench][name], how or "")

    return _PLACE.sub(fill, template)


def _shown(figure: Figure, how: str) -> str:
    if how.startswith("base"):
        if figure.baseline is None:
            raise InputError(f"figure {figure.name} has no baseline; drop 'base' from its format")
        return _formatted(figure.baseline, how.removeprefix("base"))
    if how == "of":
        return f"{figure.value:.0f} {figure.unit.split(',')[0]}"
    return _formatted(figure.value, how)


def _formatted(value: float, how: str) -> str:
    if how not in _FORMATS:
        raise InputError(f"format {how!r} is unknown; give one of of, {', '.join(_FORMATS)}")
    return _FORMATS[how](value)


def _out_of_bounds(figures: Sequence[Figure]) -> str:
    """A row for each figure that says so in its unit: predicted beside measured."""
    rows = ["| figure | predicted | measured |", "|---|---|---|"]
    for figure in figures:
        if figure.unit.endswith(OUT_OF_BOUNDS) and figure.baseline is not None:
            points = figure.unit.startswith("points")
            shown = [f"{v:.1f} points" if points else _FORMATS["time"](v) for v in (figure.value, figure.baseline)]
            rows.append(f"| {figure.name} | {' | '.join(shown)} |")
    return "\n".join(rows)


def _worst_cells(figures: Sequence[Figure]) -> str:
    """The cells (predicted beside measured, in seconds) with the largest errors."""
    cells = [figure for figure in figures if figure.unit == "s" and figure.baseline and figure.ratio]
    cells.sort(key=lambda figure: (-round(abs(math.log(figure.ratio or 1.0)), 3), figure.name))
    rows = ["| load, budget, metric | predicted | measured | error |", "|---|---|---|---|"]
    for figure in cells[:WORST_CELLS]:
        shown = [_FORMATS["time"](value) for value in (figure.value, figure.baseline or 0.0)]
        rows.append(f"| {figure.name} | {' | '.join(shown)} | {100 * ((figure.ratio or 1.0) - 1.0):+.0f} % |")
    return "\n".join(rows)


def read_figures(folder: Path) -> Figures:
    """Figures of NAME.jsonl for each bench of the page. Raises InputError when one is absent or damaged."""
    figures = {}
    for name in BENCHES:
        path = folder / f"{name}.jsonl"
        try:
            figures[name] = [Figure(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, TypeError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {error}; write it with: rooftune bench {name} --json") from error
    return figures


def run_benches() -> Figures:
    """All benches of the page, in full."""
    return {name: list(bench(False)) for name, bench in BENCHES.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; 2 with one line when something is missing."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.truth", description="write docs/truth.md")
    parser.add_argument("out", type=Path, help="the page to write")
    parser.add_argument(
        "--from", dest="folder", type=Path, help="a folder of NAME.jsonl instead of running the benches"
    )
    options = parser.parse_args(arguments)
    try:
        figures = run_benches() if options.folder is None else read_figures(options.folder)
        text = page(figures, PAGE.read_text(encoding="utf-8"))
    except RooftuneError as error:
        print(f"truth: {error}", file=sys.stderr)
        return 2
    options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
