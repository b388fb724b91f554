"""The study: ask and tell, constraints, repeats, failed values."""

import math
from dataclasses import replace
from typing import Any

import pytest

from rooftune.policies.errors import InputError, RefusedError
from rooftune.policies.request import FCFS, Boot, Setting
from rooftune.policies.slo import MarginReason, MarginRow, Slo, Target
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.search import study as study_module
from rooftune.tuner.search.baselines import random_settings
from rooftune.tuner.search.evaluation import Case, Evaluation, Role
from rooftune.tuner.search.objective import MARGIN_CAP, capped_margin, constraint, evaluate
from rooftune.tuner.search.space import AGED_ONE_IN, Recorded, SearchSpace, search_space
from rooftune.tuner.search.study import STARTUP_TRIALS, SettingStudy, constraint_names
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.traffic.generate import document_mix

ENGINE = Engine(Boot(2048, 16, 1, 1, 0, 1), 600_000 // 16, 64)
SLO = Slo((Target("ttft", 2.0, 0.99), Target("gap", 0.03, 0.99)))
BASE = Setting(2048, max_running=64)


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return search_space(ENGINE, BASE, SLO, NAMED_MODELS["8b-2tbs"])


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    traffic = document_mix(1, 3.0, 20.0, 10, (4_000, 8_000))
    return evaluate(Case(traffic, ENGINE, NAMED_MODELS["8b-2tbs"], SLO), BASE, Role.SEARCH)[0]


@pytest.mark.parametrize("bounds", [{}, {"aged_share": (1.0, 1.0), "wait_tokens_per_s": (0.0, 0.0)}])
def test_turns_of_the_aged_and_the_weight_of_waiting_are_tried_where_the_engine_has_them(bounds: Any) -> None:
    model, knobs = NAMED_MODELS["8b-2tbs"], frozenset({"order_policy"})
    space = search_space(ENGINE, BASE, SLO, model, knobs=knobs, bounds=bounds)
    source = random_settings(space, 1)
    drawn = [setting for setting in (next(source) for _ in range(200)) if setting.order_policy != FCFS]
    shares, weights = {s.aged_share for s in drawn}, {s.wait_tokens_per_s for s in drawn}
    assert shares == ({1.0} if bounds else {1.0 / steps for steps in AGED_ONE_IN})
    assert weights == ({0.0} if bounds else {0.0, 25_000.0, 6_250.0, 1_562.0})
    assert all(space.draw(Recorded(space.params(setting))) == setting for setting in drawn)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_every_proposal_lies_on_the_grid_and_inside_the_envelope(
    space: SearchSpace, evaluation: Evaluation, sampler: str
) -> None:
    study = SettingStudy(space, sampler=sampler, seed=3)
    budgets, caps = set(), set()
    for number in range(60):
        ticket = study.ask()
        setting = ticket.setting
        assert 64 <= setting.step_tokens <= 2048 and setting.step_tokens % 8 == 0
        assert setting.chunk_cap_tokens == 0 or 16 <= setting.chunk_cap_tokens < setting.step_tokens
        assert setting.chunk_cap_tokens % 8 == 0 and setting.max_running == 64
        budgets.add(setting.step_tokens)
        caps.add(setting.chunk_cap_tokens)
        study.tell(ticket, evaluation, float(number))
    assert len(budgets) > 10 and 0 in caps and len(caps) > 10


def test_the_same_seed_proposes_the_same_settings(space: SearchSpace, evaluation: Evaluation) -> None:
    def proposals(seed: int) -> list[Setting]:
        study = SettingStudy(space, sampler="tpe", seed=seed)
        out = []
        for number in range(30):
            ticket = study.ask()
            out.append(ticket.setting)
            study.tell(ticket, evaluation, -abs(ticket.setting.step_tokens - 700.0) - number * 1e-9)
        return out

    assert proposals(5) == proposals(5)
    assert proposals(5) != proposals(6)


def test_a_warm_start_is_proposed_first_and_survives_rounding_to_the_grid(space: SearchSpace) -> None:
    study = SettingStudy(space, sampler="tpe", seed=0)
    wanted = [BASE._replace(step_tokens=512, chunk_cap_tokens=96), BASE._replace(step_tokens=640, chunk_cap_tokens=0)]
    for setting in wanted:
        study.enqueue(setting)
    assert [study.ask().setting for _ in wanted] == wanted


def test_a_setting_off_the_grid_is_rounded_to_its_nearest_neighbour(space: SearchSpace) -> None:
    study = SettingStudy(space, sampler="tpe", seed=0)
    study.enqueue(BASE._replace(step_tokens=1021, chunk_cap_tokens=3))
    assert study.ask().setting == BASE._replace(step_tokens=1024, chunk_cap_tokens=16)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nan_value_fails_the_trial_and_the_study_continues(
    space: SearchSpace, evaluation: Evaluation, bad: float
) -> None:
    study = SettingStudy(space, sampler="tpe", seed=0)
    study.tell(study.ask(), evaluation, bad)
    again = study.ask()
    study.tell(again, evaluation, 0.5)
    assert again.number == 1


def test_a_trial_cannot_be_reported_twice(space: SearchSpace, evaluation: Evaluation) -> None:
    study = SettingStudy(space, sampler="tpe", seed=0)
    ticket = study.ask()
    study.tell(ticket, evaluation, 0.5)
    with pytest.raises(RefusedError):
        study.tell(ticket, evaluation, 0.6)


def test_constraints_have_the_margins_sign_and_one_scale(evaluation: Evaluation) -> None:
    target = SLO.targets[0]
    met = MarginRow(target, None, 1.0, -0.5, 10, MarginReason.MEASURED)
    missed = MarginRow(target, None, math.inf, math.inf, 10, MarginReason.MEASURED)
    silent = MarginRow(target, None, math.nan, math.nan, 0, MarginReason.NO_SAMPLES)
    assert constraint(met, 0.004) == -0.5
    assert constraint(missed, 0.3) == pytest.approx(0.3 * MARGIN_CAP)
    assert 0.0 < constraint(silent, 0.0) < 0.01 and 0.0 < constraint(missed, 0.0) < 0.01
    assert capped_margin(missed) == MARGIN_CAP == capped_margin(silent)
    for row, share in zip(evaluation.margins, evaluation.missed, strict=True):
        assert (constraint(row, share) > 0) == (row.margin > 0)
    assert constraint_names(evaluation.margins) == ["ttft-p99-2s", "gap-p99-0.03s"]


def test_an_unknown_sampler_is_refused(space: SearchSpace) -> None:
    with pytest.raises(RefusedError, match="tpe"):
        SettingStudy(space, sampler="annealing", seed=0)


def test_a_gaussian_process_without_its_libraries_is_one_clear_line(
    space: SearchSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_module, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(InputError, match="torch"):
        SettingStudy(space, sampler="gp", seed=0)


@pytest.mark.engine
def test_a_gaussian_process_beats_its_start(space: SearchSpace, evaluation: Evaluation) -> None:
    pytest.importorskip("scipy")
    study = SettingStudy(space, sampler="gp", seed=1)
    values = []
    for _ in range(30):
        ticket = study.ask()
        assert ticket.setting.step_tokens % 8 == 0 and 64 <= ticket.setting.step_tokens <= 2048
        values.append(-abs(math.log(ticket.setting.step_tokens / 700)))
        study.tell(ticket, replace(evaluation, margins=(), missed=()), values[-1])
    assert max(values[STARTUP_TRIALS:]) > max(values[:STARTUP_TRIALS]) and max(values) > -0.03
