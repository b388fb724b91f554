"""The engine's loop: arrivals, lease, plan, forward, book, publish. One thread owns the model and the state.

``EngineLoop.step`` is the page to read. Other threads only put requests and cancellations into the ``Intake`` that
the next step empties, and talk to the ``TuningDesk``; so state and knobs change only between two steps.
"""

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from typing import cast

from rooftune.engine.decode_run import DecodeRun
from rooftune.engine.figures import StepFigures
from rooftune.engine.flight import Flight
from rooftune.engine.intake import Intake
from rooftune.engine.interface import (
    Deliver,
    FinishReason,
    Flights,
    Observer,
    Sink,
    StepRecord,
    TokenEvent,
)
from rooftune.engine.kv_blocks import ContentKeys, chain_digests, engine_state, leave
from rooftune.engine.options import EngineOptions
from rooftune.engine.protocol import InForce, TuningDesk
from rooftune.engine.step import Runner, Segment, StepBatch
from rooftune.policies import request as r
from rooftune.policies import wire
from rooftune.policies.kv import blocks_for
from rooftune.policies.packing import finish_step, plan_step
from rooftune.policies.request import append_waiting

Events = list[tuple[Sink, TokenEvent]]


def deliver_here(events: Iterable[tuple[Sink, TokenEvent]]) -> None:
    """Call every sink on this thread."""
    for sink, event in events:
        sink(event)


class EngineLoop:
    """The scheduler's state around one runner. Everything but the gauges is for one thread at a time.

    now_s: the engine's clock (s). observer, deliver: see ``rooftune.engine.interface``; set before the first step.
    """

    def __init__(
        self,
        runner: Runner,
        options: EngineOptions,
        intake: Intake,
        desk: TuningDesk,
        now_s: Callable[[], float],
    ) -> None:
        facts = runner.facts
        self._runner, self._options, self._intake, self._desk, self._now_s = runner, options, intake, desk, now_s
        self._boot = options.boot(facts)
        self._pool_blocks = facts.kv_blocks
        slots = options.max_running + options.max_queue
        rows = blocks_for(options.max_request_tokens(facts), facts.block_tokens)
        self._state = engine_state(slots, pool_blocks=facts.kv_blocks, row_blocks=rows)
        self._rows = cast(list[list[int]], self._state.requests)
        self._plan = cast(list[list[int]], self._state.planned)
        self._keys = ContentKeys(self._state)
        self._tables = self._state.table.reshape(slots, rows)
        self._flights: list[Flight | None] = [None] * slots
        self._slot_of: dict[int, int] = {}
        self._free_slots = list(range(slots))  # a heap: requests that arrive together keep their order of arrival
        self._ended = count()
        self._run: DecodeRun | None = None  # while all requests decode and none joins or leaves
        self._preempted = self._preempted_before = 0
        self._joins_s: float | None = None  # end of the step just before; None after a pause
        self.latest: StepRecord | None = None
        self.observer: Observer | None = None
        self.deliver: Deliver = deliver_here

    def step(self) -> bool:
        """One step; False when there was nothing to compute, and nothing will change without a call from outside."""
        now_s = self._now_s()
        start_s = now_s if self._joins_s is None else self._joins_s
        self._joins_s = None
        events: Events = []
        self._take_calls(now_s, events)
        if self._intake.asks:
            self._answer()
        counters = self._state.counters
        if counters[r.RUNNING_COUNT] + counters[r.WAITING_COUNT] == 0:
            self._publish(events)
            return False
        force = self._desk.begin_step(now_s)
        if self._run is not None and self._run.plan(force.setting, force.step_model):
            batch, sampled, figures = self._run.batch(), self._run.flights, self._run.figures
        else:
            self._end_run()
            planned = plan_step(force.setting, self._boot, force.step_model, self._state, now_s)
            self._preempted += counters[r.PREEMPTED_COUNT]
            if planned == 0:
                self._desk.skip_step()
                self._publish(events)
                return bool(counters[r.PREEMPTED_COUNT] > 0)
            batch, sampled, figures = self._batch(planned, now_s)
        token_ids = self._runner.run(batch)
        gaps_s = self._book(sampled, token_ids, self._now_s(), events)
        if self._run is None:
            self._finish(force, sampled, figures, events)
            self._publish(events)
        self._record(force, start_s, figures, gaps_s)
        return True

    def _take_calls(self, now_s: float, events: Events) -> None:
        """Arrivals, then cancellations, since the last step."""
        arrivals, cancels = self._intake.take()
        if arrivals or cancels:
            self._end_run()
        for flight in arrivals:
            slot = flight.slot = heapq.heappop(self._free_slots)
            flight.block_table = self._tables[slot]
            self._flights[slot] = flight
            self._slot_of[flight.request_id] = slot
            row = self._rows[slot]
            row[r.PROMPT] = row[r.KNOWN] = flight.prompt_tokens
            row[r.OUTPUT] = flight.request.max_tokens
            row[r.COMPUTED] = row[r.PREEMPTIONS] = row[r.HIT] = 0
            self._state.arrival_s[slot] = flight.arrival_s
            for digest in flight.digests:
                self._name_block(flight, digest)
            append_waiting(self._state, slot)
        for request_id, why in cancels:
            gone = self._slot_of.get(request_id)
            if gone is not None:
                leave(self._boot, self._state, gone)
                self._retire(gone, why, now_s, events)

    def _answer(self) -> None:
        asks = self._intake.asks
        while asks:
            asks.pop().set_result(self._in_flight())

    def in_flight(self) -> Flights:
        """What is in flight, new arrivals included; for the thread that runs the steps."""
        events: Events = []
        self._take_calls(self._now_s(), events)
        self._publish(events)
        return self._in_flight()

    def _in_flight(self) -> Flights:
        self._end_run()
        rows, counters = self._rows, self._state.counters
        slots = sorted(self._state.running[: counters[r.RUNNING_COUNT]], key=lambda slot: rows[slot][r.ADMITTED])
        running, waiting = len(slots), counters[r.WAITING_HEAD]
        while waiting >= 0:
            slots.append(waiting)
            waiting = rows[waiting][r.NEXT]
        found = []
        for place, slot in enumerate(slots[: wire.MAX_IN_FLIGHT]):
            flight = self._flights[slot]
            assert flight is not None
            found.append(flight.row(rows[slot][r.COMPUTED], place < running))
        return found, len(slots) - len(found)

    def _end_run(self) -> None:
        if self._run is not None:
            self._run.settle()
            self._run = None

    def _batch(self, planned: int, now_s: float) -> tuple[StepBatch, list[Flight], StepFigures]:
        """The planned step for the runner, the flights that sample a token in it, and its figures."""
        rows, flights = self._rows, self._flights
        segments, sampled, figures = [], [], StepFigures()
        decodes = decode_context = 0
        for slot, taken in self._plan[:planned]:
            row, flight = rows[slot], flights[slot]
            assert flight is not None
            end = row[r.COMPUTED]
            begin = end - taken
            complete = end == row[r.KNOWN]
            tokens, sampling = flight.token_ids[begin:end], flight.request.sampling
            segments.append(Segment(tokens, begin, flight.block_table, complete, sampling))
            if taken == 1 and begin >= flight.prompt_tokens:
                decodes += 1
                decode_context += begin
            else:
                figures.add_prefill(taken, begin)
            if complete:
                sampled.append(flight)
            if flight.scheduled_s is None:
                flight.scheduled_s = now_s
                flight.cached = row[r.HIT]
        figures.decodes, figures.decode_context, figures.sampled = decodes, decode_context, len(sampled)
        figures.see(self._state)
        return StepBatch(tuple(segments)), sampled, figures

    def _book(self, sampled: list[Flight], token_ids: list[int], now_s: float, events: Events) -> list[float]:
        """Add the new tokens to their flights; returns the gaps that they closed."""
        run, caching = self._run, self._options.prefix_caching
        if run is not None and run.all_stay(token_ids):
            shared_gap_s, heard = run.take(token_ids, now_s)
            self.deliver(heard)
            return [shared_gap_s] * len(token_ids)
        self._end_run()
        gaps_s = []
        size = self._boot.block_tokens
        for flight, token_id in zip(sampled, token_ids, strict=True):
            gap_s = flight.take(token_id, now_s)
            if gap_s is not None:
                gaps_s.append(gap_s)
            elif self.observer is not None:
                self.observer.on_first_token(*flight.first_token())
            if flight.finished is None:
                events.append((flight.sink, TokenEvent(flight.request_id, (token_id,), None, flight.cached)))
                if caching and len(flight.token_ids) % size == 0:
                    self._name_full(flight)
            elif flight.finished is FinishReason.STOP:
                # For the scheduler a request ends when it has produced OUTPUT tokens: these were all.
                self._rows[flight.slot][r.OUTPUT] = flight.output_tokens
        return gaps_s

    def _finish(self, force: InForce, sampled: list[Flight], figures: StepFigures, events: Events) -> None:
        """Book the step in the state and release requests that ended; if none did and all decode, a run begins."""
        if finish_step(self._boot, self._state) > 0:
            for flight in sampled:
                if flight.finished is not None:
                    last = (flight.token_ids[-1],)
                    self._retire(flight.slot, flight.finished, flight.gaps.last_s, events, last)
        elif DecodeRun.can_follow(force.setting, self._state, figures):
            name = self._name_full if self._options.prefix_caching else None
            self._run = DecodeRun(force.setting, self._boot, self._state, sampled, figures, name)

    def _publish(self, events: Events) -> None:
        if events:
            self.deliver(events)

    def _record(self, force: InForce, start_s: float, figures: StepFigures, gaps_s: list[float]) -> None:
        """Steps without a pause join: time spent after this counts in the next step's duration, so none is lost."""
        preempted = self._preempted - self._preempted_before
        self._preempted_before = self._preempted
        self._joins_s = self._now_s()
        step, duration_s = self._desk.steps - 1, self._joins_s - start_s
        record = figures.record(step, force.revision, start_s, duration_s, self._pool_blocks, preempted)
        self.latest = record
        self._desk.add_step(record)
        if self.observer is not None:
            self.observer.on_step(record)
            if gaps_s:
                self.observer.on_gaps(gaps_s)

    # --- requests ---

    def _name_block(self, flight: Flight, digest: bytes) -> None:
        self._keys.name(self._rows[flight.slot][r.KEY_AT] + flight.named, digest)
        flight.named += 1
        flight.digest = digest

    def _name_full(self, flight: Flight) -> None:
        """The content of the first block that has none yet, now that it is full."""
        size = self._boot.block_tokens
        begin = flight.named * size
        self._name_block(flight, chain_digests(flight.token_ids[begin : begin + size], size, flight.digest)[0])

    def _retire(self, slot: int, why: FinishReason, now_s: float, events: Events, last: tuple[int, ...] = ()) -> None:
        """Free the slot, keys and id of a request that holds no block any more."""
        flight = self._flights[slot]
        assert flight is not None
        row = self._rows[slot]
        self._keys.forget(row[r.KEY_AT], flight.named)
        self._flights[slot] = None
        del self._slot_of[flight.request_id]
        heapq.heappush(self._free_slots, slot)
        self._end(flight, why, now_s, row[r.PREEMPTIONS], events, last)

    def _end(
        self,
        flight: Flight,
        why: FinishReason,
        now_s: float,
        preemptions: int,
        events: Events,
        last: tuple[int, ...] = (),
    ) -> None:
        flight.finished = why
        record = flight.record(next(self._ended), max(now_s, flight.arrival_s), preemptions)
        self._desk.add_request(record)
        if self.observer is not None:
            self.observer.on_finished(record)
        events.append((flight.sink, TokenEvent(flight.request_id, last, why, flight.cached)))
        self._intake.one_ended(now_s)

    def let_go(self, why: FinishReason) -> None:
        """End everything that is in flight or has just arrived; the loop has taken its last step."""
        now_s = self._now_s()
        events: Events = []
        self._end_run()
        arrivals, _ = self._intake.take()
        for flight in arrivals:
            self._end(flight, why, now_s, 0, events)
        for slot in list(self._slot_of.values()):
            leave(self._boot, self._state, slot)
            self._retire(slot, why, now_s, events)
        self._publish(events)
        self._answer()

    # --- for gauges, from any thread: single numbers of the latest step ---

    @property
    def running(self) -> int:
        return int(self._state.counters[r.RUNNING_COUNT])

    @property
    def kv_used(self) -> float:
        """0..1."""
        return 1.0 - int(self._state.counters[r.FREE_BLOCKS]) / self._pool_blocks

    @property
    def preemptions(self) -> int:
        """Since the start."""
        return self._preempted
