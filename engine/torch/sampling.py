"""From logits to tokens: greedy, or drawn with a number that only the request's seed and the position decide.

A counter in place of a generator with state: a request draws the same tokens whatever else runs beside
it, and again when it is recomputed after a preemption.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from engine.step import IntArray, Sampling
from engine.torch.kv_store import as_numpy

_MASK = (1 << 64) - 1
# A smaller temperature is greedy in all but name, and dividing by it in float32 would leave nothing but NaN.
_GREEDY_BELOW = 1e-5
# Most requests with top_p keep few tokens; sorting a whole vocabulary costs milliseconds.
_SHORTLISTS = (128, 1024)
_BFLOAT16_INFINITY = 0x7F80  # all bits of the exponent: infinite or NaN
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a logit


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
    tokens: list[int] = greedy(logits).tolist()
    draw(logits, drawn_rows(samplings), positions, tokens)
    return tokens


def drawn_rows(samplings: Iterable[Sampling]) -> list[tuple[int, Sampling]]:
    """The rows whose tokens chance decides."""
    return [(row, sampling) for row, sampling in enumerate(samplings) if sampling.temperature >= _GREEDY_BELOW]


def draw(
    logits: torch.Tensor, rows: Sequence[tuple[int, Sampling]], positions: Sequence[int] | IntArray, tokens: list[int]
) -> None:
    """Put drawn tokens in place of these rows' greedy ones; positions: where each row's new token will stand."""
    for row, sampling in rows:
        tokens[row] = _draw(logits[row], sampling, uniform(sampling.seed, int(positions[row])))


def greedy(logits: torch.Tensor) -> IntArray:
    """The largest logit of each row; the first of several. A NaN counts as larger than any number."""
    if logits.device.type != "cpu":
        chosen: IntArray = logits.argmax(dim=-1).cpu().numpy()
        return chosen
    # torch's argmax over a vocabulary takes ten times as long as numpy's, and numpy has none for bfloat16.
    if logits.dtype == torch.float32:
        found: IntArray = logits.numpy().argmax(axis=-1)
        return found
    # Numbers that are not negative have the order of their bits; a row whose largest is negative is looked at again.
    bits = logits.view(_BITS[logits.itemsize]).numpy()
    best: IntArray = bits.argmax(axis=-1)
    for row in (bits[np.arange(len(best)), best] < 0).nonzero()[0].tolist():
        best[row] = int(logits[row].float().numpy().argmax())
    return best


def all_finite(logits: torch.Tensor, best: IntArray) -> bool:
    """Whether each row's ``best`` logit is a finite number, hence the row that it was made of; on a CPU."""
    numbers = as_numpy(logits)
    largest = numbers[np.arange(len(best)), best]
    if logits.dtype == torch.bfloat16:
        return bool(((largest & _BFLOAT16_INFINITY) != _BFLOAT16_INFINITY).all())
    return bool(np.isfinite(largest).all())


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
