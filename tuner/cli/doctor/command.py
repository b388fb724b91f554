"""``rooftune doctor``: what stands in the way, a line each with its remedy. It changes nothing."""

import argparse
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rooftune.policies.commands import Command
from rooftune.policies.errors import InputError, RooftuneError
from rooftune.tuner.cli.controller.client import add_face_flag, add_state_flags, ask, read_config, state_folder
from rooftune.tuner.cli.doctor.engine import Place, engine_findings
from rooftune.tuner.cli.doctor.env import env_findings
from rooftune.tuner.cli.doctor.finding import Check, Finding, bad, exit_code, note, ok
from rooftune.tuner.cli.flags.values import add_value, flag_of, parse_duration, parse_url
from rooftune.tuner.clock import Clock, SystemClock
from rooftune.tuner.config import CadenceSection, Config, EngineSection
from rooftune.tuner.control.state.store import StateFile
from rooftune.tuner.files import shown_path
from rooftune.tuner.ports.http import Timeouts
from rooftune.tuner.ports.vllm.env import VARIABLE, read_env

SCHEMA = "rooftune.doctor"
_CYCLE_S = CadenceSection().cycle_s
_TIMEOUT_S: float = EngineSection.model_fields["timeout_s"].default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``doctor``."""
    parser.add_argument("--json", action="store_true", help="one JSON object")
    engine = parser.add_argument_group("an engine")
    add_value(engine, "--engine", parse_url, "URL", "its address: http, https or unix:/PATH")
    engine.add_argument("--token-file", metavar="FILE", help="its tuning token")
    engine.add_argument("--ca-file", metavar="FILE", help="certificates (PEM) to trust for https")
    add_value(engine, "--timeout", parse_duration, "TIME", f"longest wait for one answer (default: {_TIMEOUT_S:g}s)")
    env = parser.add_argument_group("a vLLM environment")
    env.add_argument("--vllm-env", metavar="DIR", help="the folder of the environment that vLLM runs in")
    env.add_argument(
        "--vllm-plugins", metavar="NAMES", help=f"{VARIABLE} of the server now (default: the variable of this shell)"
    )
    add_state_flags(parser)
    add_face_flag(parser, "a running controller's pages, for its latest signals")


def run(arguments: argparse.Namespace) -> int:
    """Look, print, and end with the worst of what was found."""
    config = read_config(arguments)
    env = None if arguments.vllm_env is None else read_env(Path(arguments.vllm_env))
    in_force = os.environ.get(VARIABLE) if arguments.vllm_plugins is None else arguments.vllm_plugins
    findings = [] if env is None else list(env_findings(env, in_force))
    findings += _findings(arguments, config, SystemClock())
    code = exit_code(findings)
    line = None if env is None else f"{VARIABLE}={','.join(env.allowlist(in_force))}"
    if arguments.json:
        rows = [
            {"mark": one.mark.value, "check": one.check.value, "text": one.text, "remedy": one.remedy}
            for one in findings
        ]
        print(json.dumps({"schema": SCHEMA, "version": 1, "exit_code": code, "findings": rows, "plugins_line": line}))
    else:
        print("\n".join(found.line() for found in findings))
        if line is not None:
            print(line)
    return code


def _findings(arguments: argparse.Namespace, config: Config | None, clock: Clock) -> Iterator[Finding]:
    place = _place(arguments, config)
    controller = arguments.face is not None or arguments.state is not None or config is not None
    if place is None and arguments.vllm_env is None and not controller:
        raise InputError(
            "nothing to look at; give --engine URL, --vllm-env DIR, --config FILE, --state DIR or --face URL"
        )
    if place is not None:
        yield from _open_to_all(place.token_file)
        yield from engine_findings(place, clock)
    if controller:
        yield from controller_findings(arguments, config)


def _place(arguments: argparse.Namespace, config: Config | None) -> Place | None:
    """What a flag says wins over the configuration."""
    engine = None if config is None else config.engine
    url = arguments.engine or (engine.url if engine else None)
    if url is None:
        for flag in ("token_file", "ca_file", "timeout"):
            if getattr(arguments, flag) is not None:
                raise InputError(f"{flag_of(flag)} goes with --engine URL; give it too")
        return None
    token = arguments.token_file or (engine.token_file if engine else None)
    authority = arguments.ca_file or (engine.ca_file if engine else None)
    total_s = arguments.timeout or (engine.timeout_s if engine else _TIMEOUT_S)
    return Place(
        url=url,
        token_file=None if token is None else Path(token),
        ca_file=None if authority is None else Path(authority),
        timeouts=Timeouts(connect_s=min(2.0, total_s), total_s=total_s),
        cycle_s=_CYCLE_S if config is None else config.cadence.cycle_s,
    )


def _open_to_all(token_file: Path | None) -> Iterator[Finding]:
    """A user who can read the token can set the engine's knobs. A missing file is reported when it is used."""
    with suppress(OSError):
        if token_file is not None and token_file.stat().st_mode & stat.S_IROTH:
            who = f"token file {shown_path(token_file)} can be read by every user here"
            yield note(Check.TOKEN, who, "chmod o-r it, unless this is a container with one user")


def controller_findings(arguments: argparse.Namespace, config: Config | None) -> Iterator[Finding]:
    """What a running controller saw last: its signals stand in its state and on its pages."""
    try:
        if arguments.face is not None:
            last = ask(arguments.face, "/status").get("last")
        else:
            with StateFile.visit(state_folder(arguments, config)) as state:
                last = next((one.model_dump(mode="json") for one in state.last(1)), None)
    except InputError as error:
        if arguments.face is not None or arguments.state is not None:
            raise
        yield note(Check.CONTROLLER, f"none has run yet: {error}")
        return
    except RooftuneError as error:
        yield bad(Check.CONTROLLER, str(error), exit_code=error.exit_code)
        return
    if not isinstance(last, dict):
        yield note(Check.CONTROLLER, "no cycle has been written down yet")
        return
    yield ok(Check.CONTROLLER, f"cycle {last.get('number')}: {last.get('action')}, {last.get('reason')}")
    for part in last.get("signals") or ():
        code = str(part.get("code"))
        yield note(Check.SIGNAL, f"{code} (of the controller)", f"see {code} in the runbook")


COMMAND = Command(
    "doctor", "check an engine, a vLLM environment or a controller and says what to do", add_arguments, run
)
