"""``rooftune explain N``: why cycle N did what it did, in five plain lines."""

import argparse
from functools import partial

from rooftune.policies.commands import Command
from rooftune.policies.errors import InputError, RefusedError
from rooftune.tuner.cli.controller.client import add_state_flags, visit_state
from rooftune.tuner.cli.flags.values import parse_count
from rooftune.tuner.control.explain.explain import explain, knobs
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.state.store import StateFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``explain``."""
    number = partial(parse_count, what="N")
    parser.add_argument("number", type=number, metavar="N", nargs="?", help="number of the cycle (default: the latest)")
    add_state_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Five lines. 1: nothing has been written down for it yet; 2: there is no such cycle."""
    with visit_state(arguments) as state:
        record = _record(state, arguments.number)
    for line in explain(record):
        print(line)
    return 0


def _record(state: StateFile, number: int | None) -> CycleRecord:
    latest = state.last(1)
    record = state.get(number) if number is not None else latest[0] if latest else None
    if record is not None:
        return record
    if number is None:
        raise RefusedError(f"no cycle has been written down in {str(state.path)!r} yet; wait for the first one")
    for push in state.unfinished():
        if push.number == number:
            raise RefusedError(
                f"cycle {number} was never written down: the controller ended after it had noted a push of "
                f"{knobs(push.changes)}; the lease took care of the engine"
            )
    kept = f"the latest is {latest[0].number}" if latest else "there is none yet"
    raise InputError(f"there is no cycle {number} in {str(state.path)!r}; {kept}")


COMMAND = Command("explain", "tell in five lines why a cycle did what it did", add_arguments, run)
