"""An engine that only reads prompts, and the choice of the plainest among equal settings."""

import numpy as np
import pytest

from rooftune.policies.request import Boot, Setting
from rooftune.policies.slo import Slo, Target
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.search.evaluation import Case, Role
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.search.rank import complexity, rank
from rooftune.tuner.search.recommend import recommend
from rooftune.tuner.search.study import constraints_of
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.traffic.generate import document_mix
from rooftune.tuner.traffic.workload import Traffic

MODEL = NAMED_MODELS["8b-2tbs"]
ENGINE = Engine(Boot(8192, 16, 1, 1, 0, 0), 37_500, 64)
CURRENT = Setting(128, max_running=64)
MIX = document_mix(2, 6.0, 40.0, 8, (4_000, 8_000))
ONE = Traffic(MIX.arrival_s, MIX.prompt_tokens, np.ones_like(MIX.output_tokens), MIX.cached_tokens, MIX.tenant)


def test_answers_of_one_token_are_tuned_for_the_time_to_first_token_alone() -> None:
    with_gap = Slo((Target("ttft", 0.3, 0.9), Target("gap", 0.001, 0.99)))
    alone = Slo((Target("ttft", 0.3, 0.9),))
    both = [recommend(Case(ONE, ENGINE, MODEL, slo), current=CURRENT, trials=30) for slo in (with_gap, alone)]
    # The gap target still gives the search another start, so the two need not end in the same place.
    assert both[0].best.attainment == pytest.approx(both[1].best.attainment, abs=0.01)
    assert all(found.best.feasible and found.best.attainment > found.current.attainment + 0.2 for found in both)
    # No request decodes, so nothing needs a small budget.
    assert all(found.best.setting.step_tokens > CURRENT.step_tokens for found in both)
    silent = constraints_of(both[0].best)
    assert list(silent) == ["ttft-p90-0.3s"]  # to the sampler, too
    keys = [rank(e, with_gap) for e in both[0].evaluations]
    assert not any(value != value for key in keys for value in key)  # no NaN in an order


def test_a_sequence_cap_of_its_own_makes_a_setting_less_plain() -> None:
    slo = Slo((Target("ttft", 2.0, 0.99),))
    tried = {
        setting: evaluate(Case(MIX, ENGINE, MODEL, slo), setting, Role.SEARCH)[0]
        for setting in (CURRENT, CURRENT._replace(max_running=32), CURRENT._replace(step_tokens=512))
    }
    assert [complexity(e, CURRENT) for e in tried.values()] == [0, 1, 0]
    assert complexity(tried[CURRENT], CURRENT._replace(max_running=32)) == 1
