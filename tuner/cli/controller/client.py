"""A controller's pages from the command line: GET /status, POST /pause, /resume, /revert."""

import argparse
import json
import os
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from rooftune.policies.errors import InputError, RefusedError, UnreachableError
from rooftune.tuner.cli.flags.values import add_value, parse_url
from rooftune.tuner.config import Config, load_config
from rooftune.tuner.config.model import STATE_FOLDER
from rooftune.tuner.control.state.store import StateFile
from rooftune.tuner.files import at_home
from rooftune.tuner.ports.base import PortError
from rooftune.tuner.ports.fetch import Fetcher, Timeouts

TIMEOUTS = Timeouts(connect_s=10.0, total_s=20.0)
MAX_ANSWER_BYTES = 4_000_000


def ask(url: str, path: str, token_file: str | None = None, body: dict[str, str] | None = None) -> dict[str, Any]:
    """The JSON answer of a page; a body makes it a POST. No proxy and no redirect is followed.

    Raises InputError for a bad token file, UnreachableError without an answer, RefusedError when it refuses.
    """
    data = None if body is None else json.dumps(body).encode()
    fetcher = Fetcher(url, None if token_file is None else Path(token_file), TIMEOUTS, what="controller")
    try:
        reply = fetcher.ask("GET" if body is None else "POST", path, data, limit_bytes=MAX_ANSWER_BYTES)
    except PortError as error:
        raise UnreachableError(str(error)) from None
    finally:
        fetcher.close()
    return _parsed(url, path, reply.status, reply.body, command=body is not None)


def _parsed(url: str, path: str, status: int, text: bytes, *, command: bool) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UnreachableError(f"{url}{path} answers {status} with something that is no controller's; is --face right?")
    if status == 404:
        raise InputError(f"{url} has no {path}, so it is no controller; --face takes the controller's address (listen)")
    if status >= 400:
        reason = " ".join(str(found.get("error", "no reason given")).split())[:300]
        raise RefusedError(f"controller at {url} answers {status}: {reason}")
    if command and found.get("asked") != path.removeprefix("/"):
        raise UnreachableError(f"{url}{path} does not confirm the request; is --face a controller's?")
    return found


def add_face_flag(where: argparse._ActionsContainer, help: str) -> None:
    """--face, the address of a controller's pages."""
    add_value(where, "--face", partial(parse_url, engine=False, sockets=False), "URL", help)


def add_state_flags(parser: argparse.ArgumentParser) -> None:
    """--state and --config."""
    group = parser.add_argument_group("which controller")
    group.add_argument("--state", metavar="DIR", help=f"its state folder (default: ROOFTUNE_STATE or {STATE_FOLDER})")
    group.add_argument("--config", metavar="FILE", help="its configuration, which names the state folder")


def read_config(arguments: argparse.Namespace) -> Config | None:
    """The configuration that --config names; None without it."""
    return None if arguments.config is None else load_config(arguments.config)


def visit_state(arguments: argparse.Namespace) -> AbstractContextManager[StateFile]:
    """The state file that --state or --config names, to read."""
    return StateFile.visit(state_folder(arguments, read_config(arguments)))


def state_folder(arguments: argparse.Namespace, config: Config | None) -> Path:
    """The state folder. --state wins over --config, both over the environment."""
    if arguments.state == "":
        raise InputError("--state is '', must be a folder; name one or leave it out")
    if arguments.state is not None:
        return at_home(arguments.state)
    if config is not None:
        return config.state
    return at_home(os.environ.get("ROOFTUNE_STATE") or STATE_FOLDER)
