"""``rooftune resume``: pushes are allowed again after a pause or a revert."""

import argparse

from rooftune.policies.commands import Command
from rooftune.tuner.cli.controller.client import ask
from rooftune.tuner.cli.controller.wish import Desk, actor, add_wish_flags, engine_port, reason_of, resume_engine
from rooftune.tuner.control.state import operator as wishes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``resume``."""
    add_wish_flags(parser, engine=True)


def run(arguments: argparse.Namespace) -> int:
    """At the controller, or straight at an engine that a revert has blocked."""
    reason = reason_of(arguments)
    if arguments.engine is not None:
        print(resume_engine(engine_port(arguments.engine, arguments.token_file), reason))
        return 0
    if arguments.face is not None:
        ask(arguments.face, "/resume", arguments.token_file, {"actor": actor(), "reason": reason})
        print("asked; the controller resumes in its next cycle")
        return 0
    desk = Desk(arguments)
    wish = desk.write(wishes.resume, reason)
    if desk.pid:
        print(f"resumed: the controller (pid {desk.pid}) may push again from its next cycle on")
    elif desk.config is not None:
        engine = desk.config.engine
        port = engine_port(engine.url, arguments.token_file or engine.token_file, engine.ca_file)
        done = resume_engine(port, reason)
        desk.note_done(wish)
        print(f"resumed: {done}")
    else:
        print("resumed: no controller runs; the next one begins without a pause and lifts the block that is known here")
    return 0


COMMAND = Command("resume", "allow pushes again after a pause or a revert", add_arguments, run)
