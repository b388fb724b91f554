"""The compiled twin equals the plain walk, only faster: same plans, same instants, same gaps, in every run."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import event, given, settings

from rooftune.policies.request import Boot, Setting
from rooftune.policies.step_time import NAMED_MODELS, priced
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.traffic.workload import Traffic
from tests.properties.watch import Watch
from tests.twin import walk as walk_module
from tests.twin.random_runs import Run, runs
from tests.twin.walk import walk

# Too rare for the short test; tested by hand elsewhere.
RARE = {"aged before the others": 5, "aged behind the others": 5, "refused": 5, "stalled": 5}
GAP_BOUNDS_S = (0.03, 0.0096)

# Feature -> least runs in which it must take effect for the comparison to cover it.
FEATURES = {
    "planned ahead": 40,
    "attention table": 15,
    "stretches skipped": 40,
    "preemption": 5,
    "resumed after preemption": 5,
    "prefix hit": 5,
    "block shared": 5,
    "chunk cap binds": 10,
    "adaptive cap above the cap": 1,
    "lone request past the cap": 1,
    "held back by a cap": 1,
    "passed over": 1,
    "passing-over ended": 1,
    "sequence cap full": 5,
    "order other than arrival": 1,
    "budget policy 1 binds": 5,
    "budget policy 2 binds": 3,
    "changed in mid-run": 20,
    "reserve_whole_prompt off": 50,
    "chunking off": 10,
    "contents on": 50,
    "contents off": 50,
    "measured tables": 10,
    "hard maximum": 10,
    "soft maximum": 50,
}


def assert_same(one: RunResult, other: RunResult) -> None:
    """Identical plans and counts; instants within 1e-9 relative; the same gaps as often."""
    assert np.array_equal(one.log, other.log)
    for label in ("scheduled_s", "first_token_s", "finish_s", "longest_gap_s"):
        np.testing.assert_allclose(
            getattr(one.outcomes, label), getattr(other.outcomes, label), rtol=1e-9, atol=0.0, err_msg=label
        )
    np.testing.assert_allclose(one.log_times_s, other.log_times_s, rtol=1e-9, atol=0.0)
    for label in ("gap_count", "gap_over", "failed", "gap_bounds_s"):
        assert np.array_equal(getattr(one.outcomes, label), getattr(other.outcomes, label)), label
    assert np.array_equal(one.preemptions, other.preemptions)
    # A gap is a difference of instants, so its error counts against the instants.
    np.testing.assert_allclose(all_gaps_s(one), all_gaps_s(other), rtol=1e-9, atol=1e-9 * one.span_s)
    totals = ("steps", "computed_tokens", "cache_hit_tokens", "preempted", "refused", "stalled")
    assert [getattr(one, label) for label in totals] == [getattr(other, label) for label in totals]
    assert one.span_s == pytest.approx(other.span_s, rel=1e-9)


def all_gaps_s(result: RunResult) -> np.ndarray:
    """Every single gap of a run, ascending."""
    return np.sort(np.repeat(result.outcomes.gap_values_s, result.outcomes.gap_weights.astype(np.int64)))


def compare(run: Run, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Walk, twin and twin without skipping, all three the same; returns the features that took effect."""
    watch = Watch()
    monkeypatch.setattr(walk_module, "plan_step", watch)
    arguments = (run.traffic, run.engine, run.setting, run.model)
    slow = walk(*arguments, changes=run.changes, gap_bounds_s=GAP_BOUNDS_S)
    fast = simulate(*arguments, changes=run.changes, gap_bounds_s=GAP_BOUNDS_S, keep_log=True)
    stepwise = simulate(*arguments, changes=run.changes, gap_bounds_s=GAP_BOUNDS_S, keep_log=True, skip=False)
    assert_same(slow, fast)
    assert_same(stepwise, fast)
    assert stepwise.skipped_steps == 0
    boot = run.engine.boot
    facts = {
        "stretches skipped": fast.skipped_steps > 0,
        "refused": slow.refused > 0,
        "stalled": slow.stalled,
        "planned ahead": boot.plan_ahead == 1,
        "attention table": len(priced(run.model).attention.decodes) > 0,
        "changed in mid-run": any(0.0 < change.at_s < slow.span_s for change in run.changes),
        "reserve_whole_prompt off": boot.reserve_whole_prompt == 0,
        "chunking off": boot.chunking == 0,
        "contents on": boot.contents == 1,
        "contents off": boot.contents == 0,
        "measured tables": len(priced(run.model).base_s) > 0,
        "hard maximum": priced(run.model).formula.sharpness == 0.0,
        "soft maximum": priced(run.model).formula.sharpness > 0.0,
    }
    return {name for name, count in watch.seen.items() if count} | {name for name, holds in facts.items() if holds}


def assert_agree(monkeypatch: pytest.MonkeyPatch, examples: int) -> Counter[str]:
    total: Counter[str] = Counter()

    @settings(max_examples=examples, deadline=None)
    @given(runs())
    def agree(run: Run) -> None:
        features = compare(run, monkeypatch)
        for feature in sorted(features):
            event(feature)
        total.update(features)

    agree()
    return total


def test_walk_and_compiled_twin_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    # The many runs below check how often each feature occurs: in few runs, chance decides.
    assert assert_agree(monkeypatch, 120).total() > 0


@pytest.mark.slow
def test_walk_and_compiled_twin_agree_on_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    total = assert_agree(monkeypatch, 4000)
    rare = {name: total[name] for name, least in (FEATURES | RARE).items() if total[name] < least}
    assert not rare, f"too rare to count as compared: {rare}"


def test_a_block_filled_in_a_stretch_of_decodes_can_be_found() -> None:
    """Request 1 fills its first block while it decodes. Findable, that block is reused last, so request 2 evicts

    the second block of the known prompt instead, and request 3 finds only the first one.
    """
    prompts, keys = [8, 2, 7, 9], [[1, 2], [], [], [1, 2]]
    traffic = Traffic(
        np.arange(4.0),
        np.array(prompts, dtype=np.int64),
        np.array([1, 3, 1, 1], dtype=np.int64),
        np.zeros(4, dtype=np.int64),
        np.zeros(4, dtype=np.int64),
        prefix_offsets=np.concatenate([[0], np.cumsum([len(row) for row in keys])]).astype(np.int64),
        prefix_keys=np.array([key for row in keys for key in row], dtype=np.int64),
        prefix_span_tokens=4,
    )
    arguments = (traffic, Engine(Boot(64, 4, 1, 1, 1, 1), 4, 4), Setting(64, max_running=4), NAMED_MODELS["8b-2tbs"])
    slow, fast = walk(*arguments), simulate(*arguments, keep_log=True)
    assert fast.skipped_steps > 0
    assert slow.cache_hit_tokens == 4
    assert_same(slow, fast)
