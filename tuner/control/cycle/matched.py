"""Compares live traffic before and after a push, like with like. Pure.

Selection: all windows have one length and count the requests that arrived and ended inside, so all of them cut off the
same kind of request.
Matched: arrivals per second differ by at most RATE_RATIO beyond counting noise, and the shares of the prompt length
classes (a factor of four each) overlap by at least OVERLAP. Both sides then weight the classes alike, so that a few
more documents after the push do not look like a loss.
Starved requests leave no record while they wait. Those at a window's end that must have waited longer than the TTFT
target (without one: half of ``verify_s``) count as missed.
The interval is a bootstrap over blocks of neighbouring requests, which share their fate.
"""

import math
from dataclasses import dataclass

import numpy as np

from rooftune.tuner.observe.rows import FloatArray, IntArray

RATE_RATIO = 1.3
OVERLAP = 0.7
BLOCKS = 24
DRAWS = 400
# Every cycle looks for a verdict, so a single look must rarely be wrong: 99 % of a normal distribution.
LOOK_Z = 2.58


@dataclass(frozen=True, eq=False)
class Side:
    """One window. good: 0 or 1 per judged request, by arrival; prompt_tokens likewise, shape (n,). span_s: its length.

    arrived: requests that arrived in it, ended or not. overdue: waiting at its end and sure to miss their target.
    """

    good: FloatArray
    prompt_tokens: IntArray
    span_s: float
    arrived: float
    overdue: float = 0.0

    def __len__(self) -> int:
        return len(self.good)

    @property
    def served_share(self) -> float:
        """Ended requests over ended and overdue ones."""
        return len(self) / (len(self) + self.overdue) if len(self) else 0.0


@dataclass(frozen=True)
class Matched:
    """gain: attainment after minus before, NaN without a comparison; half_width: of its interval.

    before, after: attainment on the common mix.
    """

    gain: float
    half_width: float
    matched: bool
    before: float
    after: float


def overdue(waiting: float, rate_rps: float, ttft_bound_s: float) -> float:
    """Waiting requests beyond those that arrive within the bound: they waited longer. 0 without a finite bound."""
    if not (math.isfinite(ttft_bound_s) and math.isfinite(rate_rps)):
        return 0.0
    return max(0.0, waiting - rate_rps * ttft_bound_s)


def classes(prompt_tokens: IntArray) -> IntArray:
    """Prompt length classes, one per factor of four, shape (n,)."""
    return np.floor(np.log2(np.maximum(prompt_tokens, 1)) / 2.0 + 1e-9).astype(np.int64)


def compare(before: Side, after: Side, seed: int = 0) -> Matched:
    """The difference in attainment, and whether the windows match."""
    rate_ratio = _rate_ratio(before, after)
    if not len(before):
        return Matched(math.nan, math.nan, False, math.nan, math.nan)
    if not len(after):
        # No request ended after the push: an empty window shows nothing, overdue requests show a loss.
        was = float(before.good.mean()) * before.served_share
        if after.overdue <= 0.0:
            return Matched(math.nan, math.nan, False, was, math.nan)
        half = 1.0 / len(before) + 1.0 / after.overdue
        return Matched(-was, half, _same_rate(before, after, rate_ratio), was, 0.0)
    kinds = np.union1d(classes(before.prompt_tokens), classes(after.prompt_tokens))
    first, second = _table(before, kinds), _table(after, kinds)
    share_before, share_after = first.count / len(before), second.count / len(after)
    overlap = float(np.minimum(share_before, share_after).sum())
    both = (first.count > 0) & (second.count > 0)
    if not both.any():
        return Matched(math.nan, math.nan, False, math.nan, math.nan)
    weight = np.where(both, share_before + share_after, 0.0)
    weight = weight / weight.sum()
    was = float(weight @ first.mean) * before.served_share
    now = float(weight @ second.mean) * after.served_share
    generator = np.random.default_rng(seed)
    drawn_before = first.drawn(generator) @ weight * before.served_share
    drawn_after = second.drawn(generator) @ weight * after.served_share
    # A single request in either window proves nothing.
    least = 1.0 / len(before) + 1.0 / len(after)
    half = max(LOOK_Z * float((drawn_after - drawn_before).std()), least)
    return Matched(now - was, half, _alike(before, after, rate_ratio, overlap), was, now)


def _rate_ratio(before: Side, after: Side) -> float:
    if not (before.arrived > 0 and after.arrived > 0 and before.span_s > 0.0 and after.span_s > 0.0):
        return math.nan
    return (after.arrived / after.span_s) / (before.arrived / before.span_s)


def _same_rate(before: Side, after: Side, rate_ratio: float) -> bool:
    if not math.isfinite(rate_ratio):
        return False
    counting = 2.0 * math.sqrt(1.0 / before.arrived + 1.0 / after.arrived)
    return abs(math.log(rate_ratio)) <= math.log(RATE_RATIO) + counting


def _alike(before: Side, after: Side, rate_ratio: float, overlap: float) -> bool:
    # With few requests the mixes overlap less by chance alone.
    chance = 1.0 / math.sqrt(len(before)) + 1.0 / math.sqrt(len(after))
    return _same_rate(before, after, rate_ratio) and overlap >= OVERLAP - 0.5 * chance


@dataclass(frozen=True, eq=False)
class _Table:
    """Counts of good and of all requests, shape (blocks, classes)."""

    good_blocks: FloatArray
    count_blocks: FloatArray

    @property
    def count(self) -> FloatArray:
        total: FloatArray = self.count_blocks.sum(axis=0)
        return total

    @property
    def mean(self) -> FloatArray:
        return _ratio(self.good_blocks.sum(axis=0), self.count, np.zeros(self.count_blocks.shape[1]))

    def drawn(self, generator: np.random.Generator) -> FloatArray:
        """Means by class under DRAWS draws of whole blocks, shape (DRAWS, classes)."""
        blocks = len(self.count_blocks)
        picks = generator.multinomial(blocks, np.full(blocks, 1.0 / blocks), size=DRAWS).astype(np.float64)
        return _ratio(picks @ self.good_blocks, picks @ self.count_blocks, np.tile(self.mean, (DRAWS, 1)))


def _ratio(part: FloatArray, whole: FloatArray, otherwise: FloatArray) -> FloatArray:
    return np.divide(part, whole, out=otherwise, where=whole > 0)


def _table(side: Side, kinds: IntArray) -> _Table:
    blocks = min(BLOCKS, len(side))
    block = np.arange(len(side)) * blocks // len(side)
    column = np.searchsorted(kinds, classes(side.prompt_tokens))
    shape = (blocks, len(kinds))
    good_blocks, count_blocks = np.zeros(shape), np.zeros(shape)
    np.add.at(good_blocks, (block, column), side.good)
    np.add.at(count_blocks, (block, column), 1.0)
    return _Table(good_blocks, count_blocks)
