"""What the command line knows about a subcommand and about a benchmark.

Both sides register theirs in the entry-point groups below, so that the controller and the engine
share one command without importing each other.
"""

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

COMMAND_GROUP = "rooftune.commands"
BENCH_GROUP = "rooftune.benches"
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised where Ctrl-C would be."""


def exit_code_of(stop: KeyboardInterrupt) -> int:
    """128 and the number of the signal, as a shell has it."""
    return EXIT_TERMINATED if isinstance(stop, Terminated) else EXIT_INTERRUPTED


@dataclass(frozen=True)
class Command:
    """One subcommand. Write ``help`` as a plain string literal: the overview reads it without importing the module.

    add_arguments: adds the flags to a fresh parser; run: does the work and returns the exit code
    (0 done, 1 refused or infeasible, 2 usage or input, 3 unreachable, ``exit_code_of`` what stopped it when it ends
    with what there was) or raises a ``RooftuneError``. What serves until it is told to end, ends with 0 when it is.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Figure:
    """One measured figure of a benchmark, in ``unit``.

    baseline: what it is compared with, in the same unit; None when there is nothing to compare with.
    ratio: value / baseline unless the bench states another one; None without a baseline.
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


# A bench gets ``short`` (True: seconds, for every run of the tests; False: the full measurement).
Bench = Callable[[bool], Iterable[Figure]]
