"""Step noise: drawn from measurements, the same luck for every setting, and walk and twin still agree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftune.policies.errors import InputError
from rooftune.policies.request import Boot, Setting
from rooftune.policies.step_time import StepModel
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.noise import QUIET, StepNoise, noise_from_steps, with_noise
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.traffic.workload import Traffic
from tests.twin.random_runs import Run, runs
from tests.twin.test_walk_vs_twin import assert_same
from tests.twin.walk import walk

# Twice as long in every third step, and steps from 20 ms on another pattern.
ROUGH = StepNoise(np.array([0.02]), np.array([[1.0, 1.0, 2.0], [1.5, 0.5, 1.0]]))
# The same, and for 20 ms in every 50 ms the machine takes three times as long.
PACED = ROUGH._replace(pace=np.array([1.0, 1.0, 3.0, 3.0, 1.0]), cell_s=0.01)
BOOT = Boot(1_000, 16, chunking=1, reserve_whole_prompt=1, contents=0, keep_decodes_moving=1)
MODEL = StepModel(0.010, 0.0, 0.0, 0.0, 0.001, 0.0, 0.0)


def scattered(seed: int, steps: int = 4_000) -> tuple[np.ndarray, np.ndarray]:
    """Modelled and measured durations: short steps scatter more than long ones."""
    random = np.random.default_rng(seed)
    modelled = np.where(random.random(steps) < 0.8, 0.003, 0.035) * (1.0 + 0.1 * random.random(steps))
    spread = np.where(modelled < 0.01, 0.25, 0.04)
    return modelled, modelled * np.exp(spread * random.normal(size=steps))


def test_a_run_by_hand() -> None:
    """The prompt (60 ms at factor 1.5), then decode steps of 11 ms, each third one twice as long."""
    zero = np.zeros(1, dtype=np.int64)
    traffic = Traffic(np.array([0.0]), np.array([50]), np.array([5]), zero, zero)
    result = simulate(traffic, Engine(BOOT, 100, 8), Setting(100, max_running=8), MODEL, noise=ROUGH)
    outcomes = result.outcomes
    assert outcomes.first_token_s[0] == pytest.approx(0.090)
    assert outcomes.finish_s[0] == pytest.approx(0.090 + 0.011 + 0.022 + 0.011 + 0.011)
    assert outcomes.longest_gap_s[0] == pytest.approx(0.022)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(runs(), st.sampled_from([ROUGH, PACED]))
def test_walk_and_compiled_twin_agree_with_noise(run: Run, noise: StepNoise) -> None:
    arguments = (run.traffic, run.engine, run.setting, run.model)
    slow = walk(*arguments, changes=run.changes, noise=noise)
    fast = simulate(*arguments, changes=run.changes, keep_log=True, noise=noise)
    assert_same(slow, fast)


def test_quiet_changes_nothing() -> None:
    assert with_noise(QUIET, 7, 1.5, 0.0123) == 0.0123


def test_a_slowdown_stretches_only_the_steps_inside_it() -> None:
    """Slow from 20 to 40 ms and from 70 to 90 ms; steps of 10 ms and more, at their factor of 1."""
    even = PACED._replace(factors=np.ones((2, 1)))
    assert with_noise(even, 0, 0.0, 0.020) == pytest.approx(0.020), "done when it begins"
    assert with_noise(even, 0, 0.0, 0.022) == pytest.approx(0.026), "2 ms of it in slow time"
    assert with_noise(even, 0, 0.025, 0.004) == pytest.approx(0.012), "all of it"
    assert with_noise(even, 0, 0.035, 0.010) == pytest.approx(0.005 + 0.010 - 0.005 / 3.0), "the first 5 ms"
    long_s = with_noise(even, 0, 0.0, 0.090)
    assert long_s == pytest.approx(0.090 + 2 * 0.020 * (1.0 - 1.0 / 3.0)), "both whole, and no third one"
    assert with_noise(even, 0, 0.05 * 7 + 0.02, 0.010) == pytest.approx(0.020 + 0.010 / 3.0), "it repeats"


def test_slowdowns_recur_by_the_clock_and_leave_the_scatter_alone() -> None:
    """Each 1,000th step begins 0.3 s in which short steps take four times as long: no long step is to take so long."""
    modelled, measured = scattered(4)
    slowed = measured.copy()
    for start in range(500, len(modelled), 1000):
        inside = start + np.flatnonzero(np.cumsum(modelled[start:]) < 0.08)
        slowed[inside] *= 4.0
    quiet, noise = (noise_from_steps(modelled, steps, seed=3) for steps in (measured, slowed))
    assert not len(quiet.pace), "scatter of single steps is not a slowdown"
    assert noise.factors.max(axis=1) == pytest.approx(quiet.factors.max(axis=1), rel=0.1)
    assert noise.factors.mean() == pytest.approx(quiet.factors.mean(), rel=0.02)
    slow = noise.pace[noise.pace > 1.0]
    assert 2.5 < slow.min() and slow.max() < 5.0
    lost = float((1.0 - 1.0 / noise.pace).mean())
    assert lost == pytest.approx((slowed - measured).sum() / slowed.sum(), rel=0.5), "as much time as was lost"
    again, other = (noise_from_steps(modelled, slowed, seed=seed) for seed in (3, 4))
    assert np.array_equal(noise.pace, again.pace) and not np.array_equal(noise.pace, other.pace)


def test_each_class_scatters_as_its_own_steps_do_and_keeps_the_common_level() -> None:
    modelled, measured = scattered(1)
    noise = noise_from_steps(modelled, 1.1 * measured, seed=3, draws=50_000)
    assert noise.factors.min() > 0.0 and len(noise.factors) == len(noise.edges_s) + 1 >= 2
    level = 1.1 * measured.sum() / modelled.sum()
    assert noise.factors.mean(axis=1) == pytest.approx(level, rel=0.01)
    short, long = np.std(np.log(noise.factors[0])), np.std(np.log(noise.factors[-1]))
    assert short == pytest.approx(0.25, rel=0.1) and long == pytest.approx(0.04, rel=0.1)


def test_the_same_seed_is_the_same_luck_in_every_class() -> None:
    modelled, measured = scattered(2)
    one, again, other = (noise_from_steps(modelled, measured, seed=seed) for seed in (5, 5, 6))
    assert np.array_equal(one.factors, again.factors) and not np.array_equal(one.factors, other.factors)
    ranks = [np.argsort(np.argsort(row, kind="stable"), kind="stable") for row in (one.factors[0], one.factors[-1])]
    assert np.corrcoef(*ranks)[0, 1] > 0.99


@pytest.mark.parametrize(
    ("modelled", "measured"),
    [(np.ones(5), np.ones(5)), (np.ones(50), np.ones(49)), (np.zeros(50), np.ones(50)), (np.ones(50), -np.ones(50))],
)
def test_too_few_or_invalid_steps_are_refused(modelled: np.ndarray, measured: np.ndarray) -> None:
    with pytest.raises(InputError):
        noise_from_steps(modelled, measured, seed=0)
