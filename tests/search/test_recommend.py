"""recommend end to end on small traffic: what it picks, when it says keep, when infeasible, and that it repeats."""

import math

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.policies.request import (
    DEADLINE,
    FCFS,
    FIXED_BUDGET,
    PRESSURE,
    SHORTEST_FIRST,
    STEP_TIME_TARGET,
    Boot,
    Setting,
)
from rooftune.policies.slo import PROFILES, Slo, Target, good
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.search.evaluation import Advice, Case, Recommendation, Role
from rooftune.tuner.search.recommend import recommend
from rooftune.tuner.search.space import EVERYTHING
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.traffic.generate import document_mix
from rooftune.tuner.traffic.workload import Traffic

MODEL = NAMED_MODELS["8b-2tbs"]
ENGINE = Engine(Boot(8192, 16, 1, 1, 0, 1), 600_000 // 16, 128)
CURRENT = Setting(2048, max_running=128)
CHAT = document_mix(1, 4.0, 60.0, 1000, (2_000, 3_000))
DOCUMENTS = document_mix(2, 3.0, 150.0, 30, (60_000, 100_000))


def slo(ttft_s: float, gap_s: float) -> Slo:
    return Slo((Target("ttft", ttft_s, 0.99), Target("gap", gap_s, 0.99)))


def run(traffic: Traffic, targets: Slo, **more: object) -> Recommendation:
    settings: dict[str, object] = {"current": CURRENT, "trials": 30, "seed": 1, **more}
    return recommend(Case(traffic, ENGINE, MODEL, targets), **settings)  # type: ignore[arg-type]  # test shorthand


@pytest.fixture(scope="module")
def chat() -> Recommendation:
    return run(CHAT, slo(2.0, 0.03))


def test_chat_at_30_ms_changes_the_default_with_figures_from_the_twin(chat: Recommendation) -> None:
    assert chat.verdict is Advice.CHANGE
    assert chat.best.feasible and not chat.current.feasible
    assert chat.best.setting.step_tokens < 1024
    result = simulate(CHAT, ENGINE, chat.best.setting, MODEL, gap_bounds_s=[0.03])
    assert chat.best.attainment == good(result.outcomes, slo(2.0, 0.03)).mean()
    assert chat.best.simulated_steps == result.steps
    assert chat.best.attainment > chat.current.attainment + chat.noise


def test_no_tried_setting_is_better_than_the_recommended_one(chat: Recommendation) -> None:
    feasible = [e for e in chat.evaluations if e.feasible and e.role is not Role.RANDOM]
    assert chat.best.attainment >= max(e.attainment for e in feasible) - 0.002


def test_baselines_are_reported_and_random_search_gets_as_many_steps(chat: Recommendation) -> None:
    roles = {e.role for e in chat.evaluations}
    assert {Role.CURRENT, Role.FORMULA, Role.KNEE, Role.SWEEP, Role.RANDOM, Role.SEARCH} <= roles
    known = {e.setting for e in chat.evaluations if e.role in (Role.FORMULA, Role.KNEE, Role.SWEEP)}
    search = {e.setting: e.simulated_steps for e in chat.evaluations if e.role is Role.SEARCH}
    random = {e.setting: e.simulated_steps for e in chat.evaluations if e.role is Role.RANDOM}
    assert chat.trials == 30
    # A repeat costs nothing, so only simulated steps count, on both sides.
    assert chat.simulated_steps == sum(steps for setting, steps in search.items() if setting not in known)
    assert chat.simulated_steps <= sum(random.values()) <= 1.3 * chat.simulated_steps


def test_the_same_arguments_give_the_same_recommendation(chat: Recommendation) -> None:
    again = run(CHAT, slo(2.0, 0.03))
    assert again.best == chat.best
    assert again.evaluations == chat.evaluations and again.noise == chat.noise


def test_a_good_setting_in_force_is_kept(chat: Recommendation) -> None:
    kept = run(CHAT, slo(2.0, 0.03), current=chat.best.setting)
    assert kept.verdict is Advice.KEEP
    assert kept.best.setting == chat.best.setting == kept.current.setting


def test_targets_beyond_the_card_are_infeasible_and_the_binding_one_is_named() -> None:
    found = run(CHAT, slo(2.0, 0.009))
    assert found.verdict is Advice.INFEASIBLE
    assert found.binding_target is not None and found.binding_target.target.metric == "gap"
    assert found.binding_target.margin > 0 and not found.best.feasible


@pytest.mark.slow
def test_documents_need_a_chunk_cap_beside_the_budget() -> None:
    found = run(DOCUMENTS, slo(2.0, 0.03), trials=60)
    plain = max(e.attainment for e in found.evaluations if e.role is Role.SWEEP)
    assert found.best.setting.chunk_cap_tokens > 0
    assert found.best.attainment > plain + 0.02


def test_batch_takes_the_smallest_budget_within_one_percent_of_the_best_throughput() -> None:
    rush = Traffic(
        np.zeros(200),
        np.full(200, 800, dtype=np.int64),
        np.full(200, 60, dtype=np.int64),
        np.zeros(200, dtype=np.int64),
        np.zeros(200, dtype=np.int64),
    )
    found = run(rush, PROFILES["batch"], current=Setting(128, max_running=128))
    assert found.verdict is Advice.CHANGE
    top = max(e.tokens_per_s for e in found.evaluations if e.role is not Role.RANDOM)
    assert found.best.tokens_per_s >= 0.99 * top
    smaller = [
        e for e in found.evaluations if e.role is Role.SWEEP and e.setting.step_tokens < found.best.setting.step_tokens
    ]
    assert all(e.tokens_per_s < 0.99 * top for e in smaller)
    # A setting in force that is within 1 % itself has nothing to gain: a smaller budget is no reason to touch it.
    assert run(rush, PROFILES["batch"]).verdict is Advice.KEEP


def test_a_budget_below_the_sequence_cap_is_refused_before_anything_runs() -> None:
    with pytest.raises(InputError, match="sequence cap"):
        run(CHAT, slo(2.0, 0.03), current=Setting(64, max_running=128))


def test_a_pool_that_holds_no_request_is_refused_instead_of_searched() -> None:
    small = Engine(Boot(8192, 16, 1, 1, 0, 1), 1, 128)
    with pytest.raises(InputError, match="KV pool"):
        recommend(Case(CHAT, small, MODEL, slo(2.0, 0.03)), current=CURRENT, trials=4)


def test_progress_is_reported_by_stage_and_ends_at_its_total() -> None:
    reports: list[tuple[str, int, int]] = []
    run(CHAT, slo(2.0, 0.03), trials=6, progress=lambda *step: reports.append(step))
    stages = dict.fromkeys(stage for stage, _, _ in reports)
    assert list(stages) == ["current", "baselines", "search", "random search"]
    for stage in stages:
        counts = [(done, total) for name, done, total in reports if name == stage]
        assert counts[-1][0] == counts[-1][1] and [c[0] for c in counts] == sorted(c[0] for c in counts)


def test_noise_is_the_half_width_of_a_paired_interval(chat: Recommendation) -> None:
    assert math.isfinite(chat.noise) and 0.0 < chat.noise < 0.2


def test_long_traffic_is_raced_on_windows_and_reported_on_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftune.tuner.search.recommend.SEARCH_STEPS", 25_000)
    monkeypatch.setattr("rooftune.tuner.search.recommend.LEAST_WINDOW_S", 4.0)
    found = run(CHAT, slo(2.0, 0.03), trials=40)
    looks = [e for e in found.evaluations if not e.whole_traffic]
    assert {e.role for e in looks} == {Role.SEARCH, Role.RANDOM}
    assert max(e.simulated_steps for e in looks) < 0.7 * found.current.simulated_steps
    assert found.best.whole_traffic and found.random_best.whole_traffic and found.current.whole_traffic
    assert all(e.whole_traffic for e in found.evaluations if e.role is Role.SWEEP)
    whole = run(CHAT, slo(2.0, 0.03), trials=40)
    assert whole.simulated_steps < found.simulated_steps * 3
    assert found.best.attainment >= whole.best.attainment - 0.01


@pytest.mark.slow
def test_more_knobs_find_more_where_the_order_of_prompts_matters() -> None:
    plain = run(DOCUMENTS, slo(2.0, 0.03), trials=60)
    joint = run(DOCUMENTS, slo(2.0, 0.03), trials=120, knobs=EVERYTHING)
    assert joint.best.attainment >= plain.best.attainment - 0.002
    used = {e.setting.order_policy for e in joint.evaluations if e.role is Role.SEARCH}
    assert used == {FCFS, SHORTEST_FIRST, DEADLINE}
    assert any(e.setting.max_partial_prefills for e in joint.evaluations)
    assert {e.setting.budget_policy for e in joint.evaluations} == {FIXED_BUDGET, PRESSURE, STEP_TIME_TARGET}


def test_a_slower_draw_of_the_step_model_decides_among_equals() -> None:
    slow = MODEL._replace(slope_s_per_token=MODEL.slope_s_per_token * 1.25)
    sure = run(CHAT, slo(2.0, 0.03), trials=20)
    careful = run(CHAT, slo(2.0, 0.03), trials=20, draws=(slow,))
    assert careful.best.attainment >= sure.best.attainment - 0.002
    settings = (careful.best.setting, sure.best.setting)
    worst = [
        good(simulate(CHAT, ENGINE, s, slow, gap_bounds_s=[0.03]).outcomes, slo(2.0, 0.03)).mean() for s in settings
    ]
    assert worst[0] >= worst[1] - 0.002


def test_without_a_gain_the_nearest_setting_is_the_one_in_force() -> None:
    giant = np.array([700_000, *([300] * 49)], dtype=np.int64)
    traffic = Traffic(np.arange(50.0), giant, np.full(50, 20), np.zeros(50, np.int64), np.zeros(50, np.int64))
    found = run(traffic, slo(2.0, 0.03), trials=6)  # one request never fits the pool: no setting helps it
    assert found.verdict is Advice.INFEASIBLE and found.current.attainment == 0.98
    assert found.best.setting == CURRENT
