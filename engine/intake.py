"""The box between other threads and the loop: requests and cancellations go in, the next step takes them out."""

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from threading import Condition, Event

from rooftune.engine.flight import Flight
from rooftune.engine.interface import (
    Busy,
    FinishReason,
    Flights,
    GenerationRequest,
    Observer,
    RejectReason,
    Sink,
    Stopping,
    TooLong,
)
from rooftune.engine.kv_blocks import chain_digests
from rooftune.engine.options import EngineOptions
from rooftune.engine.step import ModelFacts
from rooftune.policies.errors import InputError, RooftuneError

MAX_RETRY_AFTER_S = 60


class Intake:
    """Refuses requests that can never run or do not fit the queue. Safe for any thread; now_s: the engine's clock."""

    def __init__(self, facts: ModelFacts, options: EngineOptions, now_s: Callable[[], float]) -> None:
        self._facts = facts
        self._options = options
        self._now_s = now_s
        self._most_tokens = options.max_request_tokens(facts)
        self._ids = count()
        self._changed = Condition()
        self._arrivals: list[Flight] = []
        self._cancels: list[tuple[int, FinishReason]] = []
        self.asks: list[Future[Flights]] = []  # answered between two steps
        self.live = 0  # requests taken and not ended
        self._ends_s: deque[float] = deque(maxlen=32)
        self._closed = ""
        self.wake = Event()
        self.observer: Observer | None = None

    @property
    def accepting(self) -> bool:
        return not self._closed

    def submit(self, request: GenerationRequest, sink: Sink, arrived_s: float | None = None) -> int:
        """Takes a request and returns its id; ``sink`` gets an event for every token and always one finishing event.

        arrived_s: when it reached the process, now if None; must not lie in the future.
        Raises Busy, TooLong, Stopping, or InputError for a token id outside the vocabulary.
        """
        now_s = self._now_s()
        size = self._facts.block_tokens
        try:
            self._check(request)
            # Hashing a long prompt costs most, so it runs on the caller's thread, outside the lock.
            digests = chain_digests(request.prompt_token_ids, size) if self._options.prefix_caching else []
            stops = request.stop_token_ids
            if not request.ignore_eos:
                stops = stops.union(self._facts.eos_token_ids)
            with self._changed:
                self._check_place()
                flight = Flight(
                    next(self._ids),
                    request,
                    sink,
                    now_s if arrived_s is None else min(arrived_s, now_s),
                    stops,
                    digests,
                    self._options.gap_bounds_s,
                )
                self.live += 1
                self._arrivals.append(flight)
        except RooftuneError as error:
            if self.observer is not None:
                self.observer.on_rejected(_reason(error))
            raise
        self.wake.set()
        return flight.request_id

    def cancel(self, request_id: int, why: FinishReason = FinishReason.CANCELLED) -> None:
        """Frees everything before the next step; one that has ended already, or never was, is ignored.

        why: STOP when the answer is complete for its reader (a stop string), so that records count it as finished.
        """
        with self._changed:
            self._cancels.append((request_id, why))
        self.wake.set()

    def ask(self) -> Future[Flights]:
        """What is in flight, once the step that runs has ended."""
        asked: Future[Flights] = Future()
        self.asks.append(asked)
        self.wake.set()
        return asked

    def take(self) -> tuple[list[Flight], list[tuple[int, FinishReason]]]:
        """Arrivals and cancellations since the last call."""
        if not self._arrivals and not self._cancels:
            return [], []
        with self._changed:
            taken = self._arrivals, self._cancels
            self._arrivals, self._cancels = [], []
        return taken

    def one_ended(self, now_s: float) -> None:
        with self._changed:
            self.live -= 1
            self._ends_s.append(now_s)
            if self.live == 0:
                self._changed.notify_all()

    def close(self, why: str) -> None:
        """Refuse new requests from now on; the first reason stays."""
        with self._changed:
            self._closed = self._closed or why
        self.wake.set()

    def wait_until_empty(self, timeout_s: float) -> bool:
        """False when something was still in flight after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self.live == 0, timeout_s)

    def _check(self, request: GenerationRequest) -> None:
        prompt = request.prompt_token_ids
        # Lengths first: they cost nothing, however long the prompt is.
        total = len(prompt) + request.max_tokens
        if total > self._most_tokens:
            raise TooLong(
                f"prompt of {len(prompt)} and output of {request.max_tokens} tokens are {total}, must be at most "
                f"{self._most_tokens} together; shorten the prompt or lower max_tokens"
            )
        least, most = min(prompt), max(prompt)
        if least < 0 or most >= self._facts.vocab_tokens:
            raise InputError(
                f"token id {least if least < 0 else most} is outside the vocabulary 0..{self._facts.vocab_tokens - 1}; "
                "use this model's tokenizer"
            )

    def _check_place(self) -> None:
        if self._closed:
            raise Stopping(f"the engine takes no requests: {self._closed}; try another one")
        most = self._options.max_running + self._options.max_queue
        if self.live >= most:
            raise Busy(f"{self.live} requests are in flight, must be at most {most}; come back later", self._retry())

    def _retry(self) -> int:
        """Whole seconds in which half of the requests in flight would end at the recent pace, 1 to 60."""
        ends_s = self._ends_s
        if len(ends_s) < 2:
            return 1
        each_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(each_s * self.live / 2)))


def _reason(error: RooftuneError) -> RejectReason:
    reasons = {Busy: RejectReason.BUSY, Stopping: RejectReason.STOPPING, TooLong: RejectReason.TOO_LONG}
    return reasons.get(type(error), RejectReason.INVALID)
