"""``rooftune sweep``: replay traffic under every budget and chunk cap of a grid."""

import argparse
import sys
from functools import partial

from rooftune.policies.commands import Command
from rooftune.policies.errors import InputError
from rooftune.policies.request import Setting
from rooftune.tuner.cli.flags.case import add_case_flags, read_case
from rooftune.tuner.cli.flags.engine import MAX_ENGINE_TOKENS
from rooftune.tuner.cli.flags.values import add_value, parse_count
from rooftune.tuner.cli.output import progress_to_stderr, warm_twin
from rooftune.tuner.record import json_text
from rooftune.tuner.report.replays import many_settings, replay_record, what_was_replayed
from rooftune.tuner.search.evaluation import Role
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.sim.engine import check_setting

BUDGETS = "256:2048:128,4096,8192"
MOST_SETTINGS = 100_000
_EXAMPLE = """example:
  rooftune sweep --traffic trace.csv --step-model 8b-2tbs --budgets 256:1024:64,2048 --caps 0,64,128 \\
      --ttft-p99 2s --gap-p99 30ms

LIST is values and ranges FIRST:LAST:STEP, LAST included when a step meets it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``sweep``."""
    parser.epilog = _EXAMPLE
    add_case_flags(parser)
    grid = parser.add_argument_group("grid")
    budgets = f"token budgets (default {BUDGETS}, up to the ceiling)"
    add_value(grid, "--budgets", partial(parse_counts, low=1), "LIST", budgets)
    caps = "chunk caps, 0 = none (default 0)"
    add_value(grid, "--caps", partial(parse_counts, low=0), "LIST", caps, default=[0])
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with one row per setting, nothing else"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")


def parse_counts(text: str, what: str, *, low: int) -> list[int]:
    """``256:1024:64,2048`` -> ascending, each once. Raises InputError."""
    found: set[int] = set()
    for part in text.split(","):
        numbers = part.split(":")
        if len(numbers) == 1:
            found.add(parse_count(part, what, low=low, high=MAX_ENGINE_TOKENS))
            continue
        if len(numbers) != 3:
            raise InputError(f"{what} has {part!r}, must be a number or FIRST:LAST:STEP; write 256:1024:64")
        first, last = (parse_count(number, what, low=low, high=MAX_ENGINE_TOKENS) for number in numbers[:2])
        step = parse_count(numbers[2], f"step of {what}", high=MAX_ENGINE_TOKENS)
        if last < first or (last - first) // step >= MOST_SETTINGS:
            raise InputError(f"{what} has {part!r}, must ascend in at most {MOST_SETTINGS} steps; correct it")
        found.update(range(first, last + 1, step))
    return sorted(found)


def run(args: argparse.Namespace) -> int:
    """Replay the grid and print it. Raises InputError before the first replay."""
    budgets: list[int] = args.budgets or parse_counts(BUDGETS, "--budgets", low=1)
    settings = len(budgets) * len(args.caps)
    if settings > MOST_SETTINGS:
        raise InputError(f"the grid has {settings} settings, must be at most {MOST_SETTINGS}; thin it")
    case = read_case(args)
    engine = case.engine
    if args.budgets is None:
        # The default list is ours, so it bends to the engine; a list that was given does not.
        budgets = [b for b in budgets if engine.sequence_ceiling <= b <= engine.boot.ceiling_tokens] or [
            engine.boot.ceiling_tokens
        ]
    grid = [
        Setting(step_tokens=budget, chunk_cap_tokens=cap, max_running=engine.sequence_ceiling)
        for cap in args.caps
        for budget in budgets
    ]
    for setting in grid:
        check_setting(setting, engine)
    rows = []
    with progress_to_stderr(args.quiet) as progress:
        warm_twin(progress)
        for done, setting in enumerate(grid, 1):
            rows.append(evaluate(case, setting, Role.SWEEP)[0])
            progress("sweep", done, len(grid))
    record = replay_record(rows, case)
    if args.json:
        sys.stdout.write(json_text(record))
        return 0
    table = many_settings(record)
    print(f"{what_was_replayed(record)}\n\n{table.text()}\n\n{table.note}")
    return 0


COMMAND = Command("sweep", "replay traffic under a grid of budgets and chunk caps", add_arguments, run)
