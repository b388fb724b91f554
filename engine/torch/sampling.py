"""From logits to tokens: greedy, or drawn with a number that only the request's seed and the position decide.

A counter in place of a generator with state: a request draws the same tokens whatever else runs beside
it, and again when it is recomputed after a preemption.
"""

from collections.abc import Sequence

import torch

from engine.step import Sampling

_MASK = (1 << 64) - 1
# Most requests with top_p keep far fewer tokens than this; sorting a whole vocabulary costs milliseconds.
_SHORTLIST = 1024


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: SplitMix64 (Steele, Lea and Flood, 2014) of both arguments."""
    state = _mix(seed & _MASK) ^ position
    return (_mix((state + 0x9E3779B97F4A7C15) & _MASK) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """One token id for each row of ``logits`` (rows, vocabulary); positions: where the new tokens will stand."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        if sampling.temperature > 0.0:
            tokens[row] = _draw(logits[row], sampling, uniform(sampling.seed, position))
    return tokens


def _draw(logits: torch.Tensor, sampling: Sampling, chance: float) -> int:
    # In float64 the running sum of a large vocabulary still reaches 1. The largest logit goes first, or a tiny
    # temperature overflows.
    scaled = (logits.double() - logits.max().double()) / sampling.temperature
    probabilities = torch.softmax(scaled, dim=-1)
    if sampling.top_p >= 1.0:
        return _pick(probabilities.cumsum(dim=-1), chance)
    for size in (min(_SHORTLIST, len(probabilities)), len(probabilities)):
        kept, ids = torch.topk(probabilities, size)
        sums = kept.cumsum(dim=-1)
        if sums[-1] >= sampling.top_p:
            break
    # The smallest set of most likely tokens that reaches top_p, at least one.
    count = min(int(torch.searchsorted(sums, sampling.top_p)) + 1, len(sums))
    return int(ids[_pick(sums[:count], chance)])


def _pick(sums: torch.Tensor, chance: float) -> int:
    """Index of the first running sum above ``chance`` of the total."""
    target = (sums[-1] * chance).to(sums.dtype)
    return min(int(torch.searchsorted(sums, target, right=True)), len(sums) - 1)
