"""Records of steps and requests, taken around vLLM's ``schedule`` and ``update_from_output``.

What a step carries is kept as running sums: how many requests decode and how much context they have. A step only looks
at its prefills; when the sums and the plan disagree (a preemption, a decode that got no token) it counts anew.
"""

import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

from engine.interface import FinishReason, StepRecord
from engine.protocol import InForce, TuningDesk
from engine.vllm.tracks import TokenClock, Track

# A frontend's wall clock that differs by more than this from ours has been moved; then arrival is now.
_MOST_BEFORE_S = 600.0


class Recorder:
    """One scheduler's records. Called by the engine's thread alone; times in seconds on the monotonic clock."""

    def __init__(self, desk: TuningDesk, gap_bounds_s: Sequence[float], *, one_token: bool) -> None:
        """one_token: a decode computes one token a step (no speculation), which the running sums rely on."""
        self._desk = desk
        self._clock = TokenClock(gap_bounds_s)
        self._one_token = one_token
        self._flights: deque[tuple[int, float, tuple[Any, ...], list[Track]]] = deque()
        self._arrivals = self._admissions = 0
        self._ended_s = 0.0
        self._updating = False
        self._ending: list[tuple[Track, FinishReason]] = []
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
        self, scheduler: Any, output: Any, force: InForce, budget: int, now_s: float, before: int, preempted: int
    ) -> None:
        """A step was planned. before: requests that ran until then; those behind them are new."""
        sent = output.num_scheduled_tokens
        running = scheduler.running
        joined: list[Track] = []
        if preempted or not self._one_token:
            figures = self._count(scheduler, sent, joined, now_s)
        else:
            admitted = running[before:] if len(running) > before else ()
            context = self.context
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
                self._advance(request, end, joined)
            decodes = len(sent) - prefills
            if decodes == self.decoders - len(joined):
                self.context += decodes
                figures = (tokens, decodes, prefills, context, prefix, work)
            else:
                figures = self._count(scheduler, sent, joined, now_s)
        tokens, decodes, prefills, context, prefix, work = figures
        manager = scheduler.kv_cache_manager
        rest = (
            budget, tokens, decodes, len(sent), prefills, context, prefix, work, len(self.partials), len(running),
            len(scheduler.waiting), manager.usage, preempted, force.revision,
        )  # fmt: skip
        self._flights.append((force.step, now_s, rest, joined))

    def _admit(self, request: Any, sent: dict[str, int], now_s: float) -> None:
        track = self.tracks.get(request.request_id)
        if track is None:  # it was there before us
            track = self.arrived(request, now_s)
        track.admitted = self._admissions
        self._admissions += 1
        if track.scheduled_s is None:
            track.scheduled_s = now_s
            track.cached = max(0, request.num_computed_tokens - sent.get(request.request_id, 0))

    def _advance(self, request: Any, end: int, joined: list[Track]) -> None:
        """A prefill after its chunk: part-way, or a decode from the next step on."""
        if request.is_prefill_chunk:
            self.partials[request.request_id] = request
            return
        self.partials.pop(request.request_id, None)
        track = self.tracks[request.request_id]
        track.decoding = True
        self.decoders += 1
        self.context += end
        self.joins += 1
        joined.append(track)

    def _count(
        self, scheduler: Any, sent: dict[str, int], joined: list[Track], now_s: float
    ) -> tuple[int, int, int, int, int, float]:
        """The same figures from every request of the step; mends the sums."""
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

    def updating(self) -> None:
        """From here to ``updated`` requests that end got their last token just now."""
        self._updating = True

    def updated(self, output: Any, answers: Any, now_s: float) -> None:
        """The tokens of one step came; those of steps without tokens are not told apart from nothing."""
        self._updating = False
        if output.total_num_scheduled_tokens > 0 and self._flights:
            step, planned_s, rest, joined = self._flights.popleft()
            parts = [answer.outputs for answer in answers.values()]
            count = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
            first = joined and [one for one in joined if one.first < 0 and one.request.request_id in self.tracks]
            names = (part.request_id for part in chain.from_iterable(parts) if part.new_token_ids)
            self._clock.update(now_s, first, names, count)
            start_s = planned_s if planned_s > self._ended_s else self._ended_s
            self._ended_s = now_s
            self._desk.add_step(StepRecord(step, start_s, now_s - start_s, *rest))
        for track, why in self._ending:
            self._end(track, now_s, why)
        self._ending.clear()
        if self._clock.closing:
            self._close(1 + self._clock.closing // 8)

    # --- requests ---

    def arrived(self, request: Any, now_s: float) -> Track:
        """A request is here; it counts from when the frontend had it (its wall clock is this machine's)."""
        before_s = time.time() - request.arrival_time
        arrival_s = now_s - before_s if 0.0 < before_s < _MOST_BEFORE_S else now_s
        track = self.tracks[request.request_id] = Track(request, self._arrivals, max(0.0, arrival_s))
        self._arrivals += 1
        return track

    def ended(self, request: Any, why: FinishReason, now_s: float) -> None:
        """vLLM lets go of a request, while tokens are booked or at any other time."""
        track = self.tracks.get(request.request_id)
        if track is None:
            return
        if self.partials.pop(request.request_id, None) is None and track.decoding:
            self.decoders -= 1
            self.context -= request.num_computed_tokens
        if self._updating:
            self._ending.append((track, why))
        else:
            self._end(track, now_s, why)

    def _end(self, track: Track, now_s: float, why: FinishReason) -> None:
        self.tracks.pop(track.request.request_id, None)
        self._clock.end(track, now_s, why)

    def _close(self, most: int) -> None:
        for record in self._clock.closed(most):
            self._desk.add_request(record)

    def close_all(self) -> None:
        """Every request that has ended gets its record now: somebody asks."""
        self._close(self._clock.closing)
