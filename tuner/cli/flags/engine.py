"""Flags that describe the engine the twin stands for, and the setting in force there."""

import argparse

from rooftune.policies.errors import InputError
from rooftune.policies.request import Boot, Setting
from rooftune.tuner.cli.flags.traffic import without_prefixes
from rooftune.tuner.cli.flags.values import parse_count
from rooftune.tuner.record import Source
from rooftune.tuner.sim.engine import Engine, check_setting
from rooftune.tuner.traffic.workload import Traffic

CEILING_TOKENS = 8192
KV_TOKENS = 600_000
BLOCK_TOKENS = 16
MAX_SEQS = 256
CURRENT_BUDGET_TOKENS = 2048  # vLLM 0.32 on a card below 70 GiB, server
MAX_ENGINE_TOKENS = 100_000_000


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """What was fixed when the engine started. Every default is named as assumed in the report."""
    group = parser.add_argument_group(
        "engine (a default is reported as assumed)",
        "pipeline parallelism above 1 is not modelled: its steps overlap, and these are one after the other",
    )
    group.add_argument(
        "--ceiling",
        metavar="N",
        help=f"max_num_batched_tokens at start: the largest budget the search may use (default {CEILING_TOKENS})",
    )
    group.add_argument("--kv-tokens", metavar="N", help=f"tokens that the KV pool holds (default {KV_TOKENS})")
    group.add_argument("--block-tokens", metavar="N", help=f"tokens of a KV block (default {BLOCK_TOKENS})")
    group.add_argument("--max-seqs", metavar="N", help=f"most requests in a step (default {MAX_SEQS})")
    group.add_argument("--prefix-caching", metavar="on|off", help="prefixes are found again (default on)")
    group.add_argument(
        "--keep-decodes-moving",
        metavar="on|off",
        help="the engine runs Rooftune's scheduling rule that no prompt holds up answers (default off: plain vLLM)",
    )


def add_current_flags(parser: argparse.ArgumentParser) -> None:
    """What is set today."""
    group = parser.add_argument_group("setting in force today")
    group.add_argument(
        "--current-budget",
        metavar="N",
        help=f"token budget (default {CURRENT_BUDGET_TOKENS}, vLLM's default on a card below 70 GiB)",
    )
    group.add_argument("--current-cap", metavar="N", help="chunk cap, 0 = none (default 0)")


def parse_switch(text: str, what: str) -> bool:
    """``on`` or ``off``."""
    if text not in ("on", "off"):
        raise InputError(f"{what} is {text!r}, must be on or off; choose one")
    return text == "on"


def read_engine(args: argparse.Namespace, traffic: Traffic) -> tuple[Engine, Traffic, bool, dict[str, Source]]:
    """The engine; the traffic as that engine sees it (no prefixes when it does not cache them); whether it caches
    them; and for each value where it came from. Raises InputError.
    """
    ceiling = _count(args.ceiling, "--ceiling", CEILING_TOKENS, high=MAX_ENGINE_TOKENS)
    block = _count(args.block_tokens, "--block-tokens", BLOCK_TOKENS, high=65_536)
    kv_tokens = _count(args.kv_tokens, "--kv-tokens", KV_TOKENS, low=block, high=MAX_ENGINE_TOKENS)
    max_seqs = _count(args.max_seqs, "--max-seqs", MAX_SEQS, high=1_000_000)
    caching = args.prefix_caching is None or parse_switch(args.prefix_caching, "--prefix-caching")
    moving = args.keep_decodes_moving is not None and parse_switch(args.keep_decodes_moving, "--keep-decodes-moving")
    if ceiling < max_seqs:
        raise InputError(
            f"--ceiling is {ceiling}, must be at least the sequence cap ({max_seqs}); raise it or lower --max-seqs"
        )
    if not caching:
        traffic = without_prefixes(traffic)
    boot = Boot(
        ceiling_tokens=ceiling,
        block_tokens=block,
        chunking=1,
        reserve_whole_prompt=1,
        contents=1 if len(traffic.prefix_offsets) else 0,
        keep_decodes_moving=int(moving),
    )
    stated = {
        "ceiling_tokens": args.ceiling,
        "kv_tokens": args.kv_tokens,
        "block_tokens": args.block_tokens,
        "max_seqs": args.max_seqs,
        "prefix_caching": args.prefix_caching,
        "decodes_kept_moving": args.keep_decodes_moving,
    }
    sources: dict[str, Source] = {name: "assumed" if value is None else "given" for name, value in stated.items()}
    return Engine(boot, kv_tokens // block, max_seqs), traffic, caching, sources


def read_current(args: argparse.Namespace, engine: Engine) -> tuple[Setting, Source]:
    """The setting in force, and whether it was given or is the default. Raises InputError outside the envelope."""
    budget = _count(args.current_budget, "--current-budget", CURRENT_BUDGET_TOKENS, high=MAX_ENGINE_TOKENS)
    cap = _count(args.current_cap, "--current-cap", 0, low=0, high=MAX_ENGINE_TOKENS)
    given = args.current_budget is not None or args.current_cap is not None
    if not given:
        # A small engine's default budget is its ceiling, a wide one's its sequence cap.
        budget = max(min(budget, engine.boot.ceiling_tokens), engine.sequence_ceiling)
    if budget > engine.boot.ceiling_tokens:
        raise InputError(
            f"--current-budget is {budget}, must be at most the ceiling ({engine.boot.ceiling_tokens}); raise --ceiling"
        )
    setting = Setting(step_tokens=budget, chunk_cap_tokens=cap, max_running=engine.sequence_ceiling)
    check_setting(setting, engine)
    return setting, "given" if given else "assumed"


def _count(text: str | None, what: str, default: int, *, low: int = 1, high: int) -> int:
    return default if text is None else parse_count(text, what, low=low, high=high)
