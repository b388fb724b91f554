"""Probation: whether a kept setting still does what its trial showed, block by block of live requests. Pure.

Two one-sided CUSUMs run over the blocks' shares of good requests, in units of a block's long-run deviation (Page,
Continuous Inspection Schemes, Biometrika 1954; thresholds by Siegmund, Sequential Analysis, 1985).

- *Fell*: against the expected share. At most one false alarm in FELL_BLOCKS blocks, a week of them at the default
  cadence, while the share stays at what was expected.
- *Lost*: against the share that the boot setting showed under like traffic. One alarm in LOST_BLOCKS blocks if the
  setting is exactly as good as boot, where going back costs nothing; far fewer if it is better.

Shares resemble their neighbours, so a deviation is the long-run one: of the blocks' own scatter and autocorrelation
once there are enough, before that of the counts with a margin. A block counts for at most CLIP deviations, so that one
odd block alone is no alarm.

A third rule needs no share: a queue that grew over QUEUE_BLOCKS blocks. docs/decisions/027-probation.md has the choice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from rooftune.policies.errors import bad_value

ALLOWANCE = 0.5  # smaller shifts, in deviations, are ignored
CLIP_FELL, CLIP_LOST = 4.0, 3.0
FELL_BLOCKS, LOST_BLOCKS = 20_000.0, 200.0
# Blocks that are remembered; this many older than the latest RECENT show the scatter.
REMEMBERED, SCATTER_BLOCKS, RECENT = 48, 12, 4
# Requests of one block share their fate: this part of a request's variance stays however many there are. AR_PRIOR:
# long-run over plain deviation while the blocks are too few to show it, as for an autocorrelation of 0.4.
# LEARNT_MARGIN: on what few blocks show.
SHARED, AR_PRIOR, MOST_AR, LEARNT_MARGIN = 0.04, 1.6, 0.7, 1.25
LEAST_JUDGED = 5.0
# A queue grows when it gets longer in each of QUEUE_BLOCKS consecutive blocks, and by this many requests and this
# factor in all.
QUEUE_BLOCKS, QUEUE_LEAST, QUEUE_RATIO = 4, 5.0, 1.5
CLEARLY = 1.05  # sustainable rates are estimates
RISEN = 1.1  # the offered rate over that at the verdict, beyond counting noise
DAY_S = 86_400.0


def cusum_threshold(blocks: float) -> float:
    """Height, in deviations, that a one-sided CUSUM on independent normal scores with ALLOWANCE passes by chance once
    in ``blocks`` (> 1) on average."""
    low, high = 0.0, 200.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        reach = 2.0 * ALLOWANCE * (middle + 1.166)
        run_length = (math.exp(reach) - reach - 1.0) / (2.0 * ALLOWANCE**2)
        low, high = (middle, high) if run_length < blocks else (low, middle)
    return high


FELL_AT, LOST_AT = cusum_threshold(FELL_BLOCKS), cusum_threshold(LOST_BLOCKS)


class Standing(StrEnum):
    """What a block says of a kept setting.

    HOLDS: nothing new. LOWER: clearly below what was expected, yet above the boot setting: it stays, and what it
    showed lately is expected from now on. OVERLOAD: the load has risen, and the boot setting carries less of it.
    LOST: the boot setting is likely better.
    """

    HOLDS = "holds"
    LOWER = "lower"
    OVERLOAD = "overload"
    LOST = "lost"


@dataclass(frozen=True)
class Block:
    """Requests that ended in a block of time under the kept setting. good of judged ones, those included that have
    waited beyond their target; waiting: mean queue; offered_rps: arrivals per second."""

    good: float
    judged: float
    waiting: float
    offered_rps: float

    def __post_init__(self) -> None:
        if not (0.0 <= self.good <= self.judged < math.inf):
            raise bad_value("good of judged requests", (self.good, self.judged), "0 <= good <= judged", "count again")

    @property
    def share(self) -> float:
        return self.good / self.judged


@dataclass(frozen=True)
class Rates:
    """Sustainable rates in requests/s, as the latest search estimates them; None: unknown."""

    in_force_rps: float | None = None
    boot_rps: float | None = None

    @property
    def boot_more(self) -> bool | None:
        """Whether the boot setting carries more, by CLEARLY at least; None: unknown, or about as much."""
        if self.in_force_rps is None or self.boot_rps is None:
            return None
        if self.boot_rps >= CLEARLY * self.in_force_rps:
            return True
        return False if self.boot_rps < self.in_force_rps else None

    def only_boot(self, offered_rps: float) -> bool:
        """Whether the boot setting carries what is offered and the one in force does not."""
        if self.in_force_rps is None or self.boot_rps is None or not self.boot_more:
            return False
        return self.in_force_rps < offered_rps <= self.boot_rps


@dataclass(frozen=True)
class Probation:
    """What is known of a kept setting, and the tests so far; None: unknown.

    expected: its share of good requests, by its verdict or by a twin; boot: the boot setting's when it was last seen
    under like traffic; offered_rps: arrivals at the verdict. fell, lost: heights of the two CUSUMs. blocks: the latest
    ones, oldest first. from_s: start of the running block on the engine's clock. pace: measured over modelled time of
    steps of decodes alone when the block began to be watched.
    """

    expected: float | None = None
    boot: float | None = None
    offered_rps: float | None = None
    fell: float = 0.0
    lost: float = 0.0
    blocks: tuple[Block, ...] = ()
    rates: Rates = Rates()
    from_s: float | None = None
    pace: float | None = None

    def restarted(self, from_s: float) -> "Probation":
        """The same knowledge; the running block begins at ``from_s``."""
        return replace(self, from_s=from_s)

    def expecting(self, share: float) -> "Probation":
        """Another expectation; a new test begins unless it is about the same."""
        if self.expected is not None and abs(share - self.expected) < 0.01:
            return self
        return replace(self, expected=share, fell=0.0)


def deviation(mean: float, judged: float, blocks: Sequence[Block]) -> float:
    """Long-run standard deviation of a block's share of ``judged`` requests around ``mean``. blocks: earlier ones."""
    middle = min(max(mean, 0.05), 0.95)
    counted = AR_PRIOR * math.sqrt(middle * (1.0 - middle) * (1.0 / judged + SHARED))
    shares = [block.share for block in blocks[:-RECENT] if block.judged >= LEAST_JUDGED]
    if len(shares) < SCATTER_BLOCKS:
        return counted
    centre = sum(shares) / len(shares)
    off = [share - centre for share in shares]
    variance = sum(one * one for one in off) / (len(off) - 1)
    if variance <= 0.0:
        return counted
    together = sum(a * b for a, b in pairwise(off)) / (len(off) - 1)
    # The estimate of an autocorrelation from few blocks is low by about (1 + 4 r) / n.
    raw = together / variance
    ar = min(max(raw + (1.0 + 4.0 * max(raw, 0.0)) / len(off), 0.0), MOST_AR)
    return max(counted, LEARNT_MARGIN * math.sqrt(variance * (1.0 + ar) / (1.0 - ar)))


def _higher(height: float, reference: float | None, block: Block, blocks: Sequence[Block], clip: float) -> float:
    """The height of a CUSUM on shares below ``reference`` after another block."""
    if reference is None or block.judged < LEAST_JUDGED:
        return height
    score = (reference - block.share) / deviation(reference, block.judged, blocks)
    return max(0.0, height + max(-clip, min(clip, score)) - ALLOWANCE)


def queue_grows(blocks: Sequence[Block]) -> bool:
    """Whether the queue grew over the latest QUEUE_BLOCKS blocks, in each of them."""
    lengths = [block.waiting for block in blocks[-QUEUE_BLOCKS - 1 :]]
    if len(lengths) <= QUEUE_BLOCKS or not all(a < b for a, b in pairwise(lengths)):
        return False
    return lengths[-1] >= max(lengths[0] + QUEUE_LEAST, lengths[0] * QUEUE_RATIO)


def risen(state: Probation, block: Block, block_s: float) -> bool:
    """Whether more is offered than at the verdict, beyond counting noise. block_s: length of the block (s)."""
    if state.offered_rps is None or state.offered_rps <= 0.0 or block.offered_rps <= 0.0:
        return False
    noise = 2.0 / math.sqrt(block.offered_rps * block_s)
    return math.log(block.offered_rps / state.offered_rps) > math.log(RISEN) + noise


def watch(state: Probation, block: Block, block_s: float, alike: bool) -> tuple[Probation, Standing]:
    """The tests after another block. block_s: its length (s). alike: whether the traffic is like that of the verdict;
    otherwise what boot showed says nothing."""
    boot = state.boot if alike else None
    fell = _higher(state.fell, state.expected, block, state.blocks, CLIP_FELL)
    lost = _higher(state.lost, boot, block, state.blocks, CLIP_LOST)
    blocks = (*state.blocks, block)[-REMEMBERED:]
    now = replace(state, fell=fell, lost=lost, blocks=blocks)
    standing = _standing(now, boot, block)
    if standing is Standing.HOLDS:
        return now, standing
    if standing is Standing.LOST and state.rates.boot_more is False and risen(state, block, block_s):
        standing = Standing.OVERLOAD
    if standing is Standing.LOST:
        return now, standing
    latest = block.share if block.judged >= LEAST_JUDGED else state.expected
    # The scatter seen until now belongs to another level.
    lost = 0.0 if standing is Standing.OVERLOAD else lost
    return replace(now, expected=latest, fell=0.0, lost=lost, blocks=blocks[-1:]), standing


def _standing(now: Probation, boot: float | None, block: Block) -> Standing:
    if now.lost > LOST_AT or now.rates.only_boot(block.offered_rps):
        return Standing.LOST
    above = (
        boot is not None
        and block.judged >= LEAST_JUDGED
        and block.share > boot + deviation(boot, block.judged, now.blocks)
    )
    if queue_grows(now.blocks):
        more = now.rates.boot_more
        if more or (more is None and not above):
            return Standing.LOST
    if now.fell > FELL_AT:
        return Standing.LOWER if above else Standing.LOST
    return Standing.HOLDS


def pause_s(last_s: float, since_s: float, least_s: float) -> float:
    """Seconds without pushes after a kept setting was lost. last_s: the pause before (0: none); since_s: seconds since
    then. Each repeat doubles it, each day without one halves it; from ``least_s`` to a day."""
    if last_s <= 0.0:
        return min(least_s, DAY_S)
    days = math.floor(max(since_s, 0.0) / DAY_S)
    return min(max(2.0 * last_s * 0.5 ** min(days, 60), least_s), DAY_S)
