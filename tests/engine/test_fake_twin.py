"""The engine's loop equals the twin, with tokens: same plans, same instants, step for step, in every run."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftune.policies.envelope import Envelope, full_bounds
from rooftune.policies.request import FCFS, FIXED_BUDGET, Setting
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.sim.twin import simulate
from tests.engine.drive import Log, consistent, prompts_of, replay
from tests.engine.fake_tokens import expected_tokens
from tests.twin.random_runs import SEEDS, Run, make_run, picker
from tests.twin.walk import walk

# Feature -> least runs in which it must take effect for the comparison to cover it.
FEATURES = {
    "preemption": 5,
    "prefix hit": 10,
    "changed in mid-run": 20,
    "budget policy": 20,
    "order policy": 20,
    "chunk cap": 20,
    "refused": 1,
}


def as_the_engine(run: Run, contents: int) -> Run:
    """The same run under what this engine always does: chunks, decodes kept moving, no time outside."""
    traffic = replace(consistent(run.traffic), cached_tokens=np.zeros(len(run.traffic), dtype=np.int64))
    boot = run.engine.boot._replace(chunking=1, keep_decodes_moving=1, contents=contents, plan_ahead=0)
    engine = replace(run.engine, boot=boot, outside_first_s=0.0, outside_token_s=0.0)
    envelope = Envelope(full_bounds(boot.ceiling_tokens, engine.sequence_ceiling))  # else the push would be refused
    changes = tuple(replace(change, setting=clamped(change.setting, envelope)) for change in run.changes)
    return replace(run, traffic=traffic, engine=engine, setting=clamped(run.setting, envelope), changes=changes)


def clamped(setting: Setting, envelope: Envelope) -> Setting:
    """The setting with every knob inside its bounds."""
    bounds = envelope.by_name.values()
    inside = {one.name: min(max(getattr(setting, one.name), one.minimum), one.maximum) for one in bounds}
    return setting._replace(**inside)


def assert_same(log: Log, twin: RunResult) -> None:
    """Identical plans; instants within 1e-9 relative (the compiled twin skips)."""
    assert np.array_equal(np.array(log.plan, dtype=np.int64).reshape(-1, 3), twin.log)
    np.testing.assert_allclose(log.ends_s, twin.log_times_s, rtol=1e-9, atol=0.0)
    np.testing.assert_allclose(log.scheduled_s, twin.outcomes.scheduled_s, rtol=1e-9, atol=0.0)
    first_s = [instants[0] if instants else np.nan for instants in log.token_s]
    np.testing.assert_allclose(first_s, twin.outcomes.first_token_s, rtol=1e-9, atol=0.0)
    assert log.refused == twin.refused and log.stalled == twin.stalled


def compare(run: Run) -> set[str]:
    """Engine, walk and compiled twin on one run; returns what took effect."""
    contents = run.engine.boot.contents
    log = replay(run, prefix_caching=bool(contents))
    arguments = (run.traffic, run.engine, run.setting, run.model)
    slow = walk(*arguments, changes=run.changes)
    assert_same(log, slow)
    assert log.ends_s == slow.log_times_s.tolist()  # to the bit: the same sums in the same order
    assert_same(log, simulate(*arguments, changes=run.changes, keep_log=True))
    for request, prompt in enumerate(prompts_of(run.traffic)):
        assert log.tokens[request] == expected_tokens(prompt, len(log.tokens[request]), seed=request)
    requested = run.traffic.output_tokens.tolist()
    done = [len(tokens) == wanted for tokens, wanted in zip(log.tokens, requested, strict=True)]
    assert done.count(False) == log.refused or log.stalled
    settings_used = [run.setting, *(change.setting for change in run.changes)]
    features = {
        "preemption": slow.preempted > 0,
        "prefix hit": slow.cache_hit_tokens > 0,
        "changed in mid-run": any(change.at_s < max(log.ends_s, default=0.0) for change in run.changes),
        "budget policy": any(used.budget_policy != FIXED_BUDGET for used in settings_used),
        "order policy": any(used.order_policy != FCFS for used in settings_used),
        "chunk cap": any(used.chunk_cap_tokens > 0 for used in settings_used),
        "refused": log.refused > 0,
    }
    return {name for name, took_effect in features.items() if took_effect}


@given(SEEDS, st.integers(1, 16), st.integers(0, 3), st.booleans(), st.integers(0, 1))
@settings(max_examples=10)
def test_engine_walk_and_twin_agree(seed: int, n: int, changes: int, scarce: bool, contents: int) -> None:
    compare(as_the_engine(make_run(picker(seed), n, changes, scarce), contents))


@pytest.mark.slow
def test_the_comparison_covers_what_it_should() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        run = make_run(picker(seed), 1 + seed % 16, seed % 4, seed % 2 == 0)
        seen.update(compare(as_the_engine(run, int(seed % 3 > 0))))
    assert {name: seen[name] for name, least in FEATURES.items() if seen[name] < least} == {}


@pytest.mark.parametrize("broken", ["order", "time"])
def test_a_difference_is_detected(broken: str) -> None:
    run = as_the_engine(make_run(picker(3), 12, 1, False), 1)
    log = replay(run, prefix_caching=True)
    twin = walk(run.traffic, run.engine, run.setting, run.model, changes=run.changes)
    if broken == "order":
        log.plan[1], log.plan[2] = log.plan[2], log.plan[1]
    else:
        log.ends_s[-1] *= 1.0 + 1e-8
    with pytest.raises(AssertionError):
        assert_same(log, twin)
