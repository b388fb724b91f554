"""A run of steps in which the same requests all decode, so that the work they share is done once per step."""

from collections.abc import Callable, Iterator

from rooftune.engine.figures import StepFigures
from rooftune.engine.flight import Flight, Gaps
from rooftune.engine.interface import Sink, TokenEvent
from rooftune.engine.step import Segment, StepBatch
from rooftune.policies import request as r
from rooftune.policies.budget import step_budget
from rooftune.policies.kv import grow
from rooftune.policies.packing import effective_budget
from rooftune.policies.request import STEP_TIME_TARGET, Boot, Setting, State
from rooftune.policies.step_time import StepModel


class RunEvents:
    """The events of one step of a run, made during iteration, on the thread that delivers them."""

    __slots__ = ("_callers", "_token_ids")

    def __init__(self, callers: list[tuple[Sink, int, int]], token_ids: list[int]) -> None:
        self._callers = callers
        self._token_ids = token_ids

    def __iter__(self) -> Iterator[tuple[Sink, TokenEvent]]:
        for (sink, number, cached), token_id in zip(self._callers, self._token_ids, strict=True):
            yield sink, TokenEvent(number, (token_id,), None, cached)


class DecodeRun:
    """The steps that follow one in which every running request decoded a token, all at the same instant.

    While the setting and the set of requests stay the same, ``plan_step`` and ``finish_step`` would repeat the same
    work one token further; only a new block is taken from the pool in its step. ``settle`` writes what they would have
    written, the tokens, the gaps and the contents of filled blocks. Until then the requests' rows and flights must not
    be read, and no request may join or leave.

    flights: in the order of the plan, of the step just finished. name: gives a flight's next filled block its content;
    None where no prefix is cached.
    """

    def __init__(
        self,
        setting: Setting,
        boot: Boot,
        state: State,
        flights: list[Flight],
        figures: StepFigures,
        name: Callable[[Flight], None] | None,
    ) -> None:
        self.flights = flights
        self.figures = figures
        self._setting, self._boot, self._state, self._name = setting, boot, state, name
        self._size = boot.block_tokens
        self._begun = False
        self._planned = self._written = 0  # steps; steps whose tokens their flights have

    @staticmethod
    def can_follow(setting: Setting, state: State, figures: StepFigures) -> bool:
        """Whether a run can follow a step with these figures, in which no request ended.

        A waiting request must have no chance to be admitted and must not change the budget from step to step.
        """
        if not figures.decodes == figures.sampled == figures.running:
            return False
        counters = state.counters
        if counters[r.WAITING_COUNT] == 0:
            return True
        return counters[r.RUNNING_COUNT] >= setting.max_running and setting.budget_policy != STEP_TIME_TARGET

    def plan(self, setting: Setting, model: StepModel) -> bool:
        """Plan the next step. False when it differs from the one before: nothing is planned, and the run is over."""
        if setting is not self._setting or not (self._begun or self._begin(model)):
            return False
        counters, step = self._state.counters, self._planned + 1
        # A request whose block the step before filled begins another with this token.
        beginning = self._fills[(step - 2) % self._size]
        if len(beginning) > counters[r.FREE_BLOCKS]:
            return False
        if step == 1:
            self._let_find(1)  # of blocks that filled before the run: their contents are known
        self._grow(beginning, step)
        self._planned = step
        self.figures.decode_context += len(self.flights)
        self.figures.free_blocks = counters[r.FREE_BLOCKS]
        return True

    def batch(self) -> StepBatch:
        """The planned step."""
        return StepBatch(self._segments, follows=True)

    def all_stay(self, token_ids: list[int]) -> bool:
        """Whether no request ends with these tokens. If one does, call ``settle`` and book them flight by flight."""
        return self._left > 1 and self._stops.isdisjoint(token_ids)

    def take(self, token_ids: list[int], now_s: float) -> tuple[float, RunEvents]:
        """Take the tokens of a planned step that ends no request; returns the gap before them and the events."""
        self._taken.append(token_ids)
        self._left -= 1
        return self._gaps.close(now_s), RunEvents(self._callers, token_ids)

    def settle(self) -> None:
        """Write the run's results to each request, between two steps or right after a plan; the run is over."""
        if not self._begun:
            return
        self._begun = False
        self._write_tokens()
        taken = len(self._taken)
        for flight in self.flights:
            row = self._state.requests[flight.slot]
            row[r.COMPUTED] += self._planned
            row[r.KNOWN] += taken
            flight.gaps.add(self._gaps)
        if self._name is None:
            return
        # In the order of the steps, because lookup finds the first of two blocks with the same content.
        for step in range(1, self._planned + 1):
            if step > 1:
                self._let_find(step)
            if step <= taken:
                for flight, _ in self._fills[step % self._size]:
                    self._name(flight)

    def _begin(self, model: StepModel) -> bool:
        flights, counters = self.flights, self._state.counters
        count = len(flights)
        budget = step_budget(self._setting, self._boot, model, count, 0, counters[r.WAITING_COUNT], 0)
        if self._boot.keep_decodes_moving != 0:
            budget = effective_budget(budget, self._boot.ceiling_tokens, count)
        if budget < count:
            return False
        counters[r.BUDGET] = self.figures.budget = budget
        counters[r.PREEMPTED_COUNT] = counters[r.HELD_BACK] = 0
        self._begun = True
        self._taken: list[list[int]] = []
        self._gaps = Gaps(flights[0].gaps.last_s, flights[0].gaps.bounds_s)
        self._callers = [(flight.sink, flight.request_id, flight.cached) for flight in flights]
        self._left = min([flight.most_tokens - len(flight.token_ids) for flight in flights])
        self._stops = frozenset().union(*{flight.stops for flight in flights})
        # By steps modulo the block size: flights whose block is full then, and their tokens computed before.
        self._fills: list[list[tuple[Flight, int]]] = [[] for _ in range(self._size)]
        for flight in flights:
            tokens = len(flight.token_ids)
            self._fills[-tokens % self._size].append((flight, tokens - 1))
        return True

    def _let_find(self, step: int) -> None:
        """Let lookup find the blocks that this step's plan fills."""
        self._grow(self._fills[(step - 1) % self._size], step)

    def _grow(self, whose: list[tuple[Flight, int]], step: int) -> None:
        for flight, computed in whose:
            grow(self._state, self._boot, flight.slot, computed + step)

    def _write_tokens(self) -> None:
        """Append the tokens so far to their flights."""
        new = self._taken[self._written :]
        if new:
            for flight, token_ids in zip(self.flights, zip(*new, strict=True), strict=True):
                flight.token_ids.extend(token_ids)
            self._written += len(new)

    def _segments(self) -> tuple[Segment, ...]:
        """For a runner that reads them: each computes the token that the step before sampled."""
        self._write_tokens()
        return tuple(
            Segment(flight.token_ids[-1:], len(flight.token_ids) - 1, flight.block_table, True, flight.request.sampling)
            for flight in self.flights
        )
