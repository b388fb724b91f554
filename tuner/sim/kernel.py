"""The twin: replays requests step by step through ``plan_step`` and the step-time model.

``replay`` is plain code over plain arrays; ``rooftune.tuner.sim.twin`` compiles it together with everything it calls.
Stretches in which only decodes run and no request can be admitted are not planned step by step: each of their steps
costs the step-time formula and one addition, the same additions in the same order as the slow walk,
so there is no numerical error to bound. A stretch ends at an arrival that could be admitted, a change of
setting, a finish, and before KV blocks could run out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rooftune.policies.kv import blocks_for, fits, grow
from rooftune.policies.packing import arrange_running, finish_step, leave, plan_step, release_leaving
from rooftune.policies.request import (
    CACHED,
    COMPUTED,
    FCFS,
    FINISHED,
    FIXED_BUDGET,
    FREE_BLOCKS,
    HELD,
    HIT,
    KNOWN,
    LEAVING_COUNT,
    OUTPUT,
    PLANNED_COUNT,
    PREEMPTED_COUNT,
    PROMPT,
    RUNNING_COUNT,
    STATUS,
    STEP,
    WAITING_COUNT,
    WAITING_HEAD,
    Boot,
    FloatArray,
    IntArray,
    Setting,
    State,
    append_waiting,
    is_decode,
    setting_from_row,
)
from rooftune.policies.step_time import StepCost, chunk_attention_work, step_cost
from rooftune.tuner.sim.noise import StepNoise, with_noise

# Columns of the per-request result.
SCHEDULED_S = 0
FIRST_TOKEN_S = 1
FINISH_S = 2
LONGEST_GAP_S = 3
LAST_TOKEN_S = 4
TIMES = 5

# The run's totals.
STEPS = 0
SKIPPED_STEPS = 1
COMPUTED_TOKENS = 2
PREEMPTED = 3
REFUSED = 4
STALLED = 5
GAP_ROWS = 6
LOG_ROWS = 7
CACHE_HIT_TOKENS = 8
BEGUN = 9  # requests that were in the engine when the replay began, the first rows
LATE = 10
TOTALS = 12

# When a replay ends early: more steps than this, this instant, more late requests than this; how long a first token may
# take before its request counts as late; and, if not 0, as soon as every request is late or has finished.
MOST_STEPS = 0
END_S = 1
MOST_LATE = 2
PATIENCE_S = 3
DECIDED = 4


class Run(NamedTuple):
    """The output arrays of a replay, and its totals.

    times: (n, TIMES), NaN before. gap_over: (n, bounds), gaps of a request above each of gap_bounds_s.
    over: (bounds,) scratch. totals: (TOTALS,). pool_blocks: (1,) KV blocks of the pool. clock_s: (2,) where the
    replay begins, later where it ended, and up to when arrivals were seen there. ends: see ``MOST_STEPS``.
    """

    times: FloatArray
    gap_over: IntArray
    gap_bounds_s: FloatArray
    over: IntArray
    totals: IntArray
    pool_blocks: IntArray
    clock_s: FloatArray
    ends: FloatArray


def new_run(
    requests: int,
    gap_bounds_s: Sequence[float],
    pool_blocks: int,
    ends: Sequence[float] = (np.inf, np.inf, np.inf, np.inf, 0.0),
) -> Run:
    """A run of this many requests before its first step. gap_bounds_s: in any order. ends: see ``MOST_STEPS``."""
    bounds = np.array(sorted(gap_bounds_s), dtype=np.float64)
    return Run(
        times=np.full((requests, TIMES), np.nan),
        gap_over=np.zeros((requests, len(bounds)), dtype=np.int64),
        gap_bounds_s=bounds,
        over=np.zeros(len(bounds), dtype=np.int64),
        totals=np.zeros(TOTALS, dtype=np.int64),
        pool_blocks=np.array([pool_blocks], dtype=np.int64),
        clock_s=np.zeros(2, dtype=np.float64),
        ends=np.array(ends, dtype=np.float64),
    )


def _room(values: FloatArray, weights: IntArray, used: int, more: int) -> tuple[FloatArray, IntArray]:
    """The two arrays with room for ``more`` rows behind ``used``."""
    if used + more <= len(values):
        return values, weights
    size = 2 * len(values) + more
    wider_values, wider_weights = np.empty(size, np.float64), np.empty(size, np.int64)
    for index in range(used):  # a loop, because slices cost numba seconds to compile
        wider_values[index] = values[index]
        wider_weights[index] = weights[index]
    return wider_values, wider_weights


def _planned_time(cost: StepCost, state: State) -> float:
    """Duration of the planned step (s). Computed tokens already advanced, so each start is computed - taken."""
    tokens, decodes, decode_context, prefill_context, work = 0, 0, 0.0, 0.0, 0.0
    count = state.counters[PLANNED_COUNT]
    for index in range(count):
        taken = state.planned[index, 1]
        request = state.planned[index, 0]
        before = state.requests[request, COMPUTED] - taken
        tokens += taken
        if taken > 1 or before < state.requests[request, PROMPT]:
            prefill_context += before
            work += chunk_attention_work(float(taken), float(before))
        else:
            decodes += 1
            decode_context += before
    return step_cost(cost, tokens, count, decodes, decode_context, prefill_context, work)


def _only_decodes(setting: Setting, boot: Boot, state: State) -> bool:
    """True when the next steps compute one token for every running request and nothing else."""
    counters = state.counters
    count = counters[RUNNING_COUNT]
    if count == 0 or counters[LEAVING_COUNT] > 0:
        return False
    if setting.budget_policy == FIXED_BUDGET and min(setting.step_tokens, boot.ceiling_tokens) < count:
        return False
    if counters[WAITING_COUNT] > 0 and count < setting.max_running:
        # A request could be admitted, unless the first in line finds no blocks: they only get fewer in a stretch.
        if setting.order_policy != FCFS or boot.contents != 0 or boot.reserve_whole_prompt == 0:
            return False
        if setting.max_partial_prefills > 0 or setting.max_long_partial_prefills > 0:
            return False
        head = counters[WAITING_HEAD]
        row = state.requests[head]
        if fits(state, boot, head, row[CACHED] // boot.block_tokens * boot.block_tokens, row[KNOWN]):
            return False
    for index in range(count):
        if not is_decode(state, state.running[index]):
            return False
    return True


def _stretch_steps(boot: Boot, state: State) -> int:
    """Steps until a running request may finish or blocks may run out."""
    count = state.counters[RUNNING_COUNT]
    most = state.counters[FREE_BLOCKS] // count * boot.block_tokens
    for index in range(count):
        row = state.requests[state.running[index]]
        remaining = row[OUTPUT] - (row[KNOWN] - row[PROMPT])
        if remaining < most:
            most = remaining
    return int(most)


def _context_of(state: State) -> float:
    """KV entries that one token for every running request reads."""
    context = 0.0
    for index in range(state.counters[RUNNING_COUNT]):
        context += state.requests[state.running[index], COMPUTED]
    return context


def _run_stretch(
    boot: Boot,
    cost: StepCost,
    noise: StepNoise,
    state: State,
    run: Run,
    gap_values: FloatArray,
    gap_weights: IntArray,
    most: int,
    start: float,
    wake_s: float,
) -> tuple[float, float, int]:
    """Run up to ``most`` decode-only steps until ``wake_s``; returns the last start and end (s), and their number."""
    requests, times, totals = state.requests, run.times, run.totals
    bounds, over = len(run.gap_bounds_s), run.over
    count = state.counters[RUNNING_COUNT]
    size = float(count)
    context = _context_of(state)
    number = totals[STEPS]
    first_end = start + with_noise(noise, number, start, step_cost(cost, count, count, count, context, 0.0, 0.0))
    before, now = start, first_end
    longest = 0.0
    for bound in range(bounds):
        over[bound] = 0
    first_row = totals[GAP_ROWS]
    gaps = first_row + 1
    steps = 1
    while steps < most and now < wake_s:
        before = now
        context += size
        now += with_noise(noise, number + steps, now, step_cost(cost, count, count, count, context, 0.0, 0.0))
        gap = now - before
        gap_values[gaps] = gap
        gap_weights[gaps] = count
        gaps += 1
        if gap > longest:
            longest = gap
        for bound in range(bounds):
            if gap > run.gap_bounds_s[bound]:
                over[bound] += 1
        steps += 1
    # The first gap of a request may have begun before this stretch; all later ones are equal for every request.
    regular = 0
    for index in range(count):
        request = state.running[index]
        gap = first_end - times[request, LAST_TOKEN_S]
        if times[request, LAST_TOKEN_S] == start:
            regular += 1
        else:
            gap_values[gaps] = gap
            gap_weights[gaps] = 1
            gaps += 1
        for bound in range(bounds):
            if gap > run.gap_bounds_s[bound]:
                run.gap_over[request, bound] += over[bound] + 1
            else:
                run.gap_over[request, bound] += over[bound]
        if longest > gap:
            gap = longest
        if gap > times[request, LONGEST_GAP_S]:
            times[request, LONGEST_GAP_S] = gap
        times[request, LAST_TOKEN_S] = now
        requests[request, COMPUTED] += steps
        requests[request, KNOWN] += steps
        # A block that is just full needs no other yet, but must be findable from now on: grow handles both.
        if requests[request, COMPUTED] >= requests[request, HELD] * boot.block_tokens:
            grow(state, boot, request, requests[request, COMPUTED])
    gap_values[first_row] = first_end - start
    gap_weights[first_row] = regular
    state.counters[STEP] += steps
    totals[GAP_ROWS] = gaps
    totals[STEPS] += steps
    totals[SKIPPED_STEPS] += steps
    totals[COMPUTED_TOKENS] += steps * count
    return before, now, steps


def _finish_stretch(boot: Boot, state: State, run: Run, now: float) -> int:
    """Finish the running requests that have all their output; returns how many."""
    kept, finished = 0, 0
    for index in range(state.counters[RUNNING_COUNT]):
        request = state.running[index]
        if state.requests[request, KNOWN] - state.requests[request, PROMPT] >= state.requests[request, OUTPUT]:
            state.requests[request, STATUS] = FINISHED
            run.times[request, FINISH_S] = now
            leave(boot, state, request)
            finished += 1
        else:
            state.running[kept] = request
            kept += 1
    state.counters[RUNNING_COUNT] = kept
    return finished


def _book_step(state: State, run: Run, gap_values: FloatArray, gap_weights: IntArray, start: float, now: float) -> None:
    """Record what the planned step, run from ``start`` to ``now``, gave to each request."""
    requests, times, totals = state.requests, run.times, run.totals
    gaps = totals[GAP_ROWS]
    regular = 0
    for index in range(state.counters[PLANNED_COUNT]):
        request = state.planned[index, 0]
        totals[COMPUTED_TOKENS] += state.planned[index, 1]
        if np.isnan(times[request, SCHEDULED_S]):
            times[request, SCHEDULED_S] = start
            totals[CACHE_HIT_TOKENS] += requests[request, HIT]
        known, prompt = requests[request, KNOWN], requests[request, PROMPT]
        if requests[request, COMPUTED] < known:
            continue
        if known == prompt:
            times[request, FIRST_TOKEN_S] = now
            times[request, LONGEST_GAP_S] = 0.0
        else:
            gap = now - times[request, LAST_TOKEN_S]
            if times[request, LAST_TOKEN_S] == start:
                regular += 1
            else:
                gap_values[gaps] = gap
                gap_weights[gaps] = 1
                gaps += 1
            if gap > times[request, LONGEST_GAP_S]:
                times[request, LONGEST_GAP_S] = gap
            for bound in range(len(run.gap_bounds_s)):
                if gap > run.gap_bounds_s[bound]:
                    run.gap_over[request, bound] += 1
        times[request, LAST_TOKEN_S] = now
        if known + 1 - prompt >= requests[request, OUTPUT]:
            times[request, FINISH_S] = now
    if regular > 0:
        gap_values[gaps] = now - start
        gap_weights[gaps] = regular
        gaps += 1
    totals[GAP_ROWS] = gaps
    totals[STEPS] += 1
    totals[PREEMPTED] += state.counters[PREEMPTED_COUNT]


def _arrive(boot: Boot, state: State, run: Run, request: int) -> int:
    """Queue an arrival; one that can never fit the pool is refused (returns 1)."""
    row = state.requests[request]
    if blocks_for(row[PROMPT] + row[OUTPUT] - 1, boot.block_tokens) > run.pool_blocks[0]:
        row[STATUS] = FINISHED
        run.totals[REFUSED] += 1
        return 1
    append_waiting(state, request)
    return 0


def _late(state: State, run: Run, request: int) -> bool:
    """Whether the first token took longer than the patience, or has not come."""
    waited_s = run.times[request, FIRST_TOKEN_S] - state.arrival_s[request]
    return not waited_s <= run.ends[PATIENCE_S]


def replay(
    settings: FloatArray,
    changes_s: FloatArray,
    boot: Boot,
    cost: StepCost,
    noise: StepNoise,
    state: State,
    run: Run,
    skip: int,
    keep_log: int,
) -> tuple[FloatArray, IntArray, IntArray, FloatArray]:
    """Replay all requests of ``state`` (rows in order of arrival); returns gap values, weights, the log and its times.

    settings: (m, fields of Setting); row i holds from the first step that starts at or after changes_s[i].
    The log has one row (step, request, tokens) for everything planned when keep_log is 1, and the times hold each
    step's end. skip 0 plans every step. A request that can never fit is refused on arrival.
    """
    counters, totals, arrival_s = state.counters, run.totals, state.arrival_s
    total = len(arrival_s)
    gap_values, gap_weights = np.empty(4096, np.float64), np.empty(4096, np.int64)
    log, log_times = np.empty((64, 3), np.int64), np.empty(64, np.float64)
    arrived, finished, change, due, decided = totals[BEGUN], 0, 0, 0, 0
    for request in range(arrived):
        if state.requests[request, STATUS] == FINISHED:  # refused, or about to free its blocks
            finished += 1
    # seen: arrivals up to here are in the queue for the next plan; plan-ahead plans as the previous step begins.
    now, seen = run.clock_s[0], run.clock_s[1]
    setting = setting_from_row(settings[0])
    ends = run.ends
    while finished < total and totals[STEPS] < ends[MOST_STEPS] and now < ends[END_S]:
        # Each request is looked at once, when its patience is over.
        while due < arrived and arrival_s[due] + ends[PATIENCE_S] < now:
            if _late(state, run, due):
                totals[LATE] += 1
            due += 1
        if totals[LATE] > ends[MOST_LATE]:
            break
        if ends[DECIDED] != 0.0 and due == total:
            while decided < total and (_late(state, run, decided) or not np.isnan(run.times[decided, FINISH_S])):
                decided += 1
            if decided == total:
                break
        while change + 1 < len(changes_s) and changes_s[change + 1] <= now:
            change += 1
            setting = setting_from_row(settings[change])
        while arrived < total and arrival_s[arrived] <= seen:
            finished += _arrive(boot, state, run, arrived)
            arrived += 1
        next_change_s = changes_s[change + 1] if change + 1 < len(changes_s) else np.inf
        next_arrival_s = arrival_s[arrived] if arrived < total else np.inf
        if counters[RUNNING_COUNT] == 0 and counters[WAITING_COUNT] == 0:
            if arrived >= total:
                break
            now = seen = max(now, next_arrival_s)
            release_leaving(boot, state)
            continue
        start = now
        most = 0
        if skip != 0 and _only_decodes(setting, boot, state):
            most = _stretch_steps(boot, state)
        if most > 0:
            arrange_running(setting, state)
            count = counters[RUNNING_COUNT]
            # An arrival matters only if there is a free place and the queue is empty.
            wake_s = next_change_s
            if counters[WAITING_COUNT] == 0 and count < setting.max_running:
                wake_s = min(next_change_s, next_arrival_s)
            gap_values, gap_weights = _room(gap_values, gap_weights, totals[GAP_ROWS], most + count)
            if keep_log != 0:
                context = _context_of(state)
            before, now, steps = _run_stretch(
                boot, cost, noise, state, run, gap_values, gap_weights, most, start, wake_s
            )
            seen = now if boot.plan_ahead == 0 else before
            if keep_log != 0:
                log, log_times = _log_stretch(cost, noise, state, run, log, log_times, steps, start, context)
            if steps == most:
                finished += _finish_stretch(boot, state, run, now)
            continue
        leaving = counters[LEAVING_COUNT]
        planned = plan_step(setting, boot, cost.formula, state, now)
        if planned == 0:
            seen = now
            if counters[PREEMPTED_COUNT] > 0:
                totals[PREEMPTED] += counters[PREEMPTED_COUNT]
                continue  # a preemption made room: plan again at once
            if leaving > 0:
                continue  # so did requests that finished
            now = seen = max(now, min(next_change_s, next_arrival_s))
            if now == np.inf:
                totals[STALLED] = 1
                break
            continue
        now += with_noise(noise, totals[STEPS], now, _planned_time(cost, state))
        seen = now if boot.plan_ahead == 0 else start
        gap_values, gap_weights = _room(gap_values, gap_weights, totals[GAP_ROWS], planned + 1)
        _book_step(state, run, gap_values, gap_weights, start, now)
        if keep_log != 0:
            log, log_times = _log_step(state, run, log, log_times, now)
        finished += finish_step(boot, state)
    while arrived < total and arrival_s[arrived] <= seen:  # a replay cut short leaves a whole queue
        _arrive(boot, state, run, arrived)
        arrived += 1
    run.clock_s[0], run.clock_s[1] = now, seen
    return (
        gap_values[: totals[GAP_ROWS]],
        gap_weights[: totals[GAP_ROWS]],
        log[: totals[LOG_ROWS]],
        log_times[: totals[LOG_ROWS]],
    )


def _log_step(state: State, run: Run, log: IntArray, log_times: FloatArray, now: float) -> tuple[IntArray, FloatArray]:
    """Append the planned step, which is already counted."""
    for index in range(state.counters[PLANNED_COUNT]):
        log, log_times = _log_room(log, log_times, run.totals[LOG_ROWS])
        row = run.totals[LOG_ROWS]
        log[row, 0] = run.totals[STEPS] - 1
        log[row, 1] = state.planned[index, 0]
        log[row, 2] = state.planned[index, 1]
        log_times[row] = now
        run.totals[LOG_ROWS] += 1
    return log, log_times


def _log_stretch(
    cost: StepCost,
    noise: StepNoise,
    state: State,
    run: Run,
    log: IntArray,
    log_times: FloatArray,
    steps: int,
    start: float,
    context: float,
) -> tuple[IntArray, FloatArray]:
    """Append the steps of a stretch, which are already counted; ``context`` as it was at ``start``."""
    count = state.counters[RUNNING_COUNT]
    now = start
    number = run.totals[STEPS] - steps
    for step in range(steps):
        now += with_noise(noise, number + step, now, step_cost(cost, count, count, count, context, 0.0, 0.0))
        context += count
        for index in range(count):
            log, log_times = _log_room(log, log_times, run.totals[LOG_ROWS])
            row = run.totals[LOG_ROWS]
            log[row, 0] = run.totals[STEPS] - steps + step
            log[row, 1] = state.running[index]
            log[row, 2] = 1
            log_times[row] = now
            run.totals[LOG_ROWS] += 1
    return log, log_times


def _log_room(log: IntArray, log_times: FloatArray, used: int) -> tuple[IntArray, FloatArray]:
    """The log with room for one more row."""
    if used < len(log):
        return log, log_times
    wider, wider_times = np.empty((2 * used, 3), np.int64), np.empty(2 * used, np.float64)
    for index in range(used):
        wider_times[index] = log_times[index]
        for column in range(3):
            wider[index, column] = log[index, column]
    return wider, wider_times
