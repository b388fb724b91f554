"""``rooftune revert``: the engine back to its boot setting now, and no push until a resume."""

import argparse

from rooftune.policies.commands import Command
from rooftune.tuner.cli.controller.client import ask
from rooftune.tuner.cli.controller.wish import Desk, actor, add_wish_flags, engine_port, reason_of, revert_engine
from rooftune.tuner.cli.flags.values import parse_duration
from rooftune.tuner.control.state import operator as wishes

EPILOG = """With --engine no controller is needed. With --config and no controller running it goes straight to the
engine as well. exit codes: 0 done, 1 refused or nobody there to do it, 2 usage or input, 3 no answer in time"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``revert``."""
    parser.epilog = EPILOG
    add_wish_flags(parser, engine=True)
    parser.add_argument("--wait", metavar="TIME", default="60s", help="longest wait for the controller (default 60s)")


def run(arguments: argparse.Namespace) -> int:
    """Straight at the engine, over a controller's page, or by the state folder."""
    reason, wait_s = reason_of(arguments), parse_duration(arguments.wait, "--wait")
    if arguments.engine is not None:
        done = revert_engine(engine_port(arguments.engine, arguments.token_file), reason)
        print(f"reverted: {done}; blocked until: rooftune resume --engine {arguments.engine}")
        return 0
    if arguments.face is not None:
        ask(arguments.face, "/revert", arguments.token_file, {"actor": actor(), "reason": reason})
        print("asked; the controller reverts in its next cycle and pushes nothing until: rooftune resume")
        return 0
    return _by_folder(Desk(arguments), arguments, reason, wait_s)


def _by_folder(desk: Desk, arguments: argparse.Namespace, reason: str, wait_s: float) -> int:
    wish = desk.write(wishes.ask_revert, reason)
    if desk.pid is not None:
        if desk.wait_done(wish, wait_s):
            print(f"reverted by the controller (pid {desk.pid}); blocked until: rooftune resume")
            return 0
        late = f"the controller (pid {desk.pid}) has not done it within {arguments.wait}"
        print(f"{late}; straight at the engine: rooftune revert --engine URL")
        return 3
    if desk.config is not None:
        engine = desk.config.engine
        done = revert_engine(engine_port(engine.url, arguments.token_file or engine.token_file, engine.ca_file), reason)
        desk.note_done(wish)
        print(f"reverted: {done}; blocked until: rooftune resume --config {arguments.config}")
        return 0
    print(
        "no controller runs: the next one begins blocked and reverts first; to do it now: rooftune revert --engine URL"
    )
    return 1


COMMAND = Command("revert", "take the engine back to its boot setting and block pushes", add_arguments, run)
