"""What the twin replays, from the flags of every command that uses it: traffic, step model, engine and targets."""

import argparse

from rooftune.tuner.cli.flags.engine import add_engine_flags, read_engine
from rooftune.tuner.cli.flags.target import add_target_flags, read_slo
from rooftune.tuner.cli.flags.traffic import add_model_flag, add_traffic_flags, read_model, read_traffic
from rooftune.tuner.report.build import DescribedCase, traffic_part


def add_case_flags(parser: argparse.ArgumentParser, *, needed: bool = True) -> None:
    """needed: whether traffic and step model must be given."""
    add_traffic_flags(parser, needed=needed)
    add_model_flag(parser, needed=needed)
    add_target_flags(parser)
    add_engine_flags(parser)


def read_case(args: argparse.Namespace, *, targets_needed: bool = True) -> DescribedCase:
    """Raises InputError for a file or values that do not go together."""
    slo = read_slo(args, needed=targets_needed)
    model, model_part = read_model(args.step_model)
    traffic, changes = read_traffic(args)
    engine, traffic, engine_part = read_engine(args, traffic)
    return DescribedCase(
        traffic,
        engine,
        model,
        slo,
        traffic_part=traffic_part(traffic, changes),
        model_part=model_part,
        engine_part=engine_part,
    )
