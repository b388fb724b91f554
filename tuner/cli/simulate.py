"""``rooftune simulate``: replay traffic under one setting."""

import argparse
import sys
from pathlib import Path

from rooftune.policies.commands import Command
from rooftune.policies.errors import InputError
from rooftune.policies.request import Setting
from rooftune.policies.step_time import NAMED_MODELS, priced
from rooftune.tuner.cli.flags.case import add_case_flags, read_case
from rooftune.tuner.cli.flags.setting import add_setting_flags, read_setting
from rooftune.tuner.cli.flags.traffic import read_model, without_prefixes
from rooftune.tuner.cli.flags.values import flag_of
from rooftune.tuner.cli.output import progress_to_stderr, warm_twin
from rooftune.tuner.record import Source, json_text
from rooftune.tuner.report.build import DescribedCase, engine_part, traffic_part
from rooftune.tuner.report.replays import one_setting, replay_record, what_was_replayed
from rooftune.tuner.search.evaluation import Role
from rooftune.tuner.search.objective import judge
from rooftune.tuner.sim.engine import check_setting
from rooftune.tuner.sim.simulate_input import read_simulate_input
from rooftune.tuner.sim.twin import Change, simulate

_EXAMPLE = """example:
  rooftune simulate --traffic trace.csv --step-model 8b-2tbs --step-tokens 512 --chunk-cap 128 --gap-p99 30ms"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``simulate``."""
    parser.epilog = _EXAMPLE
    parser.add_argument("--input", metavar="FILE", help="all of it from one JSON file instead of flags")
    add_case_flags(parser, needed=False)
    add_setting_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    defaults = {name: parser.get_default(name) for name in vars(parser.parse_args([]))}
    parser.set_defaults(flag_defaults=defaults)


_Job = tuple[DescribedCase, Setting, tuple[Change, ...]]  # what is replayed, the first setting and its changes


def _from_flags(args: argparse.Namespace) -> _Job:
    for flag in ("traffic", "step_model"):
        if getattr(args, flag) is None:
            raise InputError(f"{flag_of(flag)} is missing; give it, or everything in a file with --input")
    case = read_case(args, targets_needed=False)
    return case, read_setting(args, case.engine, priced(case.model).formula), ()


def _from_file(args: argparse.Namespace) -> _Job:
    for name, default in args.flag_defaults.items():
        if name not in ("input", "json", "quiet") and getattr(args, name) != default:
            raise InputError(f"--input says everything, so {flag_of(name)} does not go with it; drop one")
    path = Path(args.input)
    given = read_simulate_input(path)
    slo = given.slo()
    setting, changes = given.settings()
    beside = str(path.parent / given.step_model)
    model, model_part = read_model(given.step_model if given.step_model in NAMED_MODELS else beside)
    traffic = given.load_traffic(path.parent)
    if not given.engine.prefix_caching:
        traffic = without_prefixes(traffic)
    engine = given.engine.engine(traffic)
    sources: dict[str, Source] = {
        shown: "given" if name in given.engine.model_fields_set else "assumed" for shown, name in _ENGINE_NAMES.items()
    }
    part = engine_part(engine, given.engine.prefix_caching, sources)
    case = DescribedCase(
        traffic, engine, model, slo, traffic_part=traffic_part(traffic, ()), model_part=model_part, engine_part=part
    )
    return case, setting, changes


_ENGINE_NAMES = {
    "ceiling_tokens": "ceiling_tokens",
    "kv_tokens": "kv_tokens",
    "block_tokens": "block_tokens",
    "max_seqs": "max_seqs",
    "prefix_caching": "prefix_caching",
    "decodes_kept_moving": "keep_decodes_moving",
}


def run(args: argparse.Namespace) -> int:
    """Replay and print. Raises InputError before the replay."""
    case, setting, changes = _from_flags(args) if args.input is None else _from_file(args)
    for wanted in (setting, *(change.setting for change in changes)):
        check_setting(wanted, case.engine)
    with progress_to_stderr(args.quiet) as progress:
        warm_twin(progress)
        bounds = case.slo.gap_bounds()
        result = simulate(case.traffic, case.engine, setting, case.model, changes=changes, gap_bounds_s=bounds)
    found = [judge(result, setting, case.slo, Role.CURRENT)]
    record = replay_record(found, case)
    if args.json:
        sys.stdout.write(json_text(record))
        return 0
    table = one_setting(record)
    changed = "".join(f"\nfrom {change.at_s:g} s on: budget {change.setting.step_tokens:,}" for change in changes)
    print(f"{what_was_replayed(record)}\n{table.title}{changed}\n\n{table.text()}")
    return 0


COMMAND = Command("simulate", "replay traffic under one setting and print what users would see", add_arguments, run)
