"""The twin: replays requests step by step through ``plan_step`` and the step-time model.

``replay`` is plain code over plain arrays; ``tuner.sim.twin`` compiles it together with everything it calls.
Stretches in which only decodes run and nobody can be admitted are not planned step by step: each of their steps
costs the step-time formula and one addition, the very same additions in the very same order as the slow walk,
so there is no numerical rule to bound. A stretch ends at an arrival that could be admitted, a change of
setting, a finish, and before KV blocks could run out.
"""

import numpy as np

from policies.kv import blocks_for, fits, grow, release
from policies.packing import arrange_running, finish_step, plan_step
from policies.request import (
    CACHED,
    COMPUTED,
    FCFS,
    FINISHED,
    FIXED_BUDGET,
    FREE_BLOCKS,
    HIT,
    KNOWN,
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
)
from policies.step_time import StepModel, chunk_attention_work, step_time

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
TOTALS = 12


def setting_from_row(row: FloatArray) -> Setting:
    """A Setting from one row of floats in field order (how a schedule of changes enters compiled code)."""
    return Setting(
        int(row[0]),
        int(row[1]),
        int(row[2]),
        int(row[3]),
        int(row[4]),
        int(row[5]),
        float(row[6]),
        int(row[7]),
        int(row[8]),
        float(row[9]),
        int(row[10]),
        int(row[11]),
        int(row[12]),
        int(row[13]),
        float(row[14]),
        float(row[15]),
        float(row[16]),
    )


def _room(values: FloatArray, weights: IntArray, used: int, more: int) -> tuple[FloatArray, IntArray]:
    """The two arrays with room for ``more`` rows behind ``used``."""
    if used + more <= len(values):
        return values, weights
    size = 2 * len(values) + more
    wider_values, wider_weights = np.empty(size, np.float64), np.empty(size, np.int64)
    wider_values[:used] = values[:used]
    wider_weights[:used] = weights[:used]
    return wider_values, wider_weights


def _planned_time(model: StepModel, state: State) -> float:
    """Duration of the planned step (s). Computed tokens already advanced, so each start is computed - taken."""
    tokens, context, work = 0.0, 0.0, 0.0
    count = state.counters[PLANNED_COUNT]
    for index in range(count):
        taken = state.planned[index, 1]
        row = state.requests[state.planned[index, 0]]
        before = row[COMPUTED] - taken
        tokens += taken
        context += before
        if taken > 1 or before < row[PROMPT]:
            work += chunk_attention_work(taken, before)
    return step_time(model, tokens, float(count), context, work)


def _only_decodes(setting: Setting, boot: Boot, state: State) -> bool:
    """True when the next steps compute one token for every running request and nothing else."""
    counters = state.counters
    count = counters[RUNNING_COUNT]
    if count == 0:
        return False
    if setting.budget_policy == FIXED_BUDGET and min(setting.step_tokens, boot.ceiling_tokens) < count:
        return False
    if counters[WAITING_COUNT] > 0 and count < setting.max_running:
        # Somebody could be admitted, unless the first in line finds no blocks: they only get fewer in a stretch.
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


def replay(
    arrival_s: FloatArray,
    settings: FloatArray,
    changes_s: FloatArray,
    boot: Boot,
    model: StepModel,
    state: State,
    pool_blocks: int,
    gap_bounds_s: FloatArray,
    skip: int,
    keep_log: int,
    max_steps: int,
    times: FloatArray,
    gap_over: IntArray,
    totals: IntArray,
) -> tuple[FloatArray, IntArray, IntArray, FloatArray]:
    """Replay all requests of ``state`` (rows in order of arrival); returns gap values, weights, the log and its times.

    settings: (m, fields of Setting); row i holds from the first step that starts at or after changes_s[i].
    times: (n, TIMES) out, NaN before. gap_over: (n, bounds) out, gaps of a request above each bound.
    totals: (TOTALS,) out. The log has one row (step, request, tokens) for everything planned when
    keep_log is 1, and the times hold each step's end. A request that can never fit is refused on arrival.
    """
    requests, counters = state.requests, state.counters
    total, bounds = len(arrival_s), len(gap_bounds_s)
    gap_values, gap_weights = np.empty(4096, np.float64), np.empty(4096, np.int64)
    log, log_times = np.empty((64 if keep_log else 0, 3), np.int64), np.empty(64 if keep_log else 0, np.float64)
    over = np.zeros(bounds, np.int64)
    gaps = 0
    logged = 0
    arrived = 0
    finished = 0
    change = 0
    now = 0.0
    setting = setting_from_row(settings[0])
    while finished < total and totals[STEPS] < max_steps:
        while change + 1 < len(changes_s) and changes_s[change + 1] <= now:
            change += 1
            setting = setting_from_row(settings[change])
        while arrived < total and arrival_s[arrived] <= now:
            row = requests[arrived]
            if blocks_for(row[PROMPT] + row[OUTPUT] - 1, boot.block_tokens) > pool_blocks:
                row[STATUS] = FINISHED
                totals[REFUSED] += 1
                finished += 1
            else:
                append_waiting(state, arrived)
            arrived += 1
        if counters[RUNNING_COUNT] == 0 and counters[WAITING_COUNT] == 0:
            if arrived >= total:
                break
            now = arrival_s[arrived]
            continue
        start = now
        most = 0
        if skip != 0 and _only_decodes(setting, boot, state):
            most = _stretch_steps(boot, state)
        if most > 0:
            arrange_running(setting, state)
            count = counters[RUNNING_COUNT]
            context = 0.0
            for index in range(count):
                context += requests[state.running[index], COMPUTED]
            # A full house does not care about arrivals, anybody else looks up at the next one.
            wake_s = np.inf
            if arrived < total and not counters[WAITING_COUNT] > 0:
                if count < setting.max_running:
                    wake_s = arrival_s[arrived]
            if change + 1 < len(changes_s) and changes_s[change + 1] < wake_s:
                wake_s = changes_s[change + 1]
            gap_values, gap_weights = _room(gap_values, gap_weights, gaps, most + count)
            now += step_time(model, float(count), float(count), context, 0.0)
            first_end = now
            longest = 0.0
            over[:] = 0
            steps = 1
            first_row = gaps
            gaps += 1
            while steps < most and now < wake_s:
                before = now
                context += count
                now += step_time(model, float(count), float(count), context, 0.0)
                gap = now - before
                gap_values[gaps] = gap
                gap_weights[gaps] = count
                gaps += 1
                if gap > longest:
                    longest = gap
                for bound in range(bounds):
                    if gap > gap_bounds_s[bound]:
                        over[bound] += 1
                steps += 1
            regular = 0
            done = 0
            for index in range(count):
                request = state.running[index]
                row = requests[request]
                gap = first_end - times[request, LAST_TOKEN_S]
                if times[request, LAST_TOKEN_S] == start:
                    regular += 1
                else:
                    gap_values[gaps] = gap
                    gap_weights[gaps] = 1
                    gaps += 1
                for bound in range(bounds):
                    gap_over[request, bound] += over[bound]
                    if gap > gap_bounds_s[bound]:
                        gap_over[request, bound] += 1
                if longest > gap:
                    gap = longest
                if gap > times[request, LONGEST_GAP_S]:
                    times[request, LONGEST_GAP_S] = gap
                times[request, LAST_TOKEN_S] = now
                row[COMPUTED] += steps
                row[KNOWN] += steps
                grow(state, boot, request, row[COMPUTED])
                if row[KNOWN] - row[PROMPT] >= row[OUTPUT]:
                    done += 1
            gap_values[first_row] = first_end - start
            gap_weights[first_row] = regular
            if keep_log != 0:
                moment = start
                context -= count * (steps - 1.0)
                for step in range(steps):
                    moment += step_time(model, float(count), float(count), context + step * count, 0.0)
                    for index in range(count):
                        log, log_times = _log_room(log, log_times, logged)
                        log[logged, 0] = totals[STEPS] + step
                        log[logged, 1] = state.running[index]
                        log[logged, 2] = 1
                        log_times[logged] = moment
                        logged += 1
            counters[STEP] += steps
            totals[STEPS] += steps
            totals[SKIPPED_STEPS] += steps
            totals[COMPUTED_TOKENS] += steps * count
            if done > 0:
                kept = 0
                for index in range(count):
                    request = state.running[index]
                    row = requests[request]
                    if row[KNOWN] - row[PROMPT] >= row[OUTPUT]:
                        row[STATUS] = FINISHED
                        times[request, FINISH_S] = now
                        release(state, boot, request)
                        finished += 1
                    else:
                        state.running[kept] = request
                        kept += 1
                counters[RUNNING_COUNT] = kept
            continue
        planned = plan_step(setting, boot, model, state, now)
        totals[PREEMPTED] += counters[PREEMPTED_COUNT]
        if planned == 0:
            if counters[RUNNING_COUNT] > 0 and counters[PREEMPTED_COUNT] > 0:
                continue  # a preemption made room: plan again at once
            if arrived >= total and change + 1 >= len(changes_s):
                totals[STALLED] = 1
                break
            wake_s = np.inf
            if arrived < total:
                wake_s = arrival_s[arrived]
            if change + 1 < len(changes_s) and changes_s[change + 1] < wake_s:
                wake_s = changes_s[change + 1]
            now = wake_s
            continue
        now += _planned_time(model, state)
        totals[STEPS] += 1
        gap_values, gap_weights = _room(gap_values, gap_weights, gaps, planned + 1)
        regular = 0
        for index in range(planned):
            request = state.planned[index, 0]
            row = requests[request]
            if np.isnan(times[request, SCHEDULED_S]):
                times[request, SCHEDULED_S] = start
                totals[CACHE_HIT_TOKENS] += row[HIT]
            totals[COMPUTED_TOKENS] += state.planned[index, 1]
            if keep_log != 0:
                log, log_times = _log_room(log, log_times, logged)
                log[logged, 0] = totals[STEPS] - 1
                log[logged, 1] = request
                log[logged, 2] = state.planned[index, 1]
                log_times[logged] = now
                logged += 1
            if row[COMPUTED] < row[KNOWN]:
                continue
            if row[KNOWN] == row[PROMPT]:
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
                for bound in range(bounds):
                    if gap > gap_bounds_s[bound]:
                        gap_over[request, bound] += 1
            times[request, LAST_TOKEN_S] = now
            if row[KNOWN] + 1 - row[PROMPT] >= row[OUTPUT]:
                times[request, FINISH_S] = now
        if regular > 0:
            gap_values[gaps] = now - start
            gap_weights[gaps] = regular
            gaps += 1
        finished += finish_step(boot, state)
    totals[GAP_ROWS] = gaps
    totals[LOG_ROWS] = logged
    return gap_values[:gaps], gap_weights[:gaps], log[:logged], log_times[:logged]


def _log_room(log: IntArray, log_times: FloatArray, used: int) -> tuple[IntArray, FloatArray]:
    if used < len(log):
        return log, log_times
    wider, wider_times = np.empty((2 * len(log), 3), np.int64), np.empty(2 * len(log), np.float64)
    wider[:used] = log[:used]
    wider_times[:used] = log_times[:used]
    return wider, wider_times
