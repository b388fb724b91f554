"""What a larger boot ceiling costs in KV cache, and the flags that leave headroom. Pure estimates, inputs stated.

vLLM measures at its start how much memory a step of ``max_num_batched_tokens`` needs and gives the rest to the KV
cache, so every token of ceiling takes room from the cache whether or not it is ever used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rooftune.policies.errors import InputError, bad_value
from rooftune.tuner.ports.vllm.boot import BootFlags
from rooftune.tuner.ports.vllm.versions import FLAGS, Capabilities, Flag


@dataclass(frozen=True)
class BootPoint:
    """One start: its ceiling, and the tokens that its KV cache held (blocks times tokens a block)."""

    ceiling_tokens: int
    kv_tokens: int

    def __post_init__(self) -> None:
        if self.ceiling_tokens < 1 or self.kv_tokens < 1:
            raise bad_value("boot", (self.ceiling_tokens, self.kv_tokens), "at least 1 token each", "see vLLM's log")


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Of a dense model as its config.json tells; bytes_per_value of the activations (2: bf16), on one GPU."""

    hidden_size: int
    intermediate_size: int
    layers: int
    kv_heads: int
    head_size: int
    bytes_per_value: int = 2

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "layers", "kv_heads", "head_size", "bytes_per_value"):
            if getattr(self, name) < 1:
                raise bad_value(name, getattr(self, name), "at least 1", "see the model's config.json")

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.bytes_per_value

    @property
    def step_bytes_per_token(self) -> int:
        """What the widest moment of a step keeps per token: gate and up, their product, the stream and its copy."""
        return self.bytes_per_value * (3 * self.intermediate_size + 2 * self.hidden_size)


class Basis(StrEnum):
    """Where the price comes from."""

    MEASURED = "measured"  # two starts or more of this very deployment
    GEOMETRY = "geometry"  # the model's shape; within some tens of percent


@dataclass(frozen=True)
class Price:
    """KV tokens that one token of ceiling costs."""

    kv_tokens_per_token: float
    basis: Basis


def price(points: Sequence[BootPoint], geometry: Geometry | None = None) -> Price:
    """The line through the starts (least squares) when they differ in ceiling, else the model's geometry.

    Raises InputError when there is neither, and when the starts say that a larger ceiling gave more room: then
    something else changed between them.
    """
    ceilings = [point.ceiling_tokens for point in points]
    if len(set(ceilings)) >= 2:
        middle = sum(ceilings) / len(points)
        level = sum(point.kv_tokens for point in points) / len(points)
        square = sum((ceiling - middle) ** 2 for ceiling in ceilings)
        slope = sum((point.ceiling_tokens - middle) * (point.kv_tokens - level) for point in points) / square
        if slope > 0.0:
            raise InputError(
                "the starts show more KV cache under a larger ceiling; compare starts of one configuration"
            )
        return Price(-slope, Basis.MEASURED)
    if geometry is None:
        raise InputError("the price of a ceiling needs two starts with different ceilings, or the model's geometry")
    return Price(geometry.step_bytes_per_token / geometry.kv_bytes_per_token, Basis.GEOMETRY)


class Headroom(StrEnum):
    """What stands in the way of room to move, if anything."""

    OK = "ok"
    NO_FLAG = "no_flag"  # this version has no --max-num-scheduled-tokens: the ceiling is the budget at the start
    FLAG_UNKNOWN = "flag_unknown"
    NO_ROOM = "no_room"  # the cache would not hold one prompt of the model's length


@dataclass(frozen=True)
class Advice:
    """flags: to add at the next start. kv_tokens: expected then; kv_tokens_lost and kv_share_lost (0..1): against now.

    kv_blocks_lost: whole blocks, rounded up. basis: of the estimate.
    """

    headroom: Headroom
    flags: BootFlags
    kv_tokens: int
    kv_tokens_lost: int
    kv_share_lost: float
    kv_blocks_lost: int
    basis: Basis


def advise(
    now: BootPoint,
    wanted_tokens: int,
    cost: Price,
    able: Capabilities,
    *,
    in_force_tokens: int | None = None,
    block_tokens: int = 16,
    model_tokens: int = 1,
) -> Advice:
    """What it takes to move the budget live up to ``wanted_tokens``.

    in_force_tokens: the budget to start with, today's ceiling without a word. The estimate is a line, so it is good
    near the starts it is drawn through.
    """
    if wanted_tokens < 1 or block_tokens < 1 or model_tokens < 1:
        raise bad_value("ceiling, block and model length", (wanted_tokens, block_tokens, model_tokens), "at least 1",
                        "give tokens")  # fmt: skip
    start_tokens = min(in_force_tokens or now.ceiling_tokens, wanted_tokens)
    lost = (wanted_tokens - now.ceiling_tokens) * cost.kv_tokens_per_token
    left = max(0, math.floor(now.kv_tokens - lost))
    does = able.flags["step_tokens"]
    headroom = {Flag.TAKEN: Headroom.OK, Flag.UNKNOWN: Headroom.FLAG_UNKNOWN}.get(does, Headroom.NO_FLAG)
    if left < model_tokens:
        headroom = Headroom.NO_ROOM
    return Advice(
        headroom=headroom,
        flags=BootFlags(ceiling_tokens=wanted_tokens, step_tokens=start_tokens if does is Flag.TAKEN else None),
        kv_tokens=left,
        kv_tokens_lost=now.kv_tokens - left,
        kv_share_lost=min(1.0, lost / now.kv_tokens),
        kv_blocks_lost=math.ceil(lost / block_tokens),
        basis=cost.basis,
    )


def advice_lines(advice: Advice) -> tuple[str, ...]:
    """For a person: the flags and their price."""
    price_line = (
        f"costs about {advice.kv_tokens_lost} tokens of KV cache ({100 * advice.kv_share_lost:.1f} %, "
        f"{advice.kv_blocks_lost} blocks; {advice.basis.value}), leaves about {advice.kv_tokens}"
    )
    flags = "start with: " + " ".join(advice.flags.words())
    reasons = {
        Headroom.NO_FLAG: f"this version lacks {FLAGS['step_tokens']}: it will also start at the ceiling",
        Headroom.FLAG_UNKNOWN: f"not known whether this version takes {FLAGS['step_tokens']}; see vllm serve --help",
        Headroom.NO_ROOM: "do not: the KV cache would not hold one prompt of the model's length",
    }
    return (flags, price_line, *([reasons[advice.headroom]] if advice.headroom in reasons else []))
