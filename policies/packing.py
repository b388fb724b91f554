"""The scheduling decision for one step, as a pure function that engine and twin call.

``plan_step`` follows vLLM V1 (0.32, v1/core/sched/scheduler.py: schedule): running requests in admission order, then
waiting ones, under a token budget; a request without a free KV block preempts the newest. It adds partial-prefill
caps, order policies and the rule that keeps decodes moving.

Computed tokens advance when the step is planned, as in vLLM; ``finish_step`` books the sampled tokens after the step
has run. All code here is scalar over arrays: the twin compiles it.
"""

from rooftune.policies.budget import step_budget
from rooftune.policies.kv import find_prefix, fits, grow, release, take_prefix
from rooftune.policies.order import begin_ordered_step, goes_before
from rooftune.policies.request import (
    ADMISSIONS,
    ADMITTED,
    BUDGET,
    COMPUTED,
    FCFS,
    FINISHED,
    HELD_BACK,
    HIT,
    KNOWN,
    LEAVING_COUNT,
    NEXT,
    OUTPUT,
    PLANNED_COUNT,
    PLANNED_IN,
    PREEMPTED_COUNT,
    PREEMPTIONS,
    PROMPT,
    REORDERED,
    RUNNING,
    RUNNING_COUNT,
    STATUS,
    STEP,
    WAITING_COUNT,
    WAITING_HEAD,
    Boot,
    Setting,
    State,
    is_decode,
    prepend_waiting,
    remove_waiting,
)
from rooftune.policies.step_time import StepModel

NO_CAP = 1 << 60


def plan_step(setting: Setting, boot: Boot, model: StepModel, state: State, now_s: float) -> int:
    """Plan one step at ``now_s``; returns the number of its requests (rows of ``State.planned``).

    Only the step-time-target budget policy reads ``model``. Returns 0 when no request runs and no waiting one fits. The
    caller keeps max_running at most the budget, or decodes can starve.
    """
    counters = state.counters
    counters[STEP] += 1
    counters[PLANNED_COUNT] = counters[PREEMPTED_COUNT] = counters[HELD_BACK] = 0
    arrange_running(setting, state)
    decodes, partials, context = 0, 0, 0
    first_prefill = -1
    requests, running = state.requests, state.running
    for index in range(counters[RUNNING_COUNT]):
        request = running[index]
        row = requests[request]
        if row[KNOWN] - row[COMPUTED] == 1 and row[KNOWN] > row[PROMPT]:  # is_decode, without its call
            decodes += 1
            context += row[COMPUTED]
        else:
            partials += 1
            if first_prefill < 0:
                first_prefill = request
    first_computed = requests[first_prefill][COMPUTED] if first_prefill >= 0 else 0
    budget = step_budget(setting, boot, model, decodes, context, partials + counters[WAITING_COUNT], first_computed)
    if boot.keep_decodes_moving != 0:
        budget = effective_budget(budget, boot.ceiling_tokens, decodes)
    counters[BUDGET] = budget
    cap = chunk_cap(setting, boot.ceiling_tokens, counters[RUNNING_COUNT] + counters[WAITING_COUNT])
    if setting.order_policy == FCFS:
        left, partials = _serve_running(boot, state, budget, cap, decodes, partials, counters[RUNNING_COUNT])
        if counters[PREEMPTED_COUNT] == 0:
            _admit_in_order(setting, boot, state, left, cap, partials, now_s)
    else:
        admissible = counters[WAITING_COUNT] > 0 and counters[RUNNING_COUNT] < setting.max_running
        if budget > decodes and (partials > 0 or admissible):
            begin_ordered_step(state, setting)
        left, partials = _serve_running(boot, state, budget, cap, decodes, partials, decodes)
        _serve_by_policy(setting, boot, state, left, cap, partials, now_s)
    release_leaving(boot, state)
    return int(counters[PLANNED_COUNT])


def finish_step(boot: Boot, state: State) -> int:
    """Book the planned step as run; returns the number of finished requests.

    Every planned request without an uncomputed token gets a new one; after its last output token it is finished and
    frees its blocks, in planned order. With ``boot.plan_ahead`` the end of the next ``plan_step`` frees them, because
    that plan is made before. A planned row has got a token when KNOWN - COMPUTED is 1 and KNOWN > PROMPT.
    """
    requests, counters = state.requests, state.counters
    finished = 0
    for index in range(counters[PLANNED_COUNT]):
        request = state.planned[index][0]
        row = requests[request]
        if row[COMPUTED] < row[KNOWN]:
            continue
        row[KNOWN] += 1
        if row[KNOWN] - row[PROMPT] >= row[OUTPUT]:
            row[STATUS] = FINISHED
            leave(boot, state, request)
            finished += 1
    if finished > 0:
        _drop_finished(state)
    return finished


def leave(boot: Boot, state: State, request: int) -> None:
    """Free a finished request's blocks: now, or with ``plan_ahead`` at the end of the next plan."""
    if boot.plan_ahead == 0:
        release(state, boot, request)
    else:
        state.leaving[state.counters[LEAVING_COUNT]] = request
        state.counters[LEAVING_COUNT] += 1


def release_leaving(boot: Boot, state: State) -> None:
    """Free the blocks and places of requests that finished in the step before the one just planned."""
    for index in range(state.counters[LEAVING_COUNT]):
        release(state, boot, state.leaving[index])
    state.counters[LEAVING_COUNT] = 0


def effective_budget(budget: int, ceiling_tokens: int, decodes: int) -> int:
    """One half of the rule that keeps decodes moving: a budget lowered below the running decodes still carries them.

    They were admitted under a larger budget, so the step stays below that one while they drain. Never above the
    boot ceiling.
    """
    if budget >= decodes:
        return budget
    return decodes if decodes < ceiling_tokens else ceiling_tokens


def effective_chunk_cap(cap: int, left: int, decodes_behind: int) -> int:
    """The other half: a running prefill leaves a token for every decode served behind it."""
    room = left - decodes_behind
    return cap if cap < room else room


def chunk_cap(setting: Setting, ceiling_tokens: int, eligible: int) -> int:
    """The cap in force: none for a lone request; the adaptive one never falls below a fair share."""
    cap = setting.chunk_cap_tokens
    if cap <= 0 or eligible <= 1:
        return NO_CAP
    if setting.adaptive_chunk_cap != 0 and ceiling_tokens // eligible > cap:
        return ceiling_tokens // eligible
    return cap


def _serve_running(
    boot: Boot, state: State, left: int, cap: int, decodes: int, partials: int, upto: int
) -> tuple[int, int]:
    """Serve running requests in order; returns tokens left and unfinished prefills."""
    counters, running, requests = state.counters, state.running, state.requests
    behind = decodes
    index = 0
    while index < upto and index < counters[RUNNING_COUNT] and left > 0:
        request = running[index]
        row = requests[request]
        take = row[KNOWN] - row[COMPUTED]
        missing = take
        decode = take == 1 and row[KNOWN] > row[PROMPT]  # is_decode, without its call
        if decode:
            behind -= 1
        if take > cap:
            take = cap
        if boot.keep_decodes_moving != 0 and not decode:
            take = min(take, effective_chunk_cap(cap, left, behind))
        if take > left:
            take = left
        index += 1
        if take <= 0:
            continue
        if not _hold_blocks(boot, state, request, row[COMPUTED] + take):
            break
        left -= _plan(state, request, take)
        if not decode and take == missing:
            partials -= 1
    return left, partials


def _hold_blocks(boot: Boot, state: State, request: int, tokens: int) -> bool:
    """Hold blocks for a running request; preempts the newest until they fit or it is the newest itself."""
    counters, running = state.counters, state.running
    while not grow(state, boot, request, tokens):
        place = counters[RUNNING_COUNT] - 1
        # A request already planned in this step stays (happens only under an order policy).
        while place > 0 and state.requests[running[place]][PLANNED_IN] == counters[STEP]:
            place -= 1
        victim = running[place]
        for index in range(place, counters[RUNNING_COUNT] - 1):
            running[index] = running[index + 1]
        counters[RUNNING_COUNT] -= 1
        release(state, boot, victim)
        state.requests[victim][PREEMPTIONS] += 1
        prepend_waiting(state, victim)
        state.preempted[counters[PREEMPTED_COUNT]] = victim
        counters[PREEMPTED_COUNT] += 1
        if victim == request:
            return False
    return True


def _plan(state: State, request: int, tokens: int) -> int:
    """Write one row of the plan and advance the request; returns its tokens."""
    counters = state.counters
    place = counters[PLANNED_COUNT]
    planned, row = state.planned[place], state.requests[request]
    planned[0] = request
    planned[1] = tokens
    counters[PLANNED_COUNT] = place + 1
    row[COMPUTED] += tokens
    row[PLANNED_IN] = counters[STEP]
    return tokens


def _admit_in_order(
    setting: Setting, boot: Boot, state: State, left: int, cap: int, partials: int, now_s: float
) -> None:
    """Admit waiting requests in arrival order, passing over those that a partial-prefill cap holds back."""
    counters = state.counters
    request = counters[WAITING_HEAD]
    places = setting.max_running - counters[LEAVING_COUNT]
    while request >= 0 and left > 0 and counters[RUNNING_COUNT] < places:
        following = state.requests[request][NEXT]
        tokens = _admit(setting, boot, state, request, left, cap, partials)
        if tokens == NO_ROOM:
            break
        if tokens == HELD_BACK_BY_CAP:
            counters[HELD_BACK] += 1
            if now_s - state.arrival_s[request] >= setting.pass_over_max_s:
                break
        else:
            left -= tokens
            if state.requests[request][COMPUTED] < state.requests[request][KNOWN]:
                partials += 1
        request = following


NO_ROOM = -1
HELD_BACK_BY_CAP = -2


def _admit(setting: Setting, boot: Boot, state: State, request: int, left: int, cap: int, partials: int) -> int:
    """Admit one waiting request and plan its first chunk; returns its tokens, or why not."""
    counters = state.counters
    row = state.requests[request]
    hit = find_prefix(state, boot, request)
    missing = row[KNOWN] - hit
    take = min(missing, cap)
    if boot.chunking == 0 and take > left:
        return NO_ROOM
    take = min(take, left)
    if take < missing and _cap_reached(setting, state, request, partials):
        return HELD_BACK_BY_CAP
    if boot.reserve_whole_prompt != 0 and not fits(state, boot, request, hit, row[KNOWN]):
        return NO_ROOM
    if not fits(state, boot, request, hit, hit + take):
        return NO_ROOM
    remove_waiting(state, request)
    take_prefix(state, boot, request, hit)
    grow(state, boot, request, hit + take)
    row[STATUS] = RUNNING
    row[HIT] = hit
    row[ADMITTED] = counters[ADMISSIONS]
    counters[ADMISSIONS] += 1
    state.running[counters[RUNNING_COUNT]] = request
    counters[RUNNING_COUNT] += 1
    return _plan(state, request, take)


def _cap_reached(setting: Setting, state: State, request: int, partials: int) -> bool:
    """True when another partial prefill would exceed a cap."""
    if setting.max_partial_prefills > 0 and partials >= setting.max_partial_prefills:
        return True
    if setting.max_long_partial_prefills <= 0 or state.requests[request][PROMPT] < setting.long_prompt_tokens:
        return False
    long_partials = 0
    for index in range(state.counters[RUNNING_COUNT]):
        row = state.requests[state.running[index]]
        if row[PROMPT] >= setting.long_prompt_tokens and row[COMPUTED] < row[KNOWN]:
            if row[KNOWN] - row[COMPUTED] > 1 or row[KNOWN] == row[PROMPT]:
                long_partials += 1
    return long_partials >= setting.max_long_partial_prefills


def _serve_by_policy(
    setting: Setting, boot: Boot, state: State, left: int, cap: int, partials: int, now_s: float
) -> None:
    """Give the tokens that decodes left to running and waiting prefills in the policy's order.

    A waiting request may pass a running one only when all running prefills still fit beside it; otherwise admission
    would preempt more than first come, first served does.
    """
    counters, running = state.counters, state.running
    admitting = counters[PREEMPTED_COUNT] == 0
    while left > 0:
        best, best_waits = -1, False
        for index in range(counters[RUNNING_COUNT]):
            request = running[index]
            if state.requests[request][PLANNED_IN] == counters[STEP] or is_decode(state, request):
                continue
            if best < 0 or goes_before(state, setting, request, best, now_s):
                best = request
        if admitting and counters[RUNNING_COUNT] + counters[LEAVING_COUNT] < setting.max_running:
            request = counters[WAITING_HEAD]
            while request >= 0:
                if state.requests[request][PLANNED_IN] != -counters[STEP] - 1:
                    if best < 0 or goes_before(state, setting, request, best, now_s):
                        best, best_waits = request, True
                request = state.requests[request][NEXT]
        if best < 0:
            return
        row = state.requests[best]
        if best_waits:
            if not _fits_beside_prefills(boot, state, best):
                admitting = False
                continue
            tokens = _admit(setting, boot, state, best, left, cap, partials)
            if tokens == NO_ROOM:
                admitting = False
                continue
            if tokens == HELD_BACK_BY_CAP:
                counters[HELD_BACK] += 1
                row[PLANNED_IN] = -counters[STEP] - 1  # passed over in this step
                if now_s - state.arrival_s[best] >= setting.pass_over_max_s:
                    admitting = False
                continue
            left -= tokens
            if row[COMPUTED] < row[KNOWN]:
                partials += 1
        else:
            missing = row[KNOWN] - row[COMPUTED]
            take = min(missing, cap, left)
            if not _hold_blocks(boot, state, best, row[COMPUTED] + take):
                return
            admitting = admitting and counters[PREEMPTED_COUNT] == 0
            left -= _plan(state, best, take)
            if take == missing:
                partials -= 1


def _fits_beside_prefills(boot: Boot, state: State, request: int) -> bool:
    """True when the blocks that running prefills still need and this request's fit together."""
    need = 0
    for index in range(state.counters[RUNNING_COUNT]):
        row = state.requests[state.running[index]]
        missing = row[KNOWN] - row[COMPUTED]
        if missing > 1 or (missing == 1 and row[KNOWN] == row[PROMPT]):
            need += missing + boot.block_tokens
    row = state.requests[request]
    return fits(state, boot, request, 0, row[KNOWN] + need)


def arrange_running(setting: Setting, state: State) -> None:
    """Serving order: admission order for FCFS, else decodes before prefills, each in admission order."""
    if setting.order_policy != FCFS:
        _sort_running(state, True)
        state.counters[REORDERED] = 1
    elif state.counters[REORDERED] == 1:
        _sort_running(state, False)
        state.counters[REORDERED] = 0


def _sort_running(state: State, decodes_first: bool) -> None:
    """Insertion sort by (prefill?, admission): one pass or little more, since the input is nearly sorted."""
    running = state.running
    for index in range(1, state.counters[RUNNING_COUNT]):
        request = running[index]
        late = decodes_first and not is_decode(state, request)
        admitted = state.requests[request][ADMITTED]
        place = index - 1
        while place >= 0:
            other = running[place]
            other_late = decodes_first and not is_decode(state, other)
            if other_late == late:
                if state.requests[other][ADMITTED] < admitted:
                    break
            elif late:
                break
            running[place + 1] = other
            place -= 1
        running[place + 1] = request


def _drop_finished(state: State) -> None:
    """Close the gaps that finished requests leave in the serving order."""
    running, counters = state.running, state.counters
    kept = 0
    for index in range(counters[RUNNING_COUNT]):
        request = running[index]
        if state.requests[request][STATUS] != FINISHED:
            running[kept] = request
            kept += 1
    counters[RUNNING_COUNT] = kept
