"""``rooftune history``: cycles and pushes, with what was predicted and what was observed."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial

from rooftune.policies.commands import Command
from rooftune.tuner.cli.controller.client import add_state_flags, visit_state
from rooftune.tuner.cli.flags.values import add_value, parse_count
from rooftune.tuner.control.explain.explain import knobs, points, share
from rooftune.tuner.control.outcome import CycleRecord, Knobs
from rooftune.tuner.control.state.store import PushRow
from rooftune.tuner.report.tables import aligned

SCHEMA = "rooftune.history"
MOST = 100_000
_LEFT_CYCLES = frozenset({1, 2, 3, 6})
_LEFT_PUSHES = frozenset({1, 5, 6})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``history``."""
    add_value(parser, "--last", partial(parse_count, high=MOST), "N", "cycles to look back (default 100)", default=100)
    parser.add_argument("--json", action="store_true", help="one JSON object with whole records")
    add_state_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print both tables, newest last; holds in a row for one reason share a line."""
    count = arguments.last
    with visit_state(arguments) as state:
        records = state.last(count)[::-1]
        oldest = records[0].number if records else 0
        pushes = [push for push in state.pushes(count) if push.number >= oldest][::-1]
    if arguments.json:
        print(json.dumps(_document(records, pushes)))
        return 0
    lines = [*_cycles(records), "", *_pushes(pushes)] if records else ["no cycle has been written down yet"]
    print("\n".join(lines))
    return 0


def _document(records: Sequence[CycleRecord], pushes: Sequence[PushRow]) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "version": 1,
        "cycles": [record.model_dump(mode="json", by_alias=True) for record in records],
        "pushes": [asdict(push) for push in pushes],
    }


def _cycles(records: Sequence[CycleRecord]) -> list[str]:
    runs: list[list[CycleRecord]] = []
    for record in records:
        if runs and _alike(runs[-1][-1], record):
            runs[-1].append(record)
        else:
            runs.append([record])
    head = ("cycle", "at", "action", "reason", "in targets", "good/s", "setting")
    return aligned([head, *map(_cycle_row, runs)], _LEFT_CYCLES)


def _alike(before: CycleRecord, after: CycleRecord) -> bool:
    """Holds for one reason with nothing between them that a person would look for: of a trial, one turn."""
    turns = [(one.verify.arm, one.verify.block) if one.verify is not None else None for one in (before, after)]
    same_turn = turns[0] == turns[1] and (turns[0] is None or turns[0][0] is not None)
    quiet = same_turn and before.pushed is None and after.pushed is None
    same = before.action is after.action and before.reason is after.reason and before.mode == after.mode
    return quiet and same and before.would_push == after.would_push


def _cycle_row(run: Sequence[CycleRecord]) -> tuple[str, ...]:
    first, latest = run[0], run[-1]
    number = f"{first.number}" if len(run) == 1 else f"{first.number}-{latest.number}"
    seen = latest.observed
    attainment = "" if seen is None or seen.attainment is None else share(seen.attainment)
    goodput = "" if seen is None or seen.goodput_rps is None else f"{seen.goodput_rps:.3g}"
    setting = ""
    if latest.pushed is not None:
        setting = _short(latest.pushed)
    elif latest.would_push is not None:
        setting = f"would push {_short(latest.would_push)}"
    action = latest.action.value + (f" ({latest.verify.verdict})" if latest.verify is not None else "")
    return (number, _at(first.started_at_s), action, latest.reason.value, attainment, goodput, setting)


def _pushes(pushes: Sequence[PushRow]) -> list[str]:
    if not pushes:
        return ["no pushes in these cycles"]
    head = ("push", "at", "predicted", "observed", "+/-", "verdict", "setting")
    rows = [
        (
            str(push.number),
            _at(push.noted_at_s),
            _points(push.predicted_gain),
            _points(push.observed_gain),
            "" if push.half_width is None else points(push.half_width)[1:],
            _verdict(push),
            _short(push.changes),
        )
        for push in pushes
    ]
    return ["pushes, gains in points of the share within the targets:", *aligned([head, *rows], _LEFT_PUSHES)]


def _verdict(push: PushRow) -> str:
    if push.verdict is not None:
        return f"{push.verdict} in {push.verified_in}"
    if push.ended is None:
        return "never written down"
    return "" if push.ended in ("ok", "step_limited") else push.ended


def _short(setting: Knobs) -> str:
    return knobs(setting).replace("token budget", "budget").replace(" tokens", "")


def _points(value: float | None) -> str:
    return "" if value is None else points(value)


def _at(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


COMMAND = Command("history", "list cycles and pushes with what was predicted and observed", add_arguments, run)
