"""Slowdowns: found where a machine was slow for a while, not where single steps or whole classes are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftune.tuner.sim.noise import CELL_S, CELLS, LEAST_FACTOR, LEAST_S, Slowdown, find_slowdowns, pace_of

STEPS = np.full(400, 0.010)


def test_a_stretch_of_slow_steps_is_one_slowdown_with_duration_and_factor() -> None:
    measured = STEPS.copy()
    measured[100:120] *= 3.0
    (found,), inside = find_slowdowns(STEPS, measured)
    assert np.flatnonzero(inside).tolist() == list(range(100, 120)), "and not the quick ones around it"
    assert found == pytest.approx(Slowdown(0.6, 3.0))


def test_one_long_step_is_enough_and_a_few_short_ones_are_not() -> None:
    expected = np.where(np.arange(400) == 50, 0.2, 0.010)
    measured = expected.copy()
    measured[50] = 0.5
    measured[200:202] = 0.02
    found, inside = find_slowdowns(expected, measured)
    assert found == [pytest.approx(Slowdown(0.5, 2.5))] and np.flatnonzero(inside).tolist() == [50]


def test_the_end_of_the_data_is_not_judged_by_a_step_or_two() -> None:
    measured = STEPS.copy()
    measured[-2:] *= 2.0
    assert find_slowdowns(STEPS, measured)[0] == []


@given(st.lists(st.tuples(st.floats(1e-4, 1.0), st.floats(0.2, 8.0)), min_size=1, max_size=200))
def test_every_slowdown_is_long_and_slow_and_all_are_found(steps: list[tuple[float, float]]) -> None:
    expected = np.array([step[0] for step in steps])
    measured = expected * np.array([step[1] for step in steps])
    found, inside = find_slowdowns(expected, measured)
    assert sum(one.lasted_s for one in found) == pytest.approx(measured[inside].sum())
    assert all(one.factor > 1.0 for one in found)
    again, _ = find_slowdowns(np.where(inside, measured, expected), measured)
    assert again == [], "what is left once they are expected"
    slow = measured > LEAST_FACTOR * expected
    if measured.sum() >= LEAST_S and slow.all():
        assert inside.any()


def test_slowdowns_recur_as_often_as_they_were_seen() -> None:
    assert not len(pace_of([], 10.0, seed=0))
    path = pace_of([Slowdown(0.2, 3.0), Slowdown(0.001, 9.0)], 20.0, seed=1)
    assert path.shape == (CELLS,) and set(np.unique(path)) == {1.0, 3.0, 9.0}
    span_s = CELLS * CELL_S
    assert (path == 3.0).sum() * CELL_S == pytest.approx(span_s / 20.0 * 0.2, rel=0.75)
    assert 3 <= (path == 9.0).sum() <= 40, "a short one takes a cell"
