"""Counting for Prometheus at a fraction of the price of its own client: a histogram that takes many values at once."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby


class Histogram:
    """Counts per bucket and a sum. Not locked: its owner is."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._labels = (*(f"{bound:g}" for bound in self._bounds), "+Inf")
        self._counts = [0] * len(self._labels)
        self.total = 0.0

    def add(self, values: Iterable[float]) -> None:
        """Each value goes into the first bucket whose upper bound is not below it."""
        bounds, counts = self._bounds, self._counts
        # Gaps of one step are mostly equal: whoever decodes in it got a token in the one before as well.
        for value, same in groupby(values):
            count = len(list(same))
            counts[bisect_left(bounds, value)] += count
            self.total += count * value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulated, as Prometheus wants them: (upper bound, values up to it)."""
        return list(zip(self._labels, map(float, accumulate(self._counts)), strict=True))


class StepTable:
    """Steps by how many tokens they computed: a duration histogram and the exact sums for each bucket of tokens."""

    def __init__(self, token_bounds: Sequence[int], duration_bounds_s: Sequence[float]) -> None:
        self._token_bounds = tuple(token_bounds)
        self._duration_bounds_s = tuple(duration_bounds_s)
        self.rows: dict[str, tuple[Histogram, list[int]]] = {}

    def add(self, computed_tokens: int, context_tokens: int, duration_s: float) -> None:
        place = bisect_left(self._token_bounds, computed_tokens)
        label = str(self._token_bounds[place]) if place < len(self._token_bounds) else "+Inf"
        row = self.rows.get(label)
        if row is None:
            row = self.rows[label] = (Histogram(self._duration_bounds_s), [0, 0])
        row[0].add((duration_s,))
        row[1][0] += computed_tokens
        row[1][1] += context_tokens
