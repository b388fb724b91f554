"""``rooftune envelope``: what a vLLM starts with by itself, what a larger ceiling costs, and the flags that leave room.

No server is asked: the figures are those of earlier starts, which vLLM prints into its log.
"""

import argparse
import json
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rooftune.policies.commands import Command
from rooftune.policies.errors import InfeasibleError, InputError, bad_value
from rooftune.tuner.cli.flags.values import add_value, flag_of, parse_choice, parse_count, parse_pair
from rooftune.tuner.files import read_small
from rooftune.tuner.ports.vllm.boot import (
    Batch,
    BootFlags,
    Card,
    ModelFacts,
    Objection,
    Platform,
    Start,
    Usage,
    default_batch,
    objections,
)
from rooftune.tuner.ports.vllm.envelope import Advice, BootPoint, Geometry, Headroom, advice_lines, advise, price
from rooftune.tuner.ports.vllm.versions import Version, capabilities, parse_version

SCHEMA = "rooftune.envelope"
_EPILOG = """examples:
  rooftune envelope --vllm 0.32.0 --card-memory 80GiB --card-name "NVIDIA H100 80GB HBM3" --model-tokens 32768
  rooftune envelope --vllm 0.32.0 --card-memory 24GiB --model-tokens 8192 \\
      --boot 2048:40464 --boot 8192:36720 --want 8192
  rooftune envelope --vllm 0.32.0 --card-memory 24GiB --model-tokens 8192 \\
      --boot 2048:40464 --model-config config.json --want 8192

--boot takes what vLLM's log says of a start: its max_num_batched_tokens and "GPU KV cache size: N tokens". The first
is the start of today; two with different ceilings measure the price, one and the model's shape estimate it.
exit codes: 0 done, 1 such a start would fail or leave no headroom, 2 usage or input"""
_MEMORY = re.compile(r"(\d{1,7}(?:\.\d{1,3})?) ?(GiB|GB|MiB|MB)")
_UNITS = {"GiB": 1024**3, "GB": 10**9, "MiB": 1024**2, "MB": 10**6}
_MOST_TOKENS = 100_000_000
_MOST_CONFIG_BYTES = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``envelope``."""
    parser.epilog = _EPILOG
    deployment = parser.add_argument_group("the deployment")
    add_value(deployment, "--vllm", _version, "VERSION", "such as 0.32.0", required=True)
    add_value(deployment, "--model-tokens", _tokens, "N", "max_model_len", required=True)
    add_value(deployment, "--card-memory", _memory, "SIZE", "of one card, such as 80GiB (not for --platform cpu)")
    deployment.add_argument(
        "--card-name", metavar="NAME", default="", help="as the driver prints it; vLLM's default differs on an A100"
    )
    platform = partial(parse_choice, known=list(Platform))
    add_value(deployment, "--platform", platform, "NAME", "gpu (default), cpu or tpu", default="gpu")
    usage = partial(parse_choice, known=list(Usage))
    add_value(deployment, "--usage", usage, "NAME", "server (default) or llm: the class LLM", default="server")
    size = partial(parse_count, high=100_000)
    add_value(deployment, "--world-size", size, "N", "tensor times pipeline parallel (default 1)", default=1)
    deployment.add_argument("--throughput", action="store_true", help="vLLM runs in throughput performance mode")
    item = partial(parse_count, low=0, high=_MOST_TOKENS)
    add_value(deployment, "--item-tokens", item, "N", "largest multimodal item (default 0: text)", default=0)
    room = parser.add_argument_group("room to move")
    add_value(room, "--want", _tokens, "N", "largest budget to allow without a restart")
    add_value(room, "--budget", _tokens, "N", "budget to start with (default: the ceiling of today)")
    add_value(room, "--boot", _boot, "CEILING:KV_TOKENS", "a measured start; today's first", action="append")
    add_value(room, "--ended", _tokens, "CEILING", "a ceiling at which the start ran out of memory", action="append")
    room.add_argument("--model-config", metavar="FILE", help="config.json of the model, for its shape")
    block = partial(parse_count, high=1024)
    add_value(room, "--block-tokens", block, "N", "tokens of a KV block (default 16)", default=16)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print what vLLM would do by itself and, with --want, what it takes to have room."""
    version = arguments.vllm
    start = Start(
        model_tokens=arguments.model_tokens,
        usage=Usage(arguments.usage),
        world_size=arguments.world_size,
        throughput=arguments.throughput,
    )
    card = _card(arguments)
    default = default_batch(card, start)
    if arguments.want is None:
        for flag in ("budget", "boot", "ended", "model_config"):
            if getattr(arguments, flag) is not None:
                raise InputError(f"{flag_of(flag)} goes with --want N; name the ceiling that you want")
        _print(arguments, version, default, None, ())
        return 0
    advice, against = _advice(arguments, version, start)
    _print(arguments, version, default, advice, against)
    return InfeasibleError.exit_code if against or advice.headroom is Headroom.NO_ROOM else 0


def _advice(arguments: argparse.Namespace, version: Version, start: Start) -> tuple[Advice, tuple[Objection, ...]]:
    """What it takes, and what speaks against the start."""
    boots: list[BootPoint] = arguments.boot
    if not boots:
        raise InputError("--want needs the start of today; give --boot CEILING:KV_TOKENS from vLLM's log")
    shape = None if arguments.model_config is None else read_geometry(Path(arguments.model_config))
    able = capabilities(version)
    advice = advise(
        boots[0],
        arguments.want,
        price(boots, shape),
        able,
        in_force_tokens=arguments.budget,
        block_tokens=arguments.block_tokens,
        model_tokens=start.model_tokens,
    )
    ended = [BootFlags(ceiling_tokens=tokens) for tokens in arguments.ended or ()]
    facts = ModelFacts(model_tokens=start.model_tokens, item_tokens=arguments.item_tokens)
    return advice, objections(advice.flags, facts, able, ended)


def read_geometry(path: Path) -> Geometry:
    """The shape of a dense model from its config.json, weights and activations of two bytes. Raises InputError."""
    try:
        fields = json.loads(read_small(path, f"--model-config {str(path)!r}", _MOST_CONFIG_BYTES))
    except ValueError:
        raise InputError(f"--model-config {str(path)!r} is no JSON; give the model's config.json") from None
    heads = _field(fields, path, "num_attention_heads")
    hidden = _field(fields, path, "hidden_size")
    head_size = fields.get("head_dim")
    kv_heads = fields.get("num_key_value_heads")
    return Geometry(
        hidden_size=hidden,
        intermediate_size=_field(fields, path, "intermediate_size"),
        layers=_field(fields, path, "num_hidden_layers"),
        kv_heads=heads if kv_heads is None else _field(fields, path, "num_key_value_heads"),
        head_size=hidden // heads if head_size is None else _field(fields, path, "head_dim"),
    )


def _field(fields: object, path: Path, name: str) -> int:
    value = fields.get(name) if isinstance(fields, dict) else None
    if type(value) is not int or value < 1:
        raise InputError(f"{name} in {str(path)!r} is {value!r}, must be a whole number of at least 1; "
                         "give the config.json of a dense model")  # fmt: skip
    return value


def _card(arguments: argparse.Namespace) -> Card:
    platform = Platform(arguments.platform)
    if arguments.card_memory is None and platform is Platform.GPU:
        raise InputError("--card-memory is missing: vLLM's default depends on it; give it as 80GiB")
    return Card(arguments.card_memory or 0, arguments.card_name, platform)


def _version(text: str, what: str) -> Version:
    version = parse_version(text)
    if version is None:
        raise bad_value(what, text, "a version such as 0.32.0", "see vllm --version")
    if version.major:
        raise bad_value(what, text, "a version 0.x", "its rules are not known; give the version that you run")
    return version


def _memory(text: str, what: str) -> int:
    """Bytes."""
    found = _MEMORY.fullmatch(text)
    if found is None:
        raise bad_value(what, text, "a size such as 80GiB or 24564MiB", "see nvidia-smi")
    return int(float(found[1]) * _UNITS[found[2]])


def _boot(text: str, what: str) -> BootPoint:
    ceiling, held = parse_pair(text, what, "CEILING:KV_TOKENS", "2048:40464")
    return BootPoint(_tokens(ceiling, f"ceiling of {what}"), _tokens(held, f"KV tokens of {what}"))


def _tokens(text: str, what: str) -> int:
    return parse_count(text.replace(",", ""), what, high=_MOST_TOKENS)


def _print(
    arguments: argparse.Namespace,
    version: Version,
    default: Batch,
    advice: Advice | None,
    against: tuple[Objection, ...],
) -> None:
    if arguments.json:
        document = {"schema": SCHEMA, "version": 1, "vllm": str(version), "default": asdict(default)}
        document["advice"] = None if advice is None else asdict(advice) | {"flags": advice.flags.words()}
        document["objections"] = [asdict(one) for one in against]
        print(json.dumps(document))
        return
    print(
        f"vLLM {version} by itself: --max-num-batched-tokens {default.ceiling_tokens} "
        f"--max-num-seqs {default.sequences} (rules of 0.32)"
    )
    if advice is not None:
        print("\n".join(advice_lines(advice)))
    for one in against:
        bound = "" if one.bound is None else f", bound {one.bound}"
        print(f"do not: {one.problem.value.replace('_', ' ')}: {one.flag} {one.value}{bound}")


COMMAND = Command(
    "envelope", "vLLM's default on a card, what a larger ceiling costs, the flags that leave room", add_arguments, run
)
