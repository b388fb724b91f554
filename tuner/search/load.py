"""What a setting carries: the highest rate of this traffic at which its queue does not grow.

An estimate for every candidate, from the step model and the mean work of a request: at the highest rate each step is as
full as budget, sequences and KV pool allow, however few requests were running in the window. For the few settings that
decide, bisection on replays of the repeated traffic. See docs/decisions/026-headroom.md.
"""

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from rooftune.policies.outcomes import FloatArray, Outcomes
from rooftune.policies.request import FIXED_BUDGET, PRESSURE, Setting
from rooftune.policies.step_time import StepCost, chunk_attention_work, priced, step_cost
from rooftune.tuner.search.evaluation import Case
from rooftune.tuner.search.feasible_rate import bracket
from rooftune.tuner.sim.twin import Ends, simulate
from rooftune.tuner.traffic.reshape import period_of, repeat, window

C = TypeVar("C", bound=Case)

# A queue grows when over a period it gains more than this share of the work that arrived: chance in step times, and
# what the last arrivals of a period leave behind, gain less.
GROWTH = 0.02
# Bisection ends when both ends are this close, or after so many replays; it begins at the estimate.
RATE_TOLERANCE, RATE_REPLAYS, RATE_STRIDE = 0.05, 8, 1.1
LEAST_PERIODS, MOST_PERIODS = 2, 20
# Under a queue that grows: requests that may gather in a replay, the growth assumed at least (of what is offered), and
# the shortest stretch that is looked at.
MOST_QUEUE, LEAST_GROWTH, LEAST_HORIZON_S = 150, 0.25, 60.0
# Under overload a setting must carry this share of what the best one does: one that serves much less shows good shares
# only until its queue has grown.
LEAST_CARRIED = 0.85


@dataclass(frozen=True)
class Carried:
    """What one setting carries: requests per second; and the share of the window in which steps ran, 0..1."""

    sustainable_rps: float
    busy_share: float


@dataclass(frozen=True)
class Load:
    """offered_rps: of the window. overload: nothing carries it with headroom, neither within the bounds of the search
    nor at the boot setting."""

    offered_rps: float
    in_force: Carried
    boot: Carried | None
    proposed: Carried
    overload: bool


@dataclass(frozen=True)
class Demand:
    """What arrives, and what carries it (requests per second), as known before the search.

    wanted_rps: with headroom. most_rps: estimate for the setting that carries most. in_force_rps, boot_rps: replayed.
    """

    offered_rps: float
    wanted_rps: float
    most_rps: float
    in_force_rps: float
    boot_rps: float

    @property
    def overload(self) -> bool:
        """Nothing within the bounds carries it with headroom."""
        return max(self.most_rps, self.in_force_rps) < self.wanted_rps

    @property
    def required_rps(self) -> float:
        """What the search asks of a setting."""
        return LEAST_CARRIED * max(self.most_rps, self.in_force_rps) if self.overload else self.wanted_rps

    @property
    def short(self) -> bool:
        """What matters shows only over the horizon: a queue that grows."""
        return self.overload or self.in_force_rps < self.offered_rps

    def horizon_s(self, most_s: float) -> float:
        """How far a short supply is looked at: until a queue has built up that no target survives. A replay's time
        grows with the square of its queue, and further on the same happens."""
        growth_rps = max(self.offered_rps - self.in_force_rps, LEAST_GROWTH * self.offered_rps)
        return min(max(MOST_QUEUE / growth_rps, LEAST_HORIZON_S), most_s)


@dataclass(frozen=True)
class Work:
    """What one request of the traffic asks of the steps, on average, under one setting.

    decodes, prefill_tokens: computed ones; long_tokens: of long prompts. chunk_tokens: of the chunk in which a prompt
    token is computed. budget_tokens: of a step. place_steps: steps in which it runs; kv_token_steps: tokens that it
    holds, summed over these. The rest as the arguments of ``step_cost``, summed over its steps.
    """

    decodes: float
    prefill_tokens: float
    long_tokens: float
    chunk_tokens: float
    budget_tokens: float
    place_steps: float
    kv_token_steps: float
    decode_context: float
    prefill_context: float
    attention: float

    def step_s(self, cost: StepCost, requests: float) -> float:
        """Mean time of steps that do the work of ``requests`` (a fraction) each: where prompts do not fill them all,
        some read a whole chunk and the others none."""
        decodes = round(requests * self.decodes)
        running = max(round(requests * self.place_steps), 1)
        context = requests * self.decode_context
        prefill = requests * self.prefill_tokens
        whole = max(min(self.chunk_tokens, self.budget_tokens - requests * self.decodes), 1.0)
        share = min(prefill / whole, 1.0)
        more = requests / share
        with_s = step_cost(
            cost,
            decodes + max(round(prefill / share), 1),
            running,
            decodes,
            context,
            more * self.prefill_context,
            more * self.attention,
        )
        if share == 1.0 or decodes == 0:
            return share * with_s
        return share * with_s + (1.0 - share) * step_cost(cost, decodes, decodes, decodes, context, 0.0, 0.0)


def work_of(case: Case, setting: Setting) -> Work:
    """Means over the traffic's requests."""
    t = case.traffic
    budget = float(min(setting.step_tokens, case.engine.boot.ceiling_tokens))
    if setting.budget_policy == PRESSURE:
        budget = min(budget, float(setting.pressure_tokens))
    prompt, output = t.prompt_tokens.astype(np.float64), t.output_tokens.astype(np.float64)
    # Engines that know contents find what the traffic's prefixes give; none is assumed here.
    cached = t.cached_tokens.astype(np.float64) if case.engine.boot.contents == 0 else np.zeros(len(t))
    fresh = np.maximum(prompt - cached, 1.0)
    chunk = min(float(setting.chunk_cap_tokens) or budget, budget)
    chunks = np.ceil(fresh / chunk)
    decodes = output - 1.0  # the last chunk gives the first token
    long = fresh * (prompt >= setting.long_prompt_tokens)
    return Work(
        decodes=float(decodes.mean()),
        prefill_tokens=float(fresh.mean()),
        long_tokens=float(long.mean()),
        chunk_tokens=float((fresh * np.minimum(fresh, chunk)).sum() / fresh.sum()),
        budget_tokens=budget,
        place_steps=float((chunks + decodes).mean()),
        kv_token_steps=float((chunks * (cached + fresh / 2.0) + decodes * (prompt + output / 2.0)).mean()),
        decode_context=float((decodes * (prompt + output / 2.0)).mean()),
        prefill_context=float((chunks * cached + chunk * chunks * (chunks - 1.0) / 2.0).mean()),
        attention=float(chunk_attention_work_of(fresh, cached).mean()),
    )


def chunk_attention_work_of(fresh: FloatArray, cached: FloatArray) -> FloatArray:
    """The same for whole prompts: chunks do not change its sum."""
    found: FloatArray = chunk_attention_work(fresh, cached)  # type: ignore[arg-type,assignment]  # plain arithmetic
    return found


def estimated_rps(case: Case, setting: Setting) -> float:
    """Requests per second of this traffic that the setting carries, by the fullest step it allows. Replays nothing."""
    work, cost, engine = work_of(case, setting), priced(case.model), case.engine
    chunk = float(setting.chunk_cap_tokens)
    most = [
        work.budget_tokens / (work.prefill_tokens + work.decodes),
        setting.max_running / max(work.place_steps, 1.0),
        engine.kv_blocks * engine.boot.block_tokens / max(work.kv_token_steps, 1.0),
    ]
    if chunk and setting.max_partial_prefills:
        most.append(setting.max_partial_prefills * chunk / work.prefill_tokens)
    if chunk and setting.max_long_partial_prefills and work.long_tokens > 0.0:
        most.append(setting.max_long_partial_prefills * chunk / work.long_tokens)
    requests = min(most)
    if setting.budget_policy not in (FIXED_BUDGET, PRESSURE):
        requests = min(requests, _within(work, cost, setting, requests))
    return requests / work.step_s(cost, requests)


def _within(work: Work, cost: StepCost, setting: Setting, most: float) -> float:
    """Requests a step within the policy's step time, at least its floor of prompt tokens."""
    low, high = 0.0, most
    for _ in range(30):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if work.step_s(cost, middle) <= setting.budget_target_s else (low, middle)
    return max(low, setting.budget_floor_tokens / work.prefill_tokens)


def offered_rps(case: Case) -> float:
    """Requests per second that arrive. Raises InputError for traffic that arrives all at once."""
    return len(case.traffic) / period_of(case.traffic)


def horizon(case: C, horizon_s: float) -> C:
    """The same traffic for ``horizon_s``: repeated, or its beginning."""
    traffic = case.traffic
    if traffic.span_s > horizon_s:
        return replace(case, traffic=window(traffic, float(traffic.arrival_s[0]), horizon_s))
    times = math.ceil(horizon_s / period_of(traffic) - 1e-9)
    return replace(case, traffic=repeat(traffic, min(max(times, 1), MOST_PERIODS)))


def grows(case: Case, setting: Setting, horizon_s: float) -> bool:
    """Whether the queue grows under this traffic, repeated up to ``horizon_s`` and at least twice.

    The work that is left at the end of the last period is compared with that at the end of one half-way, so that
    neither the empty start nor a burst within a period counts as growth.
    """
    period_s = period_of(case.traffic)
    periods = min(max(math.ceil(horizon_s / period_s - 1e-9), LEAST_PERIODS), MOST_PERIODS)
    end_s = period_s * periods + float(case.traffic.arrival_s[0])
    ends = Ends(at_s=end_s)
    run = simulate(repeat(case.traffic, periods), case.engine, setting, case.model, noise=case.noise, ends=ends)
    half = periods // 2
    gained = work_left(run.outcomes, end_s) - work_left(run.outcomes, end_s - (periods - half) * period_s)
    arrived = float((case.traffic.prompt_tokens + case.traffic.output_tokens).sum()) * (periods - half)
    return run.stalled or gained > GROWTH * arrived


def work_left(o: Outcomes, at_s: float) -> float:
    """Tokens of prompt and output not yet computed at an instant, of the requests that have arrived by then.

    Within a prompt and within an answer they count as computed evenly.
    """
    here = o.arrival_s <= at_s
    begin_s = np.where(np.isnan(o.scheduled_s), np.inf, o.scheduled_s)
    first_s = np.where(np.isnan(o.first_token_s), np.inf, o.first_token_s)
    finish_s = np.where(np.isnan(o.finish_s), np.inf, o.finish_s)
    prompt = o.prompt_tokens * (1.0 - _passed(begin_s, first_s, at_s))
    output = o.output_tokens * (1.0 - _passed(first_s, finish_s, at_s))
    return float((prompt + output)[here].sum())


def _passed(begin_s: FloatArray, end_s: FloatArray, at_s: float) -> FloatArray:
    """How much of each stretch lies before an instant, 0..1. One without an end has not begun to pass."""
    length_s = np.where(np.isfinite(end_s), end_s - np.where(np.isfinite(begin_s), begin_s, 0.0), np.inf)
    share: FloatArray = np.clip(
        (at_s - np.where(np.isfinite(begin_s), begin_s, at_s)) / np.maximum(length_s, 1e-9), 0, 1
    )
    return share


def sustainable_rps(case: Case, setting: Setting, horizon_s: float) -> tuple[float, int]:
    """The rate by bisection on ``grows``, and how many replays it took; the rate is the middle of both ends."""
    offered = offered_rps(case)

    def carries(scale: float) -> bool:
        return not grows(case.at_rate(scale), setting, horizon_s)

    low, high, replays = bracket(
        carries, estimated_rps(case, setting) / offered, RATE_STRIDE, RATE_TOLERANCE, RATE_REPLAYS
    )
    scale = high if math.isnan(low) else low if math.isinf(high) else math.sqrt(low * high)
    return scale * offered, replays
