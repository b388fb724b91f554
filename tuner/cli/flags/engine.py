"""Flags that describe the engine the twin stands for, and the setting in force there."""

import argparse
from functools import partial

from rooftune.policies.commands import Reader
from rooftune.policies.errors import InputError
from rooftune.policies.request import Boot, Setting
from rooftune.tuner.cli.flags.traffic import without_prefixes
from rooftune.tuner.cli.flags.values import add_value, parse_count
from rooftune.tuner.record import EnginePart, Source
from rooftune.tuner.report.build import engine_part
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
    ceiling = f"max_num_batched_tokens at start: the largest budget the search may use (default {CEILING_TOKENS})"
    add_value(group, "--ceiling", _tokens(), "N", ceiling)
    add_value(group, "--kv-tokens", _tokens(), "N", f"tokens that the KV pool holds (default {KV_TOKENS})")
    add_value(group, "--block-tokens", _tokens(65_536), "N", f"tokens of a KV block (default {BLOCK_TOKENS})")
    add_value(group, "--max-seqs", _tokens(1_000_000), "N", f"most requests in a step (default {MAX_SEQS})")
    add_value(group, "--prefix-caching", parse_switch, "on|off", "reuse KV blocks of known prefixes (default on)")
    rule = "the engine runs Rooftune's scheduling rule that no prompt holds up answers (default off: plain vLLM)"
    add_value(group, "--keep-decodes-moving", parse_switch, "on|off", rule)


def add_current_flags(parser: argparse.ArgumentParser) -> None:
    """What is set today."""
    group = parser.add_argument_group("setting in force today")
    budget = f"token budget (default {CURRENT_BUDGET_TOKENS}, vLLM's default on a card below 70 GiB)"
    add_value(group, "--current-budget", _tokens(), "N", budget)
    add_value(group, "--current-cap", _tokens(low=0), "N", "chunk cap, 0 = none (default 0)")


def _tokens(high: int = MAX_ENGINE_TOKENS, low: int = 1) -> Reader:
    return partial(parse_count, low=low, high=high)


def parse_switch(text: str, what: str) -> bool:
    """``on`` or ``off``."""
    if text not in ("on", "off"):
        raise InputError(f"{what} is {text!r}, must be on or off; choose one")
    return text == "on"


def read_engine(args: argparse.Namespace, traffic: Traffic) -> tuple[Engine, Traffic, EnginePart]:
    """The engine; the traffic as that engine sees it (no prefixes when it does not cache them); and the engine's values
    with where they came from. Raises InputError.
    """
    ceiling = args.ceiling or CEILING_TOKENS
    block = args.block_tokens or BLOCK_TOKENS
    kv_tokens = args.kv_tokens or KV_TOKENS
    max_seqs = args.max_seqs or MAX_SEQS
    caching = args.prefix_caching is not False
    if kv_tokens < block:
        raise InputError(f"--kv-tokens is {kv_tokens}, must be at least one block ({block}); raise it")
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
        keep_decodes_moving=int(args.keep_decodes_moving is True),
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
    engine = Engine(boot, kv_tokens // block, max_seqs)
    return engine, traffic, engine_part(engine, caching, sources)


def read_current(args: argparse.Namespace, engine: Engine) -> tuple[Setting, Source]:
    """The setting in force, and whether it was given or is the default. Raises InputError outside the envelope."""
    budget: int = args.current_budget or CURRENT_BUDGET_TOKENS
    given = args.current_budget is not None or args.current_cap is not None
    if not given:
        # A small engine's default budget is its ceiling, a wide one's its sequence cap.
        budget = max(min(budget, engine.boot.ceiling_tokens), engine.sequence_ceiling)
    if budget > engine.boot.ceiling_tokens:
        raise InputError(
            f"--current-budget is {budget}, must be at most the ceiling ({engine.boot.ceiling_tokens}); raise --ceiling"
        )
    setting = Setting(step_tokens=budget, chunk_cap_tokens=args.current_cap or 0, max_running=engine.sequence_ceiling)
    check_setting(setting, engine)
    return setting, "given" if given else "assumed"
