"""Chooses tokens from logits, greedily or by a random number that depends only on the request's seed and position.

A counter in place of a generator with state: a request draws the same tokens whatever else runs beside
it, and again when it is recomputed after a preemption.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from rooftune.engine.step import IntArray, Sampling

_MASK = (1 << 64) - 1
# A smaller temperature is greedy in all but name, and dividing by it in float32 would leave nothing but NaN.
_GREEDY_BELOW = 1e-5
# Most requests with top_p keep few tokens; sorting a whole vocabulary costs milliseconds.
_SHORTLISTS = (128, 1024)
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float64: 0x7FF << 52}  # bits; NaN has more
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a logit


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: SplitMix64 (Steele, Lea and Flood, 2014) of both arguments."""
    state = _mix(seed & _MASK) ^ position
    return (_mix((state + 0x9E3779B97F4A7C15) & _MASK) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def drawn_rows(samplings: Iterable[Sampling]) -> list[tuple[int, Sampling]]:
    """The rows whose tokens are drawn at random."""
    return [(row, sampling) for row, sampling in enumerate(samplings) if sampling.temperature >= _GREEDY_BELOW]


def draw(
    logits: torch.Tensor, rows: Sequence[tuple[int, Sampling]], positions: Sequence[int] | IntArray, tokens: list[int]
) -> None:
    """Put drawn tokens in place of these rows' greedy ones; positions: where each row's new token will stand."""
    for row, sampling in rows:
        tokens[row] = _draw(logits[row], sampling, uniform(sampling.seed, int(positions[row])))


def greedy(logits: torch.Tensor) -> list[int]:
    """The largest logit of each row; the first of several. NaN counts as larger than any number."""
    if logits.device.type != "cpu":
        chosen: list[int] = logits.argmax(dim=-1).tolist()
        return chosen
    # torch's argmax over a vocabulary takes ten times as long as numpy's, and numpy has none for bfloat16.
    if logits.dtype == torch.float32:
        found: list[int] = logits.numpy().argmax(axis=-1).tolist()
        return found
    # Numbers that are not negative have the order of their bits; a row whose largest is negative or NaN is
    # checked again.
    bits = logits.view(_BITS[logits.itemsize]).numpy()
    best = bits.argmax(axis=-1)
    largest = bits[np.arange(len(best)), best]
    tokens: list[int] = best.tolist()
    for row in ((largest < 0) | (largest > _INFINITY[logits.dtype])).nonzero()[0].tolist():
        tokens[row] = int(logits[row].float().numpy().argmax())
    return tokens


def all_finite(logits: torch.Tensor, tokens: Sequence[int]) -> bool:
    """Whether the rows of which ``logits`` were made were finite; tokens: what ``greedy`` found in them.

    A NaN or infinity in a row, normalized and multiplied with the vocabulary, makes all its logits NaN, and of these
    ``greedy`` takes the first. So only rows with token 0 need a check.
    """
    return 0 not in tokens or all(math.isfinite(logits[row, 0]) for row, token in enumerate(tokens) if token == 0)


def _draw(logits: torch.Tensor, sampling: Sampling, chance: float) -> int:
    # The largest logit goes first, or a tiny temperature overflows. Running sums in float64: they still tell the
    # last tokens of a large vocabulary apart.
    logits = logits.float()
    probabilities = torch.softmax((logits - logits.max()) / sampling.temperature, dim=-1)
    if sampling.top_p >= 1.0:
        return _pick(probabilities.cumsum(dim=-1, dtype=torch.float64), chance)
    for size in (*_SHORTLISTS, len(probabilities)):
        kept, ids = torch.topk(probabilities, min(size, len(probabilities)))
        sums = kept.cumsum(dim=-1, dtype=torch.float64)
        if sums[-1] >= sampling.top_p:
            break
    # The smallest set of most likely tokens that reaches top_p, at least one.
    count = min(int(torch.searchsorted(sums, sampling.top_p)) + 1, len(sums))
    return int(ids[_pick(sums[:count], chance)])


def _pick(sums: torch.Tensor, chance: float) -> int:
    """Index of the first running sum above ``chance`` of the total."""
    target = (sums[-1] * chance).to(sums.dtype)
    return min(int(torch.searchsorted(sums, target, right=True)), len(sums) - 1)
