"""The slow walk: the twin in a page of plain Python, against which the compiled twin is tested.

Every step is planned by ``plan_step``; nothing is skipped, nothing compiled. Same inputs, same ``RunResult``.
"""

from collections.abc import Sequence

import numpy as np

from rooftune.policies.kv import blocks_for
from rooftune.policies.packing import finish_step, plan_step, release_leaving
from rooftune.policies.request import (
    COMPUTED,
    FINISHED,
    HIT,
    KNOWN,
    LEAVING_COUNT,
    OUTPUT,
    PLANNED_COUNT,
    PREEMPTED_COUNT,
    PROMPT,
    RUNNING_COUNT,
    STATUS,
    WAITING_COUNT,
    Setting,
    State,
    append_waiting,
)
from rooftune.policies.step_time import StepCost, StepModel, chunk_attention_work, priced, step_cost
from rooftune.tuner.sim import kernel
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.noise import QUIET, StepNoise, with_noise
from rooftune.tuner.sim.progress import Progress
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.sim.twin import Change, prepare
from rooftune.tuner.traffic.workload import Traffic


def planned_time_s(cost: StepCost, state: State) -> float:
    """Duration of the planned step, from its rows."""
    decode_context = prefill_context = work = 0.0
    decodes = 0
    rows = state.planned[: state.counters[PLANNED_COUNT]].tolist()
    for request, taken in rows:
        before = int(state.requests[request, COMPUTED]) - taken
        if taken > 1 or before < state.requests[request, PROMPT]:
            prefill_context += before
            work += chunk_attention_work(taken, before)
        else:
            decodes += 1
            decode_context += before
    return step_cost(cost, sum(taken for _, taken in rows), len(rows), decodes, decode_context, prefill_context, work)


def walk(
    traffic: Traffic,
    engine: Engine,
    setting: Setting,
    model: StepModel | StepCost,
    *,
    changes: Sequence[Change] = (),
    gap_bounds_s: Sequence[float] = (),
    noise: StepNoise = QUIET,
    progress: Progress | None = None,
) -> RunResult:
    """Replay step by step in plain Python; arguments and result as ``rooftune.tuner.sim.twin.simulate``."""
    state = prepare(traffic, engine)
    cost = priced(model)
    requests, counters = state.requests, state.counters
    n = len(traffic)
    run = kernel.new_run(n, gap_bounds_s, engine.kv_blocks)
    times, totals = run.times, run.totals
    token_s: list[list[float]] = [[] for _ in range(n)]
    log: list[tuple[int, int, int]] = []
    log_times: list[float] = []
    pending = list(changes)
    if progress is not None:
        progress.enter(state, run, engine)
        for request in progress.request[progress.produced_tokens > 0].tolist():
            token_s[request].append(float(times[request, kernel.LAST_TOKEN_S]))
    begun_s, begun_gap_s = times[:, kernel.FIRST_TOKEN_S].copy(), times[:, kernel.LONGEST_GAP_S].copy()
    now, seen = run.clock_s.tolist()
    arrived = int(totals[kernel.BEGUN])
    finished = int((requests[:, STATUS] == FINISHED).sum())
    while finished < n:
        while pending and pending[0].at_s <= now:
            setting = pending.pop(0).setting
        while arrived < n and traffic.arrival_s[arrived] <= seen:
            if (
                blocks_for(
                    int(traffic.prompt_tokens[arrived] + traffic.output_tokens[arrived]) - 1, engine.boot.block_tokens
                )
                > engine.kv_blocks
            ):
                requests[arrived, STATUS] = FINISHED
                totals[kernel.REFUSED] += 1
                finished += 1
            else:
                append_waiting(state, arrived)
            arrived += 1
        if counters[RUNNING_COUNT] == 0 and counters[WAITING_COUNT] == 0:
            if arrived >= n:
                break
            now = seen = max(now, float(traffic.arrival_s[arrived]))
            release_leaving(engine.boot, state)
            continue
        start = now
        leaving = int(counters[LEAVING_COUNT])
        planned = plan_step(setting, engine.boot, cost.formula, state, now)
        totals[kernel.PREEMPTED] += counters[PREEMPTED_COUNT]
        if planned == 0:
            seen = now
            if leaving > 0 or (counters[RUNNING_COUNT] > 0 and counters[PREEMPTED_COUNT] > 0):
                continue
            wake = [c.at_s for c in pending[:1]] + ([float(traffic.arrival_s[arrived])] if arrived < n else [])
            if not wake:
                totals[kernel.STALLED] = 1
                break
            now = seen = max(now, min(wake))
            continue
        now += with_noise(noise, int(totals[kernel.STEPS]), now, planned_time_s(cost, state))
        seen = start if engine.boot.plan_ahead else now
        for request, taken in state.planned[:planned].tolist():
            if np.isnan(times[request, kernel.SCHEDULED_S]):
                times[request, kernel.SCHEDULED_S] = start
                totals[kernel.CACHE_HIT_TOKENS] += requests[request, HIT]
            log.append((int(totals[kernel.STEPS]), request, taken))
            log_times.append(now)
            totals[kernel.COMPUTED_TOKENS] += taken
            if requests[request, COMPUTED] == requests[request, KNOWN]:
                token_s[request].append(now)
                if requests[request, KNOWN] + 1 - requests[request, PROMPT] == requests[request, OUTPUT]:
                    times[request, kernel.FINISH_S] = now
        totals[kernel.STEPS] += 1
        finished += finish_step(engine.boot, state)
    gaps = [np.diff(np.array(instants)) for instants in token_s]
    for request, instants in enumerate(token_s):
        if instants:
            times[request, kernel.FIRST_TOKEN_S] = np.fmin(begun_s[request], instants[0])
            longest_s = gaps[request].max() if len(gaps[request]) else 0.0
            times[request, kernel.LONGEST_GAP_S] = np.fmax(begun_gap_s[request], longest_s)
        run.gap_over[request] = [(gaps[request] > bound).sum() for bound in run.gap_bounds_s]
    values = np.concatenate(gaps)
    return RunResult.from_run(
        traffic,
        engine,
        state,
        run,
        (values, np.ones(len(values), dtype=np.int64)),
        (np.array(log, dtype=np.int64).reshape(-1, 3), np.array(log_times)),
    )
