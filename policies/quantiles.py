"""Exact weighted quantiles."""

import math
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rooftune.policies.errors import InputError, bad_value

FloatArray = npt.NDArray[np.float64]

# Products such as 0.07 * 100 come out slightly above the whole number.
RELATIVE_SLACK = 1e-12
_SORT_BELOW = 256
_BINS = 4096


def weighted_quantile(values: npt.ArrayLike, weights: npt.ArrayLike, q: float) -> float:
    """Smallest of ``values`` with at least share ``q`` of the weight at or below it ("inverted cdf").

    values: any order, shape (m,), +inf allowed, NaN not; weights: same shape, finite and >= 0; 0 < q <= 1.
    NaN without any weight. Time O(m) unless most values crowd together. Raises InputError on anything else.
    """
    v = np.asarray(values, dtype=np.float64)
    w = np.asarray(weights, dtype=np.float64)
    if not 0.0 < q <= 1.0:
        raise bad_value("quantile", q, "above 0 and at most 1", "give 0.99 for the 99th percentile")
    if v.ndim != 1 or v.shape != w.shape:
        raise InputError(f"values {v.shape} and weights {w.shape} must be two rows of one length")
    if np.isnan(v).any() or not np.isfinite(w).all() or (w < 0.0).any():
        raise InputError("values must not be NaN and weights must be finite and at least 0; drop missing samples first")
    kept = w > 0.0
    v, w = v[kept], w[kept]
    total = float(w.sum())
    if total <= 0.0:
        return math.nan
    need = q * total - RELATIVE_SLACK * total
    below = 0.0
    if v.size > _SORT_BELOW:
        # One pass into monotone bins finds the answer's bin; only that one is sorted.
        low, high = float(v.min()), float(np.max(v, where=v < np.inf, initial=0.0))
        with np.errstate(over="ignore"):
            scale = (_BINS - 1) / (high - low) if high > low else 0.0
        if 0.0 < scale < np.inf:
            at_bin = np.minimum((np.minimum(v, high) - low) * scale, _BINS - 1).astype(np.int64)
            reached_bins = np.cumsum(np.bincount(at_bin, weights=w, minlength=_BINS))
            chosen = min(int(np.searchsorted(reached_bins, need, side="left")), int(at_bin.max()))
            below = float(reached_bins[chosen - 1]) if chosen else 0.0
            inside = at_bin == chosen
            v, w = v[inside], w[inside]
    order = np.argsort(v, kind="stable")
    reached = below + np.cumsum(w[order])
    # Rounding may leave the last partial sum slightly below the need.
    at = min(int(np.searchsorted(reached, need, side="left")), v.size - 1)
    return float(v[order[at]])


def quantile(values: npt.ArrayLike, q: float) -> float:
    """``weighted_quantile`` with one unit of weight for each value."""
    v = np.asarray(values, dtype=np.float64)
    return weighted_quantile(v, np.ones(v.shape), q)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Low, median, high: order statistics around the median with at least 95 % coverage (binomial tails); below six
    values the whole range."""
    ordered = sorted(values)
    count = len(ordered)
    tail, chance, place = 0.0, 0.5**count, 0
    while tail + chance <= 0.025 and place < count // 2:
        tail += chance
        place += 1
        chance *= (count - place + 1) / place
    low = max(0, place - 1)
    return ordered[low], statistics.median(ordered), ordered[count - 1 - low]
