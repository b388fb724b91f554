"""Prompt and output lengths to draw from, and the request classes made of them.

The named mixes are teaching values: round numbers in the range that public traces show, not measurements.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from rooftune.policies.errors import InputError, bad_value
from rooftune.tuner.sim.workload import MAX_TOKENS_PER_REQUEST, FloatArray, IntArray


class Lengths(Protocol):
    """Something that draws n whole lengths in tokens, each at least 1."""

    def sample(self, rng: np.random.Generator, n: int) -> IntArray: ...


def _check_tokens(what: str, value: float) -> None:
    if not math.isfinite(value) or not 1 <= value <= MAX_TOKENS_PER_REQUEST:
        raise bad_value(what, value, f"within 1..{MAX_TOKENS_PER_REQUEST}", "give tokens")


def _whole(values: FloatArray) -> IntArray:
    """Rounded to the nearest token and held within 1..MAX_TOKENS_PER_REQUEST."""
    return np.clip(np.rint(values), 1, MAX_TOKENS_PER_REQUEST).astype(np.int64)


@dataclass(frozen=True)
class Constant:
    """Always ``tokens``."""

    tokens: int

    def __post_init__(self) -> None:
        _check_tokens("constant length", self.tokens)

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        return np.full(n, self.tokens, dtype=np.int64)


@dataclass(frozen=True)
class Uniform:
    """Every whole length from ``low`` to ``high`` tokens, both included, equally often."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_tokens("shortest length", self.low)
        _check_tokens("longest length", self.high)
        if self.low > self.high:
            raise bad_value("shortest length", self.low, f"at most the longest, {self.high}", "swap the two")

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        return rng.integers(self.low, self.high, size=n, endpoint=True, dtype=np.int64)


@dataclass(frozen=True)
class Exponential:
    """Exponential with ``mean`` tokens before rounding; lengths under 1 become 1."""

    mean: float

    def __post_init__(self) -> None:
        _check_tokens("mean length", self.mean)

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        return _whole(rng.exponential(self.mean, size=n))


@dataclass(frozen=True)
class LogNormal:
    """Log-normal with ``median`` tokens; ``sigma`` is the standard deviation of the logarithm (above 0, at most 5)."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        _check_tokens("median length", self.median)
        if not 0.0 < self.sigma <= 5.0:
            raise bad_value("sigma of a log-normal length", self.sigma, "above 0 and at most 5", "1 is a usual spread")

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        return _whole(rng.lognormal(math.log(self.median), self.sigma, size=n))


@dataclass(frozen=True, eq=False)
class RequestClass:
    """A kind of request: how often, how long, whose, and how much of its prompt the prefix cache holds.

    share: probability of the class, above 0 and at most 1; the shares of a mix add up to 1.
    pairs: prompt and output lengths drawn together, arrays of equal shape (k,); they replace ``prompt`` and
    ``output`` and keep what long prompts and short answers have to do with each other.
    cached_share: cached_tokens = min(floor(cached_share * prompt), prompt - 1), 0..1.
    """

    share: float
    prompt: Lengths
    output: Lengths
    tenant: str = "default"
    cached_share: float = 0.0
    pairs: tuple[IntArray, IntArray] | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise bad_value("share of a request class", self.share, "above 0 and at most 1", "write 1/30 or 0.05")
        if not 0.0 <= self.cached_share <= 1.0:
            raise bad_value("cached share", self.cached_share, "within 0..1", "0 means nothing is cached")
        if self.pairs is not None and (len(self.pairs[0]) == 0 or len(self.pairs[0]) != len(self.pairs[1])):
            raise InputError("prompt and output lengths must be as many as each other, at least one; check the file")

    def sample(self, rng: np.random.Generator, n: int) -> tuple[IntArray, IntArray]:
        """n prompt and n output lengths, shape (n,) each."""
        if self.pairs is not None:
            rows = rng.integers(0, len(self.pairs[0]), size=n)
            return self.pairs[0][rows], self.pairs[1][rows]
        return self.prompt.sample(rng, n), self.output.sample(rng, n)


# Named mixes. Chat: short questions, answers of some hundred tokens. RAG: a few thousand tokens of passages.
# Documents: whole documents to summarise. Long output: reasoning and code writing.
NAMED_MIXES: dict[str, Callable[[], tuple[RequestClass, ...]]] = {
    "chat": lambda: (RequestClass(1.0, LogNormal(400.0, 1.0), Exponential(200.0)),),
    "rag": lambda: (RequestClass(1.0, LogNormal(4000.0, 0.6), Exponential(150.0)),),
    "documents": lambda: (RequestClass(1.0, Uniform(20_000, 100_000), Exponential(300.0)),),
    "long-output": lambda: (RequestClass(1.0, LogNormal(500.0, 0.8), LogNormal(2000.0, 0.7)),),
}


def named_mix(name: str) -> tuple[RequestClass, ...]:
    """The classes of a named mix. Raises InputError for an unknown name."""
    if name not in NAMED_MIXES:
        raise bad_value("mix", name, f"one of {', '.join(NAMED_MIXES)}", "choose one, or give --prompt and --output")
    return NAMED_MIXES[name]()


def with_rare_class(rare: RequestClass, rest: tuple[RequestClass, ...]) -> tuple[RequestClass, ...]:
    """``rare`` with its share, the others scaled down to what is left. Raises InputError when nothing is left."""
    left = 1.0 - rare.share
    if left <= 0.0:
        raise bad_value("share of the long prompts", rare.share, "below 1", "give --prompt instead")
    scaled = tuple(RequestClass(c.share * left, c.prompt, c.output, c.tenant, c.cached_share, c.pairs) for c in rest)
    return (*scaled, rare)
