"""Which controller a command is about: its state folder, by flag, configuration, environment or the default."""

import argparse
import os
from pathlib import Path

from rooftune.policies.errors import InputError
from rooftune.tuner.config import Config, load_config
from rooftune.tuner.files import at_home

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
