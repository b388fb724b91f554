"""Latency targets, and how a run's outcomes are judged on them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, cast, get_args

import numpy as np

from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.outcomes import BoolArray, FloatArray, IntArray, Outcomes
from rooftune.policies.quantiles import RELATIVE_SLACK, quantile, weighted_quantile

Metric = Literal["ttft", "gap", "tpot", "longest_gap", "e2e", "queue"]
Objective = Literal["goodput", "tokens_per_s"]
GAP_METRICS: tuple[Metric, ...] = ("gap", "longest_gap", "tpot")  # a long step makes each of them worse


@dataclass(frozen=True)
class Target:
    """At least share ``quantile`` of the samples of ``metric`` within ``bound_s`` seconds.

    For ``gap`` a request's samples are its own gaps: with Target("gap", 0.03, 0.99) at most 1 % of them may exceed
    30 ms. quantile: above 0, at most 1 (1 = all); bound_s: above 0, finite.
    """

    metric: Metric
    bound_s: float
    quantile: float

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            raise bad_value("metric", self.metric, "one of " + ", ".join(get_args(Metric)), "correct the target")
        if not (math.isfinite(self.bound_s) and self.bound_s > 0.0):
            raise bad_value(f"{self.metric} bound_s", self.bound_s, "above 0 and finite", "give seconds, such as 2.0")
        if not 0.0 < self.quantile <= 1.0:
            raise bad_value(f"{self.metric} quantile", self.quantile, "above 0 and at most 1", "give 0.99 for p99")


@dataclass(frozen=True)
class Condition:
    """The requests of an override: every stated part must hold; token limits are inclusive.

    cached: True for requests with at least one cached prompt token, False for those without.
    """

    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    min_output_tokens: int | None = None
    max_output_tokens: int | None = None
    tenant: str | None = None
    cached: bool | None = None

    def __post_init__(self) -> None:
        parts = (self.min_prompt_tokens, self.max_prompt_tokens, self.min_output_tokens, self.max_output_tokens)
        if all(part is None for part in (*parts, self.tenant, self.cached)):
            raise InputError("an override's condition is empty; state a part, or change the targets themselves")
        for part in parts:
            if part is not None and part < 0:
                raise bad_value("a condition's token limit", part, "at least 0", "correct the override")
        for low, high in (parts[:2], parts[2:]):
            if low is not None and high is not None and low > high:
                raise bad_value("a condition's lower limit", low, f"at most {high}", "no request can match; swap them")

    def matches(self, outcomes: Outcomes) -> BoolArray:
        """Which requests match, shape (n,)."""
        hit = np.ones(len(outcomes), dtype=np.bool_)
        for tokens, low, high in (
            (outcomes.prompt_tokens, self.min_prompt_tokens, self.max_prompt_tokens),
            (outcomes.output_tokens, self.min_output_tokens, self.max_output_tokens),
        ):
            if low is not None:
                hit &= tokens >= low
            if high is not None:
                hit &= tokens <= high
        if self.tenant is not None:
            codes = cast(IntArray, outcomes.need("tenant", f"the override for tenant {self.tenant}"))
            wanted = [code for code, name in enumerate(outcomes.tenant_names) if name == self.tenant]
            hit &= np.isin(codes, wanted)
        if self.cached is not None:
            cached = cast(IntArray, outcomes.need("cached_tokens", "an override by cache hit"))
            hit &= (cached > 0) == self.cached
        return hit


def _check_targets(targets: Sequence[Target], where: str) -> None:
    seen = [(target.metric, target.quantile) for target in targets]
    for metric, share in seen:
        if seen.count((metric, share)) > 1:
            raise InputError(f"{where} hold two bounds for {metric} at quantile {share:g}; keep one")


@dataclass(frozen=True)
class Override:
    """For matching requests ``targets`` replace those of the same metric and join the others."""

    when: Condition
    targets: tuple[Target, ...]

    def __post_init__(self) -> None:
        if not self.targets:
            raise InputError("an override without targets changes nothing; give one, or drop it")
        _check_targets(self.targets, "an override's targets")

    @property
    def metrics(self) -> frozenset[Metric]:
        return frozenset(target.metric for target in self.targets)


@dataclass(frozen=True)
class Slo:
    """Targets, overrides (the first match counts) and the objective to maximise."""

    targets: tuple[Target, ...]
    overrides: tuple[Override, ...] = ()
    objective: Objective = "goodput"

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise bad_value("objective", self.objective, "goodput or tokens_per_s", "correct the objective")
        if self.objective == "goodput" and not self.targets:
            raise InputError("goodput needs at least one target; give one, or the objective tokens_per_s")
        _check_targets(self.targets, "the targets")

    def all_targets(self) -> tuple[tuple[Target, int | None], ...]:
        """Every target with the index of its override (None: the base), in the order of the rows of ``margins``."""
        rows: list[tuple[Target, int | None]] = [(target, None) for target in self.targets]
        for index, override in enumerate(self.overrides):
            rows.extend((target, index) for target in override.targets)
        return tuple(rows)

    def tightest_gap_s(self) -> float | None:
        """The least bound on a gap, stall or TPOT: the time a step may take. None without such a target."""
        return min((target.bound_s for target, _ in self.all_targets() if target.metric in GAP_METRICS), default=None)

    def gap_bounds(self) -> tuple[float, ...]:
        """Distinct bounds of the gap targets in seconds, ascending, for a twin to count per request."""
        return tuple(sorted({target.bound_s for target, _ in self.all_targets() if target.metric == "gap"}))


_CHAT = (Target("ttft", 2.0, 0.99), Target("gap", 0.05, 0.99))
LONG_DOCUMENT_TOKENS = 8_000

# Starting points for an operator, who adds overrides by tenant.
PROFILES: dict[str, Slo] = {
    "chat": Slo(_CHAT),
    "documents-with-chat": Slo(
        _CHAT, (Override(Condition(min_prompt_tokens=LONG_DOCUMENT_TOKENS), (Target("ttft", 20.0, 0.99),)),)
    ),
    "multi-tenant": Slo((Target("ttft", 3.0, 0.99), Target("gap", 0.1, 0.99), Target("longest_gap", 1.0, 0.99))),
    "batch": Slo((), objective="tokens_per_s"),
}


class MarginReason(StrEnum):
    """How a margin was computed."""

    MEASURED = "measured"
    BY_SHARE = "by_share"  # from counts above the bound: margin = share above / share allowed - 1
    NO_SAMPLES = "no_samples"


@dataclass(frozen=True)
class MarginRow:
    """One target over a run. margin = measured_s / bound_s - 1, met when <= 0; NaN without samples."""

    target: Target
    override_index: int | None
    measured_s: float
    margin: float
    samples: int
    reason: MarginReason


def _override_of(outcomes: Outcomes, slo: Slo) -> IntArray:
    """Index of the first override that matches each request, -1 for none."""
    chosen = np.full(len(outcomes), -1, dtype=np.int64)
    for index, override in enumerate(slo.overrides):
        chosen[(chosen < 0) & override.when.matches(outcomes)] = index
    return chosen


def _applies(slo: Slo, chosen: IntArray, target: Target, override_index: int | None) -> BoolArray:
    if override_index is not None:
        return np.equal(chosen, override_index)
    replaced = [index for index, override in enumerate(slo.overrides) if target.metric in override.metrics]
    return ~np.isin(chosen, replaced)


def _latency(outcomes: Outcomes, metric: Metric) -> tuple[FloatArray, BoolArray]:
    """Value of a per-request metric in seconds (+inf: never reached), and which requests have it."""
    finished = outcomes.finished
    exists = np.ones(len(outcomes), dtype=np.bool_)
    if metric == "ttft":
        value = outcomes.first_token_s - outcomes.arrival_s
    elif metric == "queue":
        value = cast(FloatArray, outcomes.need("scheduled_s", "a queue target")) - outcomes.arrival_s
    elif metric == "e2e":
        value = outcomes.finish_s - outcomes.arrival_s
    elif metric == "tpot":
        exists = (outcomes.output_tokens > 1) | ~finished
        value = (outcomes.finish_s - outcomes.first_token_s) / np.maximum(outcomes.output_tokens - 1, 1)
    else:
        value = cast(FloatArray, outcomes.need("longest_gap_s", f"a {metric} target"))
        exists = (cast(IntArray, outcomes.need("gap_count", f"a {metric} target")) > 0) | ~finished
    lost = np.isnan(value) | (outcomes.failed if len(outcomes.failed) else False)
    if metric not in ("ttft", "queue"):
        lost = lost | ~finished
    return np.where(lost, np.inf, value), exists


def applies(outcomes: Outcomes, slo: Slo, target: Target, override_index: int | None) -> BoolArray:
    """The requests of a row of ``all_targets``, shape (n,)."""
    return _applies(slo, _override_of(outcomes, slo), target, override_index)


def samples(outcomes: Outcomes, metric: Metric, group: BoolArray) -> FloatArray:
    """Values (s) of a per-request metric over the requests of ``group`` that have it; +inf: never reached."""
    value, exists = _latency(outcomes, metric)
    return value[group & exists]


def _gaps_over(outcomes: Outcomes, bound_s: float) -> IntArray:
    column = np.flatnonzero(np.isclose(outcomes.gap_bounds_s, bound_s, rtol=RELATIVE_SLACK, atol=0.0))
    if not column.size:
        known = ", ".join(f"{bound:g}" for bound in outcomes.gap_bounds_s) or "none"
        raise bad_value("gap bound_s", bound_s, f"one that the run counted ({known})", "count Slo.gap_bounds()")
    return outcomes.gap_over[:, column[0]]


def meets(outcomes: Outcomes, target: Target) -> BoolArray:
    """Which requests meet the target, shape (n,), whether it applies to them or not."""
    if target.metric != "gap" or target.quantile == 1.0:
        value, exists = _latency(outcomes, target.metric)
        return (value <= target.bound_s) | ~exists
    if not len(outcomes):
        return np.zeros(0, dtype=np.bool_)
    within = outcomes.gap_count - _gaps_over(outcomes, target.bound_s)
    return within >= (target.quantile - RELATIVE_SLACK) * outcomes.gap_count


def good(outcomes: Outcomes, slo: Slo) -> BoolArray:
    """Which requests finished and meet every target that applies to them, shape (n,).

    Raises InputError when the run did not record what a target needs.
    """
    chosen = _override_of(outcomes, slo)
    met = outcomes.finished.copy()
    for target, index in slo.all_targets():
        met &= meets(outcomes, target) | ~_applies(slo, chosen, target, index)
    return met


def missed_shares(outcomes: Outcomes, slo: Slo) -> tuple[float, ...]:
    """For each row of ``margins`` the share of its requests that miss the target, 0..1; 0 without requests.

    A request that did not finish misses every target.
    """
    chosen = _override_of(outcomes, slo)
    shares = []
    for target, index in slo.all_targets():
        group = _applies(slo, chosen, target, index)
        missed = group & ~(meets(outcomes, target) & outcomes.finished)
        shares.append(float(missed.sum()) / max(int(group.sum()), 1))
    return tuple(shares)


def attainment(outcomes: Outcomes, slo: Slo) -> float:
    """Share of good requests, 0..1; NaN without requests."""
    return float(good(outcomes, slo).mean()) if len(outcomes) else math.nan


def goodput_rps(outcomes: Outcomes, slo: Slo, span_s: float) -> float:
    """Good requests per second of ``span_s`` (above 0, finite); NaN without requests."""
    if not (math.isfinite(span_s) and span_s > 0.0):
        raise bad_value("span_s", span_s, "above 0 and finite", "give the seconds that the run covers")
    return float(good(outcomes, slo).sum()) / span_s if len(outcomes) else math.nan


def _row(target: Target, index: int | None, measured_s: float, samples: int) -> MarginRow:
    if not samples:
        return MarginRow(target, index, math.nan, math.nan, 0, MarginReason.NO_SAMPLES)
    return MarginRow(target, index, measured_s, measured_s / target.bound_s - 1.0, samples, MarginReason.MEASURED)


def _gap_row(outcomes: Outcomes, target: Target, index: int | None, group: BoolArray) -> MarginRow:
    # An unfinished request still waits for a token: one endless gap each.
    endless = int((group & ~outcomes.finished).sum())
    if group.all() and len(outcomes.gap_values_s):
        values = np.append(outcomes.gap_values_s, np.inf)
        weights = np.append(outcomes.gap_weights, float(endless))
        measured_s = weighted_quantile(values, weights, target.quantile)
        return _row(target, index, measured_s, round(float(weights.sum())))
    if target.quantile == 1.0 or not group.any():
        value, exists = _latency(outcomes, "longest_gap")
        return _row(target, index, quantile(value[group & exists], 1.0), int((group & exists).sum()))
    counts = cast(IntArray, outcomes.need("gap_count", "a gap target"))
    samples = int(counts[group].sum()) + endless
    if not samples:
        return _row(target, index, math.nan, 0)
    over = int(_gaps_over(outcomes, target.bound_s)[group].sum()) + endless
    within_enough = samples - over >= (target.quantile - RELATIVE_SLACK) * samples
    margin = over / samples / (1.0 - target.quantile) - 1.0
    # The same rule as for single requests; rounding must not turn a met target into a missed one.
    margin = min(margin, 0.0) if within_enough else margin
    return MarginRow(target, index, math.nan, margin, samples, MarginReason.BY_SHARE)


def margins(outcomes: Outcomes, slo: Slo) -> tuple[MarginRow, ...]:
    """One row per target over the requests it applies to: base targets first, then those of each override.

    A gap target for all requests uses the exact distribution of the run's gaps. One for some requests has only counts
    above the bound: its margin is share above / share allowed - 1 and its measured_s is NaN.
    """
    chosen = _override_of(outcomes, slo)
    rows: list[MarginRow] = []
    for target, index in slo.all_targets():
        group = _applies(slo, chosen, target, index)
        if target.metric == "gap":
            rows.append(_gap_row(outcomes, target, index, group))
            continue
        value, exists = _latency(outcomes, target.metric)
        kept = group & exists
        rows.append(_row(target, index, quantile(value[kept], target.quantile), int(kept.sum())))
    return tuple(rows)


def feasible(rows: Sequence[MarginRow]) -> bool:
    """Whether every target with samples is met; False when there are targets but no samples."""
    judged = [row for row in rows if row.samples > 0]
    return not rows or (bool(judged) and all(row.margin <= 0.0 for row in judged))


def longest_wait_s(outcomes: Outcomes) -> float:
    """Longest TTFT in seconds; +inf when a first token never came, NaN without requests."""
    waits, _ = _latency(outcomes, "ttft")
    return float(waits.max()) if len(waits) else math.nan
