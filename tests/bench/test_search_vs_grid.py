"""Grid points whose replay stops early are not the best: complete replays give the same winner."""

import pytest

from rooftune.tuner.bench.mixes import DEFAULT, ENGINE, GIANTS, MODEL, SLO, mix
from rooftune.tuner.bench.search_vs_grid import SHORT_BUDGETS, SHORT_CAPS, grid_best, surely_failed
from rooftune.tuner.search.arena import Arena
from rooftune.tuner.search.evaluation import Case, Role


@pytest.mark.slow
def test_the_best_of_the_grid_is_the_same_without_early_stops() -> None:
    traffic = mix(GIANTS, 60.0)
    cells = [(budget, cap) for budget in SHORT_BUDGETS for cap in SHORT_CAPS if cap < budget]
    settings = [DEFAULT._replace(step_tokens=budget, chunk_cap_tokens=cap) for budget, cap in cells]
    whole = Arena(Case(traffic, ENGINE, MODEL, SLO)).run([(setting, Role.SWEEP) for setting in settings])
    assert grid_best(traffic, SHORT_BUDGETS, SHORT_CAPS).attainment == max(e.attainment for e in whole)
    given_up = 0
    for e in whole:
        for steps in (e.simulated_steps // 4, e.simulated_steps // 2, e.simulated_steps):
            bad = surely_failed(traffic, e.setting, steps)
            # Never more than fail in total, and all of them at the end.
            assert bad <= round((1.0 - e.attainment) * len(traffic))
            given_up += bad > 0 and steps < e.simulated_steps
        assert bad == round((1.0 - e.attainment) * len(traffic))
    assert given_up > 20
