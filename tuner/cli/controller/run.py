"""``rooftune run``: the controller. Shadow mode watches and proposes; live mode pushes under the guard."""

import argparse
from contextlib import suppress
from functools import partial
from pathlib import Path

from rooftune.policies.commands import Command
from rooftune.policies.errors import InputError
from rooftune.tuner.cli.flags.values import add_value, flag_of, parse_count
from rooftune.tuner.config import Config, Override, json_schema, load_config
from rooftune.tuner.config.tokens import read_token, read_tokens
from rooftune.tuner.control.assemble import run_controller

EPILOG = """A flag wins over the environment (ROOFTUNE_ENGINE_TOKEN_FILE, ROOFTUNE_TOKEN_FILE, ROOFTUNE_STORAGE,
ROOFTUNE_STATE), and that over the file. exit codes: 0 done, 1 refused (another controller has the state folder;
with --once also by the engine), 2 usage or configuration, 3 the state folder cannot be read or written, or with --once
the engine did not answer"""
_FLAGS = {
    "engine": ("engine.url", "URL", "the engine to tune, such as http://127.0.0.1:8000"),
    "mode": ("mode", "MODE", "shadow (default) or live"),
    "state": ("state", "DIR", "state folder of this controller alone"),
    "profile": ("profile", "NAME", "named targets instead of those in the file"),
    "engine_token_file": ("engine.token_file", "FILE", "tuning token of the engine"),
    "token_file": ("token_file", "FILE", "token for pause, resume and revert over HTTP"),
    "listen": ("listen", "HOST:PORT", "where the controller's own pages are"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``run``."""
    parser.epilog = EPILOG
    parser.add_argument("--config", metavar="FILE", help="configuration (YAML); deploy/rooftune.yaml shows every key")
    for name, (_, metavar, text) in _FLAGS.items():
        parser.add_argument(flag_of(name), metavar=metavar, help=text)
    count = parser.add_mutually_exclusive_group()
    count.add_argument("--once", action="store_true", help="one cycle, then end")
    add_value(count, "--cycles", partial(parse_count, high=10**9), "N", "end after N cycles")
    parser.add_argument("--report", metavar="DIR", help="write a report of what was found here")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="check the configuration, touch nothing, end")
    only.add_argument("--print-schema", action="store_true", help="print the JSON schema of the configuration, end")


def run(arguments: argparse.Namespace) -> int:
    """Check everything that can be checked before anything is touched, then run."""
    if arguments.print_schema:
        print(json_schema(), end="")
        return 0
    cycles = 1 if arguments.once else arguments.cycles
    report = None if arguments.report is None else _report(arguments.report)
    config = read(arguments)
    if arguments.check:
        print("\n".join(["the configuration is good", *config.summary()]))
        return 0
    return run_controller(config, cycles=cycles, report=report, tell=tell)


def read(arguments: argparse.Namespace) -> Config:
    """File, environment and flags as one value, and the files that it names."""
    given = [
        Override(key, getattr(arguments, name), flag_of(name))
        for name, (key, _, _) in _FLAGS.items()
        if getattr(arguments, name) is not None
    ]
    config = load_config(arguments.config, given)
    _check_files(config)
    return config


def tell(line: str) -> None:
    """Progress for a person at the terminal. There may be none, and the disk behind it may be full."""
    with suppress(OSError):
        print(line, flush=True)


def _report(text: str) -> Path:
    if not text:
        raise InputError("--report is '', must be a folder; name one or leave it out")
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise InputError(f"--report is {text!r}, which is a file; name a folder")
    return path


def _check_files(config: Config) -> None:
    if config.engine.token_file is not None:
        read_token(config.engine.token_file)
    if config.token_file is not None:
        read_tokens(config.token_file)
    if config.engine.ca_file is not None and not config.engine.ca_file.is_file():
        raise InputError(f"engine.ca_file is {str(config.engine.ca_file)!r}, which is no file; correct the path")
    if config.state.exists() and not config.state.is_dir():
        raise InputError(f"state is {str(config.state)!r}, which is a file; name a folder")


COMMAND = Command(
    "run", "run the controller beside an engine: watch it, or tune it with --mode live", add_arguments, run
)
