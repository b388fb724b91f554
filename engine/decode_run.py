"""Everybody decodes, step after step, and nobody comes or goes: what is then alike for all is done once for all."""

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
    """The events of one step of a run, made when somebody goes through them: on the thread that delivers them."""

    __slots__ = ("_callers", "_token_ids")

    def __init__(self, callers: list[tuple[Sink, int, int]], token_ids: list[int]) -> None:
        self._callers = callers
        self._token_ids = token_ids

    def __iter__(self) -> Iterator[tuple[Sink, TokenEvent]]:
        for (sink, number, cached), token_id in zip(self._callers, self._token_ids, strict=True):
            yield sink, TokenEvent(number, (token_id,), None, cached)


class DecodeRun:
    """The steps that follow one in which everybody who runs got a token behind its prompt, all at the same instant.

    While the setting stays the same and nobody comes or goes, ``plan_step`` and ``finish_step`` would do the same for
    everybody again, one token further; only a block that begins is taken from the pool in its step. What they would
    have written, the tokens, the gaps and the contents of filled blocks are booked by ``settle``: until then nobody may
    look at the requests' rows or flights, nor let anybody come or go.

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
        """Whether a step with these figures, in which nobody has ended, can be taken further.

        Whoever waits must have no chance to be admitted, and change nothing in the budget from step to step.
        """
        if not figures.decodes == figures.sampled == figures.running:
            return False
        counters = state.counters
        if counters[r.WAITING_COUNT] == 0:
            return True
        return counters[r.RUNNING_COUNT] >= setting.max_running and setting.budget_policy != STEP_TIME_TARGET

    def plan(self, setting: Setting, model: StepModel) -> bool:
        """Plan the next step. False: it is not like the one before; nothing is planned, and the run is over."""
        if setting is not self._setting or not (self._begun or self._begin(model)):
            return False
        counters, step = self._state.counters, self._planned + 1
        # Whose block is full with the step before computes the first token of another.
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
        """Whether nobody ends with these tokens. If not, they are for the flights one by one, after ``settle``."""
        return self._left > 1 and self._stops.isdisjoint(token_ids)

    def take(self, token_ids: list[int], now_s: float) -> tuple[float, RunEvents]:
        """The tokens of the planned step, after which all stay; the gap before them, and what their callers hear."""
        self._taken.append(token_ids)
        self._left -= 1
        return self._gaps.close(now_s), RunEvents(self._callers, token_ids)

    def settle(self) -> None:
        """Book what was done for all, between two steps or behind the plan of one; the run is over."""
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
        # In the order of the steps: of two blocks with one content, the first is the one that is found.
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
        # After so many tokens (modulo the size of a block): whose blocks are full, and what they had computed before.
        self._fills: list[list[tuple[Flight, int]]] = [[] for _ in range(self._size)]
        for flight in flights:
            tokens = len(flight.token_ids)
            self._fills[-tokens % self._size].append((flight, tokens - 1))
        return True

    def _let_find(self, step: int) -> None:
        """The blocks that the plan of this step fills can be found from then on."""
        self._grow(self._fills[(step - 1) % self._size], step)

    def _grow(self, whose: list[tuple[Flight, int]], step: int) -> None:
        for flight, computed in whose:
            grow(self._state, self._boot, flight.slot, computed + step)

    def _write_tokens(self) -> None:
        """The tokens so far to their flights."""
        new = self._taken[self._written :]
        if new:
            for flight, token_ids in zip(self.flights, zip(*new, strict=True), strict=True):
                flight.token_ids.extend(token_ids)
            self._written += len(new)

    def _segments(self) -> tuple[Segment, ...]:
        """For a runner that asks: each computes the token that came out of the step before."""
        self._write_tokens()
        return tuple(
            Segment(flight.token_ids[-1:], len(flight.token_ids) - 1, flight.block_table, True, flight.request.sampling)
            for flight in self.flights
        )
