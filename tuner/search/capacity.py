"""What one engine can carry: the highest rate at which a setting still meets every target, and what is full there.

Everything is simulated. The setting that carries most is searched for where the last one failed, and then climbed to
on the grid; see ``feasible_rate`` for how a rate is found.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from rooftune.policies.request import Setting
from rooftune.policies.slo import GAP_METRICS, MarginRow, Slo
from rooftune.tuner.search.evaluation import Case, Role
from rooftune.tuner.search.feasible_rate import (
    STRIDES_TOKENS,
    TOLERANCE,
    FeasibleRate,
    beside,
    candidates,
    climb,
    feasible_rate,
)
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.search.rank import binding
from rooftune.tuner.search.recommend import recommend
from rooftune.tuner.search.space import STOCK_VLLM
from rooftune.tuner.search.stretch import MINUTE_S, Steps, steps_between, worst_window
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.traffic.workload import Traffic

Progress = Callable[[str, int, int], None]

ROUNDS = 4
FULL = 0.95
# Shares of the time of the worst minute from which on a resource counts as what is full.
KV_BLOCKED, SEQUENCES_FULL, PREFILL_BUSY = 0.2, 0.5, 0.75
OVER_BY_PROMPTS = 0.5
SPREAD_LENGTHS = 8.0  # p99 over p50 of the prompts, from which on short ones and long ones are two kinds of traffic


class Resource(StrEnum):
    """What is full first."""

    PREFILL = "prefill"  # there is always a prompt to read
    DECODE = "decode"  # writing answers takes the time
    KV = "kv"  # the pool holds no further request
    SEQUENCES = "sequences"  # the sequence cap
    BUDGET = "budget"  # steps are too long for the prompt tokens they carry: the setting, not the engine
    NOTHING = "nothing"  # a single request or step misses a target by itself


class Lever(StrEnum):
    """What to try next."""

    SMALLER_BUDGET = "smaller_budget"
    PREFIX_CACHING = "prefix_caching"
    PREFILL_POOL = "prefill_pool"
    SPLIT_POOLS = "split_pools"
    ADMISSION = "admission"
    MORE_KV = "more_kv"
    MORE_SEQUENCES = "more_sequences"
    MORE_REPLICAS = "more_replicas"
    TARGETS = "targets"


@dataclass(frozen=True)
class Shares:
    """Of the time of the worst minute, 0..1: at the budget; with a prompt to read; with the sequence cap reached; with
    requests waiting although budget and sequences had room (so the pool had none). kv_peak: most of the pool that
    was asked for at once, an estimate that counts shared prefixes for each request; above 1: some had to wait.
    over_by_prompts: of the time of steps longer than the tightest gap target, the share of those that read a prompt.
    """

    at_budget: float
    prefill: float
    sequences_full: float
    kv_blocked: float
    kv_peak: float
    over_by_prompts: float


@dataclass(frozen=True)
class Capacity:
    """rate: for ``setting``. breaks: the target that fails first above it, None when nothing failed up to 64 times.

    resource, shares: of the worst minute just above. levers: most useful first. searched: whether the setting was
    looked for (again at the rate it can carry) or given.
    """

    setting: Setting
    rate: FeasibleRate
    breaks: MarginRow | None
    resource: Resource
    shares: Shares | None
    levers: tuple[Lever, ...]
    searched: bool
    replays: int


def find_capacity(
    case: Case,
    *,
    current: Setting,
    setting: Setting | None = None,
    knobs: frozenset[str] = STOCK_VLLM,
    trials: int = 100,
    seed: int = 0,
    prefix_caching: bool = True,
    progress: Progress | None = None,
) -> Capacity:
    """Capacity of ``setting``, or of the best one: that is searched for at the rate at which the last one fails, until
    nothing that is found there carries more.

    Deterministic. Raises InputError as ``feasible_rate`` and ``recommend`` do.
    """
    tell = progress or (lambda stage, done, total: None)
    chosen = setting or current
    tell("capacity", 0, 1)
    rate = feasible_rate(case, chosen)
    replays = rate.replays
    for number in range(ROUNDS if setting is None and math.isfinite(rate.above_scale) else 0):
        busy = case.at_rate(rate.above_scale)
        found = recommend(busy, current=chosen, trials=trials, seed=seed, knobs=knobs, against_random=False)
        tell("capacity: search", number + 1, ROUNDS)
        before = rate.above_scale
        chosen, rate, paid = climb(candidates(found), chosen, rate, case)
        replays += paid
        for stride in STRIDES_TOKENS if math.isfinite(rate.above_scale) else ():
            chosen, rate, paid = climb(beside(chosen, stride, case.engine), chosen, rate, case)
            replays += paid
        if rate.above_scale <= before * (1.0 + TOLERANCE) or math.isinf(rate.above_scale):
            break
    resource, shares = Resource.NOTHING, None
    breaks = binding(rate.above.margins) if rate.above is not None else None
    if rate.above is not None:
        shares, preempted_share = _shares(case.at_rate(rate.above_scale), chosen)
        resource = saturated(shares, preempted_share, breaks)
    levers = next_levers(resource, case.traffic, prefix_caching)
    return Capacity(chosen, rate, breaks, resource, shares, levers, setting is None, replays)


def _shares(case: Case, setting: Setting) -> tuple[Shares, float]:
    evaluation, result = evaluate(case, setting, Role.SEARCH)
    start_s, _ = worst_window(result, case.slo)
    # What piles up in the minute is served in it or soon after.
    steps = steps_between(case, setting, result, start_s, MINUTE_S)
    return shares_of(steps, setting, case.engine, result, case.slo), evaluation.preempted / len(case.traffic)


def shares_of(steps: Steps, setting: Setting, engine: Engine, result: RunResult, slo: Slo) -> Shares:
    """What was full during these steps of that run."""
    over = steps.duration_s > (slo.tightest_gap_s() or math.inf)
    over_share, by_prompts = steps.time_share(over), steps.time_share(over & (steps.prefill_tokens > 0))
    tokens = steps.decode_tokens + steps.prefill_tokens
    at_budget = tokens >= FULL * setting.step_tokens
    sequences_full = steps.sequences >= setting.max_running
    blocked = (steps.waiting > 0) & (steps.prefill_tokens == 0) & ~sequences_full
    return Shares(
        at_budget=steps.time_share(at_budget),
        prefill=steps.time_share(steps.prefill_tokens > 0),
        sequences_full=steps.time_share(sequences_full),
        kv_blocked=steps.time_share(blocked),
        kv_peak=_kv_peak(steps, engine, result),
        over_by_prompts=by_prompts / over_share if over_share > 0.0 else 0.0,
    )


def _kv_peak(steps: Steps, engine: Engine, result: RunResult) -> float:
    """Prompt and, as time goes by, output of every request between its first step and its finish, at step starts."""
    o = result.outcomes
    ran = ~np.isnan(o.scheduled_s) & o.finished
    if not len(steps) or not ran.any():
        return 0.0
    start, first, end = o.scheduled_s[ran], o.first_token_s[ran], o.finish_s[ran]
    prompt, output = o.prompt_tokens[ran].astype(np.float64), o.output_tokens[ran].astype(np.float64)
    peak = 0.0
    for now in steps.start_s[:: max(1, len(steps) // 200)]:
        alive = (start <= now) & (now < end)
        written = np.clip((now - first[alive]) / np.maximum(end[alive] - first[alive], 1e-9), 0.0, 1.0)
        peak = max(peak, float((prompt[alive] + written * output[alive]).sum()))
    return peak / (engine.kv_blocks * engine.boot.block_tokens)


def saturated(shares: Shares, preempted_share: float, breaks: MarginRow | None) -> Resource:
    """The scarcest first: a full pool or sequence cap holds prompts back whatever the steps have room for."""
    if shares.kv_blocked >= KV_BLOCKED or preempted_share > 0.01:
        return Resource.KV
    if shares.sequences_full >= SEQUENCES_FULL:
        return Resource.SEQUENCES
    if shares.prefill >= PREFILL_BUSY:
        return Resource.PREFILL
    by_gap = breaks is not None and breaks.target.metric in GAP_METRICS
    if by_gap and shares.over_by_prompts >= OVER_BY_PROMPTS:
        return Resource.BUDGET
    if by_gap:
        return Resource.DECODE
    return Resource.NOTHING


def next_levers(resource: Resource, traffic: Traffic, prefix_caching: bool) -> tuple[Lever, ...]:
    """What relieves that resource for this traffic."""
    short, long = np.quantile(traffic.prompt_tokens, [0.5, 0.99], method="inverted_cdf")
    split = (Lever.SPLIT_POOLS,) if long > SPREAD_LENGTHS * short else ()
    caching = () if prefix_caching else (Lever.PREFIX_CACHING,)
    return {
        Resource.PREFILL: (*caching, *split, Lever.PREFILL_POOL, Lever.ADMISSION),
        Resource.DECODE: (Lever.MORE_REPLICAS, *split, Lever.ADMISSION),
        Resource.KV: (Lever.MORE_KV, *caching, Lever.ADMISSION),
        Resource.SEQUENCES: (Lever.MORE_SEQUENCES, Lever.ADMISSION),
        Resource.BUDGET: (Lever.SMALLER_BUDGET, *split),
        Resource.NOTHING: (Lever.TARGETS, *split),
    }[resource]
