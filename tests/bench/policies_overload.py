"""Bench ``policies-overload``: orders under overload, ours against published ones, each tuned on the traffic it is
judged on.

Three traffics at 0.7 to 1.8 times what the setting carries (requests per second while all of them wait at once, first
come, first served). A figure is the share of good requests, as in the bench ``policies``; its baseline is the best
published order on the same traffic. The published orders live here alone: they are compiled into a copy of the twin.

- SGLang's shortest job first: prompt tokens minus a rate times the wait
- PREFLOW: 2^(age/D) / (prompt tokens x tokens left), greatest first
- QoServe (ASPLOS 26): deadline plus a weight times the work left, hopeless requests behind all others
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from rooftune.policies import packing
from rooftune.policies.commands import Figure
from rooftune.policies.order import begin_ordered_step as begin_by_steps
from rooftune.policies.order import goes_before as goes_before_by_policy
from rooftune.policies.order import tokens_left
from rooftune.policies.packing import release_leaving
from rooftune.policies.quantiles import quantile
from rooftune.policies.request import (
    AGED_FIRST,
    COMPUTED,
    DEADLINE,
    FCFS,
    KNOWN,
    PLANNED_COUNT,
    PROMPT,
    SHORTEST_FIRST,
    Boot,
    Setting,
    State,
)
from rooftune.policies.slo import good, longest_wait_s
from rooftune.policies.step_time import priced
from rooftune.tuner.bench.mixes import AZURE_CONV, DEFAULT, ENGINE, MODEL, SLO, TRACES
from rooftune.tuner.search.space import WORK_WEIGHTS
from rooftune.tuner.sim import compile as compiling
from rooftune.tuner.sim import kernel
from rooftune.tuner.sim.noise import QUIET
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.sim.twin import like, prepare
from rooftune.tuner.traffic.generate import document_mix
from rooftune.tuner.traffic.reshape import scale_rate, window
from rooftune.tuner.traffic.traces import load_traffic
from rooftune.tuner.traffic.workload import Traffic

SGLANG, PREFLOW, QOSERVE = 3, 4, 5  # order policies of this bench alone; their parameter stands in aging_s
BY_TOKENS = 99  # as ``pressure_prefills``, idle here: the share is of the prefill tokens
PREFILL_TOKENS, AGED_TOKENS = 20, 21  # counters of this bench alone

BUDGET_TOKENS = 600
LOADS = (0.7, 1.0, 1.3, 1.8)
SPAN_S, SHORT_SPAN_S = 200.0, 60.0
AGING_S = (10.0, 30.0)
SHARES = (0.2, 0.1, 0.05)
DOCUMENTS = "documents"


def _urgency(state: State, setting: Setting, request: int, now_s: float) -> float:
    """Of a published order: the smallest goes first."""
    waited_s = now_s - state.arrival_s[request]
    prompt, left = float(state.requests[request][PROMPT]), float(max(tokens_left(state, request), 1))
    if setting.order_policy == SGLANG:
        return prompt - setting.aging_s * waited_s
    if setting.order_policy == PREFLOW:
        return math.log(prompt) + math.log(left) - math.log(2.0) * waited_s / setting.aging_s
    left_s = left * setting.prefill_s_per_token
    hopeless_s = 1e9 if waited_s + left_s > setting.ttft_target_s else 0.0
    return state.arrival_s[request] + setting.ttft_target_s + setting.aging_s * left_s + hopeless_s


def goes_before(state: State, setting: Setting, first: int, second: int, now_s: float) -> bool:
    """The product's order for its own policies, the published ones behind preempted requests."""
    if setting.order_policy < SGLANG:
        return goes_before_by_policy(state, setting, first, second, now_s)
    fresh_first = state.requests[first][KNOWN] <= state.requests[first][PROMPT]
    fresh_second = state.requests[second][KNOWN] <= state.requests[second][PROMPT]
    if fresh_first != fresh_second:
        return bool(fresh_second)
    one, other = _urgency(state, setting, first, now_s), _urgency(state, setting, second, now_s)
    return one < other if one != other else first < second


def begin_ordered_step(state: State, setting: Setting) -> None:
    """The product's turns, or turns by tokens: the aged go first while they have had less than their share."""
    begin_by_steps(state, setting)
    if setting.pressure_prefills == BY_TOKENS:
        counters = state.counters
        behind = counters[AGED_TOKENS] < setting.aged_share * counters[PREFILL_TOKENS]
        counters[AGED_FIRST] = 1 if behind else 0


def release_and_count(boot: Boot, state: State) -> None:
    """What ends a plan, and a count of its prompt tokens."""
    counters = state.counters
    for index in range(counters[PLANNED_COUNT]):
        taken = state.planned[index][1]
        row = state.requests[state.planned[index][0]]
        if row[COMPUTED] - taken < row[PROMPT]:
            counters[PREFILL_TOKENS] += taken
            if counters[AGED_FIRST] != 0:
                counters[AGED_TOKENS] += taken
    release_leaving(boot, state)


@cache
def _replay() -> Callable[..., Any]:
    """The twin with the published orders; its machine code is not kept."""
    ours = {f.__name__: f for f in (goes_before, begin_ordered_step)} | {"release_leaving": release_and_count}
    places = {"PACKAGES": (*compiling.PACKAGES, __name__), "is_writable": lambda folder: False}
    with patch.multiple(packing, **ours), patch.multiple(compiling, **places):
        twin: Callable[..., Any] = compiling.compiled(kernel.replay, like=like())
    return twin


def run(traffic: Traffic, setting: Setting) -> RunResult:
    """``simulate`` with the published orders."""
    state, result = prepare(traffic, ENGINE), kernel.new_run(len(traffic), SLO.gap_bounds(), ENGINE.kv_blocks)
    rows = np.array([[float(value) for value in setting]])
    values, weights, log, log_times = _replay()(
        rows, np.array([-np.inf]), ENGINE.boot, priced(MODEL), QUIET, state, result, 1, 0
    )
    return RunResult.from_run(traffic, ENGINE, state, result, (values, weights), (log, log_times))


BASE = DEFAULT._replace(
    step_tokens=BUDGET_TOKENS, ttft_target_s=SLO.targets[0].bound_s, prefill_s_per_token=MODEL.slope_s_per_token
)


def _ours(shares: tuple[float, ...] = SHARES, **more: int) -> tuple[Setting, ...]:
    return tuple(
        BASE._replace(order_policy=policy, aging_s=aging_s, aged_share=share, **more)
        for policy in (SHORTEST_FIRST, DEADLINE)
        for aging_s in AGING_S
        for share in shares
    )


def _published(policy: int, parameters: tuple[float, ...]) -> tuple[Setting, ...]:
    return tuple(BASE._replace(order_policy=policy, aging_s=parameter) for parameter in parameters)


FCFS_FAMILY, ABSOLUTE, SHARE, TOKENS = "first come", "aged always first", "share of steps", "share of tokens"
WEIGHT = "share of steps, weight of waiting"
OURS = (SHARE, WEIGHT)
PUBLISHED = ("SGLang", "PREFLOW", "QoServe")
FAMILIES: dict[str, tuple[Setting, ...]] = {
    FCFS_FAMILY: (BASE._replace(order_policy=FCFS),),
    ABSOLUTE: _ours((1.0,)),
    SHARE: _ours(),
    TOKENS: tuple(s for s in _ours(pressure_prefills=BY_TOKENS) if s.aging_s == AGING_S[-1]),
    WEIGHT: tuple(
        setting._replace(wait_tokens_per_s=1.0 / (weight * MODEL.slope_s_per_token))
        for setting in _ours()
        for weight in WORK_WEIGHTS
        if weight > 0 and setting.aging_s == AGING_S[-1]
    ),
    "SGLang": _published(SGLANG, (0.0, 10.0, 50.0, 200.0, 1000.0, 5000.0)),
    "PREFLOW": _published(PREFLOW, (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)),
    "QoServe": _published(QOSERVE, (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)),
}


@dataclass(frozen=True)
class Best:
    """The best of a family: most good requests, then the shortest longest wait. Long: the longest tenth of prompts."""

    setting: Setting
    good_share: float
    longest_wait_s: float
    short_p99_s: float
    long_p99_s: float


@dataclass(frozen=True)
class Case:
    """One traffic at one load, a multiple of what the setting carries."""

    traffic: str
    load: float
    rate_rps: float
    best: dict[str, Best]

    def best_among(self, families: tuple[str, ...]) -> str:
        """The best of these families here."""
        return max(families, key=lambda name: self.best[name].good_share)


def best_of(traffic: Traffic, family: tuple[Setting, ...]) -> Best:
    """Every setting of the family on that traffic."""
    found = []
    for setting in family:
        outcomes = run(traffic, setting).outcomes
        waits_s = np.where(np.isnan(outcomes.first_token_s), np.inf, outcomes.first_token_s - outcomes.arrival_s)
        long = outcomes.prompt_tokens >= np.quantile(outcomes.prompt_tokens, 0.9)
        found.append(
            Best(
                setting,
                float(good(outcomes, SLO).mean()),
                longest_wait_s(outcomes),
                quantile(waits_s[~long], 0.99),
                quantile(waits_s[long], 0.99),
            )
        )
    return max(found, key=lambda best: (best.good_share, -best.longest_wait_s))


def capacity_rps(traffic: Traffic) -> float:
    """Requests per second while all of them wait at once."""
    at_once = replace(traffic, arrival_s=np.zeros(len(traffic)))
    return len(traffic) / run(at_once, FAMILIES[FCFS_FAMILY][0]).span_s


def traffics(span_s: float) -> Iterator[tuple[str, Traffic]]:
    """The document mix, and what lies beside the project of the public traces."""
    yield DOCUMENTS, document_mix(2, 4.0, 4.0 * span_s, 8, (16_000, 32_000))
    for name, path in (("azure-conv", AZURE_CONV), ("azure-code", TRACES / "azure-2023-code.csv")):
        if path.is_file():
            yield name, load_traffic(path)


def cases(short: bool) -> Iterator[Case]:
    """Every traffic at every load; short: a minute of documents at two loads."""
    for name, traffic in traffics(SHORT_SPAN_S if short else SPAN_S):
        if short and name != DOCUMENTS:
            continue
        capacity, offered = capacity_rps(traffic), len(traffic) / traffic.span_s
        for load in LOADS[2:4] if short else LOADS:
            scaled = window(scale_rate(traffic, load * capacity / offered), 0.0, SHORT_SPAN_S if short else SPAN_S)
            yield Case(name, load, load * capacity, {f: best_of(scaled, settings) for f, settings in FAMILIES.items()})


def headline(found: list[Case]) -> list[Figure]:
    """Means over the traffics at more than they carry: good share of the best of ours over the best published order,
    and what each of its parts adds."""
    over = [case for case in found if case.load > 1.0]

    def mean(one: tuple[str, ...], other: tuple[str, ...]) -> float:
        pairs = [(case.best[case.best_among(one)], case.best[case.best_among(other)]) for case in over]
        return float(np.mean([first.good_share / second.good_share for first, second in pairs]))

    return [
        Figure("overload_best_over_published", mean(OURS, PUBLISHED), "ratio", 1.0),
        Figure("overload_share_over_always_first", mean((SHARE,), (ABSOLUTE,)), "ratio", 1.0),
        Figure("overload_weight_over_none", mean(OURS, (SHARE,)), "ratio", 1.0),
        Figure("overload_steps_over_tokens", mean((SHARE,), (TOKENS,)), "ratio", 1.0),
    ]


def bench(short: bool) -> Iterator[Figure]:
    """The best of every family on each traffic and load, and the headline."""
    found = []
    for case in cases(short):
        found.append(case)
        published = case.best[case.best_among(PUBLISHED)].good_share
        for family, best in case.best.items():
            name = f"{case.traffic} at {case.load:g}x: {family}"
            yield Figure(f"good_share: {name}", best.good_share, "share", published)
            yield Figure(f"longest_wait_s: {name}", best.longest_wait_s, "s")
    yield from headline(found)


_HEAD = """# Orders under overload

Generated by `python -m tests.bench.policies_overload docs/policies-overload.md`; every number comes from that command.

Everything here is **simulated**, as on [What policies gain](policies.md), under a budget of 600 tokens. Load is a
multiple of what that setting carries. A request is good when its first token comes within 2 s and at most 1 % of its
own gaps are above 30 ms. Each cell is the best of a small grid on the traffic it is judged on: share of good requests,
and the longest wait for a first token.

- **aged always first**: shortest first or deadline, where requests that waited for the aging bound always go first
- **share of steps**: they go first in 5, 10 or 20 % of the steps, else last; **share of tokens**: the same, counted in
  prompt tokens
- **weight of waiting**: also, a second of waiting outweighs some prompt tokens
- published orders: **SGLang** (prompt tokens less a rate times the wait), **PREFLOW** (2^(age/D) over prompt x tokens
  left), **QoServe** (deadline plus a weight times the work left, hopeless requests last). They guarantee no request
  anything; under ours, in its turns the oldest goes first.
"""


def page(found: Sequence[Case]) -> str:
    """The page in Markdown."""
    over, absolute, weight, tokens = (figure.value for figure in headline(list(found)))
    lines = [
        _HEAD,
        f"Above capacity, on average: the best of ours serves {over - 1:+.1%} good requests over the best published"
        f" order; a share {absolute:.1f} times as many as aged requests that always go first; the weight of waiting"
        f" adds {weight - 1:+.1%}. Turns counted in steps serve {tokens - 1:+.2%} against turns counted in tokens.",
        "",
        f"| traffic | load | {' | '.join(FAMILIES)} |",
        "|---|---|" + "---|" * len(FAMILIES),
    ]
    for case in found:
        cells = (f"{100 * best.good_share:.1f} %, {best.longest_wait_s:.0f} s" for best in case.best.values())
        lines.append(f"| {case.traffic} | {case.load:g} ({case.rate_rps:.1f} req/s) | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(list(cases(short=False))), encoding="utf-8")
