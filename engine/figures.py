"""What one planned step computes and the state it leaves: the content of its record."""

from rooftune.engine.interface import StepRecord
from rooftune.policies.request import (
    BUDGET,
    COMPUTED,
    FREE_BLOCKS,
    KNOWN,
    PROMPT,
    RUNNING_COUNT,
    WAITING_COUNT,
    State,
)
from rooftune.policies.step_time import chunk_attention_work


class StepFigures:
    """Counted from the segments that are sent, so that the record says what was computed, not what was wanted.

    decodes, decode_context: segments of one token behind their prompt, which the loop counts itself (32 calls for 32
    decodes were a tenth of its time), and their KV entries. sampled: segments that yield a token.
    """

    __slots__ = (
        "attention_work", "budget", "decode_context", "decodes", "free_blocks", "partials", "prefill_context",
        "prefill_tokens", "prefills", "running", "sampled", "waiting",
    )  # fmt: skip

    def __init__(self) -> None:
        self.decodes = self.decode_context = self.prefills = self.prefill_tokens = self.prefill_context = 0
        self.sampled = 0
        self.attention_work = 0.0

    def add_prefill(self, tokens: int, begin: int) -> None:
        """Add a prefill segment of ``tokens`` from position ``begin`` on."""
        self.prefills += 1
        self.prefill_tokens += tokens
        self.prefill_context += begin
        self.attention_work += chunk_attention_work(tokens, begin)

    def see(self, state: State) -> None:
        """The state after planning and before the step is booked."""
        counters = state.counters
        self.running = counters[RUNNING_COUNT]
        self.waiting = counters[WAITING_COUNT]
        self.free_blocks = counters[FREE_BLOCKS]
        self.budget = counters[BUDGET]
        # A request that gets a token has its whole prompt computed; when all get one, none needs a closer look.
        self.partials = 0 if self.sampled == self.running else _partials(state)

    def record(
        self, step: int, revision: int, start_s: float, duration_s: float, pool_blocks: int, preemptions: int
    ) -> StepRecord:
        return StepRecord(
            step,
            start_s,
            duration_s,
            self.budget,
            self.prefill_tokens,
            self.decodes,
            self.decodes + self.prefills,
            self.prefills,
            self.decode_context,
            self.prefill_context,
            self.attention_work,
            self.partials,
            self.running,
            self.waiting,
            1.0 - self.free_blocks / pool_blocks,
            preemptions,
            revision,
        )


def _partials(state: State) -> int:
    """Running requests with prompt tokens left."""
    count, requests = 0, state.requests
    for slot in state.running[: state.counters[RUNNING_COUNT]]:
        row = requests[slot]
        missing = row[KNOWN] - row[COMPUTED]
        if missing > 0 and (missing > 1 or row[KNOWN] == row[PROMPT]):
            count += 1
    return count
