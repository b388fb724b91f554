"""Latency targets as values: what an operator asks for. How they are judged stands in slo.py."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.outcomes import BoolArray, IntArray, Outcomes

Metric = Literal["ttft", "gap", "tpot", "longest_gap", "e2e", "queue"]
Objective = Literal["goodput", "tokens_per_s"]


@dataclass(frozen=True)
class Target:
    """At least share ``quantile`` of the samples of ``metric`` within ``bound_s`` seconds.

    For ``gap`` the samples of one request are its own gaps: Target("gap", 0.03, 0.99) makes a request good when
    at most 1 % of its gaps are above 30 ms. quantile: above 0, at most 1 (1 = every one); bound_s: above 0, finite.
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
    """Which requests an override is for: every stated part must hold; token limits are inclusive.

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
    """For requests that match, ``targets`` replace those of the same metric and join the others."""

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
    """Targets, overrides (for each request only the first that matches counts) and what is maximised."""

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

    def gap_bounds(self) -> tuple[float, ...]:
        """Distinct bounds of the gap targets in seconds, ascending: what a twin must count for each request."""
        return tuple(sorted({target.bound_s for target, _ in self.all_targets() if target.metric == "gap"}))


_CHAT = (Target("ttft", 2.0, 0.99), Target("gap", 0.05, 0.99))
LONG_DOCUMENT_TOKENS = 8_000

# Starting points, for an operator to replace: overrides by tenant come from the operator, whose tenants they are.
PROFILES: dict[str, Slo] = {
    "chat": Slo(_CHAT),
    "documents-with-chat": Slo(
        _CHAT, (Override(Condition(min_prompt_tokens=LONG_DOCUMENT_TOKENS), (Target("ttft", 20.0, 0.99),)),)
    ),
    "multi-tenant": Slo((Target("ttft", 3.0, 0.99), Target("gap", 0.1, 0.99), Target("longest_gap", 1.0, 0.99))),
    "batch": Slo((), objective="tokens_per_s"),
}
