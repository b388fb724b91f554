"""``rooftune capacity``: the highest rate that still meets every target, what breaks first and what is full there."""

import argparse
import sys

from rooftune.policies.commands import Command
from rooftune.policies.errors import InfeasibleError, InputError
from rooftune.policies.request import Setting
from rooftune.policies.step_time import priced
from rooftune.tuner.cli.flags.case import add_case_flags, read_case
from rooftune.tuner.cli.flags.engine import add_current_flags, read_current
from rooftune.tuner.cli.flags.search import KNOBS, TRIALS, add_search_flags
from rooftune.tuner.cli.flags.setting import add_setting_flags, given_knobs, read_setting
from rooftune.tuner.cli.flags.values import flag_of
from rooftune.tuner.cli.output import progress_to_stderr, warm_twin
from rooftune.tuner.record import json_text
from rooftune.tuner.report.capacity import capacity_record, capacity_text
from rooftune.tuner.search.capacity import find_capacity

_EXAMPLE = """examples:
  rooftune capacity --traffic trace.csv --step-model 8b-2tbs --ttft-p99 2s --gap-p99 30ms
  rooftune capacity --traffic trace.csv --step-model 8b-2tbs --step-tokens 512 --gap-p99 30ms

Without a setting, it searches for the best one at the highest rate. The rate is the traffic's own, faster or
slower, to within 2 %. exit codes: 0 done, 1 no rate meets every target, 2 usage or input"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``capacity``."""
    parser.epilog = _EXAMPLE
    add_case_flags(parser)
    add_setting_flags(parser)
    add_current_flags(parser)
    search = parser.add_argument_group("search (when no setting is given) and output")
    add_search_flags(search)
    search.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    search.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    """Find it and print it. Raises InputError before the long work; 1 when no rate meets every target."""
    if args.storage is not None or args.study is not None:
        raise InputError("--storage and --study belong to recommend: capacity keeps no trials; drop them")
    case = read_case(args)
    given: Setting | None = None
    if given_knobs(args):
        given = read_setting(args, case.engine, priced(case.model).formula)
        for name in ("trials", "seed", "current_budget", "current_cap"):
            if getattr(args, name) is not None:
                raise InputError(f"{flag_of(name)} does nothing with a setting of your own; drop one")
    current, _ = read_current(args, case.engine)
    with progress_to_stderr(args.quiet) as progress:
        warm_twin(progress)
        found = find_capacity(
            case,
            current=current,
            setting=given,
            knobs=KNOBS[args.engine],
            trials=args.trials or TRIALS,
            seed=args.seed or 0,
            prefix_caching=case.engine_part.prefix_caching,
            progress=progress,
        )
    record = capacity_record(found, case)
    if args.json:
        sys.stdout.write(json_text(record))
    else:
        print(capacity_text(record))
    return InfeasibleError.exit_code if record.scale is None else 0


COMMAND = Command("capacity", "find the highest rate that still meets your targets", add_arguments, run)
