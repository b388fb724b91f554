"""plan_step on small states, computed by hand."""

import pytest

from rooftune.policies import request as r
from rooftune.policies.packing import effective_budget, effective_chunk_cap, finish_step
from rooftune.policies.request import DEADLINE, SHORTEST_FIRST, Setting, append_waiting, remove_waiting
from tests.policies.scheduler import BOOT, plan, waiting


def test_decodes_then_chunks_under_one_budget() -> None:
    state = waiting([10, 300])
    assert plan(state, Setting(100)) == [[0, 10], [1, 90]]
    assert finish_step(BOOT, state) == 0
    assert plan(state, Setting(100)) == [[0, 1], [1, 99]]


def test_a_request_is_finished_with_its_last_token() -> None:
    state = waiting([10, 5], outputs=2)
    plan(state, Setting(100))
    finish_step(BOOT, state)
    assert plan(state, Setting(100)) == [[0, 1], [1, 1]]
    assert finish_step(BOOT, state) == 2
    assert state.counters[r.RUNNING_COUNT] == 0 and state.counters[r.FREE_BLOCKS] == 10_000
    assert plan(state, Setting(100)) == []


def test_the_chunk_cap_does_not_bind_a_lone_request() -> None:
    assert plan(waiting([300]), Setting(100, 20)) == [[0, 100]]
    assert plan(waiting([300, 300]), Setting(100, 20)) == [[0, 20], [1, 20]]


def test_the_adaptive_cap_is_a_fair_share_of_the_ceiling() -> None:
    """Ceiling 1,000 over 4 requests: 250 each, although the cap says 20; over 100 requests the cap holds."""
    adaptive = Setting(1_000, 20, adaptive_chunk_cap=1)
    assert plan(waiting([300] * 4), adaptive) == [[request, 250] for request in range(4)]
    assert plan(waiting([300] * 100), adaptive)[:2] == [[0, 20], [1, 20]]


def test_the_sequence_cap_holds_back_admission_only() -> None:
    state = waiting([5, 5, 5])
    assert plan(state, Setting(100, max_running=2)) == [[0, 5], [1, 5]]
    finish_step(BOOT, state)
    assert plan(state, Setting(100, max_running=1)) == [[0, 1], [1, 1]]


@pytest.mark.parametrize(("waited_s", "third"), [(29.0, [[2, 8]]), (30.0, [])])
def test_a_partial_prefill_cap_lets_short_prompts_pass_for_a_bounded_time(
    waited_s: float, third: list[list[int]]
) -> None:
    state = waiting([300, 300, 8])
    setting = Setting(100, 40, max_partial_prefills=1, pass_over_max_s=30.0)
    assert plan(state, setting, now_s=waited_s) == [[0, 40], *third]


def test_a_prompt_that_ends_in_this_step_makes_room_under_the_partial_prefill_cap() -> None:
    state = waiting([150, 300])
    setting = Setting(100, max_partial_prefills=1)
    assert plan(state, setting) == [[0, 100]]
    assert plan(state, setting) == [[0, 50], [1, 50]]


def test_the_long_cap_counts_only_long_prompts() -> None:
    setting = Setting(400, 40, max_long_partial_prefills=1, long_prompt_tokens=200)
    assert plan(waiting([300, 300, 100]), setting) == [[0, 40], [2, 40]]
    assert plan(waiting([199, 199, 300]), setting) == [[0, 40], [1, 40], [2, 40]]
    assert plan(waiting([200, 200, 199]), setting) == [[0, 40], [2, 40]]


def test_chunking_off_runs_a_prompt_whole_or_not_at_all() -> None:
    whole = BOOT._replace(chunking=0)
    state = waiting([60, 50, 10])
    assert plan(state, Setting(100), whole) == [[0, 60]]  # 50 do not fit 40, and no request passes
    finish_step(whole, state)
    assert plan(state, Setting(100), whole) == [[0, 1], [1, 50], [2, 10]]


@pytest.mark.parametrize(("reserve", "planned"), [(1, [[0, 100]]), (0, [[0, 100], [1, 60]])])
def test_whole_prompt_reservation(reserve: int, planned: list[list[int]]) -> None:
    """10 blocks of 16: the second prompt's first chunk would fit, the whole prompt does not."""
    boot = BOOT._replace(reserve_whole_prompt=reserve)
    assert plan(waiting([100, 100], pool_blocks=11), Setting(160), boot) == planned


def test_the_newest_is_preempted_when_blocks_run_out() -> None:
    boot = BOOT._replace(reserve_whole_prompt=0)
    state = waiting([32, 32], pool_blocks=4)
    assert plan(state, Setting(100), boot) == [[0, 32], [1, 32]]
    finish_step(boot, state)
    assert plan(state, Setting(100), boot) == [[0, 1]]
    assert state.preempted[: state.counters[r.PREEMPTED_COUNT]].tolist() == [1]
    assert state.requests[1, r.COMPUTED] == 0 and state.requests[1, r.STATUS] == r.WAITING
    assert state.counters[r.FREE_BLOCKS] == 1


def test_shortest_first_passes_a_long_prompt_until_it_has_aged() -> None:
    setting = Setting(100, order_policy=SHORTEST_FIRST, aging_s=5.0)
    arrival_s = [0.0, 1.0, 1.0]
    assert plan(waiting([300, 60, 30], arrival_s=arrival_s), setting, now_s=4.9) == [[2, 30], [1, 60], [0, 10]]
    assert plan(waiting([300, 60, 30], arrival_s=arrival_s), setting, now_s=5.0) == [[0, 100]]


def test_after_an_order_policy_the_serving_order_is_that_of_admission() -> None:
    state = waiting([300, 60, 30])
    shortest = Setting(100, order_policy=SHORTEST_FIRST)
    assert plan(state, shortest) == [[2, 30], [1, 60], [0, 10]]
    finish_step(BOOT, state)
    assert plan(state, shortest) == [[2, 1], [1, 1], [0, 98]]
    finish_step(BOOT, state)
    state.requests[[0, 2], r.ADMITTED] = state.requests[[2, 0], r.ADMITTED]  # as if the long one had been the first
    assert plan(state, Setting(100)) == [[0, 100]]


def test_deadline_puts_requests_that_are_already_late_last() -> None:
    setting = Setting(100, order_policy=DEADLINE, aging_s=50.0, ttft_target_s=1.0, prefill_s_per_token=0.002)
    # 90 tokens need 0.18 s: too late after 0.9 s. The longer prompt that has just arrived can still be in time.
    state = waiting([90, 95], arrival_s=[0.0, 0.9])
    assert plan(state, setting, now_s=0.9) == [[1, 95], [0, 5]]


def test_a_running_prefill_is_overtaken_under_an_order_policy_and_decodes_are_not() -> None:
    setting = Setting(100, order_policy=SHORTEST_FIRST)
    state = waiting([5, 500, 20])
    remove_waiting(state, 2)
    assert plan(state, setting) == [[0, 5], [1, 95]]
    finish_step(BOOT, state)
    append_waiting(state, 2)
    assert plan(state, setting) == [[0, 1], [2, 20], [1, 79]]


def test_effective_chunk_cap_and_budget() -> None:
    assert effective_chunk_cap(256, 300, 100) == 200
    assert effective_chunk_cap(256, 2_048, 20) == 256
    assert effective_chunk_cap(256, 100, 100) == 0
    assert effective_budget(64, 1_000, 100) == 100
    assert effective_budget(64, 80, 100) == 80
    assert effective_budget(200, 1_000, 100) == 200
