"""A bounded sample of steps, stratified over computed tokens, so that decode-only steps do not drown the rest.

Every row draws one random key; a stratum keeps the rows with the smallest keys, and all strata share one limit,
the largest under which the total stays within the capacity. The limit only falls as rows arrive and the smallest
keys of a smaller limit are a subset of those of a larger one, so adding in any batches, and merging, give what one
pass over everything would give.
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
    """At most ``capacity_steps`` steps. ``seed`` decides which: two that are to be merged need different seeds."""

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
    def seen_steps(self) -> int:
        """Steps offered so far, kept or not."""
        return sum(self._seen.values())

    @property
    def samples(self) -> StepSamples:
        """The kept steps in the order in which they came."""
        return self._samples

    def add(self, samples: StepSamples) -> None:
        """Offer steps in order of time."""
        self._take(samples, self._random.random(len(samples)), _counts(samples))

    def merge(self, other: "Reservoir") -> None:
        """Take over the steps of another reservoir, as if its steps had been offered here with its keys."""
        if other.capacity_steps < self.capacity_steps:
            raise bad_value(
                "capacity of the reservoir to merge", other.capacity_steps, f"at least {self.capacity_steps}",
                "merge into the smaller one",
            )  # fmt: skip
        self._take(other._samples, other._keys, other._seen)

    def clear(self) -> None:
        """Forget the steps (after a drift alarm); the random stream goes on."""
        self._samples, self._keys, self._seen = join([]), np.zeros(0), {}

    def _take(self, samples: StepSamples, keys: FloatArray, seen: dict[int, int]) -> None:
        for stratum, count in seen.items():
            self._seen[stratum] = self._seen.get(stratum, 0) + count
        merged = join([self._samples, samples])
        all_keys = np.concatenate([self._keys, keys])
        kept = _smallest(all_keys, stratum_of(merged.computed_tokens), self._limit())
        self._samples, self._keys = merged.select(kept), all_keys[kept]

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


def _counts(samples: StepSamples) -> dict[int, int]:
    strata, counts = np.unique(stratum_of(samples.computed_tokens), return_counts=True)
    return {int(s): int(c) for s, c in zip(strata, counts, strict=True)}


def _smallest(keys: FloatArray, strata: IntArray, limit: int) -> npt.NDArray[np.bool_]:
    """Mask of the ``limit`` smallest keys in each stratum; equal keys go by position."""
    order = np.lexsort((np.arange(len(keys)), keys, strata))
    ranked = strata[order]
    starts = np.searchsorted(ranked, ranked)
    kept = np.zeros(len(keys), dtype=np.bool_)
    kept[order] = np.arange(len(keys)) - starts < limit
    return kept
