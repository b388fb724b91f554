"""For any workload and setting, every step keeps the invariants of ``plan_step``."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import event, given, settings

from tests.properties.watch import Watch
from tests.twin import walk as walk_module
from tests.twin.random_runs import Run, runs

# Feature -> least steps in which it must take effect over all runs for the test to cover it.
FEATURES = {
    "preemption": 20,
    "resumed after preemption": 10,
    "prefix hit": 10,
    "block shared": 10,
    "chunk cap binds": 20,
    "adaptive cap above the cap": 1,
    "lone request past the cap": 1,
    "held back by a cap": 10,
    "passed over": 5,
    "passing-over ended": 2,
    "sequence cap full": 20,
    "order other than arrival": 10,
    "budget policy 1 binds": 20,
    "budget policy 2 binds": 20,
}


def run_watched(run: Run, monkeypatch: pytest.MonkeyPatch):
    """The plain walk with every step checked; the result and what was seen."""
    watch = Watch()
    monkeypatch.setattr(walk_module, "plan_step", watch)
    result = walk_module.walk(run.traffic, run.engine, run.setting, run.model, changes=run.changes)
    return result, watch.seen


def check_runs(monkeypatch: pytest.MonkeyPatch, examples: int) -> Counter[str]:
    """Random runs, every step watched; how often each feature took effect."""
    total: Counter[str] = Counter()

    @settings(max_examples=examples)
    @given(runs())
    def check(run: Run) -> None:
        result, seen = run_watched(run, monkeypatch)
        for feature in FEATURES:
            if seen[feature]:
                event(feature)
        total.update(seen)
        finished = ~np.isnan(result.outcomes.finish_s)
        if result.stalled:
            # Only an engine with chunking off may meet a prompt that fits no step of its.
            assert run.engine.boot.chunking == 0
            total["stalled"] += 1
        else:
            assert finished.sum() + result.refused == len(run.traffic)
        tokens = np.zeros(len(run.traffic), dtype=np.int64)
        np.add.at(tokens, result.log[:, 1], result.log[:, 2])
        due = run.traffic.prompt_tokens + run.traffic.output_tokens - 1
        spared = result.preemptions == 0
        if result.preempted == 0 and run.engine.boot.contents == 0:
            hits = (
                np.minimum(run.traffic.cached_tokens, due)
                // run.engine.boot.block_tokens
                * run.engine.boot.block_tokens
            )
            whole = (run.traffic.prompt_tokens - 1) // run.engine.boot.block_tokens * run.engine.boot.block_tokens
            assert np.array_equal(tokens[finished], (due - np.minimum(hits, whole))[finished])
        assert (tokens[finished & spared] <= due[finished & spared]).all()

    check()
    return total


def test_every_step_keeps_its_invariants(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_runs(monkeypatch, 50)["chunk cap binds"] > 0


@pytest.mark.slow
def test_enough_runs_exercise_every_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    total = check_runs(monkeypatch, 800)
    missing = {name: total[name] for name, least in FEATURES.items() if total[name] < least}
    assert not missing, f"too rare to count as tested: {missing}"
