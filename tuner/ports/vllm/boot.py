"""A start of vLLM before it is tried: what would end it, and what earlier starts taught. Pure.

A start costs minutes and, when it fails, the replica. So a candidate is held against the version's flags, against
the checks that vLLM makes itself (0.32: ``SchedulerConfig.verify_max_model_len``), and against every start so far: one
that ended is never tried again, nor anything larger.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rooftune.policies.errors import bad_value
from rooftune.tuner.ports.vllm.versions import DEFAULTS, FLAGS, Capabilities, Flag


@dataclass(frozen=True)
class BootFlags:
    """The scheduler's flags of one start; None: not named. Tokens and counts, at least 1 (chunk cap: 0 = none)."""

    ceiling_tokens: int | None = None
    step_tokens: int | None = None
    chunk_cap_tokens: int | None = None
    adaptive_chunk_cap: bool | None = None
    max_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    sequence_ceiling: int | None = None
    max_running: int | None = None

    def named(self) -> dict[str, int]:
        """The flags that are named, in the order of ``FLAGS``."""
        return {name: int(value) for name in FLAGS if (value := getattr(self, name)) is not None}

    def words(self) -> tuple[str, ...]:
        """As they stand on vLLM's command line."""
        found: list[str] = []
        for name, value in self.named().items():
            if name != "adaptive_chunk_cap":  # the one switch
                found += [FLAGS[name], str(value)]
            elif value:
                found.append(FLAGS[name])
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """model_tokens: max_model_len, None: not known. item_tokens: the largest multimodal item, 0 for a text model."""

    model_tokens: int | None = None
    item_tokens: int = 0
    chunking: bool = True


class BootProblem(StrEnum):
    """Why a start is not worth trying."""

    FLAG_UNSUPPORTED = "flag_unsupported"  # this version does not take this flag, or not this value
    FLAG_UNKNOWN = "flag_unknown"  # it is unknown whether this version takes it
    BELOW_ITEM = "below_item"  # a multimodal item would not fit
    BELOW_MODEL_LENGTH = "below_model_length"  # without chunking a prompt must fit whole
    BELOW_SEQUENCES = "below_sequences"  # fewer tokens than sequences
    ABOVE_CEILING = "above_ceiling"  # budget in force above the ceiling, or active above the sequence ceiling
    ABOVE_MODEL_LENGTH = "above_model_length"  # chunk cap above the model length
    TRIED_AND_ENDED = "tried_and_ended"
    ABOVE_LEARNT_BOUND = "above_learnt_bound"  # a smaller ceiling already ended a start


@dataclass(frozen=True)
class Objection:
    """value: of the flag named; bound: what it would have to keep, None where there is none."""

    problem: BootProblem
    flag: str
    value: int
    bound: int | None = None


def learnt_bound_tokens(ended: Iterable[BootFlags]) -> int | None:
    """The least ceiling that ended a start although every flag was fine: from there on none is tried. None: none did.

    A start that came up with that ceiling or a larger one (another day, another neighbour on the card) does not lift
    it.
    """
    return min((flags.ceiling_tokens for flags in ended if flags.ceiling_tokens is not None), default=None)


def objections(
    flags: BootFlags, model: ModelFacts, able: Capabilities, ended: Sequence[BootFlags] = ()
) -> tuple[Objection, ...]:
    """Everything against this start; empty: it may be tried, once. ended: starts that ended before they answered."""
    found = [*_flags(flags, able), *_item(flags, model), *_own_checks(flags, model)]
    if flags in ended:
        found.append(Objection(BootProblem.TRIED_AND_ENDED, FLAGS["ceiling_tokens"], flags.ceiling_tokens or 0))
    # A start that the flags alone would have ended says nothing about the ceiling.
    bound = learnt_bound_tokens(one for one in ended if not (_flags(one, able) or _own_checks(one, model)))
    if bound is not None and flags.ceiling_tokens is not None and flags.ceiling_tokens >= bound:
        found.append(
            Objection(BootProblem.ABOVE_LEARNT_BOUND, FLAGS["ceiling_tokens"], flags.ceiling_tokens, bound - 1)
        )
    return tuple(found)


def _flags(flags: BootFlags, able: Capabilities) -> list[Objection]:
    found = []
    for name, value in flags.named().items():
        does = able.flags[name]
        if does is Flag.UNKNOWN:
            found.append(Objection(BootProblem.FLAG_UNKNOWN, FLAGS[name], value))
        elif does is Flag.MISSING:
            found.append(Objection(BootProblem.FLAG_UNSUPPORTED, FLAGS[name], value))
        elif does is Flag.DEFAULT_ONLY and value != DEFAULTS[name]:
            found.append(Objection(BootProblem.FLAG_UNSUPPORTED, FLAGS[name], value, DEFAULTS[name]))
    return found


def _item(flags: BootFlags, model: ModelFacts) -> list[Objection]:
    """Budget and chunk cap must let the largest item through in one step: images are not read in pieces."""
    capped = ("ceiling_tokens", "step_tokens", "chunk_cap_tokens")
    named = {name: value for name, value in flags.named().items() if name in capped}
    return [
        Objection(BootProblem.BELOW_ITEM, FLAGS[name], value, model.item_tokens)
        for name, value in named.items()
        if value < model.item_tokens and (value > 0 or name != "chunk_cap_tokens")
    ]


def _own_checks(flags: BootFlags, model: ModelFacts) -> list[Objection]:
    """What vLLM checks itself; only between flags that are named, for the rest are its defaults and fit."""
    ceiling, sequences, length = flags.ceiling_tokens, flags.sequence_ceiling, model.model_tokens
    bounds = (  # at least, at most
        (BootProblem.BELOW_MODEL_LENGTH, "ceiling_tokens", None if model.chunking else length, None),
        (BootProblem.BELOW_SEQUENCES, "ceiling_tokens", sequences, None),
        (BootProblem.ABOVE_CEILING, "step_tokens", None, ceiling),
        (BootProblem.ABOVE_CEILING, "max_running", None, sequences),
        (BootProblem.ABOVE_MODEL_LENGTH, "chunk_cap_tokens", None, length),
    )
    found, named = [], flags.named()
    for problem, name, least, most in bounds:
        value = named.get(name)
        if value is None:
            continue
        if (least is not None and value < least) or (most is not None and value > most):
            found.append(Objection(problem, FLAGS[name], value, most if least is None else least))
    return found


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
