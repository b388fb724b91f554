"""What an engine holds at an instant, so that a replay can begin or end in the middle of a run."""

from dataclasses import dataclass

import numpy as np

from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.kv import blocks_for
from rooftune.policies.request import (
    ADMISSIONS,
    ADMITTED,
    COMPUTED,
    FINISHED,
    FREE_BLOCKS,
    HELD,
    KNOWN,
    LEAVING_COUNT,
    NEXT,
    ORDERED_STEPS,
    OUTPUT,
    PROMPT,
    RUNNING,
    RUNNING_COUNT,
    STATUS,
    WAITING_HEAD,
    FloatArray,
    IntArray,
    State,
)
from rooftune.tuner.sim import kernel
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.traffic.workload import Traffic


@dataclass(frozen=True, eq=False)
class Progress:
    """The requests in an engine at ``at_s``: first those that hold KV blocks, by admission, then the queue.

    at_s: where the replay begins (s) on the traffic's clock, at which all of them had arrived. request: their rows in
    the traffic, which are its first ones, shape (k,) as all columns. running: how many hold KV blocks; one of these
    with all its output has finished and keeps blocks and place until the next plan (``Boot.plan_ahead``).
    computed_tokens: tokens with KV entries, 0 in the queue. produced_tokens: output so far, below the output but for
    such a finished one. scheduled_s, first_token_s, last_token_s: instants without the engine's constant times outside,
    NaN when not reached. longest_gap_s: so far, NaN before the first token. seen_s: arrivals up to then are in the
    queue; None: up to at_s. Only a plan made ahead sees them later. ordered_steps: steps with an order policy so far,
    of which a share begins with the aged.
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
    seen_s: float | None = None
    ordered_steps: int = 0

    def __len__(self) -> int:
        return len(self.request)

    def check(self, traffic: Traffic, engine: Engine) -> None:
        """Raises InputError for progress that this traffic and this engine cannot have made."""
        if engine.boot.contents != 0:
            raise InputError("a replay in mid-run needs counted KV blocks; set the engine's contents to 0")
        if len(self) > len(traffic) or sorted(self.request.tolist()) != list(range(len(self))):
            raise InputError(
                f"the {len(self)} requests in progress must be the first rows of the traffic; sort them by arrival"
            )
        if not 0.0 <= self.at_s < np.inf:
            raise bad_value("start of the replay", self.at_s, "at least 0 s and finite", "count from the first arrival")
        if len(self) and float(traffic.arrival_s[len(self) - 1]) > self.at_s:
            late_s = float(traffic.arrival_s[len(self) - 1])
            raise bad_value("arrival of a request in progress", late_s, f"at most {self.at_s:g} s", "leave it out")
        if not 0 <= self.running <= len(self):
            raise bad_value("running requests in progress", self.running, f"within 0..{len(self)}", "queue the others")
        known = traffic.prompt_tokens[self.request] + self.produced_tokens
        if np.any(self.produced_tokens < 0) or np.any(self.produced_tokens > traffic.output_tokens[self.request]):
            raise InputError(
                "a request in progress has produced more than its output, or less than 0 tokens; see to it"
            )
        if np.any(self.computed_tokens < 0) or np.any(self.computed_tokens >= known):
            raise InputError(
                "a request in progress has computed all its tokens, or less than 0; the newest has no KV yet"
            )
        if np.any((self.produced_tokens > 0) & ~np.isfinite(self.last_token_s)):
            raise InputError("a request in progress has produced tokens but no instant of its last one; give it")

    def enter(self, state: State, run: kernel.Run, engine: Engine) -> None:
        """Put the requests into a fresh state and run. Running ones beyond the KV blocks or places wait instead."""
        times, rows, counters = run.times, self.request, state.counters
        running = min(self.running, engine.sequence_ceiling)
        times[rows, kernel.SCHEDULED_S] = self.scheduled_s
        times[rows, kernel.FIRST_TOKEN_S] = self.first_token_s
        times[rows, kernel.LAST_TOKEN_S] = self.last_token_s
        times[rows, kernel.LONGEST_GAP_S] = self.longest_gap_s
        state.requests[rows, KNOWN] = state.requests[rows, PROMPT] + self.produced_tokens
        for number, request in enumerate(rows.tolist()):
            computed = int(self.computed_tokens[number])
            held = blocks_for(computed, engine.boot.block_tokens)
            row = state.requests[request]
            ended = row[KNOWN] - row[PROMPT] >= row[OUTPUT]
            if number >= running or held > counters[FREE_BLOCKS]:
                if ended:
                    row[STATUS], times[request, kernel.FINISH_S] = FINISHED, self.last_token_s[number]
                else:
                    kernel._arrive(engine.boot, state, run, request)
                continue
            row[COMPUTED], row[HELD] = computed, held
            counters[FREE_BLOCKS] -= held
            if ended:
                row[STATUS], times[request, kernel.FINISH_S] = FINISHED, self.last_token_s[number]
                state.leaving[counters[LEAVING_COUNT]] = request
                counters[LEAVING_COUNT] += 1
                continue
            row[STATUS], row[ADMITTED] = RUNNING, counters[ADMISSIONS]
            counters[ADMISSIONS] += 1
            state.running[counters[RUNNING_COUNT]] = request
            counters[RUNNING_COUNT] += 1
        counters[ORDERED_STEPS] = self.ordered_steps
        run.totals[kernel.BEGUN] = len(self)
        run.clock_s[:] = self.at_s, self.at_s if self.seen_s is None else self.seen_s


def progress_of(state: State, run: kernel.Run) -> Progress:
    """Where a replay ended; rows are those of its traffic."""
    counters = state.counters
    leaving = state.leaving[: counters[LEAVING_COUNT]].tolist()
    running = state.running[: counters[RUNNING_COUNT]]
    admitted = running[np.argsort(state.requests[running, ADMITTED], kind="stable")].tolist()
    waiting, request = [], int(counters[WAITING_HEAD])
    while request >= 0:
        waiting.append(request)
        request = int(state.requests[request, NEXT])
    rows = np.array([*leaving, *admitted, *waiting], dtype=np.int64)
    times = run.times[rows]
    return Progress(
        at_s=float(run.clock_s[0]),
        request=rows,
        running=len(leaving) + len(admitted),
        computed_tokens=state.requests[rows, COMPUTED].copy(),
        produced_tokens=state.requests[rows, KNOWN] - state.requests[rows, PROMPT],
        scheduled_s=times[:, kernel.SCHEDULED_S],
        first_token_s=times[:, kernel.FIRST_TOKEN_S],
        last_token_s=times[:, kernel.LAST_TOKEN_S],
        longest_gap_s=times[:, kernel.LONGEST_GAP_S],
        seen_s=float(run.clock_s[1]),
        ordered_steps=int(counters[ORDERED_STEPS]),
    )
