"""Boot.plan_ahead: a step planned while the previous one runs knows its finished requests, but not their blocks."""

import numpy as np
import pytest

from rooftune.policies import request as r
from rooftune.policies.packing import finish_step, release_leaving
from rooftune.policies.request import SHORTEST_FIRST, Boot, Setting
from rooftune.policies.step_time import StepModel
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.traffic.workload import Traffic
from tests.policies.scheduler import BOOT, plan, waiting
from tests.twin.walk import walk

AHEAD = BOOT._replace(plan_ahead=1)


def test_blocks_of_finished_requests_are_free_only_after_the_next_plan() -> None:
    state = waiting([32, 32], outputs=1, pool_blocks=2)
    assert plan(state, Setting(100), AHEAD) == [[0, 32]]
    assert finish_step(AHEAD, state) == 1
    assert state.counters[r.FREE_BLOCKS] == 0 and state.counters[r.RUNNING_COUNT] == 0
    assert plan(state, Setting(100), AHEAD) == []
    assert state.counters[r.FREE_BLOCKS] == 2
    assert plan(state, Setting(100), AHEAD) == [[1, 32]]


def test_without_plan_ahead_blocks_are_free_at_once() -> None:
    state = waiting([32, 32], outputs=1, pool_blocks=2)
    plan(state, Setting(100))
    finish_step(BOOT, state)
    assert plan(state, Setting(100)) == [[1, 32]]


@pytest.mark.parametrize("order", [0, SHORTEST_FIRST])
def test_the_place_of_a_finished_request_is_taken_until_the_next_plan(order: int) -> None:
    state = waiting([32, 32, 32], outputs=1)
    setting = Setting(100, max_running=1, order_policy=order)
    assert plan(state, setting, AHEAD) == [[0, 32]]
    finish_step(AHEAD, state)
    assert plan(state, setting, AHEAD) == []
    assert plan(state, setting, AHEAD) == [[1, 32]]


def test_an_idle_engine_releases_finished_requests_without_a_plan() -> None:
    state = waiting([32], outputs=1, pool_blocks=2)
    plan(state, Setting(100), AHEAD)
    finish_step(AHEAD, state)
    release_leaving(AHEAD, state)
    assert state.counters[r.FREE_BLOCKS] == 2 and state.counters[r.LEAVING_COUNT] == 0


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(("ahead", "starts_s"), [(0, [0.0, 0.02, 0.04]), (1, [0.0, 0.03, 0.05])])
def test_an_arrival_is_planned_one_step_later(ahead: int, starts_s: list[float], skip: bool) -> None:
    # Steps of 10 ms. The second arrives during step 2 and the third at the very start of step 5.
    zeros = np.zeros(3, dtype=np.int64)
    traffic = Traffic(np.array([0.0, 0.015, 0.04]), zeros + 8, zeros + 20, zeros, zeros)
    engine = Engine(Boot(64, 16, 1, 1, 0, 0, ahead), 100)
    model = StepModel(0.01, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    got = simulate(traffic, engine, Setting(64, max_running=8), model, skip=skip)
    assert got.outcomes.scheduled_s == pytest.approx(starts_s)
    slow = walk(traffic, engine, Setting(64, max_running=8), model)
    assert slow.outcomes.scheduled_s == pytest.approx(starts_s)
