"""Where an engine stands at an instant, so that a replay may begin or end in the middle of a run."""

from dataclasses import dataclass

import numpy as np

from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.kv import blocks_for
from rooftune.policies.request import (
    ADMISSIONS,
    ADMITTED,
    COMPUTED,
    FREE_BLOCKS,
    HELD,
    KNOWN,
    NEXT,
    PROMPT,
    RUNNING,
    RUNNING_COUNT,
    STATUS,
    WAITING_HEAD,
    FloatArray,
    IntArray,
    State,
    append_waiting,
)
from rooftune.tuner.sim import kernel
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.traffic.workload import Traffic


@dataclass(frozen=True, eq=False)
class Progress:
    """The requests in an engine at ``at_s``: running ones in order of admission, then waiting ones in their order.

    at_s: on the clock of the traffic. request: rows of the traffic, shape (k,); running: how many of them run.
    computed_tokens: KV entries that exist (0 while waiting); produced_tokens: output so far. scheduled_s,
    first_token_s, last_token_s: instants, NaN when not reached; longest_gap_s: so far, NaN before the first token. All
    of shape (k,).
    """

    at_s: float
    request: IntArray
    running: int
    computed_tokens: IntArray
    produced_tokens: IntArray
    scheduled_s: FloatArray
    first_token_s: FloatArray
    last_token_s: FloatArray
    longest_gap_s: FloatArray

    def __len__(self) -> int:
        return len(self.request)

    def check(self, traffic: Traffic, engine: Engine) -> None:
        """Raises InputError unless these are the first rows of ``traffic``, in an engine that only counts blocks."""
        if engine.boot.contents != 0:
            raise InputError("a replay begins in mid-run only where KV blocks are counted; leave the contents out")
        if sorted(self.request.tolist()) != list(range(len(self))) or len(self) > len(traffic):
            raise InputError("requests in progress must be the first rows of the traffic; sort them by arrival")
        if not 0.0 <= self.at_s < np.inf:
            raise bad_value("start of the replay", self.at_s, "at least 0 s and finite", "count from the first arrival")

    def enter(self, state: State, run: kernel.Run, engine: Engine) -> None:
        """Puts the requests into a fresh state and run. Running requests that find no KV blocks wait instead."""
        block, counters = engine.boot.block_tokens, state.counters
        times, rows = run.times, self.request
        times[rows, kernel.SCHEDULED_S] = self.scheduled_s
        times[rows, kernel.FIRST_TOKEN_S] = self.first_token_s
        times[rows, kernel.LAST_TOKEN_S] = self.last_token_s
        times[rows, kernel.LONGEST_GAP_S] = self.longest_gap_s
        state.requests[rows, KNOWN] = state.requests[rows, PROMPT] + self.produced_tokens
        for number, request in enumerate(rows.tolist()):
            computed = int(self.computed_tokens[number])
            held = blocks_for(computed, block)
            if number >= self.running or held > counters[FREE_BLOCKS]:
                append_waiting(state, request)
                continue
            row = state.requests[request]
            row[STATUS], row[COMPUTED], row[HELD] = RUNNING, computed, held
            row[ADMITTED] = counters[ADMISSIONS]
            counters[FREE_BLOCKS] -= held
            counters[ADMISSIONS] += 1
            state.running[counters[RUNNING_COUNT]] = request
            counters[RUNNING_COUNT] += 1
        run.totals[kernel.BEGUN] = len(self)
        run.now_s[0] = self.at_s


def progress_of(state: State, run: kernel.Run) -> Progress:
    """Where a replay ended; rows are those of its traffic."""
    running = state.running[: state.counters[RUNNING_COUNT]]
    admitted = running[np.argsort(state.requests[running, ADMITTED], kind="stable")].tolist()
    waiting, request = [], int(state.counters[WAITING_HEAD])
    while request >= 0:
        waiting.append(request)
        request = int(state.requests[request, NEXT])
    rows = np.array([*admitted, *waiting], dtype=np.int64)
    times = run.times[rows]
    return Progress(
        at_s=float(run.now_s[0]),
        request=rows,
        running=len(admitted),
        computed_tokens=state.requests[rows, COMPUTED].copy(),
        produced_tokens=state.requests[rows, KNOWN] - state.requests[rows, PROMPT],
        scheduled_s=times[:, kernel.SCHEDULED_S],
        first_token_s=times[:, kernel.FIRST_TOKEN_S],
        last_token_s=times[:, kernel.LAST_TOKEN_S],
        longest_gap_s=times[:, kernel.LONGEST_GAP_S],
    )
