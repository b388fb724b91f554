"""Reads and checks the flags of ``rooftune serve``; each error is one line."""

import argparse
from functools import partial
from pathlib import Path

from rooftune.engine.options import GAP_TARGETS_S, MAX_QUEUE, EngineOptions
from rooftune.engine.server.limits import Limits
from rooftune.engine.server.run import LOOPBACK
from rooftune.engine.server.tuning import SecretFile
from rooftune.policies.commands import add_value, flag_of, parse_count, parse_positive
from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.request import Setting

_FROM_0 = partial(parse_count, low=0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--model", required=True, metavar="DIR", help="folder, name on the hub, or fake:8b-2tbs")
    model.add_argument("--served-name", metavar="NAME", help="the name clients use (default: the folder's)")
    model.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    model.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    add_value(model, "--max-model-tokens", _FROM_0, "N", "default: the model's own length", default=0)
    add_value(model, "--kv-blocks", parse_kv_blocks, "N", "KV blocks, or auto (default)")
    add_value(model, "--block-tokens", parse_count, "N", "default: %(default)s", default=16)
    model.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt from its start")

    knobs = parser.add_argument_group("boot setting and envelope")
    greatest = "largest token budget (default: %(default)s)"
    add_value(knobs, "--max-step-tokens", parse_count, "N", greatest, default=2048)
    add_value(knobs, "--step-tokens", parse_count, "N", "token budget at boot (default: the largest)")
    add_value(knobs, "--chunk-cap-tokens", _FROM_0, "N", "0 = none (default)", default=0)
    add_value(knobs, "--max-partial-prefills", _FROM_0, "N", "0 = no limit (default)", default=0)
    add_value(knobs, "--max-running", parse_count, "N", "sequence cap (default: %(default)s)", default=64)

    limits = parser.add_argument_group("limits")
    queue = partial(parse_count, low=0, high=MAX_QUEUE)
    add_value(limits, "--max-queue", queue, "N", "more get 429 (default: %(default)s)", default=512)
    add_value(limits, "--max-prompt-tokens", _FROM_0, "N", "default: the model's length", default=0)
    add_value(limits, "--max-body-bytes", parse_count, "N", "default: %(default)s", default=Limits().body_bytes)
    seconds = partial(parse_positive, high=86_400.0)
    stalled = "cut off a dead or stalled client after this (default: 60)"
    add_value(limits, "--client-timeout", seconds, "S", stalled, default=60.0)
    add_value(limits, "--drain", seconds, "S", "time for answers after SIGTERM (default: 30)", default=30.0)

    doors = parser.add_argument_group("addresses and tokens")
    doors.add_argument("--host", default=LOOPBACK, help="default: %(default)s; 0.0.0.0 for every address")
    port = partial(parse_count, low=0, high=65_535)
    add_value(doors, "--port", port, None, "0 = any free one (default: %(default)s)", default=8000)
    doors.add_argument("--api-key-file", type=Path, metavar="FILE", help="/v1 then needs a key, one per line")
    doors.add_argument(
        "--tuning-token-file", type=Path, metavar="FILE", help="tuning routes: read and write with a token"
    )
    private = f"tuning routes on {LOOPBACK}:N instead; read-only without a token"
    add_value(doors, "--tuning-port", port, "N", private)
    doors.add_argument("--tuning-socket", type=Path, metavar="PATH", help="the same on a Unix socket")


def options(arguments: argparse.Namespace, version: str) -> EngineOptions:
    """Raises InputError."""
    ceiling_tokens = arguments.max_step_tokens
    step_tokens = ceiling_tokens if arguments.step_tokens is None else arguments.step_tokens
    if step_tokens > ceiling_tokens:
        raise bad_value("--step-tokens", step_tokens, f"within 1..{ceiling_tokens}", "or raise --max-step-tokens")
    for name, most in (("chunk_cap_tokens", ceiling_tokens), ("max_partial_prefills", arguments.max_running)):
        if getattr(arguments, name) > most:
            raise bad_value(flag_of(name), getattr(arguments, name), f"within 0..{most}", "0 = none")
    setting = Setting(
        step_tokens=step_tokens,
        chunk_cap_tokens=arguments.chunk_cap_tokens,
        max_partial_prefills=arguments.max_partial_prefills,
        max_running=arguments.max_running,
    )
    return EngineOptions(
        setting,
        ceiling_tokens=ceiling_tokens,
        max_queue=arguments.max_queue,
        max_model_tokens=arguments.max_model_tokens,
        prefix_caching=not arguments.no_prefix_caching,
        gap_bounds_s=GAP_TARGETS_S,
        engine_version=version,
    )


def limits(arguments: argparse.Namespace) -> Limits:
    """Raises InputError."""
    return Limits(body_bytes=arguments.max_body_bytes, prompt_tokens=arguments.max_prompt_tokens)


def parse_kv_blocks(text: str, what: str) -> int | None:
    """KV blocks; None = as many as fit. Raises InputError."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 12 and 1 <= int(text) <= 10**9):
        raise bad_value(what, text, "auto or a whole number within 1..1000000000", "auto fills the memory")
    return int(text)


def secret(path: Path | None) -> SecretFile | None:
    return None if path is None else SecretFile(path)


def check_doors(arguments: argparse.Namespace) -> None:
    """Raises InputError."""
    if arguments.tuning_port is not None and arguments.tuning_socket is not None:
        raise InputError("--tuning-port and --tuning-socket exclude each other; give one of them")
