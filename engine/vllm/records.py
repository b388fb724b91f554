"""Records of steps and requests, taken around vLLM's ``schedule`` and ``update_from_output``.

What a step carries is kept as running sums: how many requests decode and how much context they have. A step in which
all that runs decodes is written down from them alone; any other looks at its prefills; when the sums and the plan
disagree (a preemption, a decode that got no token) it counts anew. Whatever can wait for a reader waits for one.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from threading import Lock
from typing import Any

from engine.vllm.desk import Planned, RowDesk
from engine.vllm.tracks import TokenClock, Track

# A frontend's wall clock that differs by more than this from ours has been moved; then arrival is now.
_MOST_BEFORE_S = 600.0
# Ended requests that may wait for a reader; beyond it each step makes the record of one.
_MOST_WAITING = 1024
_AT_ONCE = 8  # records, some 50 us each
_NOBODY: tuple[Track, ...] = ()


class Recorder:
    """One scheduler's records. Called by the engine's thread alone, but for ``close_all``; times in seconds on the
    monotonic clock."""

    def __init__(
        self,
        scheduler: Any,
        desk: RowDesk,
        gap_bounds_s: Sequence[float],
        now_s: Callable[[], float],
        *,
        one_token: bool,
        pool: Any,
        length: Callable[[Any], int],
    ) -> None:
        """one_token: a decode computes one token a step (no speculation), which the running sums rely on.
        pool, length: see ``probe.pool_of`` and ``probe.length_of``."""
        self._scheduler, self._desk, self._now_s = scheduler, desk, now_s
        self._clock = TokenClock(gap_bounds_s)
        self._one_token, self._pool, self._length = one_token, pool, length
        self._flights: deque[Planned] = deque()
        self._joined: dict[int, list[Track]] = {}  # step in flight -> prefills that end with it
        self._arrivals = self._admissions = 0
        self._ended_s = 0.0
        self._ending: list[tuple[Track, Any]] = []
        self._closing = Lock()
        self.booking = False  # requests that end now got their last token just now
        self.tracks: dict[str, Track] = {}
        self.partials: dict[str, Any] = {}  # running requests part-way through their prompt, in admission order
        self.decoders = 0  # running requests due one token
        self.context = 0  # KV entries they hold
        self.joins = 0  # prefills that became decodes since the start

    # --- around schedule() ---

    def recount(self, running: Sequence[Any]) -> None:
        """The sums from scratch."""
        self.partials = {}
        self.decoders = self.context = 0
        for request in running:
            track = self.tracks.get(request.request_id)
            if track is not None and track.decoding and not request.is_prefill_chunk:
                self.decoders += 1
                self.context += request.num_computed_tokens
            else:
                self.partials[request.request_id] = request

    def planned(
        self, output: Any, step: int, revision: int, budget: int, now_s: float, before: int, preempted: int
    ) -> None:
        """A step was planned. before: requests that ran until then; those behind them are new."""
        scheduler, sent = self._scheduler, output.num_scheduled_tokens
        count = running = len(scheduler.running)
        pool = self._pool
        used = scheduler.kv_cache_manager.usage if pool is None else pool.num_free_blocks
        waiting = self._length(scheduler.waiting)
        if len(sent) == count == before == self.decoders and not (preempted or self.partials) and self._one_token:
            context = self.context
            self.context = context + count
            self._flights.append(
                (step, now_s, budget, 0, count, count, 0, context, 0, 0.0, 0, running, waiting, used, 0, revision)
            )
            return
        joined: list[Track] = []
        if preempted or not self._one_token:
            figures = self._count(sent, joined, now_s)
        else:
            figures = self._prefills(sent, joined, now_s, before)
        tokens, decodes, prefills, context, prefix, work = figures
        if joined:
            self._joined[step] = joined
        self._flights.append(
            (
                step, now_s, budget, tokens, decodes, len(sent), prefills, context, prefix, work, len(self.partials),
                running, waiting, used, preempted, revision,
            )
        )  # fmt: skip

    def _prefills(
        self, sent: dict[str, int], joined: list[Track], now_s: float, before: int
    ) -> tuple[int, int, int, int, int, float]:
        """The figures of a step from its prefills and the sums."""
        running, context = self._scheduler.running, self.context
        admitted = running[before:] if len(running) > before else ()
        prefills = tokens = prefix = 0
        work = 0.0
        for request in admitted:
            self._admit(request, sent, now_s)
        for request in (*self.partials.values(), *admitted) if self.partials or admitted else ():
            request_id = request.request_id
            taken = sent.get(request_id)
            if taken is None:
                continue
            prefills += 1
            end = request.num_computed_tokens
            tokens += taken
            prefix += end - taken
            work += taken * (end - 0.5 * taken)
            if request.is_prefill_chunk:
                self.partials[request_id] = request
                continue
            self.partials.pop(request_id, None)
            track = self.tracks[request_id]
            track.decoding = True
            self.decoders += 1
            self.context += end
            self.joins += 1
            joined.append(track)
        decodes = len(sent) - prefills
        if decodes != self.decoders - len(joined):
            return self._count(sent, joined, now_s)
        self.context += decodes
        return tokens, decodes, prefills, context, prefix, work

    def _admit(self, request: Any, sent: dict[str, int], now_s: float) -> None:
        track = self.tracks.get(request.request_id)
        if track is None:  # it was there before us
            track = self.arrived(request, now_s)
        track.admitted = self._admissions
        self._admissions += 1
        if track.scheduled_s is None:
            track.scheduled_s = now_s
            track.cached = max(0, request.num_computed_tokens - sent.get(request.request_id, 0))

    def _count(self, sent: dict[str, int], joined: list[Track], now_s: float) -> tuple[int, int, int, int, int, float]:
        """The same figures from every request of the step; mends the sums."""
        scheduler = self._scheduler
        came = {track.request.request_id for track in joined}
        running = {request.request_id for request in scheduler.running}
        for request_id, track in self.tracks.items():
            if track.decoding and request_id not in running:
                track.decoding = False  # preempted: what it had is computed again
        tokens = decodes = prefills = context = prefix = 0
        work = 0.0
        for request_id, taken in sent.items():
            request = scheduler.requests[request_id]
            known = self.tracks.get(request_id)
            if known is None or known.admitted < 0:
                self._admit(request, sent, now_s)
            track = self.tracks[request_id]
            end = request.num_computed_tokens
            if track.decoding and request_id not in came:
                decodes += taken
                context += end - taken
                continue
            prefills += 1
            tokens += taken
            prefix += end - taken
            work += taken * (end - 0.5 * taken)
            if not request.is_prefill_chunk and request_id not in came:
                track.decoding = True
                self.joins += 1
                joined.append(track)
        self.recount(scheduler.running)
        return tokens, decodes, prefills, context, prefix, work

    # --- around update_from_output() ---

    def updated(self, output: Any, answers: Any) -> None:
        """The tokens of one step came; those of steps without tokens are not told apart from nothing."""
        now_s = self._now_s()
        self.booking = False
        if self._flights and output.total_num_scheduled_tokens > 0:
            planned = self._flights.popleft()
            count = 0
            for answer in answers.values():
                count += len(answer.outputs)
            clock, ended_s = self._clock, self._ended_s
            if self._joined or count != len(clock.streaming) or len(clock.ends_s) >= clock.trim_at:
                self._tokens(now_s, self._joined.pop(planned[0], _NOBODY), answers, count)
            else:
                clock.ends_s.append(now_s)
            self._ended_s = now_s
            self._desk.keep(planned[0], (planned[1] if planned[1] > ended_s else ended_s, now_s, planned))
        if self._ending:
            for track, request in self._ending:
                self._end(track, request, now_s)
            self._ending.clear()

    def _tokens(self, now_s: float, joined: Sequence[Track], answers: Any, count: int) -> None:
        first = [one for one in joined if one.first < 0 and one.request is not None]
        parts = chain.from_iterable(answer.outputs for answer in answers.values())
        self._clock.update(now_s, first, (part.request_id for part in parts if part.new_token_ids), count)

    # --- requests ---

    def arrived(self, request: Any, now_s: float) -> Track:
        """A request is here; it counts from when the frontend had it (its wall clock is this machine's)."""
        before_s = time.time() - request.arrival_time
        arrival_s = now_s - before_s if 0.0 < before_s < _MOST_BEFORE_S else now_s
        track = self.tracks[request.request_id] = Track(request, self._arrivals, max(0.0, arrival_s))
        self._arrivals += 1
        return track

    def ended(self, request: Any) -> None:
        """vLLM lets go of a request, while tokens are booked or at any other time."""
        track = self.tracks.get(request.request_id)
        if track is None:
            return
        if self.partials.pop(request.request_id, None) is None and track.decoding:
            self.decoders -= 1
            self.context -= request.num_computed_tokens
        if self.booking:
            self._ending.append((track, request))
        else:
            self._end(track, request, self._now_s())

    def _end(self, track: Track, request: Any, now_s: float) -> None:
        self.tracks.pop(request.request_id, None)
        self._clock.end(track, request, now_s)
        if self._clock.closing > _MOST_WAITING:
            self._close(1)

    def _close(self, most: int) -> None:
        with self._closing:
            for record in self._clock.closed(most):
                self._desk.add_request(record)

    def close_all(self) -> None:
        """Every request that has ended gets its record now: somebody asks. From any thread; the engine's goes on in
        between, for it shares the interpreter's lock."""
        while self._clock.closing:
            self._close(_AT_ONCE)
            time.sleep(0.0)
