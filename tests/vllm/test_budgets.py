"""A cached budget is the one that the policy would compute."""

import random

import pytest

from rooftune.engine.vllm import knobs as budgets
from rooftune.engine.vllm.knobs import Budgets
from rooftune.policies.budget import step_budget
from rooftune.policies.request import PRESSURE, STEP_TIME_TARGET, Boot, Setting
from rooftune.policies.step_time import NAMED_MODELS, StepModel

BOOT = Boot(2048, 1, 1, 1, 0, 1)
SOFT = StepModel(0.001, 1e-4, 0.004, 2e-6, 4e-5, 1e-9, 3.0)
TARGET = Setting(2048, budget_policy=STEP_TIME_TARGET, budget_target_s=0.03, budget_floor_tokens=16)
CALM = Setting(2048, budget_policy=PRESSURE, pressure_tokens=128, pressure_prefills=2)


@pytest.mark.parametrize("setting", [TARGET, TARGET._replace(budget_target_s=0.006), CALM])
@pytest.mark.parametrize("model", [NAMED_MODELS["8b-2tbs"], SOFT])
def test_a_cached_budget_equals_the_policys(setting: Setting, model: StepModel) -> None:
    chance, remembered = random.Random(7), Budgets(BOOT)
    decodes, context, prefills, first = 8, 4000, 0, 0
    for _ in range(3000):
        if chance.random() < 0.1:
            decodes = max(0, decodes + chance.randint(-2, 2))
            context = max(0, context + chance.randint(-900, 900))
            prefills = chance.choice([0, 0, 1, 3])
        first = first + 256 if prefills and chance.random() < 0.3 else 0
        counts = (decodes, context, prefills, first)
        assert remembered.ask(setting, model, *counts) == step_budget(setting, BOOT, model, *counts), counts
        context += decodes


def test_a_run_of_decodes_rarely_computes_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def counted(*arguments: object) -> int:
        counts.append(1)
        return step_budget(*arguments)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(budgets, "step_budget", counted)
    remembered = Budgets(BOOT)
    for step in range(320):
        remembered.ask(TARGET, NAMED_MODELS["8b-2tbs"], 16, 4000 + 16 * step, 3, 0)
    assert len(counts) <= 2 * 320 // 16 + 20
