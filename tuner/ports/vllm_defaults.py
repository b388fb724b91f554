"""The budget and the sequence cap that vLLM gives itself when nobody says, by its own rules. Pure.

Rules of 0.32, engine/arg_utils.py: ``get_batch_defaults`` and
``_set_default_max_num_seqs_and_batched_tokens_args``; a test holds this against that code in a real environment.
"""

from dataclasses import dataclass
from enum import StrEnum

from rooftune.policies.errors import bad_value

GIB = 1024**3
_LARGE_BYTES, _MIDDLE_BYTES = 160 * GIB, 70 * GIB
_BATCHED_DP_TOKENS = 256


class Usage(StrEnum):
    """Who starts the engine: the OpenAI server, or a program through the class LLM."""

    SERVER = "server"
    LLM = "llm"


class Platform(StrEnum):
    GPU = "gpu"
    CPU = "cpu"
    TPU = "tpu"


_TPU_TOKENS = {"V6E": (1024, 2048), "V5E": (512, 1024), "V5P": (256, 512)}  # server, LLM


@dataclass(frozen=True)
class Card:
    """memory_bytes and name as vLLM asks the driver (0 and "" when it cannot: then the smallest card is assumed)."""

    memory_bytes: int
    name: str = ""
    platform: Platform = Platform.GPU

    def __post_init__(self) -> None:
        if self.memory_bytes < 0:
            raise bad_value("card memory_bytes", self.memory_bytes, "at least 0", "give the card's whole memory")


@dataclass(frozen=True, kw_only=True)
class Start:
    """How the engine is started. model_tokens: max_model_len. step_tokens, sequences: what the operator set, else None.

    world_size: tensor times pipeline parallel. throughput: performance mode "throughput". chunking: chunked prefill.
    prefix_item_tokens: largest item of a prefix-LM multimodal model, 0 for any other. batched_dp: a mixture of experts
    under data parallel with batched all-to-all.
    """

    model_tokens: int
    usage: Usage = Usage.SERVER
    world_size: int = 1
    throughput: bool = False
    chunking: bool = True
    prefix_item_tokens: int = 0
    batched_dp: bool = False
    step_tokens: int | None = None
    sequences: int | None = None

    def __post_init__(self) -> None:
        least = (("model_tokens", self.model_tokens, 1), ("world_size", self.world_size, 1))
        given = (("step_tokens", self.step_tokens, 1), ("sequences", self.sequences, 1))
        for what, value, low in (*least, *given, ("prefix_item_tokens", self.prefix_item_tokens, 0)):
            if value is not None and value < low:
                raise bad_value(what, value, f"at least {low}", "give the value that vLLM is started with")


@dataclass(frozen=True)
class Batch:
    """max_num_batched_tokens and max_num_seqs in force after a start."""

    ceiling_tokens: int
    sequences: int


def default_batch(card: Card, start: Start) -> Batch:
    """What this start ends up with; values that the operator set stay, except where vLLM itself would refuse them."""
    tokens, sequences = _by_card(card, start)
    if start.batched_dp:
        tokens = _BATCHED_DP_TOKENS
    tokens = tokens if start.step_tokens is None else start.step_tokens
    sequences = sequences if start.sequences is None else start.sequences
    if start.throughput:
        tokens *= 2 if start.step_tokens is None else 1
        sequences *= 2 if start.sequences is None else 1
    if start.step_tokens is None:
        if not start.chunking:
            tokens = max(tokens, start.model_tokens)
        tokens = min(max(tokens, start.prefix_item_tokens), sequences * start.model_tokens)
    if start.sequences is None:
        sequences = min(sequences, tokens)
    return Batch(tokens, sequences)


def _by_card(card: Card, start: Start) -> tuple[int, int]:
    """Budget and sequence cap of this hardware."""
    server = start.usage is Usage.SERVER
    if card.platform is Platform.CPU:
        return (2048 if server else 4096) * start.world_size, (128 if server else 256) * start.world_size
    if card.memory_bytes >= _LARGE_BYTES:
        tokens, sequences = 16_384, 1024
    elif card.memory_bytes >= _MIDDLE_BYTES and "a100" not in card.name.lower():
        tokens, sequences = 8192 if server else 16_384, 1024
    else:
        tokens, sequences = 2048 if server else 8192, 256
    if card.platform is Platform.TPU and card.name in _TPU_TOKENS:
        tokens = _TPU_TOKENS[card.name][0 if server else 1]
    return tokens, sequences
