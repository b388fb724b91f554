"""Reads and checks the flags of ``rooftune serve``; each error is one line."""

import argparse
from pathlib import Path

from rooftune.engine.options import GAP_TARGETS_S, EngineOptions
from rooftune.engine.server.limits import Limits
from rooftune.engine.server.tuning import SecretFile
from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.request import Setting

LOOPBACK = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--model", required=True, metavar="DIR", help="folder, name on the hub, or fake:8b-2tbs")
    model.add_argument("--served-name", metavar="NAME", help="the name clients use (default: the folder's)")
    model.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    model.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    model.add_argument("--max-model-tokens", type=int, default=0, metavar="N", help="default: the model's own length")
    model.add_argument("--kv-blocks", default="auto", metavar="N", help="KV blocks, or auto (default)")
    model.add_argument("--block-tokens", type=int, default=16, metavar="N", help="default: %(default)s")
    model.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt from its start")

    knobs = parser.add_argument_group("boot setting and envelope")
    knobs.add_argument(
        "--max-step-tokens", type=int, default=2048, metavar="N", help="greatest token budget (default: %(default)s)"
    )
    knobs.add_argument("--step-tokens", type=int, metavar="N", help="token budget at boot (default: the greatest)")
    knobs.add_argument("--chunk-cap-tokens", type=int, default=0, metavar="N", help="0 = none (default)")
    knobs.add_argument("--max-partial-prefills", type=int, default=0, metavar="N", help="0 = no limit (default)")
    knobs.add_argument("--max-running", type=int, default=64, metavar="N", help="sequence cap (default: %(default)s)")

    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-queue", type=int, default=512, metavar="N", help="more get 429 (default: %(default)s)")
    limits.add_argument("--max-prompt-tokens", type=int, default=0, metavar="N", help="default: the model's length")
    limits.add_argument("--max-body-bytes", type=int, default=Limits().body_bytes, metavar="N", help="%(default)s")
    limits.add_argument(
        "--client-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="cut off a dead or stalled client after this (60)",
    )
    limits.add_argument("--drain", type=float, default=30.0, metavar="S", help="time for answers after SIGTERM (30)")

    doors = parser.add_argument_group("addresses and tokens")
    doors.add_argument("--host", default=LOOPBACK, help="default: %(default)s; 0.0.0.0 for every address")
    doors.add_argument("--port", type=int, default=8000, help="0 = any free one (default: %(default)s)")
    doors.add_argument("--api-key-file", type=Path, metavar="FILE", help="/v1 then needs a key, one a line")
    doors.add_argument(
        "--tuning-token-file", type=Path, metavar="FILE", help="tuning routes: read and write with a token"
    )
    doors.add_argument(
        "--tuning-port", type=int, metavar="N", help=f"tuning routes on {LOOPBACK}:N instead; read-only without a token"
    )
    doors.add_argument("--tuning-socket", type=Path, metavar="PATH", help="the same on a Unix socket")


def options(arguments: argparse.Namespace, version: str) -> EngineOptions:
    """Raises InputError."""
    for name in ("max_step_tokens", "max_running", "block_tokens"):
        if getattr(arguments, name) < 1:
            raise bad_value(f"--{name.replace('_', '-')}", getattr(arguments, name), "at least 1", "give more")
    ceiling_tokens = arguments.max_step_tokens
    step_tokens = ceiling_tokens if arguments.step_tokens is None else arguments.step_tokens
    if not 1 <= step_tokens <= ceiling_tokens:
        raise bad_value("--step-tokens", step_tokens, f"within 1..{ceiling_tokens}", "or raise --max-step-tokens")
    for name, most in (("chunk_cap_tokens", ceiling_tokens), ("max_partial_prefills", arguments.max_running)):
        if not 0 <= getattr(arguments, name) <= most:
            raise bad_value(f"--{name.replace('_', '-')}", getattr(arguments, name), f"within 0..{most}", "0 = none")
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
    for name in ("client_timeout", "drain"):
        if not 0.0 < getattr(arguments, name) <= 86_400.0:
            raise bad_value(
                f"--{name.replace('_', '-')}", getattr(arguments, name), "above 0 and at most 86400 s", "30"
            )
    return Limits(body_bytes=arguments.max_body_bytes, prompt_tokens=arguments.max_prompt_tokens)


def kv_blocks(arguments: argparse.Namespace) -> int | None:
    """KV blocks; None = as many as fit. Raises InputError."""
    text: str = arguments.kv_blocks
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 12 and 1 <= int(text) <= 10**9):
        raise bad_value("--kv-blocks", text, "auto or a whole number within 1..1000000000", "auto fills the memory")
    return int(text)


def secret(path: Path | None) -> SecretFile | None:
    return None if path is None else SecretFile(path)


def check_doors(arguments: argparse.Namespace) -> None:
    """Raises InputError."""
    for name in ("port", "tuning_port"):
        port = getattr(arguments, name)
        if port is not None and not 0 <= port <= 65_535:
            raise bad_value(f"--{name.replace('_', '-')}", port, "within 0..65535", "0 takes any free one")
    if arguments.tuning_port is not None and arguments.tuning_socket is not None:
        raise InputError("--tuning-port and --tuning-socket exclude each other; give one of them")
