"""Order policies: a strict total order, with an aging bound that nothing gets past in the steps of the aged."""

import math
from functools import cmp_to_key

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rooftune.policies import request as r
from rooftune.policies.order import (
    AGED,
    BEHIND,
    FIRST,
    IN_TIME,
    LATE,
    aged_turn,
    begin_ordered_step,
    goes_before,
    rank,
    tokens_left,
)
from rooftune.policies.request import DEADLINE, SHORTEST_FIRST, Setting, State
from tests.policies.scheduler import waiting

REQUESTS = st.lists(
    st.tuples(st.integers(1, 50), st.sampled_from([0.0, 1.0, 2.0, 3.5]), st.booleans()), min_size=2, max_size=8
)
SETTINGS = st.builds(
    lambda policy, aging_s, ttft_s: Setting(
        64, order_policy=policy, aging_s=aging_s, ttft_target_s=ttft_s, prefill_s_per_token=0.1
    ),
    st.sampled_from([SHORTEST_FIRST, DEADLINE]),
    st.sampled_from([0.0, 1.5, 100.0]),
    st.sampled_from([0.5, 3.0]),
)
NOW_S = 4.0


def state_of(rows: list[tuple[int, float, bool]], *, aged_first: bool = True) -> State:
    state = waiting([tokens for tokens, _, _ in rows], arrival_s=[arrival for _, arrival, _ in rows])
    state.requests[:, r.KNOWN] += np.array([int(preempted) for _, _, preempted in rows])
    state.counters[r.AGED_FIRST] = int(aged_first)
    return state


@given(REQUESTS, SETTINGS, st.booleans())
def test_the_order_is_strict_and_total(rows: list[tuple[int, float, bool]], setting: Setting, aged_first: bool) -> None:
    state = state_of(rows, aged_first=aged_first)
    requests = range(len(rows))
    line = sorted(requests, key=cmp_to_key(lambda a, b: -1 if goes_before(state, setting, a, b, NOW_S) else 1))
    for place, first in enumerate(line):
        assert not goes_before(state, setting, first, first, NOW_S)
        for second in line[place + 1 :]:
            assert goes_before(state, setting, first, second, NOW_S)
            assert not goes_before(state, setting, second, first, NOW_S)


@given(REQUESTS, SETTINGS)
def test_only_preempted_and_older_requests_go_before_an_aged_one(
    rows: list[tuple[int, float, bool]], setting: Setting
) -> None:
    state = state_of(rows)
    for one, (_, arrival_s, preempted) in enumerate(rows):
        if preempted or NOW_S - arrival_s < setting.aging_s:
            continue
        for other, (_, other_s, other_preempted) in enumerate(rows):
            if goes_before(state, setting, other, one, NOW_S):
                assert other_preempted or (other_s, other) < (arrival_s, one)


def test_ranks() -> None:
    state = state_of([(10, 0.0, True), (10, 0.0, False), (10, 3.0, False), (25, 3.0, False)])
    deadline = Setting(64, order_policy=DEADLINE, aging_s=4.0, ttft_target_s=3.0, prefill_s_per_token=0.1)
    assert [rank(state, deadline, request, NOW_S) for request in range(4)] == [FIRST, AGED, IN_TIME, LATE]
    shortest = deadline._replace(order_policy=SHORTEST_FIRST)
    assert [rank(state, shortest, request, NOW_S) for request in range(4)] == [FIRST, AGED, IN_TIME, IN_TIME]


def test_in_the_other_steps_the_aged_come_behind_all_others() -> None:
    state = state_of([(10, 0.0, True), (10, 0.0, False), (10, 3.0, False), (25, 3.0, False)], aged_first=False)
    setting = Setting(64, order_policy=DEADLINE, aging_s=4.0, ttft_target_s=3.0, prefill_s_per_token=0.1)
    assert [rank(state, setting, request, NOW_S) for request in range(4)] == [FIRST, BEHIND, IN_TIME, LATE]


@given(st.floats(0.01, 1.0), st.integers(0, 10**9), st.integers(1, 500))
def test_the_aged_have_their_share_of_any_steps_in_a_row(share: float, before: int, count: int) -> None:
    turns = sum(aged_turn(step, share) for step in range(before + 1, before + count + 1))
    assert math.floor(count * share - 1e-6) <= turns <= math.ceil(count * share + 1e-6)


def test_a_turn_comes_every_so_many_steps() -> None:
    state = state_of([(10, 0.0, False)])
    for share, expected in ((1.0, "1" * 10), (0.5, "01" * 5), (0.2, "0000100001"), (0.3, "0001001001")):
        state.counters[r.ORDERED_STEPS] = 0
        found = []
        for _ in range(10):
            begin_ordered_step(state, Setting(64, order_policy=SHORTEST_FIRST, aged_share=share))
            found.append(str(state.counters[r.AGED_FIRST]))
        assert "".join(found) == expected


def test_a_known_cache_hit_does_not_count_as_left() -> None:
    state = waiting([100, 80])
    state.requests[0, r.CACHED] = 40
    assert [tokens_left(state, request) for request in (0, 1)] == [60, 80]
    assert goes_before(state, Setting(64, order_policy=SHORTEST_FIRST), 0, 1, 0.0)
    state.requests[0, r.STATUS] = r.RUNNING  # now the computed tokens say what is left
    state.requests[0, r.COMPUTED] = 10
    assert tokens_left(state, 0) == 90
