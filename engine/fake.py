"""A runner without a model: deterministic tokens, and time from a step-time model on a clock of its own.

For tests, for the comparison with a twin, and for fleets of engines that must cost nothing.
"""

from dataclasses import replace

from rooftune.engine.step import ModelFacts, Segment, StepBatch
from rooftune.policies.step_time import StepCost, StepModel, chunk_attention_work, priced, step_cost

# Large enough that nothing comes out twice by chance.
VOCAB_TOKENS = 1 << 40
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

FAKE_FACTS = ModelFacts(
    name="fake",
    parameters=0,
    vocab_tokens=VOCAB_TOKENS,
    max_model_tokens=10_000_000,
    dtype="none",
    device="none",
    kv_blocks=4096,
    block_tokens=16,
)


class ManualClock:
    """A clock that stands still until a caller moves it. Call it for the time in seconds."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def _mixed(value: int, token_id: int) -> int:
    """A 64-bit digest of everything that ``value`` covers and one more token."""
    value = ((value ^ token_id) * _MIX + 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 29)


def _spoken(content: int, seed: int, vocab_tokens: int) -> int:
    """The token that follows a content; it lies in the upper half of the vocabulary."""
    half = vocab_tokens // 2
    return half + (_mixed(content, seed) >> 11) % (vocab_tokens - half)


class FakeRunner:
    """A Runner whose steps take the time that ``cost`` says, on ``clock``; None: no time at all.

    Like a model's, its tokens follow from what it reads in its KV store: every entry holds the content up to its
    position, so a wrong block, a lost chunk or another request's prefix gives wrong tokens. ``read_all`` walks every
    block of a request in every step and raises ValueError at the first entry that does not follow the one before.

    Prompts must come from the lower half of the vocabulary: so a token tells whether it was given or produced, and
    a segment of one token whether it is a prefill or a decode.
    """

    def __init__(
        self,
        cost: StepModel | StepCost | None = None,
        clock: ManualClock | None = None,
        *,
        kv_blocks: int = FAKE_FACTS.kv_blocks,
        block_tokens: int = FAKE_FACTS.block_tokens,
        facts: ModelFacts = FAKE_FACTS,
        read_all: bool = True,
    ) -> None:
        self._facts = replace(facts, kv_blocks=kv_blocks, block_tokens=block_tokens)
        self._cost = None if cost is None else priced(cost)
        self._clock = clock
        self._store: dict[int, tuple[int, int]] = {}  # slot: token, content up to it
        self._read_all = read_all
        self.steps = 0
        self.computed_tokens = 0

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def run(self, step: StepBatch) -> list[int]:
        """See ``rooftune.engine.step.Runner``."""
        contents = [self._write(segment) for segment in step.segments]
        if self._read_all:
            for segment in step.segments:
                self._read(segment)
        if self._cost is not None and self._clock is not None:
            self._clock.advance(self.duration_s(step))
        self.steps += 1
        self.computed_tokens += step.computed_tokens
        return [
            _spoken(content, segment.sampling.seed, self._facts.vocab_tokens)
            for content, segment in zip(contents, step.segments, strict=True)
            if segment.sample
        ]

    def duration_s(self, step: StepBatch) -> float:
        """Duration of a step by the step-time model."""
        assert self._cost is not None
        half = self._facts.vocab_tokens // 2
        decodes = 0
        decode_context = prefill_context = work = 0.0
        for segment in step.segments:
            tokens = len(segment.token_ids)
            if tokens > 1 or segment.token_ids[0] < half:
                prefill_context += segment.start
                work += chunk_attention_work(tokens, segment.start)
            else:
                decodes += 1
                decode_context += segment.start
        computed, sequences = step.computed_tokens, len(step.segments)
        return step_cost(self._cost, computed, sequences, decodes, decode_context, prefill_context, work)

    def _slot(self, segment: Segment, position: int) -> int:
        size = self._facts.block_tokens
        block = int(segment.block_table[position // size])
        if not 0 <= block < self._facts.kv_blocks:
            raise ValueError(f"block {block} at position {position}: the store has 0 to {self._facts.kv_blocks - 1}")
        return block * size + position % size

    def _write(self, segment: Segment) -> int:
        """New entries to the store; returns the content up to the last."""
        content = 0
        if segment.start > 0:
            before = self._store.get(self._slot(segment, segment.start - 1))
            if before is None:
                raise ValueError(f"the entry of position {segment.start - 1} was never written")
            content = before[1]
        for offset, token_id in enumerate(segment.token_ids):
            content = _mixed(content, int(token_id))
            self._store[self._slot(segment, segment.start + offset)] = int(token_id), content
        return content

    def _read(self, segment: Segment) -> None:
        content = 0
        for position in range(segment.end):
            token_id, written = self._store.get(self._slot(segment, position), (0, -1))
            content = _mixed(content, token_id)
            if content != written:
                raise ValueError(f"the entry of position {position} does not follow the one before it")
