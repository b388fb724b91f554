"""``rooftune bench``: named benchmarks, each figure beside what it is compared with."""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import EntryPoint
from pathlib import Path

from rooftune.policies.commands import BENCH_GROUP, Bench, Command, Figure
from rooftune.policies.errors import MissingDataError
from rooftune.tuner.cli.main import find, missing_extra, registered
from rooftune.tuner.report.tables import aligned

PROJECT = Path(__file__).resolve().parents[2]  # in a checkout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``rooftune bench``."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--json", action="store_true", help="one JSON line per figure, as soon as it is known")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--short", action="store_true", help="seconds per benchmark, less sharp")
    length.add_argument("--full", action="store_true", help="the whole measurement (default)")


def run(arguments: argparse.Namespace) -> int:
    """Run the named benchmarks in the order given; an unknown name ends it before the first one starts."""
    points = _benches()
    if arguments.list:
        for name in points:
            print(name)
        return 0
    chosen = [find(name, points, "benchmark") for name in arguments.names or points]
    figures: list[Figure] = []
    for point in chosen:
        print(f"bench {point.name} ...", file=sys.stderr)
        try:
            for figure in _load(point)(arguments.short):
                figures.append(figure)
                if arguments.json:
                    print(json_line(figure), flush=True)
        except MissingDataError as error:
            if arguments.names:  # named by the user, it is not passed over
                raise
            print(f"bench {point.name}: passed over, {error}", file=sys.stderr)
    if not arguments.json:
        print(figures_text(figures))
    return 0


def json_line(figure: Figure) -> str:
    """``{"name", "value", "unit", "baseline", "ratio"}`` on one line; null where there is nothing to compare with."""
    return json.dumps(asdict(figure), allow_nan=False)


def figures_text(figures: Iterable[Figure]) -> str:
    """Figures under one head, names to the left and numbers to the right."""
    rows = [(one.name, _number(one.value), one.unit, _number(one.baseline), _number(one.ratio)) for one in figures]
    return "\n".join(aligned([("figure", "value", "unit", "baseline", "ratio"), *rows], frozenset({0, 2})))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def _benches() -> dict[str, EntryPoint]:
    """The installed benchmarks; in a checkout also those under tests/bench, which no wheel holds."""
    points = registered(BENCH_GROUP)
    try:
        project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
        more = project["tool"]["rooftune"]["benches"]
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        return points
    if str(PROJECT) not in sys.path:
        sys.path.append(str(PROJECT))
    found = points | {name: EntryPoint(name, value, BENCH_GROUP) for name, value in more.items()}
    return dict(sorted(found.items()))


def _load(point: EntryPoint) -> Bench:
    try:
        bench: Bench = point.load()
    except ModuleNotFoundError as error:
        explained = missing_extra(error, point)
        if explained is None:
            raise
        raise MissingDataError(str(explained)) from error
    return bench


COMMAND = Command("bench", "run named benchmarks and print each figure beside its baseline", add_arguments, run)
