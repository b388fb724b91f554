"""The switchback of a trial: old and new setting take turns in pairs of blocks, each pair in random order; pure.

What is judged is the difference of good shares within pairs, so that drift of machine and traffic hits both settings
alike. A trial looks a few times, after PAIRS, and each look has its own part of the false verdicts that a trial may
give, SPENT; the parts add up, however the looks depend on each other. Bench ``verdict`` says what this is worth, and
decision 024 why it is so; both are for blocks of 30 s whose first 5 s are left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from rooftune.policies.outcomes import FloatArray
from rooftune.policies.verify import Verdict

PAIRS: tuple[int, ...] = (2, 3, 4, 6, 9, 14, 20, 29)
SPENT = (0.001, 0.002, 0.003, 0.005, 0.007, 0.008, 0.008, 0.008)  # 4.2 %; the rest of 5 % is kept for what drifts
LEAST_DEGREES = 4.0  # of freedom; a scatter known less well decides nothing
# Neighbouring differences share a block, so that n of them tell as much as 2/3 n independent ones.
SHARED = 2.0 / 3.0
# Harm is a loss of at least HARM_LOSS and HARM_WIDTHS standard errors, against HARM_BLOCKS old blocks or more, and
# beyond COUNTING_Z standard errors of independent requests.
HARM_LOSS, HARM_WIDTHS, HARM_BLOCKS, COUNTING_Z = 0.15, 2.0, 6, 3.0


@dataclass(frozen=True)
class Block:
    """One block of a trial, or of the time before it (there ``new`` is False).

    judged: requests that arrived in it and are decided (its first seconds, carry-over, left out); good: of these.
    expected: the twin's share of good ones for the block's own arrivals, mean of both settings; NaN: unknown.
    """

    new: bool
    good: float
    judged: float
    expected: float = math.nan


@dataclass(frozen=True)
class Outcome:
    """A trial at its latest look. gain: new minus old share (-1..1), NaN before the first look.

    half_width: half of the interval around it; inf while the scatter is unknown. pairs: whole pairs behind it. slope:
    how far both follow the twin, 0..1.
    """

    gain: float
    half_width: float
    pairs: int
    verdict: Verdict
    looked: bool
    slope: float = 0.0


def schedule(seed: int) -> tuple[bool, ...]:
    """Whether each block of a trial runs under the new setting: 2 * PAIRS[-1] of them, each pair in random order."""
    arms: list[bool] = []
    for pair in range(PAIRS[-1]):
        new_first = bool(_mixed(seed * PAIRS[-1] + pair) & 1)
        arms += [new_first, not new_first]
    return tuple(arms)


def _mixed(number: int) -> int:
    """64 bits that look random (splitmix64)."""
    bits = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def judge_pairs(blocks: Sequence[Block], history: Sequence[Block]) -> Outcome:
    """The trial so far: its blocks in order of time, two a pair, and whole blocks of the same length before it.

    Each pair holds one block of each setting. Judged is the latest look that is due; a last, half pair waits. A pair
    with an empty block tells nothing.
    """
    looks = [look for look in PAIRS if look <= len(blocks) // 2]
    if not looks:
        return Outcome(math.nan, math.inf, 0, Verdict.INCONCLUSIVE, False)
    seen = blocks[: 2 * looks[-1]]
    slope = slope_of(seen, history)
    old = _shares([block for block in seen if not block.new], slope)
    new = _shares([block for block in seen if block.new], slope)
    paired = (new - old)[np.isfinite(new - old)]
    if len(paired) < 2:
        return Outcome(math.nan, math.inf, looks[-1], Verdict.INCONCLUSIVE, True)
    gain = float(paired.mean())
    variance, degrees = _scatter(seen, history, slope)
    if slope:
        variance = max(variance, _one_request(seen))
    half = math.inf
    if degrees >= LEAST_DEGREES:
        half = student(SPENT[len(looks) - 1], degrees) * math.sqrt(variance / len(paired))
    verdict = Verdict.INCONCLUSIVE
    if abs(gain) > half:
        verdict = Verdict.BETTER if gain > 0.0 else Verdict.WORSE
    return Outcome(gain, half, looks[-1], verdict, True, slope)


def _scatter(seen: Sequence[Block], history: Sequence[Block], slope: float) -> tuple[float, float]:
    """Variance of the difference of two neighbouring blocks, and its degrees of freedom.

    Three witnesses in the trial that no gain touches: the pairs around their mean, and the steps from block to block
    under the old and under the new setting. The time before is a fourth, at the trial's own shares and counts: near
    one half a share scatters more. A trial more restless than the time before it is judged by its own scatter.
    """
    old, new = (_shares([block for block in seen if block.new is arm], slope) for arm in (False, True))
    paired = new - old
    inner = paired[np.isfinite(paired)]
    steps = [_steps(old), _steps(new)]
    degrees = len(inner) - 1.0 + SHARED * sum(map(len, steps))
    own = float(((inner - inner.mean()) ** 2).sum()) + SHARED * sum(float(one @ one) for one in steps)
    before = _steps(_shares(history, slope))
    past_degrees = SHARED * len(before) - (slope != 0.0)
    now = _by_count(seen)
    if past_degrees <= 0.0:
        return max(own / degrees, now), degrees
    past, was = float(before @ before) / len(before), _by_count(history)
    past = max(past, past * now / was if was > 0.0 else now)
    both = degrees + past_degrees
    return max((own + past_degrees * past) / both, own / degrees), both


def _by_count(blocks: Sequence[Block]) -> float:
    """Variance of a difference of two blocks, were requests good or bad independently of each other."""
    counted = [block for block in blocks if block.judged > 0.0]
    share = sum(block.good for block in counted) / sum(block.judged for block in counted)
    return 2.0 * share * (1.0 - share) * sum(1.0 / block.judged for block in counted) / len(counted)


def _one_request(blocks: Sequence[Block]) -> float:
    """Variance of a difference of two blocks that the twin foretells to within one request: it may have been right so
    far by luck, and a machine that slows down errs in steps of requests."""
    return 2.0 * sum(1.0 / (block.judged * block.judged) for block in blocks if block.judged > 0.0) / len(blocks)


def _steps(shares: FloatArray) -> FloatArray:
    """Known differences from block to block."""
    steps = np.diff(shares)
    return steps[np.isfinite(steps)]


def slope_of(blocks: Sequence[Block], history: Sequence[Block]) -> float:
    """How far the share follows the twin's, by the time before the trial; 0: not at all, or not known.

    Fixed before the first pair, it may be wrong without any harm to the test.
    """
    steps = np.diff(np.array([_pair_of(block) for block in history]).reshape(-1, 2), axis=0)
    steps = steps[np.isfinite(steps).all(axis=1)]
    known = all(math.isfinite(block.expected) for block in blocks if block.judged > 0.0)
    spread = float(steps[:, 1] @ steps[:, 1])
    if not known or len(steps) < LEAST_DEGREES or spread <= 0.0:
        return 0.0
    return min(max(float(steps[:, 0] @ steps[:, 1]) / spread, 0.0), 1.0)


def _pair_of(block: Block) -> tuple[float, float]:
    return (block.good / block.judged if block.judged > 0.0 else math.nan), block.expected


def _shares(blocks: Sequence[Block], slope: float) -> FloatArray:
    """Good share of each block, less what the twin explains; NaN where no request is judged."""
    found = np.array([_pair_of(block) for block in blocks]).reshape(-1, 2)
    return found[:, 0] - slope * found[:, 1] if slope else found[:, 0]


def student(tails: float, degrees: float) -> float:
    """What |t| exceeds with probability ``tails`` (0..1); up to 4 % too wide from 4 degrees of freedom on (Wallace)."""
    normal = NormalDist().inv_cdf(1.0 - tails / 2.0) * (8.0 * degrees + 3.0) / (8.0 * degrees + 1.0)
    return math.sqrt(degrees * math.expm1(normal * normal / degrees))


def harmful(blocks: Sequence[Block], history: Sequence[Block] = ()) -> bool:
    """Whether to give the trial up for caution: the new setting loses much, and more than blocks scatter.

    Blocks in order of time, those of a ramp included. No verdict: it errs more often than one may.
    """
    if not _loses_beyond_counting([*history, *blocks]):
        return False
    before = [*history, *(block for block in blocks if not block.new)]
    old = _shares(before, 0.0)
    new = _shares([block for block in blocks if block.new], 0.0)
    old, new = old[np.isfinite(old)], new[np.isfinite(new)]
    if len(new) == 0 or len(old) < 2:
        return False
    steps = np.diff(old)
    variance = 0.5 * float(steps @ steps) / len(steps)
    recent = old[-max(HARM_BLOCKS, len(new)) :]
    loss = float(recent.mean() - new.mean())
    return loss > max(HARM_LOSS, HARM_WIDTHS * math.sqrt(variance * (1.0 / len(new) + 1.0 / len(recent))))


def _loses_beyond_counting(blocks: Sequence[Block]) -> bool:
    """Whether the new setting loses beyond the chance of independent requests: few blocks may look calm by chance."""
    (was_good, was), (good, judged) = (
        (sum(b.good for b in blocks if b.new is arm), sum(b.judged for b in blocks if b.new is arm))
        for arm in (False, True)
    )
    if min(was, judged) <= 0.0:
        return False
    both = (was_good + good + 1.0) / (was + judged + 2.0)
    chance = math.sqrt(both * (1.0 - both) * (1.0 / was + 1.0 / judged))
    return was_good / was - good / judged > COUNTING_Z * chance
