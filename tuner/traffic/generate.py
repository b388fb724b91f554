"""Synthetic traffic: arrivals of three shapes, lengths drawn from request classes. Same seed, same requests.

Each purpose (arrivals, classes, the lengths of each class) has its own random generator, so that a change
of one leaves the others as they were: the same arrivals with other lengths, the same chats with other documents.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rooftune.policies.errors import InputError, bad_value
from rooftune.tuner.traffic.workload import MAX_ARRIVAL_S, MAX_TOKENS_PER_REQUEST, FloatArray, IntArray, Traffic


class Lengths(Protocol):
    """Something that draws n whole lengths in tokens, each at least 1."""

    def sample(self, rng: np.random.Generator, n: int) -> IntArray: ...


def _check_tokens(what: str, value: float) -> None:
    if not math.isfinite(value) or not 1 <= value <= MAX_TOKENS_PER_REQUEST:
        raise bad_value(what, value, f"within 1..{MAX_TOKENS_PER_REQUEST}", "give tokens")


def _whole(values: FloatArray) -> IntArray:
    """Rounded to the nearest token and clamped to 1..MAX_TOKENS_PER_REQUEST."""
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
    """A kind of request: its share, lengths and tenant, and how much of its prompt the prefix cache holds.

    share: probability of the class, above 0 and at most 1; the shares of a mix add up to 1.
    pairs: prompt and output lengths drawn together, arrays of equal shape (k,); they replace ``prompt`` and
    ``output`` and keep the correlation between the two.
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
            raise InputError("prompt and output lengths must come in pairs, at least one; check the file")

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
    return (*(replace(one, share=one.share * left) for one in rest), rare)


DAY_S = 86_400.0
MAX_REQUESTS = 10_000_000
MAX_RATE_RPS = 1e6
MAX_CV = 100.0
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals, ``rate_rps`` a second."""

    rate_rps: float

    def sample(self, rng: np.random.Generator, span_s: float) -> FloatArray:
        return _renewals(rng, self.rate_rps, 1.0, span_s)


@dataclass(frozen=True)
class Gamma:
    """Bursts: gaps from a gamma distribution with mean 1 / rate_rps and coefficient of variation ``cv``.

    cv: standard deviation over mean of the gaps, above 0 and at most 100; 1 is Poisson, above 1 is bursty.
    The first request comes one gap after 0; with a large cv a short span therefore holds the rate only on average.
    """

    rate_rps: float
    cv: float

    def sample(self, rng: np.random.Generator, span_s: float) -> FloatArray:
        if not 0.01 <= self.cv <= MAX_CV:
            bound = f"within 0.01..{MAX_CV:g}"
            raise bad_value("coefficient of variation", self.cv, bound, "1 is Poisson, 3 is bursty")
        return _renewals(rng, self.rate_rps, self.cv, span_s)


@dataclass(frozen=True)
class Day:
    """A daily wave: a Poisson process whose rate follows a cosine between trough and peak.

    rate_rps: mean over a whole day; peak_to_trough: peak rate over trough rate, within 1..1000, so that
    peak = 2 rate r / (1 + r) and trough = 2 rate / (1 + r); peak_at_s: when in the day the peak comes, arrivals
    start at 0 = midnight; day_s: length of a day, shortened in tests and demonstrations.
    """

    rate_rps: float
    peak_to_trough: float = 4.0
    peak_at_s: float = 14 * 3600.0
    day_s: float = DAY_S

    def rate_at(self, time_s: FloatArray) -> FloatArray:
        """Requests per second at each instant, shape as ``time_s``."""
        depth = (self.peak_to_trough - 1.0) / (self.peak_to_trough + 1.0)
        wave = np.cos(2.0 * np.pi * (time_s - self.peak_at_s) / self.day_s)
        return np.asarray(self.rate_rps * (1.0 + depth * wave), dtype=np.float64)

    def sample(self, rng: np.random.Generator, span_s: float) -> FloatArray:
        if not 1.0 <= self.peak_to_trough <= 1000.0:
            raise bad_value("peak over trough", self.peak_to_trough, "within 1..1000", "4 is a usual day")
        if not math.isfinite(self.peak_at_s) or not 0.0 < self.day_s <= MAX_ARRIVAL_S:
            raise bad_value("length of a day", self.day_s, f"above 0 and at most {MAX_ARRIVAL_S:g}", "86400 is a day")
        peak_rps = 2.0 * self.rate_rps * self.peak_to_trough / (1.0 + self.peak_to_trough)
        # Thinning: draw at the peak rate, keep each with the share of the peak that its instant has.
        candidates = _renewals(rng, peak_rps, 1.0, span_s)
        return candidates[rng.random(len(candidates)) * peak_rps < self.rate_at(candidates)]


Arrivals = Poisson | Gamma | Day


def generate(
    arrivals: Arrivals, classes: Sequence[RequestClass], span_s: float, seed: int, name: str = "made"
) -> Traffic:
    """Requests within 0..span_s seconds.

    classes: shares that add up to 1; seed: 0..2**63 - 1. Raises InputError when a value is out of range, when more
    than MAX_REQUESTS would arrive, or when none do by chance.
    """
    if not 0 <= seed <= MAX_SEED:
        raise bad_value("seed", seed, f"within 0..{MAX_SEED}", "0 is fine")
    shares = np.array([c.share for c in classes], dtype=np.float64)
    if len(classes) == 0 or not math.isclose(float(shares.sum()), 1.0, rel_tol=1e-9):
        raise bad_value("sum of the class shares", float(shares.sum()), "1", "correct the shares")
    for_arrivals, for_classes, for_lengths = np.random.default_rng(seed).spawn(3)
    arrival_s = arrivals.sample(for_arrivals, span_s)
    n = len(arrival_s)
    if n == 0:
        raise InputError(f"no request arrived within {span_s:g} s; raise the rate or the span")
    kind = np.minimum(np.searchsorted(np.cumsum(shares), for_classes.random(n), side="right"), len(classes) - 1)
    prompt, output, cached = (np.zeros(n, dtype=np.int64) for _ in range(3))
    tenant_names = tuple(dict.fromkeys(c.tenant for c in classes))
    # Each class draws for all requests from its own generator: its lengths do not depend on the other classes.
    for index, (one, rng) in enumerate(zip(classes, for_lengths.spawn(len(classes)), strict=True)):
        mine = kind == index
        prompts, outputs = one.sample(rng, n)
        prompt[mine], output[mine] = prompts[mine], outputs[mine]
        cached[mine] = np.minimum((prompts * one.cached_share).astype(np.int64), prompts - 1)[mine]
    tenant: IntArray = np.array([tenant_names.index(c.tenant) for c in classes], dtype=np.int64)[kind]
    return Traffic(arrival_s, prompt, output, cached, tenant, tenant_names, name=name)


def document_mix(
    seed: int,
    rate_rps: float,
    span_s: float,
    one_in: float,
    long_range: tuple[int, int],
    short_range: tuple[int, int] = (100, 1500),
    output_mean: float = 200.0,
    burst_cv: float | None = None,
) -> Traffic:
    """Chat with documents: one prompt in ``one_in`` (by chance, above 1) is uniform in ``long_range`` tokens.

    The others are uniform in ``short_range``; outputs are exponential with mean ``output_mean`` and at least 1.
    burst_cv: None for Poisson arrivals, else the coefficient of variation of gamma gaps. Raises InputError.
    """
    if not math.isfinite(one_in) or one_in <= 1.0:
        raise bad_value("one_in", one_in, "finite and above 1", "30 makes one prompt in 30 long")
    output = Exponential(output_mean)
    classes = (
        RequestClass(1.0 - 1.0 / one_in, Uniform(*short_range), output),
        RequestClass(1.0 / one_in, Uniform(*long_range), output),
    )
    arrivals = Poisson(rate_rps) if burst_cv is None else Gamma(rate_rps, burst_cv)
    name = f"{rate_rps:g} req/s, 1 in {one_in:g} prompts of {long_range[0]}-{long_range[1]} tokens, seed {seed}"
    return generate(arrivals, classes, span_s, seed, name)


def _renewals(rng: np.random.Generator, rate_rps: float, cv: float, span_s: float) -> FloatArray:
    """Arrivals within 0..span_s whose gaps are gamma with mean 1 / rate_rps; cv = 1 is exponential."""
    if not 0.0 < rate_rps <= MAX_RATE_RPS:
        raise bad_value("rate", rate_rps, f"above 0 and at most {MAX_RATE_RPS:g} requests per second", "write 3")
    if not 0.0 < span_s <= MAX_ARRIVAL_S:
        raise bad_value("span", span_s, f"above 0 and at most {MAX_ARRIVAL_S:g} seconds", "write 600s")
    expected = rate_rps * span_s
    if expected > MAX_REQUESTS:
        raise bad_value("rate times span", expected, f"at most {MAX_REQUESTS} requests", "lower the rate or the span")
    pieces: list[FloatArray] = []
    reached_s, drawn = 0.0, 0
    while reached_s <= span_s:
        n = int(1.1 * expected) + 100
        drawn += n
        # Bursts may put far more requests into the span than its mean.
        if drawn > 4 * MAX_REQUESTS:
            raise bad_value("requests drawn", drawn, f"at most {4 * MAX_REQUESTS}", "lower the rate, span or variation")
        gaps_s = rng.gamma(1.0 / cv**2, cv**2 / rate_rps, size=n)
        pieces.append(reached_s + np.cumsum(gaps_s))
        reached_s = float(pieces[-1][-1])
    arrival_s = np.concatenate(pieces)
    return arrival_s[arrival_s <= span_s]
