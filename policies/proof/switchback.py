"""The test behind a trial: two settings take turns in pairs of blocks, each pair in random order; pure.

The differences within pairs are compared with their own scatter. The error of FALSE_SHARE is shared out evenly over the
looks at PAIRS pairs, so that a trial without any difference ends in a verdict in at most that share.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rooftune.policies.verify import Verdict

PAIRS: tuple[int, ...] = (4, 7, 14)
FALSE_SHARE = 0.05
# Student's t beyond which FALSE_SHARE / 3 lies, by the pairs of a look.
_T = {4: 4.857, 7: 3.287, 14: 2.746}
# Caution: at least this loss, beyond so many deviations of independent requests.
HARM_GAIN, HARM_Z = -0.1, 3.0


@dataclass(frozen=True)
class Block:
    """One block of a trial, or of the time before it.

    new: under the new setting. good, judged: good requests among those judged, >= 0. expected: what the twin says of
    the block's own arrivals, mean of both settings, 0..1; NaN: unknown.
    """

    new: bool
    good: float
    judged: float
    expected: float = math.nan


@dataclass(frozen=True)
class Outcome:
    """gain: share of good requests, new minus old, and half of its interval; NaN while unknown. looked: at a look."""

    gain: float
    half_width: float
    pairs: int
    verdict: Verdict
    looked: bool


def schedule(seed: int) -> tuple[bool, ...]:
    """Whether each block of a trial is under the new setting: both once in each pair, in random order."""
    chance = random.Random(seed)
    firsts = [chance.random() < 0.5 for _ in range(PAIRS[-1])]
    return tuple(arm for first in firsts for arm in (first, not first))


def judge_pairs(blocks: Sequence[Block], history: Sequence[Block]) -> Outcome:
    """The verdict on whole pairs in their order. Between two looks it is open, and the interval is the next look's."""
    pairs = len(blocks) // 2
    gains = []
    for first, second in zip(blocks[: 2 * pairs : 2], blocks[1::2], strict=True):
        new, old = (first, second) if first.new else (second, first)
        gains.append(new.good / new.judged - old.good / old.judged)
    if pairs < 2:
        return Outcome(gains[0] if gains else math.nan, math.nan, pairs, Verdict.INCONCLUSIVE, False)
    gain = float(np.mean(gains))
    look = next((count for count in PAIRS if count >= pairs), PAIRS[-1])
    half = _T[look] * float(np.std(gains, ddof=1)) / math.sqrt(pairs)
    looked = pairs in PAIRS
    verdict = Verdict.INCONCLUSIVE
    if looked and abs(gain) > half:
        verdict = Verdict.BETTER if gain > 0.0 else Verdict.WORSE
    return Outcome(gain, half, pairs, verdict, looked)


def harmful(blocks: Sequence[Block]) -> bool:
    """Whether the new setting loses so much that the trial ends for caution; no verdict, and asked after any block."""
    (good, judged), (was_good, was_judged) = (
        (sum(b.good for b in blocks if b.new is new), sum(b.judged for b in blocks if b.new is new))
        for new in (True, False)
    )
    if judged <= 0.0 or was_judged <= 0.0:
        return False
    both = (good + was_good + 1.0) / (judged + was_judged + 2.0)
    gain = good / judged - was_good / was_judged
    return gain < min(HARM_GAIN, -HARM_Z * math.sqrt(both * (1.0 - both) * (1.0 / judged + 1.0 / was_judged)))
