"""Before and after for groups of requests: a mean that improves may hide a group that pays for it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rooftune.policies.outcomes import BoolArray, IntArray, Outcomes
from rooftune.policies.quantiles import quantile
from rooftune.policies.slo import Slo, good
from rooftune.tuner.record import GroupFigures, GroupPart, Seconds, plain

PROMPT_EDGES_TOKENS = (500, 2_000, 8_000, 32_000)
OUTPUT_EDGES_TOKENS = (50, 200, 1_000)
MOST_TENANTS = 12


@dataclass(frozen=True)
class Group:
    """Some requests of the traffic, by one property; members: shape (n,)."""

    dimension: str
    name: str
    members: BoolArray


def _bands(dimension: str, tokens: IntArray, edges: tuple[int, ...]) -> Iterator[Group]:
    low = 0
    for high in (*edges, None):
        members = tokens > low if high is None else (tokens > low) & (tokens <= high)
        if high is None:
            name = f"above {low:,} tokens"
        else:
            name = f"up to {high:,} tokens" if low == 0 else f"{low + 1:,} to {high:,} tokens"
        yield Group(dimension, name, members)
        low = high or low


def groups_of(outcomes: Outcomes) -> tuple[Group, ...]:
    """All requests, then by prompt length, output length, tenant and cache hit; empty groups are left out."""
    found = [Group("all", "all requests", np.ones(len(outcomes), dtype=np.bool_))]
    found += _bands("prompt length", outcomes.prompt_tokens, PROMPT_EDGES_TOKENS)
    found += _bands("output length", outcomes.output_tokens, OUTPUT_EDGES_TOKENS)
    if len(outcomes.tenant) and len(outcomes.tenant_names) > 1:
        counts = np.bincount(outcomes.tenant, minlength=len(outcomes.tenant_names))
        for code in np.argsort(-counts, kind="stable")[:MOST_TENANTS].tolist():
            found.append(Group("tenant", outcomes.tenant_names[code], outcomes.tenant == code))
    if len(outcomes.cached_tokens) and outcomes.cached_tokens.any():
        hit = outcomes.cached_tokens > 0
        found += [Group("prefix cache", "prefix found", hit), Group("prefix cache", "nothing found", ~hit)]
    return tuple(group for group in found if group.members.any())


def _seconds(values: np.ndarray[tuple[int], np.dtype[np.float64]], q: float) -> Seconds:
    return plain(quantile(values, q))


def _figures(outcomes: Outcomes, is_good: BoolArray, members: BoolArray) -> GroupFigures:
    """Failed requests count as endless, as they do for a target."""
    finished = outcomes.finished
    ttft_s = np.where(finished, outcomes.first_token_s - outcomes.arrival_s, np.inf)
    longest_s = np.where(finished, outcomes.longest_gap_s, np.inf)
    with_gaps = members & ((outcomes.gap_count > 0) | ~finished)
    return GroupFigures(
        attainment=float(f"{is_good[members].mean():.9g}"),
        ttft_p50_s=_seconds(ttft_s[members], 0.5),
        ttft_p99_s=_seconds(ttft_s[members], 0.99),
        longest_gap_p99_s=_seconds(longest_s[with_gaps], 0.99),
    )


def group_parts(current: Outcomes, best: Outcomes, slo: Slo) -> tuple[GroupPart, ...]:
    """One row a group. Both runs must be of the same traffic."""
    good_current, good_best = good(current, slo), good(best, slo)
    return tuple(
        GroupPart(
            dimension=group.dimension,
            group=group.name,
            requests=int(group.members.sum()),
            current=_figures(current, good_current, group.members),
            best=_figures(best, good_best, group.members),
        )
        for group in groups_of(current)
    )
