"""``rooftune pause``, ``resume``, ``revert``: by the state folder, a controller's page, or straight at the engine."""

import argparse
import os
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal

from rooftune.policies import wire
from rooftune.policies.commands import Command
from rooftune.policies.errors import InputError, RefusedError
from rooftune.tuner.cli.controller.client import add_face_flag, add_state_flags, ask, read_config, state_folder
from rooftune.tuner.cli.flags.values import add_value, parse_duration, parse_url
from rooftune.tuner.clock import Clock, SystemClock
from rooftune.tuner.config import Config
from rooftune.tuner.control.state import operator
from rooftune.tuner.control.state.operator import OperatorRequest
from rooftune.tuner.control.state.store import StateFile, holder
from rooftune.tuner.ports.http import HttpPort

MAX_REASON = 200
ENGINE_TOKEN = "ROOFTUNE_ENGINE_TOKEN_FILE"


def add_request_flags(parser: argparse.ArgumentParser, *, engine: bool) -> None:
    """Flags of a command that asks for something; engine: also straight at the engine."""
    add_value(parser, "--reason", parse_reason, "TEXT", "why, for logs and history", default="by hand")
    add_state_flags(parser)
    group = parser.add_argument_group("from elsewhere")
    where = group.add_mutually_exclusive_group()
    add_face_flag(where, "ask a controller over HTTP instead (needs --token-file)")
    if engine:
        add_value(where, "--engine", parse_url, "URL", "straight at the engine: no controller needed")
    group.add_argument("--token-file", metavar="FILE", help="bearer token of the controller or of the engine asked")


def actor() -> str:
    """Who types the command, as far as the environment tells."""
    name = os.environ.get("LOGNAME") or os.environ.get("USER") or f"uid-{os.getuid()}"
    return "operator/" + "".join(letter for letter in name if letter.isprintable())[:50]


def parse_reason(text: str, what: str) -> str:
    """One printable line."""
    text = text.strip()
    if not text or not text.isprintable() or len(text) > MAX_REASON:
        raise InputError(f"{what} is {text[:40]!r}, must be one line of 1 to {MAX_REASON} characters; shorten it")
    return text


class Desk:
    """The state folder that a request goes to. pid: of the controller that runs on it, None when none does."""

    def __init__(self, arguments: argparse.Namespace, clock: Clock | None = None) -> None:
        self.config: Config | None = read_config(arguments)
        self.folder: Path = state_folder(arguments, self.config)
        self.clock = clock or SystemClock()
        self.pid = holder(self.folder)

    def write(self, act: Callable[[StateFile, str, str, float], OperatorRequest], reason: str) -> OperatorRequest:
        """Leave the request in the folder, whether or not a controller runs."""
        with StateFile.visit(self.folder, self.clock, create=True) as state:
            return act(state, actor(), reason, self.clock.wall_s())

    def note_done(self, request: OperatorRequest) -> None:
        """The request was done straight at the engine: the next controller need not do it again.

        Unless an earlier revert still waits for that controller: it blocks the engine, and what ends the block must
        come after it.
        """
        with StateFile.visit(self.folder, self.clock) as state:
            revert, _ = operator.pending(state)
            if revert is None or revert.id == request.id:
                operator.mark_done(state, request)

    def wait_done(self, request: OperatorRequest, wait_s: float) -> bool:
        """Whether the controller did it within ``wait_s`` seconds."""
        until_s = self.clock.now_s() + wait_s
        with StateFile.visit(self.folder, self.clock) as state:
            while not operator.is_done(state, request):
                if self.clock.now_s() >= until_s or holder(self.folder) is None:
                    return operator.is_done(state, request)
                self.clock.sleep(0.25)
        return True


def at_engine(
    command: Literal["revert", "resume"],
    reason: str,
    url: str,
    token_file: str | Path | None,
    ca_file: Path | None = None,
) -> str:
    """Straight at the engine; what came of it in words. Without a token file, that of ROOFTUNE_ENGINE_TOKEN_FILE.

    revert: boot setting now, pushes blocked. resume: pushes allowed again. Raises PortError and RefusedError.
    """
    path = token_file or os.environ.get(ENGINE_TOKEN) or None
    with closing(HttpPort(url, None if path is None else Path(path), ca_file=ca_file)) as port:
        if command == "revert":
            answer = port.revert(wire.RevertRequest(actor=actor(), reason=reason, block=True))
        else:
            answer = port.resume(wire.ResumeRequest(actor=actor(), reason=reason))
    if isinstance(answer, wire.Refusal):
        raise RefusedError(f"{port.address} refused ({answer.code}): {answer.message}")
    if command == "revert":
        return f"{port.address}: boot setting in force from step {answer.effective_from_step}"
    return f"{port.address}: pushes are allowed again (revision {answer.revision})"


REVERT_EPILOG = """--engine needs no controller. With --config and no running controller, revert goes straight to the
engine too. exit codes: 0 done, 1 refused or no controller to do it, 2 usage or input, 3 no answer in time"""


def pause(arguments: argparse.Namespace) -> int:
    """Leave the flag; without a running controller the next one begins paused."""
    reason = arguments.reason
    if arguments.face is not None:
        ask(arguments.face, "/pause", arguments.token_file, {"actor": actor(), "reason": reason})
        print("paused; go on with: rooftune resume --face URL")
        return 0
    desk = Desk(arguments)
    desk.write(operator.pause, reason)
    who = f"the controller (pid {desk.pid})" if desk.pid else "no controller runs; the next one"
    print(f"paused: {who} pushes nothing until: rooftune resume")
    return 0


PAUSE = Command("pause", "let the controller watch only, until resume", partial(add_request_flags, engine=False), pause)


def resume(arguments: argparse.Namespace) -> int:
    """At the controller, or straight at an engine that a revert has blocked."""
    reason = arguments.reason
    if arguments.engine is not None:
        print(at_engine("resume", reason, arguments.engine, arguments.token_file))
        return 0
    if arguments.face is not None:
        ask(arguments.face, "/resume", arguments.token_file, {"actor": actor(), "reason": reason})
        print("asked; the controller resumes in its next cycle")
        return 0
    desk = Desk(arguments)
    request = desk.write(operator.resume, reason)
    if desk.pid:
        print(f"resumed: the controller (pid {desk.pid}) may push again from its next cycle on")
    elif desk.config is not None:
        engine = desk.config.engine
        done = at_engine("resume", reason, engine.url, arguments.token_file or engine.token_file, engine.ca_file)
        desk.note_done(request)
        print(f"resumed: {done}")
    else:
        print("resumed: no controller runs; the next one begins without a pause and lifts the block that is known here")
    return 0


RESUME = Command(
    "resume", "allow pushes again after a pause or a revert", partial(add_request_flags, engine=True), resume
)


def _revert_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``revert``."""
    parser.epilog = REVERT_EPILOG
    add_request_flags(parser, engine=True)
    wait = "longest wait for the controller (default 60s)"
    add_value(parser, "--wait", parse_duration, "TIME", wait, default=60.0)


def revert(arguments: argparse.Namespace) -> int:
    """Straight at the engine, over a controller's page, or by the state folder."""
    reason = arguments.reason
    if arguments.engine is not None:
        done = at_engine("revert", reason, arguments.engine, arguments.token_file)
        token = "" if arguments.token_file is None else f" --token-file {arguments.token_file}"
        print(f"reverted: {done}; blocked until: rooftune resume --engine {arguments.engine}{token}")
        return 0
    if arguments.face is not None:
        ask(arguments.face, "/revert", arguments.token_file, {"actor": actor(), "reason": reason})
        print("asked; the controller reverts in its next cycle and pushes nothing until: rooftune resume")
        return 0
    return _revert_by_folder(Desk(arguments), arguments, reason)


def _revert_by_folder(desk: Desk, arguments: argparse.Namespace, reason: str) -> int:
    request = desk.write(operator.revert, reason)
    if desk.pid is not None:
        if desk.wait_done(request, arguments.wait):
            print(f"reverted by the controller (pid {desk.pid}); blocked until: rooftune resume")
            return 0
        late = f"the controller (pid {desk.pid}) has not done it within {arguments.wait:g} s"
        print(f"{late}; straight at the engine: rooftune revert --engine URL")
        return 3
    if desk.config is not None:
        engine = desk.config.engine
        done = at_engine("revert", reason, engine.url, arguments.token_file or engine.token_file, engine.ca_file)
        desk.note_done(request)
        print(f"reverted: {done}; blocked until: rooftune resume --config {arguments.config}")
        return 0
    print(
        "no controller runs: the next one begins blocked and reverts first; to do it now: rooftune revert --engine URL"
    )
    return 1


REVERT = Command("revert", "take the engine back to its boot setting and block pushes", _revert_flags, revert)
