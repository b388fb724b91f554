"""One step as a value that the loop passes to a runner, and the runner's interface.

No torch here: the fake runner and the loop use these types as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rooftune.policies.errors import bad_value

IntArray = npt.NDArray[np.int64]
MAX_TEMPERATURE = 100.0
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request draws its tokens; fixed for the life of the request.

    temperature: 0 (greedy) to 100. top_p: share of probability kept, above 0 and at most 1.
    seed: 0 to 2**64 - 1. A token depends on the seed, its position and the logits, never on the other
    requests of the step. Raises InputError outside these bounds.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise bad_value("temperature", self.temperature, f"within 0..{MAX_TEMPERATURE:g}", "use 0 for greedy")
        if not 0.0 < self.top_p <= 1.0:
            raise bad_value("top_p", self.top_p, "above 0 and at most 1", "use 1 to keep every token")
        if not 0 <= self.seed <= MAX_SEED:
            raise bad_value("seed", self.seed, "within 0..2**64 - 1", "leave it out for a random one")


GREEDY = Sampling()


class Segment(NamedTuple):
    """The part of one request that one step computes. (A tuple: one is made for every request of every step.)

    token_ids: the tokens to compute, at least one. start: their first position, equal to the tokens of
    this request whose KV entries exist already. block_table: KV blocks of the request from position 0
    on, long enough for ``start + len(token_ids)`` positions; what stands behind them means nothing. It may be
    a view of the scheduler's table that stays as it is until the step has run. sample: whether the last token of
    the segment yields the request's next token (the prompt is complete). A runner raises ValueError for one that
    breaks these bounds.
    """

    token_ids: Sequence[int] | IntArray
    start: int
    block_table: Sequence[int] | IntArray
    sample: bool
    sampling: Sampling = GREEDY

    @property
    def end(self) -> int:
        """Position after the last token: the KV entries of the request once the step has run."""
        return self.start + len(self.token_ids)


class StepBatch:
    """Everything one forward pass computes, at least one segment, each of another request.

    segments: a tuple, or a function that makes it at the first read, because a runner that kept the step before needs
    no segments of a step that ``follows``. follows: every segment of the step before was sampled, and this step
    computes exactly the tokens it sampled; the block tables are the same, with one more block where the token begins
    one (so they must be the scheduler's own rows, not copies). A runner may ignore ``follows`` and read the segments.
    """

    __slots__ = ("_segments", "follows")

    def __init__(self, segments: tuple[Segment, ...] | Callable[[], tuple[Segment, ...]], follows: bool = False):
        if segments == ():
            raise ValueError("a step needs at least one segment")
        self._segments = segments
        self.follows = follows

    @property
    def segments(self) -> tuple[Segment, ...]:
        if not isinstance(self._segments, tuple):
            self._segments = self._segments()
        return self._segments

    @property
    def computed_tokens(self) -> int:
        """Tokens this step computes, prefill and decode together."""
        return sum(len(segment.token_ids) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is fixed about a loaded model and its KV store.

    max_model_tokens: positions the model was made for. kv_blocks: KV blocks in the store, block_tokens tokens each.
    eos_token_ids: tokens that end an answer.
    """

    name: str
    parameters: int
    vocab_tokens: int
    max_model_tokens: int
    dtype: str
    device: str
    kv_blocks: int
    block_tokens: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kv_tokens(self) -> int:
        """Tokens the KV store holds."""
        return self.kv_blocks * self.block_tokens


class Runner(Protocol):
    """Computes steps. One thread uses it; a call returns when the step has really run."""

    @property
    def facts(self) -> ModelFacts:
        """What it runs, and how many KV blocks it has."""
        ...

    def run(self, step: StepBatch) -> list[int]:
        """The new token ids, one for each segment with ``sample``, in the order of the segments."""
        ...
