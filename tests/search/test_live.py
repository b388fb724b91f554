"""The controller's search: inside its bounds, corrected by live results, with an exact count of simulated steps."""

import pytest

from rooftune.policies.errors import InputError
from rooftune.policies.request import DEADLINE, FCFS, Boot, Setting
from rooftune.policies.slo import Slo, Target
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.search.evaluation import Advice, Case
from rooftune.tuner.search.lessons import LiveResult
from rooftune.tuner.search.live import LEAST_TRIALS, RANDOM_SHARE, LiveProposal, Question, research
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.search.space import search_space
from rooftune.tuner.search.study import SettingStudy
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.traffic.generate import document_mix

MODEL = NAMED_MODELS["8b-2tbs"]
ENGINE = Engine(Boot(8192, 16, 1, 1, 0, 1), 37_500, 128)
SLO = Slo((Target("ttft", 2.0, 0.99), Target("gap", 0.03, 0.99)))
BASE = Setting(2048, max_running=128)
TRAFFIC = document_mix(1, 4.0, 60.0, 8, (4_000, 8_000))
WIDE = {"step_tokens": (128.0, 8192.0), "chunk_cap_tokens": (16.0, 8192.0)}


def find(**changes: object) -> LiveProposal:
    values: dict[str, object] = {
        "traffic": TRAFFIC, "engine": ENGINE, "model": MODEL, "slo": SLO, "base": BASE, "bounds": WIDE, "trials": 24,
    }  # fmt: skip
    return research(Question(**{**values, **changes}))  # type: ignore[arg-type]  # test shorthand


@pytest.fixture(scope="module")
def wide() -> LiveProposal:
    return find()


def test_a_far_better_setting_is_found_with_figures_from_the_twin(wide: LiveProposal) -> None:
    assert wide.verdict is Advice.CHANGE and wide.gain > 0.5 > wide.noise
    again, _ = evaluate(Case(TRAFFIC, ENGINE, MODEL, SLO), wide.best.setting, wide.best.role)
    assert wide.twin_best == again.attainment == wide.best.attainment
    assert wide.now.setting == BASE
    assert wide.twin_now == wide.now.attainment < wide.twin_best


def test_random_search_gets_as_many_steps(wide: LiveProposal) -> None:
    assert wide.trials == 24 and wide.live_trials == 0
    assert wide.random_best is not None and wide.equal_best is not None
    # Repeats cost nothing, and leaders ran on the same traffic, so nothing was paid twice.
    assert RANDOM_SHARE * wide.simulated_steps * 0.9 <= wide.random_steps <= 0.6 * wide.simulated_steps
    assert wide.best.attainment >= wide.random_best.attainment


def test_the_same_job_has_the_same_answer(wide: LiveProposal) -> None:
    again = find()
    assert again.best == wide.best and again.leaders == wide.leaders and again.random_steps == wide.random_steps


@pytest.mark.parametrize(
    ("bounds", "caps"),
    [
        ({"step_tokens": (1024.0, 4096.0)}, {0}),
        ({"step_tokens": (1024.0, 4096.0), "chunk_cap_tokens": (256.0, 512.0)}, set(range(256, 513))),
        ({"step_tokens": (1024.0, 4096.0), "chunk_cap_tokens": (256.0, 4096.0)}, {0, *range(256, 4097)}),
        ({"chunk_cap_tokens": (0.0, 512.0)}, {0, *range(16, 513)}),
        ({"step_tokens": (1001.0, 1007.0), "chunk_cap_tokens": (64.0, 64.0)}, {64}),
    ],
)
def test_nothing_is_tried_outside_the_bounds(bounds: dict[str, tuple[float, float]], caps: set[int]) -> None:
    found = find(bounds=bounds, trials=12)
    least, most = bounds.get("step_tokens", (2048.0, 2048.0))
    tried = [e.setting for e in found.leaders if e.setting != BASE]
    assert tried
    for setting in tried:
        assert least <= setting.step_tokens <= most or setting.step_tokens == BASE.step_tokens
        assert setting.chunk_cap_tokens in caps
        assert setting._replace(step_tokens=2048, chunk_cap_tokens=0) == BASE


def test_without_a_knob_to_move_there_is_no_search() -> None:
    found = find(bounds={})
    assert found.verdict is Advice.INFEASIBLE and found.best == found.now and found.trials == found.random_trials == 0


@pytest.mark.slow
def test_policies_add_their_parameters_and_fcfs_adds_none() -> None:
    found = find(bounds={**WIDE, "order_policy": (0.0, 2.0)}, trials=32)
    orders = {e.setting.order_policy: e.setting for e in found.leaders}
    for order, setting in orders.items():
        assert (setting.ttft_target_s > 0.0) == (order == DEADLINE)
    only = find(bounds={**WIDE, "order_policy": (0.0, 0.0)}, trials=8)
    assert {e.setting.order_policy for e in only.leaders} == {FCFS}


def test_a_live_result_that_contradicts_the_twin_moves_the_search_away(wide: LiveProposal) -> None:
    bad = LiveResult(wide.best.setting, 0.2, 2_000, wide.twin_best)
    found = find(live=[bad], trials=40)
    assert found.live_trials == 1 and found.trials <= 40
    assert found.best.setting != wide.best.setting
    there = next((e for e in found.leaders if e.setting == wide.best.setting), None)
    assert there is None or there.attainment < 0.3
    # One that agrees with the twin changes nothing of it.
    agrees = find(live=[LiveResult(wide.best.setting, wide.twin_best, 2_000, wide.twin_best)], trials=24)
    assert agrees.best.attainment == pytest.approx(wide.best.attainment, abs=0.01)


def test_a_live_result_better_than_predicted_attracts_the_search() -> None:
    liked, targets = Setting(1024, 512, max_running=128), Slo((Target("ttft", 0.25, 0.99),))
    assert find(slo=targets).gain < 0.03
    found = find(live=[LiveResult(liked, 0.99, 5_000, 0.6)], slo=targets)
    assert found.best.setting == liked
    assert found.gain > found.twin_best - found.twin_now + 0.05  # what the twin alone would not have promised


def test_a_live_trial_outside_the_present_envelope_is_skipped() -> None:
    old = LiveResult(Setting(16_384, max_running=256), 0.1, 500, 0.9)
    assert find(live=[old], trials=8).live_trials == 0


def test_live_trials_are_marked_in_the_study_beside_the_twins(wide: LiveProposal) -> None:
    space = search_space(ENGINE, BASE, SLO, MODEL)
    study = SettingStudy(space, sampler="tpe", seed=0)
    assert study.holds(wide.best.setting) and not study.holds(BASE._replace(step_tokens=1021))
    study.add_live(wide.best.setting, 0.5, {"live": 1.0}, 300)
    ticket = study.ask()
    study.tell(ticket, wide.now, 0.2, {"live": -1.0})
    live, twin = study._study.get_trials()
    assert live.user_attrs == {"live": True, "requests": 300} and "live" not in twin.user_attrs
    assert live.constraints == {"live": 1.0} and twin.constraints["live"] == -1.0
    assert set(live.distributions) == set(twin.distributions)


def test_long_traffic_is_searched_in_part_and_decided_on_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftune.tuner.search.live.SEARCH_STEPS", 30_000)
    found = find(trials=40)
    assert LEAST_TRIALS <= found.trials <= 40
    assert all(e.whole_traffic for e in found.leaders)
    assert found.simulated_steps < 40 * found.now.simulated_steps
    assert found.best.attainment > 0.9


def test_a_pool_that_holds_no_request_is_refused() -> None:
    with pytest.raises(InputError, match="KV pool"):
        find(engine=Engine(Boot(8192, 16, 1, 1, 0, 1), 1, 128))


def test_batch_counts_tokens_per_second_and_its_gain_is_relative() -> None:
    found = find(slo=Slo((), objective="tokens_per_s"), base=Setting(128, max_running=128), trials=16)
    assert found.gain == pytest.approx(found.best.tokens_per_s / found.now.tokens_per_s - 1.0)
