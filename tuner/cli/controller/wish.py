"""What pause, resume and revert share: who asks, the state folder's flag, and the engine without a controller."""

import argparse
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from rooftune.policies import wire
from rooftune.policies.errors import InputError, RefusedError
from rooftune.tuner.cli.controller.client import add_state_flags, read_config, state_folder
from rooftune.tuner.clock import Clock, SystemClock
from rooftune.tuner.config import Config
from rooftune.tuner.control.state import operator as wishes
from rooftune.tuner.control.state.operator import Wish
from rooftune.tuner.control.state.store import StateFile, holder
from rooftune.tuner.ports.base import Port
from rooftune.tuner.ports.http import HttpPort

MAX_REASON = 200
ENGINE_TOKEN = "ROOFTUNE_ENGINE_TOKEN_FILE"


def add_wish_flags(parser: argparse.ArgumentParser, *, engine: bool) -> None:
    """Flags of a command that asks for something; engine: also straight at the engine."""
    parser.add_argument("--reason", metavar="TEXT", default="by hand", help="why, for logs and history")
    add_state_flags(parser)
    group = parser.add_argument_group("from elsewhere")
    where = group.add_mutually_exclusive_group()
    where.add_argument("--face", metavar="URL", help="ask a controller over HTTP instead (needs --token-file)")
    if engine:
        where.add_argument("--engine", metavar="URL", help="straight at the engine: no controller needed")
    group.add_argument("--token-file", metavar="FILE", help="bearer token of the controller or of the engine asked")


def actor() -> str:
    """Who types the command, as far as the environment tells."""
    name = os.environ.get("LOGNAME") or os.environ.get("USER") or f"uid-{os.getuid()}"
    return "operator/" + "".join(letter for letter in name if letter.isprintable())[:50]


def reason_of(arguments: argparse.Namespace) -> str:
    """The reason, checked: one printable line."""
    text = str(arguments.reason).strip()
    if not text or not text.isprintable() or len(text) > MAX_REASON:
        raise InputError(f"--reason is {text[:40]!r}, must be one line of 1 to {MAX_REASON} characters; shorten it")
    return text


class Desk:
    """The state folder that a wish goes to. pid: of the controller that runs on it, None when none does."""

    def __init__(self, arguments: argparse.Namespace, clock: Clock | None = None) -> None:
        self.config: Config | None = read_config(arguments)
        self.folder: Path = state_folder(arguments, self.config)
        self.clock = clock or SystemClock()
        self.pid = holder(self.folder)

    def write(self, act: Callable[[StateFile, str, str, float], Wish], reason: str) -> Wish:
        """Leave the wish in the folder, whether or not a controller runs."""
        with StateFile.visit(self.folder, self.clock, create=True) as state:
            return act(state, actor(), reason, self.clock.wall_s())

    def note_done(self, wish: Wish) -> None:
        """The wish was done straight at the engine: the next controller need not do it again.

        Unless an earlier revert still waits for that controller: it blocks the engine, and what ends the block must
        come after it.
        """
        with StateFile.visit(self.folder, self.clock) as state:
            revert, _ = wishes.pending(state)
            if revert is None or revert.id == wish.id:
                wishes.done(state, wish)

    def wait_done(self, wish: Wish, wait_s: float) -> bool:
        """Whether the controller did it within ``wait_s`` seconds."""
        until_s = self.clock.now_s() + wait_s
        with StateFile.visit(self.folder, self.clock) as state:
            while not wishes.is_done(state, wish):
                if self.clock.now_s() >= until_s or holder(self.folder) is None:
                    return wishes.is_done(state, wish)
                self.clock.sleep(0.25)
        return True


def engine_port(url: str, token_file: str | Path | None, ca_file: Path | None = None) -> Port:
    """The engine at ``url``; the token file by flag or ROOFTUNE_ENGINE_TOKEN_FILE."""
    path = token_file or os.environ.get(ENGINE_TOKEN) or None
    return HttpPort(url, None if path is None else Path(path), ca_file=ca_file)


def revert_engine(port: Port, reason: str) -> str:
    """Boot setting now, pushes blocked; what came of it in words. Raises PortError and RefusedError."""
    with closing(port):
        answer = port.revert(wire.RevertRequest(actor=actor(), reason=reason, block=True))
    return f"{port.address}: boot setting in force from step {_accepted(port, answer).effective_from_step}"


def resume_engine(port: Port, reason: str) -> str:
    """Pushes allowed again at the engine itself."""
    with closing(port):
        answer = port.resume(wire.ResumeRequest(actor=actor(), reason=reason))
    return f"{port.address}: pushes are allowed again (revision {_accepted(port, answer).revision})"


def _accepted(port: Port, answer: wire.PushAnswer | wire.Refusal) -> wire.PushAnswer:
    if isinstance(answer, wire.Refusal):
        raise RefusedError(f"{port.address} refused ({answer.code}): {answer.message}")
    return answer
