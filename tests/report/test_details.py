"""The parts of a record that are replayed for it: curve, bars, worst minute."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from rooftune.policies.request import Boot, Setting
from rooftune.policies.slo import Slo, Target
from rooftune.policies.step_time import NAMED_MODELS, StepCost, StepModel, priced, step_time
from rooftune.tuner.record import BARS
from rooftune.tuner.report.details import SHORT_S, bars_of, curve_part, timeline_part
from rooftune.tuner.search.evaluation import Case, Recommendation
from rooftune.tuner.search.recommend import recommend
from rooftune.tuner.search.stretch import Steps
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.traffic.workload import Traffic

MODEL = NAMED_MODELS["8b-2tbs"]
SLO = Slo((Target("ttft", 2.0, 0.99), Target("gap", 0.03, 0.99)))
ENGINE = Engine(Boot(8192, 16, 1, 1, 0, 0), kv_blocks=37_500)
TABLES = priced(MODEL)._replace(base_s=np.linspace(0.01, 0.3, 3000))


def _traffic(count: int = 150) -> Traffic:
    chance = np.random.default_rng(7)
    arrival_s = np.sort(chance.uniform(0, 50, count))
    prompt = np.where(chance.random(count) < 0.1, 12_000, chance.integers(50, 900, count))
    zeros = np.zeros(count, dtype=np.int64)
    return Traffic(arrival_s, prompt, chance.integers(5, 150, count), zeros, zeros)


@pytest.fixture(scope="module")
def found() -> Recommendation:
    return recommend(Case(_traffic(), ENGINE, MODEL, SLO), current=Setting(2048), trials=4)


def _steps(count: int) -> Steps:
    chance = np.random.default_rng(1)
    took = chance.uniform(0.01, 0.1, count)
    tokens = [chance.integers(0, 500, count) for _ in range(4)]
    return Steps(np.cumsum(took) - took, took, tokens[0], tokens[1], tokens[2], tokens[3], True)


@pytest.mark.parametrize("count", [1, 7, BARS, BARS + 1, 5 * BARS + 3])
def test_bars_keep_time_tokens_and_the_longest_step(count: int) -> None:
    steps = _steps(count)
    bars = bars_of(steps)
    assert min(count, BARS) * 0.9 <= len(bars.steps) <= BARS and sum(bars.steps) == count
    assert max(bars.steps) <= count / BARS + 2
    assert sum(bars.duration_s) == pytest.approx(steps.duration_s.sum(), rel=1e-4)
    for column, tokens in ((bars.decode_tokens, steps.decode_tokens), (bars.prefill_tokens, steps.prefill_tokens)):
        total = sum(mean * n for mean, n in zip(column, bars.steps, strict=True))
        assert total == pytest.approx(tokens.sum(), rel=1e-4)
    assert max(bars.longest_s) == pytest.approx(steps.duration_s.max(), rel=1e-4)


def test_a_tall_step_is_not_drawn_low() -> None:
    """One step in twenty reads a prompt: it gets a bar of its own although there are more steps than bars."""
    count = 2000
    prefill = np.where(np.arange(count) % 20 == 7, 1000, 0)
    steps = replace(_steps(count), prefill_tokens=prefill)
    bars = bars_of(steps)
    assert len(bars.steps) <= BARS
    assert set(bars.prefill_tokens) == {0.0, 1000.0}
    assert bars.prefill_tokens.count(1000.0) == 100
    # More runs than bars: then they do share, and nothing is lost.
    every_other = replace(_steps(count), prefill_tokens=np.arange(count) % 2)
    assert len(bars_of(every_other).steps) == BARS


def test_curve_is_the_formula_and_shows_the_knee(found: Recommendation) -> None:
    curve = curve_part(found, MODEL)
    assert 200 in curve.tokens and curve.tokens[0] == 1 and curve.tokens[-1] >= 2048 * 1.2
    for tokens, time_s in zip(curve.tokens, curve.idle_s, strict=True):
        assert time_s == pytest.approx(step_time(MODEL, tokens, 1, 0, tokens * tokens / 2), rel=1e-5)
    # Answers have context to read, so beside them no step is shorter.
    assert curve.running_mean > 1 and curve.context_mean_tokens > 1000
    assert curve.live_s[0] > curve.idle_s[0]


def test_curve_follows_measured_tables(found: Recommendation) -> None:
    curve = curve_part(found, TABLES)
    assert curve.idle_s[-1] == pytest.approx(TABLES.base_s[curve.tokens[-1]], rel=1e-4)
    assert curve.idle_s != curve_part(found, MODEL).idle_s


@pytest.mark.parametrize("model", [MODEL, TABLES])
def test_worst_minute_before_and_after(found: Recommendation, model: StepModel | StepCost) -> None:
    if model is TABLES:
        found = recommend(Case(_traffic(), ENGINE, model, SLO), current=Setting(2048), trials=4)
    line = timeline_part(found, Case(_traffic(), ENGINE, model, SLO))
    assert line is not None and line.exact
    assert line.bad_current > line.bad_best
    assert line.length_s == SHORT_S
    assert line.minute_start_s <= line.start_s < line.minute_start_s + line.minute_s
    for bars, setting in ((line.current, found.current.setting), (line.best, found.best.setting)):
        most = max(d + p for d, p in zip(bars.decode_tokens, bars.prefill_tokens, strict=True))
        assert most <= setting.step_tokens + 0.01  # six digits are kept
        ends = [at + took for at, took in zip(bars.start_s, bars.duration_s, strict=True)]
        assert all(end <= after + 1e-4 for end, (_, after) in zip(ends, itertools.pairwise(bars.start_s), strict=False))
        assert bars.start_s[0] > line.start_s - 0.5 and bars.start_s[-1] < line.start_s + line.length_s
    # What the picture is for: in the worst stretch steps are over the target before, and not after.
    assert max(line.current.longest_s) > 0.03
