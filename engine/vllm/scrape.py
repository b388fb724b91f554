"""Our series on vLLM's own /metrics page: steps by tokens and time, requests, and where the knobs stand.

The records live in the engine's process. The API server follows them at its own pace, so a scrape is answered from what
was read last and never waits for the engine.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from rooftune.engine.metrics import (
    GAP_BOUNDS_S,
    QUEUE,
    TPOT,
    TTFT,
    WAIT_BOUNDS_S,
    Histogram,
    StepTable,
    histograms,
    knob_gauges,
)
from rooftune.engine.server.limits import ApiError
from rooftune.engine.tuning_source import Read
from rooftune.policies import wire
from rooftune.policies.errors import InputError

LOG = logging.getLogger("vllm.rooftune")
EVERY_S = 2.0

Fetch = Callable[[Read, int], Awaitable[str]]


class Series(Collector):
    """What was read so far. ``follow`` is for the event loop, ``collect`` for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table = StepTable()
        self._ttft, self._queue = Histogram(WAIT_BOUNDS_S), Histogram(WAIT_BOUNDS_S)
        self._tpot = Histogram(GAP_BOUNDS_S)
        self._state: wire.State | None = None
        self._budget_tokens: int | None = None
        self._lost = 0
        self._steps_at = self._requests_at = -1

    async def follow(self, fetch: Fetch, every_s: float = EVERY_S) -> None:
        """Until cancelled; retries an engine that does not answer."""
        while True:
            try:
                await self.read(fetch)
            except (ApiError, InputError) as error:
                LOG.debug("rooftune: /metrics was not updated: %s", error)
            await asyncio.sleep(every_s)

    async def read(self, fetch: Fetch) -> None:
        """Count all new rows. Raises ApiError when the engine cannot be reached."""
        state = wire.parse(wire.State, (await fetch("state", -1)).encode(), wire.MAX_ANSWER_BYTES)
        with self._lock:
            self._state = state
        while self._take_steps(await fetch("steps", self._steps_at)):
            pass
        while self._take_requests(await fetch("requests", self._requests_at)):
            pass

    def _take_steps(self, text: str) -> bool:
        rows = wire.parse(wire.StepColumns, text.encode(), wire.MAX_ANSWER_BYTES)
        with self._lock:
            self._lost += rows.lost
            self._steps_at = rows.next
            for row, duration_s in enumerate(rows.duration_s):
                computed = rows.prefill_tokens[row] + rows.decode_tokens[row]
                context = rows.decode_context_tokens[row] + rows.prefill_context_tokens[row]
                self._table.add(computed, context, duration_s)
            if rows.step:
                self._budget_tokens = rows.budget_tokens[-1]
        return bool(rows.step)

    def _take_requests(self, text: str) -> bool:
        rows = wire.parse(wire.RequestColumns, text.encode(), wire.MAX_ANSWER_BYTES)
        with self._lock:
            self._requests_at = rows.next
            for row, ttft_s in enumerate(rows.ttft_s):
                scheduled_s, finish_s = rows.scheduled_s[row], rows.finish_s[row]
                if ttft_s is None or scheduled_s is None or finish_s is None:
                    continue
                self._ttft.add((ttft_s,))
                self._queue.add((scheduled_s - rows.arrival_s[row],))
                if rows.output_tokens[row] > 1:
                    after_s = finish_s - rows.arrival_s[row] - ttft_s
                    self._tpot.add((after_s / (rows.output_tokens[row] - 1),))
        return bool(rows.sequence)

    def collect(self) -> Iterator[Metric]:
        """All series at one moment; none before the engine answered for the first time."""
        with self._lock:
            state = self._state
            if state is None:
                return
            found = [
                *histograms(((TTFT, self._ttft), (QUEUE, self._queue), (TPOT, self._tpot))),
                *self._table.families(),
                CounterMetricFamily(
                    "rooftune_steps_lost", "Steps overwritten before they were counted here.", self._lost
                ),
                *knob_gauges(
                    next((knob.value for knob in state.knobs if knob.name == "step_tokens"), None),
                    self._budget_tokens,
                    state.lease.left_s if state.lease else 0.0,
                    state.revision,
                    state.blocked,
                ),
            ]
        yield from found
