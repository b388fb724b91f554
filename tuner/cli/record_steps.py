"""``rooftune record-steps``: the steps that an engine ran, from its tuning protocol into a file for ``fit``."""

import argparse
import sys
from contextlib import closing
from pathlib import Path

from rooftune.policies.commands import Command, exit_code_of
from rooftune.policies.errors import InputError
from rooftune.tuner.cli.flags.values import add_value, parse_duration, parse_url
from rooftune.tuner.cli.output import check_out_file
from rooftune.tuner.clock import Clock, SystemClock
from rooftune.tuner.config.tokens import read_token
from rooftune.tuner.files import shown_path
from rooftune.tuner.model.sample_file import write_steps
from rooftune.tuner.observe.protocol import ProtocolReader
from rooftune.tuner.observe.rows import StepRows
from rooftune.tuner.ports.http import HttpPort

_EXAMPLE = """example:
  rooftune record-steps --engine http://127.0.0.1:8124 --for 60s --out steps.csv
  rooftune fit --steps steps.csv --out model.json

Only reads. An engine keeps its latest steps in memory; without --for it writes these and exits.
Ctrl-C ends the wait and writes what has come so far."""
POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``record-steps``."""
    parser.epilog = _EXAMPLE
    add_value(parser, "--engine", parse_url, "URL", "where the engine serves its tuning protocol", required=True)
    parser.add_argument("--engine-token-file", metavar="FILE", help="its tuning token, where it asks for one")
    parser.add_argument("--out", required=True, metavar="FILE", help="write the steps here (CSV; gzip with .gz)")
    add_value(parser, "--for", parse_duration, "TIME", "keep recording this long, e.g. 60s", default=0.0)


def run(args: argparse.Namespace) -> int:
    """Read, write, say what was lost. 130 or 143: stopped by a signal, with what there was. Raises InputError, or
    UnreachableError for an engine that does not answer."""
    out = Path(args.out)
    check_out_file(args.out)
    token_file = None if args.engine_token_file is None else Path(args.engine_token_file)
    if token_file is not None:
        read_token(token_file)
    with closing(HttpPort(args.engine, token_file)) as port:
        rows, lost, code = record(ProtocolReader(port), SystemClock(), getattr(args, "for"))
    samples = rows.samples() if len(rows) else None
    if samples is None or not len(samples):
        raise InputError(f"{args.engine} has run no step yet; send it some traffic, or record for longer with --for")
    write_steps(out, samples)
    sizes = samples.computed_tokens
    print(
        f"{shown_path(out)}: {len(samples):,} steps of {int(sizes.min()):,} to {int(sizes.max()):,} tokens"
        + (f"; {lost:,} more had been overwritten before they were read" if lost else "")
    )
    return code


def record(reader: ProtocolReader, clock: Clock, length_s: float) -> tuple[StepRows, int, int]:
    """Steps of the engine in their order, how many had been overwritten before they could be read, and the exit code:
    0, or that of the signal which ended it early.

    length_s: how long to go on (s); 0: what there is now.
    """
    ends_s = clock.now_s() + length_s
    parts: list[StepRows] = []
    lost, code = 0, 0
    try:
        while True:
            reading = reader.read()
            if reading.restarted:
                print("the engine restarted; its earlier steps are kept", file=sys.stderr)
            parts.append(reading.steps)
            lost += reading.lost_steps
            left_s = ends_s - clock.now_s()
            if left_s <= 0.0 and not reading.behind:
                break
            if not reading.behind:
                clock.sleep(min(POLL_S, max(left_s, 0.0)))
    except KeyboardInterrupt as stop:
        if not parts:
            raise
        code = exit_code_of(stop)
    return StepRows.join(parts), lost, code


COMMAND = Command("record-steps", "record an engine's steps, for fit", add_arguments, run)
