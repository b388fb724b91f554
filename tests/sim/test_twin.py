"""The twin on small runs whose outcome can be computed by hand, and the settings it refuses."""

import math

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.policies.request import DEADLINE, STEP_TIME_TARGET, Boot, Setting
from rooftune.policies.step_time import StepModel
from rooftune.tuner.sim.engine import Engine, check_setting
from rooftune.tuner.sim.twin import Change, Ends, simulate
from rooftune.tuner.traffic.workload import Traffic

# 10 ms a step and 1 ms a token: instants can be added up by hand.
MODEL = StepModel(0.010, 0.0, 0.0, 0.0, 0.001, 0.0, 0.0)
BOOT = Boot(
    ceiling_tokens=1_000, block_tokens=16, chunking=1, reserve_whole_prompt=1, contents=0, keep_decodes_moving=1
)


def traffic(*rows: tuple[float, int, int]) -> Traffic:
    """(arrival_s, prompt, output) each."""
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    zeros = np.zeros(len(rows), dtype=np.int64)
    return Traffic(arrival.astype(float), prompt, output, zeros, zeros)


def engine(kv_blocks: int = 10_000, boot: Boot = BOOT) -> Engine:
    return Engine(boot, kv_blocks, sequence_ceiling=8)


def test_one_request_step_by_step() -> None:
    """50 prompt tokens in chunks of 20, 20, 10, then two decode steps of 11 ms."""
    result = simulate(
        traffic((1.0, 50, 3)), engine(), Setting(20, max_running=8), MODEL, keep_log=True, gap_bounds_s=[0.0109, 0.012]
    )
    assert result.log.tolist() == [[0, 0, 20], [1, 0, 20], [2, 0, 10], [3, 0, 1], [4, 0, 1]]
    np.testing.assert_allclose(result.log_times_s, [1.030, 1.060, 1.080, 1.091, 1.102])
    outcomes = result.outcomes
    assert outcomes.scheduled_s[0] == 1.0
    assert outcomes.first_token_s[0] == pytest.approx(1.080)
    assert outcomes.finish_s[0] == pytest.approx(1.102)
    assert outcomes.longest_gap_s[0] == pytest.approx(0.011)
    assert outcomes.gap_over.tolist() == [[2, 0]]
    assert float(outcomes.gap_weights.sum()) == 2.0


def test_time_outside_the_engine_is_added_once_for_the_first_and_once_for_the_last_token() -> None:
    outside = Engine(BOOT, 1_000, 8, outside_first_s=0.5, outside_token_s=0.25)
    result = simulate(traffic((0.0, 10, 3), (5.0, 10, 1)), outside, Setting(20, max_running=8), MODEL)
    np.testing.assert_allclose(result.outcomes.first_token_s, [0.520, 5.520])
    np.testing.assert_allclose(result.outcomes.finish_s, [0.042 + 0.25, 5.520])


def test_a_change_holds_from_the_first_step_at_or_after_its_instant() -> None:
    changes = [Change(0.030, Setting(5, max_running=5))]
    result = simulate(
        traffic((0.0, 50, 1)), engine(), Setting(20, max_running=8), MODEL, changes=changes, keep_log=True
    )
    assert result.log[:, 2].tolist() == [20, 5, 5, 5, 5, 5, 5]
    later = [Change(0.0301, Setting(5, max_running=5))]
    result = simulate(traffic((0.0, 50, 1)), engine(), Setting(20, max_running=8), MODEL, changes=later, keep_log=True)
    assert result.log[:, 2].tolist() == [20, 20, 5, 5]


def test_a_change_in_a_stretch_of_decodes_holds_too() -> None:
    """The stretch is left at the change: a request that was held back by the sequence cap gets in."""
    rows = traffic((0.0, 10, 1_000), (0.1, 10, 5))
    changes = [Change(1.0, Setting(20, max_running=2))]
    result = simulate(rows, engine(), Setting(20, max_running=1), MODEL, changes=changes)
    assert result.skipped_steps > 900
    assert 1.0 <= result.outcomes.scheduled_s[1] < 1.011


def test_a_request_that_can_never_fit_the_pool_is_refused_and_the_others_run() -> None:
    result = simulate(traffic((0.0, 100, 10), (0.0, 20, 10)), engine(kv_blocks=4), Setting(50, max_running=8), MODEL)
    assert (result.refused, result.stalled) == (1, False)
    assert result.outcomes.failed.tolist() == [True, False]
    assert math.isnan(result.outcomes.first_token_s[0])


def test_the_newest_is_preempted_and_computes_its_tokens_again() -> None:
    rows = traffic((0.0, 30, 40), (0.0, 30, 40))
    tight = engine(kv_blocks=6, boot=BOOT._replace(reserve_whole_prompt=0))
    result = simulate(rows, tight, Setting(100, max_running=8), MODEL)
    assert result.preemptions.tolist() == [0, 1] and result.preempted == 1
    assert result.computed_tokens > 2 * (30 + 39)
    assert not result.outcomes.failed.any()
    assert result.outcomes.longest_gap_s[1] > 10 * result.outcomes.longest_gap_s[0]


def test_max_steps_leaves_requests_unfinished() -> None:
    result = simulate(traffic((0.0, 500, 5)), engine(), Setting(10, max_running=8), MODEL, ends=Ends(most_steps=7))
    assert result.steps == 7 and result.outcomes.failed.tolist() == [True]


def test_chunking_off_leaves_a_prompt_that_fits_no_step() -> None:
    whole = engine(boot=BOOT._replace(chunking=0))
    result = simulate(traffic((0.0, 60, 2), (0.0, 20, 2)), whole, Setting(50, max_running=8), MODEL)
    assert result.stalled and result.steps == 0


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (Setting(0, max_running=1), "token budget is 0"),
        (Setting(1_001, max_running=1), "within 1..1000"),
        (Setting(4, max_running=5), r"at least the sequence cap \(5\)"),
        (Setting(100, max_running=0), "sequence cap is 0"),
        (Setting(100, max_running=9), "within 1..8"),
        (Setting(100, -1, max_running=8), "chunk_cap_tokens is -1"),
        (Setting(100, max_partial_prefills=-2, max_running=8), "max_partial_prefills is -2"),
        (Setting(100, pass_over_max_s=math.nan, max_running=8), "pass_over_max_s is nan"),
        (Setting(100, aging_s=-0.1, max_running=8), "aging_s is -0.1"),
        (Setting(100, budget_policy=3, max_running=8), "budget policy is 3"),
        (Setting(100, order_policy=3, max_running=8), "order policy is 3"),
    ],
)
def test_bad_settings_are_refused_with_the_bound(setting: Setting, says: str) -> None:
    with pytest.raises(InputError, match=says):
        check_setting(setting, engine())
    good = Setting(100, max_running=8)
    with pytest.raises(InputError, match=says):
        simulate(traffic((0.0, 1, 1)), engine(), good, MODEL, changes=[Change(1.0, setting)])


def test_a_budget_that_shrinks_needs_chunking() -> None:
    shrinking = Setting(100, max_running=8, budget_policy=STEP_TIME_TARGET, budget_target_s=0.03)
    check_setting(shrinking, engine())
    with pytest.raises(InputError, match="while chunking is off"):
        check_setting(shrinking, engine(boot=BOOT._replace(chunking=0)))


def test_the_smallest_valid_settings_are_accepted() -> None:
    check_setting(Setting(1, max_running=1), engine())
    check_setting(Setting(8, max_running=8, order_policy=DEADLINE, aging_s=math.inf), engine())


@pytest.mark.parametrize("instants", [(2.0, 1.0), (math.nan,), (math.inf,)])
def test_changes_must_be_in_order(instants: tuple[float, ...]) -> None:
    good = Setting(100, max_running=8)
    with pytest.raises(InputError, match="instant of a change"):
        simulate(traffic((0.0, 1, 1)), engine(), good, MODEL, changes=[Change(at_s, good) for at_s in instants])


@pytest.mark.parametrize("wrong", [{"kv_blocks": 0}, {"sequence_ceiling": 0}, {"boot": BOOT._replace(block_tokens=0)}])
def test_an_engine_without_blocks_or_sequences_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match="at least 1"):
        Engine(**({"boot": BOOT, "kv_blocks": 10} | wrong))
