"""``rooftune recommend``: the setting with the most goodput under the targets, and a report."""

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rooftune.policies.commands import Command
from rooftune.policies.errors import InfeasibleError, InputError
from rooftune.tuner.cli.flags.case import add_case_flags, read_case
from rooftune.tuner.cli.flags.engine import add_current_flags, read_current
from rooftune.tuner.cli.flags.search import KNOBS, TRIALS, add_search_flags, check_search
from rooftune.tuner.cli.flags.traffic import read_draws
from rooftune.tuner.cli.output import progress_to_stderr, warm_twin
from rooftune.tuner.files import shown_path
from rooftune.tuner.record import RunRecord, json_text
from rooftune.tuner.report.build import run_record
from rooftune.tuner.report.folder import report_folder, write_report
from rooftune.tuner.report.render import summary
from rooftune.tuner.search.recommend import recommend

_EXAMPLE = """example:
  rooftune recommend --traffic trace.csv --rate-scale 1.8 --step-model 8b-2tbs \\
      --ttft-p99 2s --gap-p99 30ms --out report/

exit codes: 0 done, 1 nothing meets every target (the report is written all the same), 2 usage or input,
3 a file system did not answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``recommend``."""
    parser.epilog = _EXAMPLE
    add_case_flags(parser)
    add_current_flags(parser)
    search = parser.add_argument_group("search and output")
    add_search_flags(search)
    search.add_argument("--out", metavar="DIR", help="write index.html, report.md and report.json there")
    search.add_argument("--json", action="store_true", help="print the record (report.json) and nothing else")
    search.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    """Search, print, write. Raises InputError before the long work; 1 when nothing meets every target."""
    check_search(args)
    seed, knobs = args.seed or 0, KNOBS[args.engine]
    case = read_case(args)
    current, current_source = read_current(args, case.engine)
    if args.out is not None and not args.out.strip():
        raise InputError("--out is empty, must name a folder; check the variable that it came from")
    place: AbstractContextManager[Path | None] = nullcontext() if args.out is None else report_folder(Path(args.out))
    with place as folder:
        with progress_to_stderr(args.quiet) as progress:
            warm_twin(progress)
            found = recommend(
                case,
                current=current,
                trials=args.trials or TRIALS,
                seed=seed,
                progress=progress,
                knobs=knobs,
                draws=read_draws(args.step_model, seed),
                storage=args.storage,
                study=args.study,
            )
        record = run_record(
            found,
            case,
            knobs,
            current_source=current_source,
            profile=args.profile,
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            made_by=_version(),
        )
        written = () if folder is None else write_report(record, folder)
    _print(record, written, args.json)
    return InfeasibleError.exit_code if record.verdict == "infeasible" else 0


def _version() -> str:
    try:
        return version("rooftune")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"


def _print(record: RunRecord, written: tuple[Path, ...], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json_text(record, indent=1))
        return
    print(summary(record))
    if written:
        print(f"  report   {', '.join(shown_path(path) for path in reversed(written))}")


COMMAND = Command("recommend", "find the setting with the most goodput under your targets", add_arguments, run)
