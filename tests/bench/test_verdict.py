"""The bench of the verdict: its runs are what they claim to be, and a large gain is found by every test."""

import numpy as np
import pytest

from rooftune.policies.verify import Verdict
from tests.bench.verdict import GOOD_SHARE, PUSH_S, TESTS, run_of

KIND = "1 document in 8, 3/s"


def test_a_raised_run_differs_in_the_share_of_the_new_setting_alone() -> None:
    run = run_of(KIND, 0)
    new = run.rows.arrival_s >= PUSH_S
    good = run.rows.ttft_s <= run.bound_s
    raised = run.pushed(0.15).ttft_s <= run.bound_s
    assert good.mean() == pytest.approx(GOOD_SHARE, abs=0.01)
    assert (raised[~new] == good[~new]).all() and (raised >= good).all()
    milder_s = float(np.quantile(run.rows.ttft_s, GOOD_SHARE + 0.15))
    assert (raised[new] == (run.rows.ttft_s[new] <= milder_s)).all()


@pytest.mark.parametrize("name", TESTS)
def test_forty_points_are_found(name: str) -> None:
    assert [TESTS[name](run_of(KIND, seed), 0.4)[0] for seed in range(3)] == [Verdict.BETTER] * 3
