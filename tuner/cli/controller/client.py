"""A controller's pages from the command line: GET /status, POST /pause, /resume, /revert."""

import argparse
import json
import os
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import URLError
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, Request

from rooftune.policies.errors import InputError, RefusedError, UnreachableError
from rooftune.tuner.config import Config, load_config
from rooftune.tuner.config.tokens import read_token
from rooftune.tuner.files import at_home

TIMEOUT_S = 10.0  # of a single read
TOTAL_S = 20.0
MAX_ANSWER_BYTES = 4_000_000


def ask(face: str, path: str, token_file: str | None = None, body: dict[str, str] | None = None) -> dict[str, Any]:
    """The JSON answer of a page; a body makes it a POST. No proxy and no redirect is followed.

    Raises InputError for an address that is none, UnreachableError without an answer, RefusedError when it says no.
    """
    if not face.startswith(("http://", "https://")) or not face.isprintable() or " " in face or "@" in face:
        shown_face = face if "@" not in face else "an address with a user"  # and maybe a password
        raise InputError(f"--face is {shown_face!r}, must be http://HOST:PORT of a controller; correct it")
    headers = {"Content-Type": "application/json"}
    if token_file is not None:
        headers["Authorization"] = "Bearer " + read_token(Path(token_file))
    data = None if body is None else json.dumps(body).encode()
    opener = OpenerDirector()  # bare: no proxy, no redirect, and a status above 400 is an answer
    opener.add_handler(HTTPHandler())
    opener.add_handler(HTTPSHandler())
    try:
        request = Request(face.rstrip("/") + path, data, headers)
        status, text = _whole(opener, request)
    except (URLError, HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UnreachableError(f"controller at {face} does not answer: {reason}; is --face right?") from None
    return _parsed(face, path, status, text, asked=body is not None)


def _whole(opener: OpenerDirector, request: Request) -> tuple[int, bytes]:
    """Status and body within TOTAL_S: a server that drips a byte a second keeps any limit of a single read."""
    came: list[tuple[int, bytes] | Exception] = []

    def fetch() -> None:
        try:
            with opener.open(request, timeout=TIMEOUT_S) as answer:
                came.append((answer.status, answer.read(MAX_ANSWER_BYTES + 1)))
        except Exception as error:  # noqa: BLE001 - raised again in the thread that asked
            came.append(error)

    fetching = Thread(target=fetch, daemon=True)  # left behind when it hangs: the command ends without it
    fetching.start()
    fetching.join(TOTAL_S)
    if not came:
        raise TimeoutError(f"no whole answer within {TOTAL_S:g} s")
    if isinstance(came[0], Exception):
        raise came[0]
    return came[0]


def _parsed(face: str, path: str, status: int, text: bytes, *, asked: bool) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UnreachableError(
            f"{face}{path} answers {status} with something that is no controller's; is --face right?"
        )
    if status >= 400:
        said = " ".join(str(found.get("error", "no reason given")).split())[:300]
        raise RefusedError(f"controller at {face} answers {status}: {said}")
    if asked and found.get("asked") != path.removeprefix("/"):
        raise UnreachableError(f"{face}{path} does not say that it took the wish; is --face a controller's?")
    return found


DEFAULT_FOLDER = "rooftune-state"


def add_state_flags(parser: argparse.ArgumentParser) -> None:
    """--state and --config."""
    group = parser.add_argument_group("which controller")
    group.add_argument("--state", metavar="DIR", help=f"its state folder (default: ROOFTUNE_STATE or {DEFAULT_FOLDER})")
    group.add_argument("--config", metavar="FILE", help="its configuration, which names the state folder")


def read_config(arguments: argparse.Namespace) -> Config | None:
    """The configuration that --config names; None without it."""
    return None if arguments.config is None else load_config(arguments.config)


def state_folder(arguments: argparse.Namespace, config: Config | None) -> Path:
    """The state folder. --state wins over --config, both over the environment."""
    if arguments.state == "":
        raise InputError("--state is '', must be a folder; name one or leave it out")
    if arguments.state is not None:
        return at_home(arguments.state)
    if config is not None:
        return config.state
    return at_home(os.environ.get("ROOFTUNE_STATE") or DEFAULT_FOLDER)
