"""``rooftune pause``: no push until a resume; what is in force stays."""

import argparse

from rooftune.policies.commands import Command
from rooftune.tuner.cli.controller.client import ask
from rooftune.tuner.cli.controller.wish import Desk, actor, add_wish_flags, reason_of
from rooftune.tuner.control.state import operator as wishes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``pause``."""
    add_wish_flags(parser, engine=False)


def run(arguments: argparse.Namespace) -> int:
    """Leave the flag; without a running controller the next one begins paused."""
    reason = reason_of(arguments)
    if arguments.face is not None:
        ask(arguments.face, "/pause", arguments.token_file, {"actor": actor(), "reason": reason})
        print("paused; go on with: rooftune resume --face URL")
        return 0
    desk = Desk(arguments)
    desk.write(wishes.pause, reason)
    who = f"the controller (pid {desk.pid})" if desk.pid else "no controller runs; the next one"
    print(f"paused: {who} pushes nothing until: rooftune resume")
    return 0


COMMAND = Command("pause", "let the controller watch only, until resume", add_arguments, run)
