"""Single steps of a stretch, against the whole replay."""

import numpy as np
import pytest

from rooftune.policies.request import Boot, Setting
from rooftune.policies.slo import Slo, Target
from rooftune.policies.step_time import NAMED_MODELS, step_time
from rooftune.tuner.search import stretch
from rooftune.tuner.search.evaluation import Case
from rooftune.tuner.search.stretch import steps_between, worst_window
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.traffic.workload import Traffic

MODEL = NAMED_MODELS["8b-2tbs"]
ENGINE = Engine(Boot(8192, 16, 1, 1, 0, 0), kv_blocks=37_500, outside_first_s=0.002)
SETTING = Setting(512, 128)
SLO = Slo((Target("ttft", 0.2, 0.99),))


def _traffic(count: int = 120, seed: int = 5) -> Traffic:
    """Two lumps of requests with an idle time between."""
    chance = np.random.default_rng(seed)
    half = count // 2
    arrival_s = np.sort(np.concatenate([chance.uniform(0, 15, half), chance.uniform(60, 75, count - half)]))
    zeros = np.zeros(count, dtype=np.int64)
    return Traffic(arrival_s, chance.integers(10, 3000, count), chance.integers(1, 60, count), zeros, zeros)


def _run(traffic: Traffic) -> RunResult:
    return simulate(traffic, ENGINE, SETTING, MODEL, gap_bounds_s=SLO.gap_bounds())


def test_all_steps_of_a_run() -> None:
    traffic = _traffic()
    result = _run(traffic)
    steps = steps_between(Case(traffic, ENGINE, MODEL, SLO), SETTING, result, 0.0, 1e6)
    assert steps.exact and len(steps) == result.steps
    # Every prompt is read once; each token of an answer but the first is a decode.
    assert steps.prefill_tokens.sum() == traffic.prompt_tokens.sum()
    assert steps.decode_tokens.sum() == (traffic.output_tokens - 1).sum()
    assert (steps.decode_tokens + steps.prefill_tokens <= SETTING.step_tokens).all()
    assert (np.diff(steps.start_s) > 0).all()
    # Steps do not overlap, and the idle time between the lumps belongs to none.
    assert (steps.start_s[1:] >= steps.start_s[:-1] + steps.duration_s[:-1] - 1e-9).all()
    assert steps.duration_s.max() < 0.2
    alone = steps.decode_tokens == 1
    lone = alone & (steps.prefill_tokens == 0)
    assert steps.duration_s[lone].min() >= step_time(MODEL, 1, 1, 0, 0) * (1 - 1e-9)


@pytest.mark.parametrize(("start_s", "length_s"), [(3.0, 5.0), (62.0, 6.0), (14.0, 50.0)])
def test_a_part_replayed_alone_is_the_same(start_s: float, length_s: float) -> None:
    traffic = _traffic()
    result = _run(traffic)
    whole = steps_between(Case(traffic, ENGINE, MODEL, SLO), SETTING, result, 0.0, 1e6).between(start_s, length_s)
    part = steps_between(Case(traffic, ENGINE, MODEL, SLO), SETTING, result, start_s, length_s)
    assert part.exact and len(part) == len(whole) > 50
    for name in ("decode_tokens", "prefill_tokens", "sequences", "waiting"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name))
    np.testing.assert_allclose(part.start_s, whole.start_s, rtol=1e-9)
    np.testing.assert_allclose(part.duration_s, whole.duration_s, rtol=1e-6)


def test_too_long_a_log_starts_in_mid_traffic_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = _traffic()
    monkeypatch.setattr(stretch, "MOST_ROWS", 300)
    part = steps_between(Case(traffic, ENGINE, MODEL, SLO), SETTING, _run(traffic), 65.0, 5.0)
    assert not part.exact and len(part) > 10


def test_worst_window_by_brute_force() -> None:
    traffic = _traffic()
    result = _run(traffic)
    waited = result.outcomes.first_token_s - result.outcomes.arrival_s
    bad = waited > SLO.targets[0].bound_s
    assert 3 < bad.sum() < len(traffic)
    start_s, count = worst_window(result, SLO, 5.0)
    arrival = traffic.arrival_s
    assert count == max(int(bad[(arrival >= at) & (arrival < at + 5.0)].sum()) for at in arrival)
    assert int(bad[(arrival >= start_s) & (arrival < start_s + 5.0)].sum()) == count


def test_without_a_bad_request_the_busiest_window_is_shown() -> None:
    traffic = _traffic()
    start_s, count = worst_window(_run(traffic), Slo((Target("ttft", 1000.0, 0.99),)), 5.0)
    tokens = traffic.prompt_tokens + traffic.output_tokens

    def load(at: float) -> int:
        return int(tokens[(traffic.arrival_s >= at) & (traffic.arrival_s < at + 5.0)].sum())

    assert count == 0 and load(start_s) == max(load(at) for at in traffic.arrival_s)
