"""Subcommands, benchmarks and flags of the command line.

Controller and engine register theirs in the entry-point groups below and so share one command without importing each
other.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rooftune.policies.errors import InputError, shown

COMMAND_GROUP = "rooftune.commands"
BENCH_GROUP = "rooftune.benches"
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised where Ctrl-C would be."""


def exit_code_of(stop: KeyboardInterrupt) -> int:
    """128 plus the signal's number, as in a shell."""
    return EXIT_TERMINATED if isinstance(stop, Terminated) else EXIT_INTERRUPTED


@dataclass(frozen=True)
class Command:
    """A subcommand. Write ``help`` as a plain string literal: the overview reads it without importing the module.

    add_arguments: adds the flags to a fresh parser; run: returns the exit code (0 done, 1 refused or infeasible,
    2 usage or input, 3 unreachable, ``exit_code_of`` the signal after an early end with partial results) or raises
    a ``RooftuneError``. A server that a signal stops returns 0.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Figure:
    """A benchmark's figure, in ``unit``.

    baseline: to compare with, in the same unit, if any. ratio: value / baseline unless the bench states another one.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        for what, number in (("value", self.value), ("baseline", self.baseline), ("ratio", self.ratio)):
            if number is not None and not math.isfinite(number):
                raise ValueError(f"figure {self.name}: {what} is {number!r}, must be finite; fail the bench instead")
        if self.ratio is None and self.baseline:
            object.__setattr__(self, "ratio", self.value / self.baseline)


# The argument is ``short``: True takes seconds, for every test run; False is the full measurement.
Bench = Callable[[bool], Iterable[Figure]]


# Flags. A reader takes the text and the name of its flag, and raises InputError with value, bound and remedy, which
# argparse passes on as it is. It looks at the text alone: what depends on a file or on another flag is checked when the
# command runs.

NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
MAX_COUNT = 10**15
_DECIMAL = re.compile(rf"[+-]?{NUMBER}")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
Reader = Callable[[str, str], object]


def add_value(
    where: argparse._ActionsContainer,
    flag: str,
    read: Reader,
    metavar: str | None,
    help: str,
    *,
    default: object = None,
    required: bool = False,
    action: str = "store",
) -> None:
    """A flag whose text ``read`` turns into a value. default: the value itself, not its text."""
    where.add_argument(
        flag,
        type=lambda text: read(text, flag),
        metavar=metavar,
        help=help,
        default=default,
        required=required,
        action=action,
    )


def refuse(what: str, text: str, bound: str, remedy: str) -> InputError:
    """What a reader raises."""
    return InputError(f"{what} is {shown(text)}, must be {bound}; {remedy}")


def number_or_nan(text: str) -> float:
    """NaN for text that is not a number, infinity for a number too large."""
    return float(text) if _DECIMAL.fullmatch(text.strip()) else math.nan


def parse_number(text: str, what: str, *, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite number within low..high (both allowed)."""
    value = number_or_nan(text)
    if not math.isfinite(value) or not low <= value <= high:
        bounds = "" if low == -math.inf and high == math.inf else f" within {low:g}..{high:g}"
        raise refuse(what, text, f"a finite number{bounds}", "correct it")
    return value


def parse_positive(text: str, what: str, *, high: float = 1e15) -> float:
    """A finite number above 0 and at most ``high``."""
    value = number_or_nan(text)
    if not math.isfinite(value) or not 0.0 < value <= high:
        raise refuse(what, text, f"a finite number above 0 and at most {high:g}", "correct it")
    return value


def parse_count(text: str, what: str, *, low: int = 1, high: int = MAX_COUNT) -> int:
    """A whole number within low..high, written in digits."""
    text = text.strip()
    value = int(text) if _WHOLE.fullmatch(text) else None
    if value is None or not low <= value <= high:
        raise refuse(what, text, f"a whole number within {low}..{high}", "correct it")
    return value


def parse_choice(text: str, what: str, known: Iterable[str]) -> str:
    """One of the known words."""
    if text not in known:
        raise refuse(what, text, f"one of {', '.join(known)}", "choose one")
    return text


def flag_of(name: str) -> str:
    """``--long-name`` of argparse's ``long_name``."""
    return "--" + name.replace("_", "-")
