"""What the controller must show, with our engine's real loop and the real twin and search, on a clock that
the test turns: a fixed list with one long prompt in eight, an honest sweep, the controller live from cold.

The same as bench ``live-gain``, which runs it as processes on the wall clock; here steps vary by a few percent from a
seeded generator, so the figures are the same on every machine.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count, product

import numpy as np
import pytest

from rooftune.policies import wire
from rooftune.policies.guard import GuardLimits
from rooftune.policies.quantiles import quantile
from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo, Target
from rooftune.tuner.bench.live_gain_rounds import Sizes, at_once, best_of, listed, ratio_interval
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.searcher.run import run_job
from rooftune.tuner.observe.rows import FINISHED, BoolArray, FloatArray, RequestRows
from rooftune.tuner.traffic.workload import Traffic as Requests
from tests.control.doubles import Rig, options, rig
from tests.control.live import BOOT, LiveEngine, Traffic

pytestmark = pytest.mark.slow

SIZES = Sizes((50, 350), (2000, 6000), (8, 32))
BUDGETS = (64, 128, 192, 256, 384, 512, 1024, 2048)
CAPS = (0, 64, 128, 256)
ROUND_S = 60.0
REST_S = 5.0
ROUNDS = 24
NOISE = 0.05


@dataclass(frozen=True)
class Again(Traffic):
    """The list repeated, with a rest before each round in which the queue runs empty."""

    requests_: Requests = None  # type: ignore[assignment]  # always given; the base has defaults

    def requests(self, seed: int, from_s: float = 0.0) -> Iterator[tuple[float, int, int]]:
        rows = self.requests_
        for number in count():
            start_s = from_s + number * (ROUND_S + REST_S)
            for at_s, prompt, output in zip(rows.arrival_s, rows.prompt_tokens, rows.output_tokens, strict=True):
                yield start_s + float(at_s), int(prompt), int(output)


def noisy(seed: int) -> LiveEngine:
    """An engine whose steps take up to a few percent more or less, by chance."""
    chance = random.Random(seed)

    def vary(engine: LiveEngine) -> None:
        engine.slow = chance.lognormvariate(0.0, NOISE)

    return LiveEngine(after_step=vary, seed=seed)


def engine_with(requests: Requests, seed: int) -> LiveEngine:
    engine = noisy(seed)
    engine.carry(Again(requests_=requests))
    return engine


def rows_of(engine: LiveEngine) -> RequestRows:
    pages, after = [], -1
    while (page := engine.running.requests_after(after)).sequence:
        pages.append(RequestRows.from_wire(page))
        after = page.next
    return RequestRows.join(pages)


@dataclass(frozen=True)
class Rounds:
    """ttft_s, gap_s: shape (rounds, requests of the list)."""

    ttft_s: FloatArray
    gap_s: FloatArray

    def good(self, ttft_s: float, gap_s: float) -> BoolArray:
        return (self.ttft_s <= ttft_s) & (self.gap_s <= gap_s)


def rounds_of(engine: LiveEngine, requests: Requests, rounds: int) -> Rounds:
    """Whole rounds, requests by arrival, which is the list's order."""
    rows = rows_of(engine)
    assert (rows.ended == FINISHED).all()
    rows = rows.select(np.argsort(rows.arrival_s, kind="stable"))
    n = len(requests)
    rows = rows.select(np.arange(n * rounds))
    assert rows.prompt_tokens.reshape(rounds, n).tolist() == [requests.prompt_tokens.tolist()] * rounds
    gap_s = np.nan_to_num(rows.longest_gap_s).reshape(rounds, n)
    return Rounds(rows.ttft_s.reshape(rounds, n), gap_s)


def push(engine: LiveEngine, setting: Setting) -> None:
    knobs = wire.Knobs(step_tokens=setting.step_tokens, chunk_cap_tokens=setting.chunk_cap_tokens)
    request = wire.PushRequest(knobs=knobs, lease_s=80_000.0, expected_revision=0, actor="sweep", reason="sweep")
    assert isinstance(engine.running.push(request), wire.PushAnswer)


def one_round(requests: Requests, seed: int, setting: Setting = BOOT) -> Rounds:
    engine = engine_with(requests, seed)
    if setting != BOOT:
        push(engine, setting)
    engine.advance(ROUND_S + REST_S - 1.0)
    while engine.running.snapshot().running + engine.running.snapshot().waiting:
        engine.silence()
        engine.advance(1.0)
    return rounds_of(engine, requests, 1)


@cache
def fixed_list() -> Requests:
    """At 72 % of the greatest rate of the default."""
    first = listed(SIZES, 4.0, ROUND_S, seed=1)
    engine = engine_with(at_once(first), 1)
    start_s = engine.clock.now_s
    engine.advance(1.0)
    engine.silence()
    while engine.running.snapshot().running:
        engine.advance(1.0)
    most_rps = len(first) / float(rows_of(engine).finish_s.max() - start_s)
    return listed(SIZES, 0.72 * most_rps, ROUND_S, seed=2)


@cache
def targets() -> tuple[float, float]:
    """The default's own p70 of TTFT and longest gap."""
    rounds = [one_round(fixed_list(), seed) for seed in (11, 12)]
    ttft_s = quantile(np.concatenate([one.ttft_s.ravel() for one in rounds]), 0.7)
    gap_s = quantile(np.concatenate([one.gap_s.ravel() for one in rounds]), 0.7)
    return ttft_s, gap_s


@cache
def sweep() -> tuple[tuple[float, ...], ...]:
    """Attainment of 8 budgets x 4 caps, two repeats."""
    settings = [BOOT._replace(step_tokens=b, chunk_cap_tokens=c) for b, c in product(BUDGETS, CAPS)]
    requests = fixed_list()
    return tuple(
        tuple(float(one_round(requests, 100 * repeat + at, s).good(*targets()).mean()) for at, s in enumerate(settings))
        for repeat in (1, 2)
    )


@cache
def controlled() -> Rig:
    ttft_s, gap_s = targets()
    slo = Slo((Target("ttft", ttft_s, 0.9), Target("longest_gap", gap_s, 0.9)))
    limits = GuardLimits(largest_ratio=64.0, dwell_s=0.0, min_shadow_s=0.0, max_inconclusive_s=4500.0, min_gain=0.02)
    given = options(slo=slo, limits=limits, cycle_s=5.0, window_s=300.0, verify_s=40.0, search_every_s=120.0, trials=60)
    run = rig(lambda job: run_job(job, lambda *_: None), engine=engine_with(fixed_list(), 21), options=given)
    run.run(int(ROUNDS * (ROUND_S + REST_S) / given.cycle_s))
    return run


@cache
def default_rounds() -> BoolArray:
    return np.concatenate([one_round(fixed_list(), seed).good(*targets()) for seed in range(31, 35)])


def good_rounds() -> BoolArray:
    return rounds_of(controlled().engine, fixed_list(), ROUNDS - 1).good(*targets())


def test_the_traffic_is_the_stated_mix() -> None:
    requests = fixed_list()
    long = requests.prompt_tokens >= SIZES.long[0]
    assert abs(float(long.mean()) - 1 / 8) < 0.03 and len(requests) >= 60
    assert 0.3 < float(default_rounds().mean()) < 0.7, "p70 of both, so about half meet both"


def test_live_gain_reaches_the_best_of_an_honest_sweep_and_beats_the_default() -> None:
    good = good_rounds()
    second = good[len(good) // 2 :]
    share = float(second.mean())
    ratio, low, high = ratio_interval(second.mean(axis=0), default_rounds().mean(axis=0))
    shown = (
        f"tuned {share:.3f}, best of the sweep {max(map(max, sweep())):.3f}, ratio {ratio:.2f} ({low:.2f}-{high:.2f})"
    )
    assert share / best_of(sweep()) >= 0.95, shown
    assert low > 1.0, shown


def trial_stretches(records: list[CycleRecord]) -> list[tuple[float, float]]:
    """Wall-clock periods in which a push was in force and on trial."""
    found: list[tuple[float, float]] = []
    for record in records:
        if record.pushed is not None:
            found.append((record.started_at_s, float("inf")))
        verdict = record.verify is not None and record.verify.verdict != "inconclusive"
        if found and (verdict or record.action.value == "revert"):
            found[-1] = (found[-1][0], min(found[-1][1], record.started_at_s))
    return found


def test_trials_cost_at_most_one_request_in_a_hundred() -> None:
    """Against a paired run without them: the default on the same list."""
    run, requests = controlled(), fixed_list()
    good = good_rounds()
    default = default_rounds().mean(axis=0)
    offset_s = run.records[0].started_at_s - run.options.cycle_s - 100.0  # the engine's clock began at 100
    lost = 0.0
    for begin_s, end_s in trial_stretches(run.records):
        gained = 0.0
        for number in range(len(good)):
            at_s = 100.0 + offset_s + number * (ROUND_S + REST_S) + requests.arrival_s
            during = (at_s >= begin_s) & (at_s < end_s)
            gained += float((good[number][during] - default[during]).sum())
        lost += max(0.0, -gained)
    assert lost <= 0.01 * good.size, f"{lost:.1f} of {good.size}"
    assert trial_stretches(run.records), "there were trials"


def test_most_of_the_gain_comes_from_a_push_that_was_predicted() -> None:
    """Every kept push has its prediction beside what was observed, and most held."""
    kept = [r.verify for r in controlled().records if r.verify is not None and r.verify.verdict == "better"]
    assert kept and kept[0].observed_gain is not None and kept[0].predicted_gain is not None
    assert kept[0].observed_gain > 0.0


def test_the_knee_is_found_from_live_steps() -> None:
    fits = [record.fit for record in controlled().records if record.fit is not None]
    model = noisy(0).model
    knee = fits[-1].knee_tokens
    assert knee is not None and knee == pytest.approx(model.floor_s / model.slope_s_per_token, rel=0.25)
