"""Everybody decodes, step after step, and nobody comes or goes: what is then alike for all is done once for all."""

from engine.figures import StepFigures
from engine.flight import Flight, Gaps
from engine.interface import Sink, TokenEvent
from engine.step import Segment, StepBatch

Plan = list[list[int]]


class DecodeRun:
    """The steps that follow one in which everybody who runs got a token behind its prompt, all at the same instant.

    It lasts while every plan is the plan of that step. Tokens go to their flights at once; gaps are the same for all
    and are counted here until ``settle``, so nobody may look at a flight's gaps before that.

    plan: requests and tokens of the step before; flights: theirs. block_tokens: of a KV block.
    """

    def __init__(self, plan: Plan, flights: list[Flight], figures: StepFigures, block_tokens: int) -> None:
        self.flights = flights
        self.figures = figures
        self._plan = [[slot, tokens] for slot, tokens in plan]
        self._size = block_tokens
        self._begun = False

    def is_again(self, plan: Plan) -> bool:
        """Whether this plan is the one of the step before."""
        return plan == self._plan

    def next(self) -> StepBatch:
        """The batch of the step that is planned now."""
        if not self._begun:
            self._begin()
        self.figures.decode_context += len(self.flights)
        return StepBatch(self._segments, follows=True)

    def all_stay(self, token_ids: list[int]) -> bool:
        """Whether nobody ends with these tokens. If not, they are for the flights one by one, after ``settle``."""
        return self._left > 1 and self._stops.isdisjoint(token_ids)

    def take(self, token_ids: list[int], now_s: float) -> tuple[float, list[Flight]]:
        """The tokens of a step after which all stay; the gap before them, and whose token fills a block."""
        for so_far, token_id in zip(self._token_ids, token_ids, strict=True):
            so_far.append(token_id)
        self._left -= 1
        self._taken += 1
        return self._gaps.close(now_s), self._fills[self._taken % self._size]

    def events(self, token_ids: list[int]) -> list[tuple[Sink, TokenEvent]]:
        """One for each of those tokens."""
        new = tuple.__new__  # what the constructor of a named tuple calls, in a third of its time
        return [
            (sink, new(TokenEvent, (number, (token_id,), None, cached)))
            for (sink, number, cached), token_id in zip(self._callers, token_ids, strict=True)
        ]

    def settle(self) -> None:
        """Book to each flight what was counted for all; the run is over."""
        if self._begun:
            for flight in self.flights:
                flight.gaps.add(self._gaps)
            self._begun = False

    def _begin(self) -> None:
        flights = self.flights
        self._begun = True
        self._gaps = Gaps(flights[0].gaps.last_s, flights[0].gaps.bounds_s)
        self._token_ids = [flight.token_ids for flight in flights]
        self._callers = [(flight.sink, flight.request_id, flight.cached) for flight in flights]
        self._left = min([flight.most_tokens - len(flight.token_ids) for flight in flights])
        self._stops = frozenset().union(*{flight.stops for flight in flights})
        self._taken = 0
        self._fills: list[list[Flight]] = [[] for _ in range(self._size)]  # whose block is full after so many tokens
        for flight in flights:
            self._fills[-len(flight.token_ids) % self._size].append(flight)

    def _segments(self) -> tuple[Segment, ...]:
        """For a runner that asks: each computes the token that came out of the step before."""
        return tuple(
            Segment(flight.token_ids[-1:], len(flight.token_ids) - 1, flight.block_table, True, flight.request.sampling)
            for flight in self.flights
        )
