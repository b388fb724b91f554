"""A minute's win that a full machine does not hold: budget 88, shortest first, is right while the queue is short and
collapses once other work on the machine slows every step by a fifth; the default slows down and goes on.

The real controller and the real loop of our engine in virtual time; the search is scripted, so that the setting is
pushed whatever a search would say of it.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from rooftune.policies.envelope import canonical
from rooftune.policies.guard import Action, GuardLimits, Reason
from rooftune.policies.request import SHORTEST_FIRST, Setting
from rooftune.policies.slo import Slo, Target, good
from rooftune.policies.step_time import StepModel
from rooftune.tuner.control.job import Job, SearchAnswer
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.observe.rows import FloatArray, RequestRows
from tests.control.doubles import Rig, answer_of, options, rig
from tests.control.kept import keep
from tests.control.live import LiveEngine, Traffic

# A small model on two cores: a step of 88 tokens takes 0.12 s, of 2048 tokens 2.1 s.
MODEL = StepModel(0.03, 0.0005, 0.012, 1e-6, 0.001, 0.0, 0.0)
BOOT = Setting(step_tokens=2048, max_running=64)
SLO = Slo((Target("ttft", 3.0, 0.9), Target("longest_gap", 0.4, 0.9)))
VERIFY_S, CYCLE_S, SLOWER = 60.0, 10.0, 1.2
AFTER_S = 1200.0


@dataclass(frozen=True)
class Mix(Traffic):
    """Chat and documents."""

    rate_rps: float = 1.72

    def requests(self, seed: int, from_s: float = 0.0) -> Iterator[tuple[float, int, int]]:
        chance, at_s = random.Random(seed), from_s
        while True:
            at_s += chance.expovariate(self.rate_rps)
            if chance.random() < 0.12 / 1.72:
                yield at_s, max(1, round(chance.gauss(3000, 900))), 30
            else:
                yield at_s, max(1, round(chance.gauss(80, 40))), 60


def engine() -> LiveEngine:
    return LiveEngine(traffic=Mix(), boot=BOOT, seed=2, model=MODEL, kv_blocks=16_384)


def once(job: Job) -> SearchAnswer:
    """The proposal of the first search; later ones find nothing better."""
    if job.base.step_tokens != BOOT.step_tokens:
        return answer_of(job, verdict="keep", gain=0.0)
    return answer_of(job, gain=0.5, step_tokens=88, order_policy=SHORTEST_FIRST, aging_s=30.0)


def rows_of(live: LiveEngine) -> RequestRows:
    pages, after = [], -1
    while (page := live.running.requests_after(after)).sequence:
        pages.append(RequestRows.from_wire(page))
        after = page.next
    return RequestRows.join(pages)


def shares(live: LiveEngine, from_s: float) -> FloatArray:
    """Share of good requests by arrival, of each verify window from ``from_s`` on; unfinished ones are missed."""
    rows, total = rows_of(live), int(AFTER_S / VERIFY_S)
    arrived = [at_s for at_s, _, _ in _arrivals(live.seed, from_s + AFTER_S) if at_s >= from_s]
    count = np.histogram(arrived, total, (from_s, from_s + AFTER_S))[0]
    met = rows.arrival_s[good(rows.outcomes(), SLO)]
    return np.histogram(met, total, (from_s, from_s + AFTER_S))[0] / np.maximum(count, 1)


def _arrivals(seed: int, until_s: float) -> Iterator[tuple[float, int, int]]:
    for one in Mix().requests(seed, 100.0):
        if one[0] >= until_s:
            return
        yield one


@dataclass(frozen=True)
class Story:
    run: Rig
    slow_from_s: float
    tuned: FloatArray
    default: FloatArray
    after: list[CycleRecord]


def through_a_trial(run: Rig) -> None:
    """The push, its trial and the good verdict."""
    run.run(90, until=lambda record: record.verify is not None and record.verify.verdict == "better")


def from_an_older_memory(run: Rig) -> None:
    """Kept by a release that did not note what its trial showed."""
    run.engine.advance(120.0)
    keep(run, BOOT._replace(step_tokens=88, order_policy=SHORTEST_FIRST, aging_s=30.0))
    run.engine.advance(120.0)


@cache
def story(kept: Callable[[Rig], None]) -> Story:
    limits = GuardLimits(largest_ratio=64.0, dwell_s=0.0, min_shadow_s=0.0, max_inconclusive_s=600.0)
    bounds = {"step_tokens": (1.0, 1e6), "order_policy": (0.0, 2.0), "aging_s": (1.0, 600.0)}
    given = options(
        slo=SLO, limits=limits, bounds=bounds, cycle_s=CYCLE_S, window_s=120.0, verify_s=VERIFY_S, settle_s=5.0
    )
    run = rig(once, engine=engine(), options=given)
    kept(run)
    assert run.setting.step_tokens == 88, "kept"
    slow_from_s = run.engine.clock.now_s
    run.engine.slow = SLOWER
    after = run.run(int(AFTER_S / CYCLE_S))
    alone = engine()
    alone.advance(slow_from_s - alone.clock.now_s)
    alone.slow = SLOWER
    alone.advance(AFTER_S)
    return Story(run, slow_from_s, shares(run.engine, slow_from_s), shares(alone, slow_from_s), after)


def ours(record: CycleRecord) -> bool:
    return record.in_force is not None and record.in_force["step_tokens"] == 88


@pytest.mark.parametrize("kept", [through_a_trial, from_an_older_memory])
def test_the_boot_setting_is_back_after_two_verify_windows_below_it(kept: Callable[[Rig], None]) -> None:
    """A window counts as below when it has less than half of the default's share."""
    told = story(kept)
    below = [tuned < 0.5 * default for tuned, default in zip(told.tuned, told.default, strict=True)]
    each = int(VERIFY_S / CYCLE_S)
    held = [all(map(ours, told.after[at * each : (at + 1) * each])) for at in range(len(below))]
    run = longest = 0
    for is_below, is_ours in zip(below, held, strict=True):
        run = run + 1 if is_below and is_ours else 0
        longest = max(longest, run)
    shown = f"tuned {told.tuned.round(2).tolist()}, default {told.default.round(2).tolist()}, ours {held}"
    assert longest <= 2, shown
    assert canonical(told.run.setting) == BOOT, shown  # maybe in the old turn of another trial


def test_it_says_so_and_pauses() -> None:
    told = story(through_a_trial)
    lost = [record for record in told.after if record.reason is Reason.KEPT_LOST]
    assert lost and lost[0].action is Action.REVERT and lost[0].probation is not None
    assert lost[0].pause_left_s is None and told.after[lost[0].number - told.after[0].number + 1].pause_left_s
