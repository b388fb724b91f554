"""Order policies: which prefill gets the tokens that decodes leave.

Every policy is a rank and a value; the smallest (rank, value, arrival, index) goes first. Preempted requests come
first, then the policy's own order: SHORTEST_FIRST by prompt tokens left, less ``wait_tokens_per_s`` times the wait;
DEADLINE likewise, with requests that can no longer meet their TTFT target last, by tokens left alone. Those that have
waited ``aging_s`` (oldest first) go before all of these in a share ``aged_share`` of the steps, and behind them in the
others: if they always went first, every policy would be first come, first served as soon as all have waited that long.
"""

import math

from rooftune.policies.request import (
    AGED_FIRST,
    CACHED,
    COMPUTED,
    DEADLINE,
    KNOWN,
    ORDERED_STEPS,
    PROMPT,
    RUNNING,
    STATUS,
    Setting,
    State,
)

FIRST = 0
AGED = 1
IN_TIME = 2
LATE = 3
BEHIND = 4  # aged, in a step that is not theirs


def aged_turn(steps: int, aged_share: float) -> bool:
    """Whether the aged go first in a step; ``steps``: that give prefills tokens by an order policy, up to this one.

    Of any n such steps in a row the aged have at least floor(n * aged_share).
    """
    return math.floor(steps * aged_share) > math.floor((steps - 1) * aged_share)


def begin_ordered_step(state: State, setting: Setting) -> None:
    """Count a step that gives prefills tokens by an order policy, and note whose turn it is."""
    counters = state.counters
    counters[ORDERED_STEPS] += 1
    counters[AGED_FIRST] = 1 if aged_turn(counters[ORDERED_STEPS], setting.aged_share) else 0


def rank(state: State, setting: Setting, request: int, now_s: float) -> int:
    """A prefill's rank in the step begun; ``now_s`` on the clock of ``State.arrival_s``."""
    row = state.requests[request]
    if row[KNOWN] > row[PROMPT]:
        return FIRST
    waited_s = now_s - state.arrival_s[request]
    if waited_s >= setting.aging_s:
        return AGED if state.counters[AGED_FIRST] != 0 else BEHIND
    if setting.order_policy == DEADLINE:
        if waited_s + tokens_left(state, request) * setting.prefill_s_per_token > setting.ttft_target_s:
            return LATE
    return IN_TIME


def tokens_left(state: State, request: int) -> int:
    """Prompt tokens left to compute, without a waiting request's known cache hit."""
    row = state.requests[request]
    if row[STATUS] == RUNNING:
        return int(row[KNOWN] - row[COMPUTED])
    return int(row[KNOWN] - row[CACHED])


def goes_before(state: State, setting: Setting, first: int, second: int, now_s: float) -> bool:
    """True when ``first`` is served before ``second``; a strict total order."""
    rank_first = rank(state, setting, first, now_s)
    rank_second = rank(state, setting, second, now_s)
    if rank_first != rank_second:
        return rank_first < rank_second
    arrival_first, arrival_second = state.arrival_s[first], state.arrival_s[second]
    if rank_first == IN_TIME or rank_first == LATE:
        # Of two waits, the difference is that of the arrivals.
        rate = setting.wait_tokens_per_s if rank_first == IN_TIME else 0.0
        value_first = tokens_left(state, first) + rate * arrival_first
        value_second = tokens_left(state, second) + rate * arrival_second
        if value_first != value_second:
            return bool(value_first < value_second)
    if arrival_first != arrival_second:
        return bool(arrival_first < arrival_second)
    return first < second
