"""Flags of a search: how long, from which seed, over whose knobs, and where its trials are kept."""

import argparse
import os
from functools import partial

import sqlalchemy
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from rooftune.policies.errors import InputError, UnreachableError
from rooftune.tuner.cli.flags.values import add_value, parse_choice, parse_count
from rooftune.tuner.search.space import EVERYTHING, STOCK_VLLM

TRIALS = 200
_EXAMPLES = "sqlite:///trials.db or postgresql+psycopg://user:password@host/name"
# Whose knobs: a stock vLLM takes budget and chunk cap; our engine, and a vLLM with our hook, take them all.
KNOBS = {"vllm": STOCK_VLLM, "rooftune": EVERYTHING}


def add_search_flags(group: argparse._ArgumentGroup) -> None:
    """``--trials``, ``--seed``, ``--engine`` and ``--storage``."""
    trials = f"settings that the search tries (default {TRIALS})"
    add_value(group, "--trials", partial(parse_count, high=100_000), "N", trials)
    add_value(group, "--seed", partial(parse_count, low=0, high=2**32 - 1), "N", "same seed, same search (default 0)")
    engine = (
        "whose knobs: vllm (budget and chunk cap, by flag) or rooftune (also caps and policies, for our engine "
        "and for vLLM with the hook); default vllm"
    )
    add_value(group, "--engine", partial(parse_choice, known=KNOBS), "NAME", engine, default="vllm")
    group.add_argument(
        "--storage",
        metavar="URL",
        help="keep the trials in this database: sqlite:///trials.db, postgresql+psycopg://...",
    )
    group.add_argument(
        "--study",
        metavar="NAME",
        help="with --storage: share the trials with every run under this name, of the same traffic, model and targets",
    )


def check_search(args: argparse.Namespace) -> None:
    """Raises InputError, or UnreachableError when the database does not answer."""
    if args.study is not None and (args.storage is None or not args.study.strip() or len(args.study) > 100):
        raise InputError("--study names 1 to 100 letters and goes with --storage; give both or neither")
    if args.storage is not None:
        check_storage(args.storage)


def check_storage(url: str) -> None:
    """Reach the database once, so that a typo is not found out after the baselines. A password is never shown."""
    try:
        parsed = sqlalchemy.make_url(url)
    except (ArgumentError, ValueError):  # a port that is no number is a ValueError
        raise InputError(f"--storage is not a database URL; write {_EXAMPLES}") from None
    shown = parsed.render_as_string(hide_password=True)
    try:
        engine = sqlalchemy.create_engine(parsed)
    except ModuleNotFoundError as error:
        raise InputError(f"--storage {shown} needs the driver {error.name!r}; pip install it") from None
    except (TypeError, ValueError) as error:
        raise _wrong_option(shown, error) from None
    except SQLAlchemyError:
        raise InputError(f"--storage {shown} is of no kind that is known; write {_EXAMPLES}") from None
    try:
        with engine.connect() as connection:
            if parsed.get_backend_name() == "sqlite" and os.path.exists(parsed.database or ""):
                connection.exec_driver_sql("pragma schema_version")  # SQLite opens any file; only reading it tells
    except (TypeError, ValueError) as error:
        raise _wrong_option(shown, error) from None
    except SQLAlchemyError as error:
        reason = " ".join(str(getattr(error, "orig", None) or type(error).__name__).split())
        remedy = "wait until the other program is done with it" if "locked" in reason else "check address and rights"
        raise UnreachableError(f"--storage {shown} does not answer: {reason}; {remedy}") from None
    finally:
        engine.dispose()


def _wrong_option(shown: str, error: Exception) -> InputError:
    """What stands behind the ? of an address goes to the driver, and what that does not take is a plain error of it."""
    return InputError(f"--storage {shown} has an option that its driver does not take: {error}; correct or drop it")
