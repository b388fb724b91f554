"""``rooftune demo``: an engine, mixed traffic and the live controller on one machine, watched for a few minutes.

Three commands of ours run as processes: ``serve``, ``replay`` and ``run --mode live``. Nothing is left running.
"""

import argparse
import contextlib
import math
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from rooftune.policies.commands import Command
from rooftune.policies.errors import InputError, UnreachableError
from rooftune.policies.step_time import StepModel
from rooftune.tuner.bench.children import (
    Child,
    Children,
    Event,
    Follower,
    Served,
    hangup_is_interrupt,
    one_core_left,
    serve,
)
from rooftune.tuner.bench.rounds_client import IDS
from rooftune.tuner.cli.demo.plan import (
    WATCH_REQUESTS,
    Bounds,
    bounds_of,
    first_model,
    measure,
    plan_of,
    traffic_csv,
    unsteadiness,
)
from rooftune.tuner.cli.demo.story import (
    asked_for,
    closing,
    happened,
    opening,
    settled,
    status,
)
from rooftune.tuner.cli.flags.values import add_value, parse_duration
from rooftune.tuner.cli.output import Progress, progress_to_stderr, warm_twin
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.state.store import StateFile
from rooftune.tuner.files import locked, shown_path, write_text
from rooftune.tuner.observe.rows import RequestRows, StepRows
from rooftune.tuner.ports.http import HttpPort

BOOT_TOKENS = 2048
MAX_RUNNING = 32
POLL_S = 0.2
# Longest look at the default: a machine on which so few requests end is too busy for a demo.
WATCH_S = 60.0
MOST_RECORDS = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``demo``."""
    parser.add_argument("--model", required=True, metavar="DIR", help="folder with a model, or fake:8b-2tbs")
    parser.add_argument("--config", default="deploy/demo.yaml", metavar="FILE", help="default: %(default)s")
    parser.add_argument("--out", default="report", metavar="DIR", help="where the report goes (default: %(default)s)")
    parser.add_argument(
        "--work", default="build/demo", metavar="DIR", help="logs, traffic, state (default: %(default)s)"
    )
    add_value(parser, "--span", parse_duration, "TIME", "longest time with traffic (default: 300s)", default=300.0)
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(arguments: argparse.Namespace) -> int:
    """0: a push proved itself, or the traffic ran to its end; whatever it came to is printed."""
    span_s = arguments.span
    template = _template(arguments.config)
    work = Path(arguments.work)
    with (
        _alone(work),
        progress_to_stderr(arguments.quiet) as progress,
        hangup_is_interrupt(),
        Children(work / "logs") as children,
    ):
        _clear(work)
        warm_twin(progress)
        progress.say(f"starting an engine on {arguments.model} ...")
        served = serve(children, _serve_words(arguments.model, work), one_core_left())
        model, model_tokens = first_model(served)
        with contextlib.closing(HttpPort(served.tuning, work / "token")) as port:
            speed = measure(served, model, port)
            plan = plan_of(speed, BOOT_TOKENS, model_tokens)
            progress.say(opening(speed, plan, served.base, model))
            write_text(work / "traffic.csv", traffic_csv(plan, span_s, seed=1))
            until_s = time.monotonic() + span_s
            client = children.start("client", _replay_words(work, served))
            bounds = watch_default(port, client, progress)
        progress.say(asked_for(bounds))
        write_text(work / "rooftune.yaml", yaml.safe_dump(_config(template, bounds, served)))
        controller = children.start(
            "controller", ["run", "--config", str(work / "rooftune.yaml"), "--report", arguments.out]
        )
        watch(controller, client, until_s, progress)
        progress.close()
        records = _records(work / "state")
        pace = _pace(served, work, records)
        controller.stop()
        client.stop()
    print(closing(records, pace))
    print(
        f"\nreport: {shown_path(str(Path(arguments.out) / 'live.md'))}; logs and every cycle: {shown_path(str(work))}"
    )
    print(f"rooftune explain --state {work / 'state'}   tells why the last cycle did what it did")
    return 0


def watch_default(port: HttpPort, client: Child, progress: Progress) -> Bounds:
    """The targets, from what requests get at the default. Raises RefusedError when hardly any come to their end."""
    after = port.requests_after(-1).next  # the probes
    until_s = time.monotonic() + WATCH_S
    while True:
        rows = RequestRows.from_wire(port.requests_after(after))
        progress("watching the default, requests", min(len(rows), WATCH_REQUESTS), WATCH_REQUESTS)
        if len(rows) >= WATCH_REQUESTS or client.ended or time.monotonic() > until_s:
            return bounds_of(rows)
        time.sleep(POLL_S)


def watch(controller: Child, client: Child, until_s: float, progress: Progress) -> list[Event]:
    """Tell what happens until a push has proved itself and nothing better is found, or the traffic ends."""
    follower, events = Follower(controller.err), list[Event]()
    while time.monotonic() < until_s and not client.ended:
        if controller.ended:
            raise UnreachableError(f"the controller ended: {controller.last_words()}; see {controller.err}")
        for event in follower.new():
            events.append(event)
            line = happened(event)
            if line is not None:
                progress.say(line)
            if sys.stderr.isatty() or len(events) < 2 or event["reason"] != events[-2]["reason"]:
                progress(status(event), 1, 1)
            if settled(events):
                return events
        time.sleep(POLL_S)
    return events


def _pace(served: Served, work: Path, records: list[CycleRecord]) -> float:
    """How far the machine's pace moved, by the engine's latest steps; NaN when they do not tell."""
    fits = [record.fit for record in records if record.fit is not None]
    try:
        with contextlib.closing(HttpPort(served.tuning, work / "token")) as port:
            steps = StepRows.from_wire(port.steps_after(-1))
    except UnreachableError:
        return math.nan
    return unsteadiness(steps, StepModel(**fits[-1].coefficients)) if fits else math.nan


def _template(path: str) -> dict[str, object]:
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(
            f"--config {shown_path(path)} cannot be read: {error}; run this in the project's folder"
        ) from None
    if not isinstance(found, dict):
        raise InputError(f"--config {shown_path(path)} must hold keys; see deploy/demo.yaml")
    return found


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[None]:
    """The folder, made when missing, for this demo alone. Raises InputError where it cannot be, or another one runs."""
    with contextlib.ExitStack() as held:
        try:
            work.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(work, wait=False))
        except BlockingIOError:
            raise InputError(f"--work {shown_path(work)} is in use by another demo; name another folder") from None
        except OSError as error:
            raise _unusable(work, error) from None
        yield


def _unusable(work: Path, error: OSError) -> InputError:
    return InputError(f"--work {shown_path(work)}: {error.strerror}; choose a folder of yours")


def _clear(path: Path) -> None:
    """Nothing of an earlier demo that this one would read; a fresh token."""
    try:
        for stale in sorted((path / "state").glob("*")):
            stale.unlink()
        token = path / "token"
        token.unlink(missing_ok=True)
        with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(16) + "\n")
    except OSError as error:
        raise _unusable(path, error) from None


def _serve_words(model: str, work: Path) -> list[str]:
    knobs = ["--max-step-tokens", str(BOOT_TOKENS), "--max-running", str(MAX_RUNNING)]
    return ["--model", model, *knobs, "--tuning-token-file", str(work / "token"), "--drain", "3"]


def _replay_words(work: Path, served: Served) -> list[str]:
    traffic, out = str(work / "traffic.csv"), str(work / "replay.json")
    return ["replay", "--traffic", traffic, "--url", served.base, "--vocab", str(IDS[1]), "--quiet", "--out", out]


def _config(template: dict[str, object], bounds: Bounds, served: Served) -> dict[str, object]:
    targets = [
        {"metric": "ttft", "quantile": 0.9, "bound": f"{bounds.ttft_s:g}s"},
        {"metric": "longest_gap", "quantile": 0.9, "bound": f"{bounds.gap_s:g}s"},
    ]
    engine = {"url": served.tuning, "name": "demo", "token_file": "token"}
    return {**template, "engine": engine, "targets": targets, "state": "state"}


def _records(state: Path) -> list[CycleRecord]:
    with StateFile.visit(state) as file:
        return file.last(MOST_RECORDS)[::-1]


COMMAND = Command(
    "demo", "an engine, traffic and the live controller on this machine, for a few minutes", add_arguments, run
)
