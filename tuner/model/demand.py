"""Demand: a window of real requests as the twin's traffic, those not yet finished included.

A window of finished requests forgets the long ones: the longer a request runs, the likelier the window ends first.
Requests still running say "longer than so many tokens" (right-censored). The lengths of all together give the
Kaplan-Meier estimate of how output lengths are spread, and every unknown length is drawn from it, given that it
exceeds what was produced already. Beyond the longest finished request the estimate goes on as an exponential.

Requests that began before the window and were still running in it belong into it, with their own arrival, which is
then before the window's start: without them the twin's first seconds are too quiet, and judged as if they were not.
Those that had ended before it are left out, so the others get there a little sooner than they did. Whoever cannot name
them starts the window where the engine was quiet.

Not covered: lengths that depend on how fast the engine was.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.request import FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]

# Finished requests that a stratum of prompt lengths needs, and the most strata: long prompts often get short answers.
PER_STRATUM = 100
MAX_STRATA = 4
MIN_FINISHED = 10
MAX_TOKENS = 10_000_000
# The tail's rate is that of the longest tenth of the finished requests, at least so many.
_TAIL_SHARE = 0.1
_TAIL_LEAST = 10


def _none() -> IntArray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class DemandWindow:
    """Requests that arrived in a window, or before it and still ran in it, in order of arrival, shape (n,) each.

    arrival_s: seconds on one clock. prompt_tokens: at least 1. produced_tokens: output so far, at least 0 (at least 1
    when finished). finished: whether the request came to its end. output_limit_tokens: most output it may have,
    at least 1 (max_tokens of the request), 0 where not known. cached_tokens, tenant: as in traffic, empty for none.
    Raises InputError when a column is ragged or out of range.
    """

    arrival_s: FloatArray
    prompt_tokens: IntArray
    produced_tokens: IntArray
    finished: BoolArray
    output_limit_tokens: IntArray
    cached_tokens: IntArray = field(default_factory=_none)
    tenant: IntArray = field(default_factory=_none)

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        if n == 0:
            raise InputError("the window holds no requests; give one with at least one arrival")
        for name in ("prompt_tokens", "produced_tokens", "finished", "output_limit_tokens"):
            if len(getattr(self, name)) != n:
                raise bad_value(f"length of {name}", len(getattr(self, name)), str(n), "give one value a request")
        if not np.isfinite(self.arrival_s).all() or (np.diff(self.arrival_s) < 0.0).any():
            raise InputError("arrival_s of the window must be finite and ascend; sort the requests by arrival")
        least = {"prompt_tokens": 1, "produced_tokens": 0, "output_limit_tokens": 0}
        for name, bound in least.items():
            values = getattr(self, name)
            if values.min() < bound or values.max() > MAX_TOKENS:
                worst = int(values.min() if values.min() < bound else values.max())
                raise bad_value(name, worst, f"within {bound}..{MAX_TOKENS}", "check the column")
        if (self.produced_tokens[self.finished] < 1).any():
            raise InputError("a finished request has produced at least 1 token; leave failed requests out")
        limited = self.output_limit_tokens > 0
        if (self.produced_tokens > self.output_limit_tokens)[limited].any():
            raise InputError("a request produced more than its output_limit_tokens; check the column")

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True, eq=False)
class LengthCurve:
    """Share of requests whose output is longer than so many tokens.

    tokens: lengths at which requests finished, ascending; longer: share (0..1) longer than each, same shape.
    tail_tokens: mean of what goes on beyond the last of them, above 0.
    """

    tokens: IntArray
    longer: FloatArray
    tail_tokens: float

    def draw(self, more_than: IntArray, luck: FloatArray) -> IntArray:
        """Lengths above ``more_than`` (tokens, shape (n,)); luck: uniform numbers in 0..1, one for each."""
        place = np.searchsorted(self.tokens, more_than, side="right")
        above = np.concatenate([[1.0], self.longer])[place]
        # The length is the first one at which the share that is longer falls to the drawn share or below it.
        drawn = (1.0 - luck) * above
        at = np.searchsorted(-self.longer, -drawn, side="left")
        last = len(self.tokens) - 1
        lengths = self.tokens[np.minimum(at, last)].astype(np.float64)
        beyond = (at > last) | (place > last)
        if beyond.any():
            start = np.maximum(more_than, self.tokens[-1])[beyond]
            # Inside the tail the draw begins anew at what is known to be exceeded.
            share = np.where(place[beyond] > last, 1.0 - luck[beyond], drawn[beyond] / max(self.longer[-1], 1e-300))
            lengths[beyond] = start + np.ceil(-self.tail_tokens * np.log(np.clip(share, 1e-12, 1.0)))
        whole: IntArray = np.clip(np.maximum(lengths, more_than + 1), 1, MAX_TOKENS).astype(np.int64)
        return whole


def length_curve(produced_tokens: IntArray, finished: BoolArray) -> LengthCurve:
    """Kaplan-Meier estimate of the output lengths; an unfinished request is longer than what it has produced.

    Raises InputError when fewer than MIN_FINISHED requests finished.
    """
    if int(finished.sum()) < MIN_FINISHED:
        raise bad_value(
            "finished requests in the window", int(finished.sum()), f"at least {MIN_FINISHED}", "give a longer window"
        )
    tokens, ends = np.unique(produced_tokens[finished], return_counts=True)
    # At risk of ending at k tokens: finished ones of at least k, and unfinished ones known to reach k.
    reach = np.sort(produced_tokens)
    at_risk = len(reach) - np.searchsorted(reach, tokens, side="left")
    longer: FloatArray = np.cumprod(1.0 - ends / at_risk, dtype=np.float64)
    done = np.sort(produced_tokens[finished])
    tail = max(_TAIL_LEAST, round(_TAIL_SHARE * len(done)))
    start = done[max(len(done) - tail, 0)] - 1
    exposure = float(np.maximum(produced_tokens - start, 0).sum())
    return LengthCurve(tokens, longer, max(exposure / float((done > start).sum()), 1.0))


def fill_lengths(window: DemandWindow, seed: int) -> IntArray:
    """Output tokens of every request: known where finished, else drawn (seeded), shape (n,).

    Requests with like prompts stand for each other where enough of them finished.
    """
    lengths = window.produced_tokens.astype(np.int64).copy()
    unknown = ~window.finished
    luck = np.random.default_rng(seed).random(len(window))
    stratum = _strata(window)
    for index in range(int(stratum.max()) + 1):
        rows = stratum == index
        wanted = rows & unknown
        if wanted.any():
            curve = length_curve(window.produced_tokens[rows], window.finished[rows])
            lengths[wanted] = curve.draw(window.produced_tokens[wanted], luck[wanted])
    limited = unknown & (window.output_limit_tokens > 0)
    lengths[limited] = np.minimum(lengths, window.output_limit_tokens)[limited]
    return np.maximum(lengths, 1)


def _strata(window: DemandWindow) -> IntArray:
    """Strata of prompt length with about equally many finished requests."""
    done = window.prompt_tokens[window.finished]
    count = int(np.clip(len(done) // PER_STRATUM, 1, MAX_STRATA))
    edges = np.quantile(done, np.arange(1, count) / count) if count > 1 else np.zeros(0)
    return np.searchsorted(np.unique(edges), window.prompt_tokens, side="left").astype(np.int64)
