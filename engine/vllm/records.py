"""Records of steps and requests, made of what the hook noted around vLLM's ``schedule`` and ``update_from_output``.

After a model's forward pass the caches are cold, and all work in a step costs several times as much. So a step only
writes notes, one tuple each for its plan and its tokens; ``fold`` makes records of several steps' notes at once: while
the model computes, when a decision needs them, or at a read. The objects a note refers to (vLLM's output of a step and
the answers made of it) do not change afterwards.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from threading import Lock
from typing import Any

from rooftune.engine.interface import FlightRecord, Flights
from rooftune.engine.vllm.desk import Row, RowDesk, Written
from rooftune.engine.vllm.tracks import TokenClock, Track
from rooftune.policies import wire
from rooftune.policies.errors import printable

# Kinds of notes, with what follows: a step (when, budget and revision, vLLM's output, running, waiting, pool reading),
# its tokens (when, vLLM's output, answers), a request that came (it, when, wall clock) and one that ended (it, when;
# None: with the tokens noted next).
PLANNED, UPDATED, ARRIVED, ENDED = range(4)
Note = tuple[Any, ...]

FOLDED = 16  # notes that are worth folding: two of every step
MOST_NOTES = 64  # beyond it a step does not wait for the model
_AT_ONCE_NOTES = 32  # folded at most, unless a caller needs all
# A frontend's wall clock that differs by more than this from ours has been moved; then arrival is now.
_MOST_BEFORE_S = 600.0
# Ended requests that may wait for a reader; beyond it each one that ends makes the record of one.
_MOST_WAITING = 1024
_AT_ONCE = 8  # records, some 50 us each
_MOST_CHARS = 200  # of wire.Text


class Recorder:
    """One scheduler's records. Called by the engine's thread alone, but for ``close_all``; times in seconds on the
    monotonic clock. ``tracks``, ``partials`` and the sums are as of the latest ``fold``; see ``settle``."""

    def __init__(
        self, scheduler: Any, desk: RowDesk, gap_bounds_s: Sequence[float], changed: Callable[[], None]
    ) -> None:
        """changed: called when the waiting list did."""
        self._scheduler, self._desk, self._changed = scheduler, desk, changed
        self._clock = TokenClock(gap_bounds_s)
        self.notes: list[Note] = []
        self.limit = MOST_NOTES  # notes beyond which the step that writes one folds; 0: nothing may wait
        self.stale = True  # requests came or left since the sums were made
        self.lacking = False  # they have all but the latest step
        # From here on as of the latest fold.
        self._flights: deque[tuple[Row, Sequence[Track]]] = deque()
        self._arrivals = self._admissions = self._sessions = 0
        self._away: set[str] = set()  # preempted
        self._ended_s = 0.0
        self._ending: list[tuple[Track, Any]] = []
        self._closing = Lock()
        self.tracks: dict[str, Track] = {}
        self.partials: dict[str, Any] = {}  # running requests part-way through their prompt, in admission order
        self.decoders = 0  # running requests due one token
        self.context = 0  # KV entries they hold
        self.joins = 0  # prefills that became decodes since the start

    # --- what a decision needs ---

    def settle(self) -> None:
        """``tracks``, ``partials`` and the sums as they are now. A step in which all that runs decodes changes one sum,
        and its notes may wait."""
        running = self._scheduler.running
        if self.stale or self.partials or self.decoders != len(running):
            self.fold()
            if self.decoders + len(self.partials) != len(running):  # a running request got nothing in the latest step
                self.recount(running)
        elif self.lacking:
            self.context += self.decoders
        self.lacking = False

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

    # --- notes become records ---

    def fold(self, most: int | None = None) -> None:
        """The oldest ``most`` notes, or all of them."""
        notes = self.notes
        rows: list[Written] = []
        count = len(notes) if most is None else min(most, len(notes))
        for note in notes[:count]:
            kind = note[0]
            if kind == PLANNED:
                self._planned(note)
            elif kind == UPDATED:
                self._updated(note, rows)
            elif kind == ARRIVED:
                self._arrived(*note[1:])
            else:
                self._ended(*note[1:])
        del notes[:count]
        self.stale, self.lacking = bool(notes), False
        self._desk.keep(rows, len(self._flights))
        self._clock.trim()
        self.limit = 0 if self._away or self._sessions else MOST_NOTES

    def catch_up(self, *, whole: bool = False) -> None:
        """A portion, unless nothing may wait."""
        self.fold(None if whole or self.limit == 0 else _AT_ONCE_NOTES)

    def _planned(self, note: Note) -> None:
        _, now_s, held, output, running, waiting, used = note
        sent = output.num_scheduled_tokens
        count = len(sent)
        if count == 0:
            return
        cached = output.scheduled_cached_reqs
        computed = cached.num_computed_tokens
        joined: Sequence[Track] = ()
        # All requests have run before, and none is in prefill.
        if len(computed) == count and not (self.partials or output.preempted_req_ids or cached.resumed_req_ids):
            tokens, context = output.total_num_scheduled_tokens, sum(computed)
            self.decoders, self.context = count, context + tokens
            row: Row = (now_s, held, count, tokens, context, running, waiting, used)
        else:
            figures, joined = self._prefills(now_s, output)
            row = (now_s, held, count, *figures[:2], running, waiting, used, *figures[2:])
        self._flights.append((row, joined))

    def _prefills(self, now_s: float, output: Any) -> tuple[tuple[float, ...], list[Track]]:
        """Fold a step with prefills or preemptions; returns its decode tokens and context, then the figures that other
        steps do not have; and the prefills that end with it."""
        sent, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        gone: Sequence[str] = output.preempted_req_ids or ()
        for request_id in gone:
            self._preempted(request_id)
        before = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        context = sum(cached.num_computed_tokens) + sum(before.values())
        admitted = len(before) + len(cached.resumed_req_ids)
        again = set()
        for request_id in list(sent)[len(sent) - admitted :]:
            if request_id in self._away:
                again.add(request_id)
            self._admit(request_id)
        prefills = tokens = prefix = ends = 0
        work = 0.0
        joined: list[Track] = []
        for request_id, request in list(self.partials.items()):
            taken = sent.get(request_id)
            if taken is None:
                continue
            start, goal = before.get(request_id), request.num_prompt_tokens
            if start is None:
                at = cached.req_ids.index(request_id)
                start = cached.num_computed_tokens[at]
                goal += cached.num_output_tokens[at]
            elif request_id in again:  # while one is away nothing waits, so this is what it has now
                goal = request.num_tokens
            end, track = start + taken, self.tracks[request_id]
            if track.scheduled_s is None:
                track.scheduled_s, track.cached = now_s, start
            prefills += 1
            tokens += taken
            prefix += start
            work += taken * (end - 0.5 * taken)
            if end >= goal:
                ends += end
                track.decoding = True
                joined.append(track)
                del self.partials[request_id]
        decodes = output.total_num_scheduled_tokens - tokens
        self.joins += len(joined)
        self.decoders = len(sent) - prefills + len(joined)
        self.context = context - prefix + decodes + ends
        return (
            (decodes, context - prefix, tokens, prefills, prefix, work, len(self.partials), len(gone)),
            joined,
        )

    def _preempted(self, request_id: str) -> None:
        """What it had is computed again, once it is admitted again."""
        track = self.tracks.get(request_id)
        if track is not None:
            track.decoding = False
            self.partials.pop(request_id, None)
            self._away.add(request_id)
        self._changed()

    def _admit(self, request_id: str) -> None:
        track = self.tracks.get(request_id)
        if track is None:  # it was there before us
            track = self._arrived(self._scheduler.requests[request_id], 0.0, 0.0)
        track.admitted = self._admissions
        track.decoding = False
        self._admissions += 1
        self._away.discard(request_id)
        self.partials.pop(request_id, None)
        self.partials[request_id] = track.request

    def _updated(self, note: Note, rows: list[Written]) -> None:
        """Books the tokens of one step; vLLM reports a step without tokens like no step at all."""
        _, now_s, output, answers = note
        if output.num_scheduled_tokens:
            row, joined = self._flights.popleft()
            count, clock = 0, self._clock
            for answer in answers.values():
                count += len(answer.outputs)
            if count == len(clock.streaming) and not joined:
                clock.ends_s.append(now_s)
            else:
                parts = chain.from_iterable(answer.outputs for answer in answers.values())
                got = {part.request_id for part in parts if part.new_token_ids}
                clock.update(now_s, [one for one in joined if one.first < 0 and one.request is not None], got)
            start_s, self._ended_s = self._ended_s, now_s
            rows.append((row[0] if row[0] > start_s else start_s, now_s, row))
        if self._ending:
            for track, request in self._ending:
                self._end(track, request, now_s)
            self._ending.clear()

    # --- requests ---

    def _arrived(self, request: Any, now_s: float, wall_s: float) -> Track:
        """A request is here; it counts from when the frontend had it (its wall clock is this machine's)."""
        before_s = wall_s - request.arrival_time
        arrival_s = now_s - before_s if 0.0 < before_s < _MOST_BEFORE_S else now_s
        track = self.tracks[request.request_id] = Track(request, self._arrivals, max(0.0, arrival_s))
        self._arrivals += 1
        self._sessions += getattr(request, "resumable", False)  # its prompt grows as it goes: nothing may wait
        self._changed()
        return track

    def _ended(self, request: Any, now_s: float | None) -> None:
        """now_s: None when its last token came with the update noted next."""
        track = self.tracks.get(request.request_id)
        if track is None:
            return
        if self.partials.pop(request.request_id, None) is None and track.decoding:
            self.decoders -= 1
            self.context -= request.num_computed_tokens
        self._away.discard(request.request_id)
        if now_s is None:
            self._ending.append((track, request))
        else:
            self._end(track, request, now_s)

    def _end(self, track: Track, request: Any, now_s: float) -> None:
        self.tracks.pop(request.request_id, None)
        self._clock.end(track, request, now_s)
        self._sessions -= getattr(request, "resumable", False)
        if self._clock.closing > _MOST_WAITING:
            self._close(1)

    def _close(self, most: int) -> None:
        with self._closing:
            for record in self._clock.closed(most):
                self._desk.add_request(record)

    def in_flight(self) -> Flights:
        """What has not ended; for the engine's thread, after ``fold``."""
        tracks, scheduler = self.tracks, self._scheduler
        known = [tracks[one.request_id] for one in scheduler.running if one.request_id in tracks]
        known.sort(key=lambda track: track.admitted)
        running = len(known)
        known += [tracks[one.request_id] for one in scheduler.waiting if one.request_id in tracks]
        if len(known) < len(tracks):  # some versions keep those that must wait for something else in a further list
            placed = {id(track) for track in known}
            known += [track for track in tracks.values() if id(track) not in placed]
        rows = [self._row(track, place < running) for place, track in enumerate(known[: wire.MAX_IN_FLIGHT])]
        return rows, len(known) - len(rows)

    def _row(self, track: Track, running: bool) -> FlightRecord:
        request = track.request
        return FlightRecord(
            request_id=printable(request.request_id)[:_MOST_CHARS] or "unnamed",
            arrival_s=track.arrival_s,
            scheduled_s=track.scheduled_s,
            first_token_s=track.first_s if track.first >= 0 else None,
            last_token_s=self._clock.latest_s(track),
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=track.cached,
            computed_tokens=request.num_computed_tokens if running else 0,
            output_tokens=request.num_output_tokens,
            running=running,
        )

    def close_all(self) -> None:
        """Make the records of all ended requests, for a read. From any thread; the engine's thread goes on meanwhile,
        since they share the interpreter's lock."""
        while self._clock.closing:
            self._close(_AT_ONCE)
            time.sleep(0.0)
