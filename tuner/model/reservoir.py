"""A bounded sample of steps, stratified over computed tokens, so that decode-only steps do not drown the rest.

Every row draws one random key; a stratum keeps the rows with the smallest keys, and all strata share one limit,
the largest under which the total stays within the capacity. The limit only falls as rows arrive and the smallest
keys of a smaller limit are a subset of those of a larger one, so adding in any batches gives what one pass
over everything would give.
"""

import numpy as np
import numpy.typing as npt

from rooftune.policies.errors import bad_value
from rooftune.tuner.model.samples import FloatArray, StepSamples, join

IntArray = npt.NDArray[np.int64]
STRATA_PER_DOUBLING = 2


def stratum_of(computed_tokens: FloatArray) -> IntArray:
    """Log-spaced stratum of each step, two for each doubling of its tokens (>= 1), shape (n,)."""
    return np.floor(np.log2(computed_tokens) * STRATA_PER_DOUBLING + 1e-9).astype(np.int64)


class Reservoir:
    """At most ``capacity_steps`` steps. ``seed`` decides which."""

    def __init__(self, capacity_steps: int = 4096, seed: int = 0) -> None:
        if not 64 <= capacity_steps <= 1_000_000:
            raise bad_value("reservoir capacity", capacity_steps, "within 64..1000000 steps", "correct it")
        self.capacity_steps = capacity_steps
        self._random = np.random.default_rng(seed)
        self._samples = join([])
        self._keys: FloatArray = np.zeros(0)
        self._seen: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def samples(self) -> StepSamples:
        """The kept steps in the order in which they arrived."""
        return self._samples

    def add(self, samples: StepSamples) -> None:
        """Offer steps in order of time."""
        for stratum, count in zip(*np.unique(stratum_of(samples.computed_tokens), return_counts=True), strict=True):
            self._seen[int(stratum)] = self._seen.get(int(stratum), 0) + int(count)
        merged = join([self._samples, samples])
        all_keys = np.concatenate([self._keys, self._random.random(len(samples))])
        kept = _smallest(all_keys, stratum_of(merged.computed_tokens), self._limit())
        self._samples, self._keys = merged.select(kept), all_keys[kept]

    def clear(self) -> None:
        """Forget the steps (after a drift alarm); the random stream continues."""
        self._samples, self._keys, self._seen = join([]), np.zeros(0), {}

    def _limit(self) -> int:
        """Largest per-stratum count under which all strata together fit the capacity."""
        counts = sorted(self._seen.values())
        left = self.capacity_steps
        for place, count in enumerate(counts):
            share = left // (len(counts) - place)
            if count > share:
                return share
            left -= count
        return self.capacity_steps


def _smallest(keys: FloatArray, strata: IntArray, limit: int) -> npt.NDArray[np.bool_]:
    """Mask of the ``limit`` smallest keys in each stratum; equal keys go by position."""
    order = np.lexsort((np.arange(len(keys)), keys, strata))
    ranked = strata[order]
    starts = np.searchsorted(ranked, ranked)
    kept = np.zeros(len(keys), dtype=np.bool_)
    kept[order] = np.arange(len(keys)) - starts < limit
    return kept
