"""``rooftune simulate``: replay traffic under one setting."""

import argparse
import sys

from policies.commands import Command
from tuner.cli.engine_flags import add_engine_flags, read_engine
from tuner.cli.progress import progress_to_stderr, warm_twin
from tuner.cli.setting_flags import add_setting_flags, read_setting
from tuner.cli.target_flags import add_target_flags, read_slo
from tuner.cli.traffic_flags import add_model_flag, add_traffic_flags, read_model, read_traffic
from tuner.report.build import engine_part, traffic_part
from tuner.report.replays import one_setting, record_line, replay_record, table_text, what_was_replayed
from tuner.search.evaluation import Role
from tuner.search.objective import evaluate

_EXAMPLE = """example:
  rooftune simulate --traffic trace.csv --step-model 8b-2tbs --step-tokens 512 --chunk-cap 128 --gap-p99 30ms"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``simulate``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
    add_traffic_flags(parser)
    add_model_flag(parser)
    add_setting_flags(parser)
    add_target_flags(parser)
    add_engine_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    """Replay and print. Raises InputError before the replay."""
    slo, _ = read_slo(args, needed=False)
    model, model_part = read_model(args)
    traffic, changes = read_traffic(args)
    engine, traffic, caching, sources = read_engine(args, traffic)
    setting = read_setting(args, engine, model)
    with progress_to_stderr(args.quiet) as progress:
        warm_twin(progress)
        row, _ = evaluate(traffic, engine, setting, model, slo, Role.CURRENT)
    record = replay_record(
        [row],
        slo,
        traffic=traffic_part(traffic, changes),
        step_model=model_part,
        engine=engine_part(engine, caching, sources),
    )
    if args.json:
        sys.stdout.write(record_line(record))
        return 0
    table = one_setting(record)
    print(f"{what_was_replayed(record)}\n{table.title}\n\n{table_text(table)}")
    return 0


COMMAND = Command("simulate", "replay traffic under one setting and print what users would see", add_arguments, run)
