"""Bench ``verdict``: how often the verdict on a push is wrong, and how long it takes.

The twin serves ten kinds of traffic for 45 minutes. Steps scatter by 3 %, and the machine's speed drifts by 10 %
(standard deviation, correlated over five minutes). A push lies at minute 15. In an A/A trial nothing changes there; in
an A/B trial the share of good requests rises by a known number of points: later requests meet a milder bound on their
first token, chosen from the same run, so that everything else about them is as it was. Each test has 30 minutes.

today: the controller's own ``check`` every 15 seconds until its first verdict. five_looks: windows that grow from the
push on, doubled between looks, variance from blocks of 60 s, the error of 5 % shared out among the looks. switchback:
the two settings take turns, pairs of 60 s in random order, the first 10 s of each left out; looks after 4, 7
and 14 pairs at the differences within pairs. ``short``: two kinds, four trials each.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from scipy.stats import t

from rooftune.policies.commands import Figure
from rooftune.policies.outcomes import BoolArray
from rooftune.policies.request import Boot, FloatArray, Setting
from rooftune.policies.slo import Slo, Target
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.policies.verify import Observed, Verdict
from rooftune.tuner.config import Config
from rooftune.tuner.config.sections import EngineSection
from rooftune.tuner.control.cycle.observe import Seen
from rooftune.tuner.control.cycle.verify import MOST_BEFORE, check
from rooftune.tuner.control.memory import Trial
from rooftune.tuner.control.options import options_of
from rooftune.tuner.observe.rows import RequestRows
from rooftune.tuner.observe.window import Window
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.noise import StepNoise
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.traffic.generate import Day, document_mix, generate, named_mix
from rooftune.tuner.traffic.workload import Traffic

MODEL = NAMED_MODELS["8b-2tbs"]
ENGINE = Engine(Boot(16_384, 16, 1, 1, 0, 0), 600_000 // 16, 256)
SETTING = Setting(2048, max_running=256)
PUSH_S, SPAN_S, CYCLE_S = 900.0, 2700.0, 15.0
BLOCK_S, FIRST_LOOK_S = 60.0, 120.0
OPTIONS = options_of(Config(engine=EngineSection(url="http://engine")), None)  # as an operator finds them
VERIFY_S, SETTLE_S = OPTIONS.verify_s, OPTIONS.settle_s
CARRY_OVER_S, PAIRS = 10.0, (4, 7, 14)
GOOD_SHARE = 0.5  # of the requests before the push, where the share scatters most
GAINS = (0.05, 0.15, 0.40)
FALSE_SHARE = 0.05
DRIFT, DRIFT_S, CELL_S, SCATTER = 0.10, 300.0, 10.0, 0.03


def _chat(rate_rps: float, **more: float) -> Callable[[int], Traffic]:
    return _documents(rate_rps, 1e6, **more)


def _documents(
    rate_rps: float, one_in: float, long_range: tuple[int, int] = (8_000, 16_000), **more: float
) -> Callable[[int], Traffic]:
    return lambda seed: document_mix(seed, rate_rps, SPAN_S, one_in, long_range, **more)


KINDS: dict[str, Callable[[int], Traffic]] = {
    "chat 6/s": _chat(6.0),
    "chat 8/s": _chat(8.0),
    "chat 9/s": _chat(9.0),
    "1 document in 8, 2/s": _documents(2.0, 8),
    "1 document in 8, 3/s": _documents(3.0, 8),
    "bursts of documents": _documents(3.0, 8, burst_cv=3.0),
    "bursts of chat": _chat(6.0, burst_cv=3.0),
    "1 giant in 30": _documents(2.0, 30, (30_000, 60_000)),
    "rag": lambda seed: generate(Day(2.0, 1.5, 1800.0, 7200.0), named_mix("rag"), SPAN_S, seed),
    "long answers": _chat(2.0, output_mean=800.0),
}


@dataclass(frozen=True, eq=False)
class Run:
    """One run's requests in the order of their ends, with the first-token bound that GOOD_SHARE of them meet."""

    rows: RequestRows
    bound_s: float

    def raised(self, gain: float, new: BoolArray) -> RequestRows:
        """The same run, in which ``gain`` more of the requests under the new setting meet the bound."""
        milder_s = float(np.quantile(self.rows.ttft_s, GOOD_SHARE + gain))
        ttft_s = np.where(new, self.rows.ttft_s * self.bound_s / milder_s, self.rows.ttft_s)
        return self.rows._with({"ttft_s": ttft_s})

    def pushed(self, gain: float) -> RequestRows:
        """The new setting from the push on."""
        return self.raised(gain, self.rows.arrival_s >= PUSH_S)


@cache
def run_of(kind: str, seed: int) -> Run:
    """One kind of traffic on the drifting machine."""
    outcomes = simulate(KINDS[kind](seed), ENGINE, SETTING, MODEL, noise=_machine(seed)).outcomes
    ended = np.flatnonzero(np.isfinite(outcomes.finish_s))
    order = ended[np.argsort(outcomes.finish_s[ended], kind="stable")]
    n = len(order)
    ttft_s = (outcomes.first_token_s - outcomes.arrival_s)[order]
    zeros, nothing = np.zeros(n, dtype=np.int64), np.full(n, np.nan)
    rows = RequestRows(
        sequence=np.arange(n), arrival_s=outcomes.arrival_s[order], scheduled_s=nothing, ttft_s=ttft_s,
        finish_s=outcomes.finish_s[order], prompt_tokens=outcomes.prompt_tokens[order], cached_tokens=zeros,
        output_tokens=outcomes.output_tokens[order], gap_count=zeros, longest_gap_s=nothing, preemptions=zeros,
        ended=zeros, gap_over=np.zeros((n, 0), dtype=np.int64),
    )  # fmt: skip
    return Run(rows, float(np.quantile(ttft_s, GOOD_SHARE)))


def _machine(seed: int) -> StepNoise:
    chance = np.random.default_rng(seed)
    cells, keep = int(SPAN_S / CELL_S) + 1, math.exp(-CELL_S / DRIFT_S)
    level, pace = chance.normal(0.0, DRIFT), np.zeros(cells)
    for cell in range(cells):
        pace[cell] = level
        level = keep * level + math.sqrt(1.0 - keep * keep) * chance.normal(0.0, DRIFT)
    factors = np.exp(chance.normal(0.0, SCATTER, (1, 997)))
    return StepNoise(np.zeros(0), factors, np.exp(pace), CELL_S)


Judged = tuple[Verdict, float]  # the first verdict, and minutes from the push to it
NONE: Judged = (Verdict.INCONCLUSIVE, math.inf)


def by_controller(run: Run, gain: float) -> Judged:
    """What the controller's ``check`` says first."""
    rows, bound_s = run.pushed(gain), run.bound_s
    trial = Trial(
        push_cycle=1, boot_id="b", began_s=PUSH_S, since_s=-1e12, before={}, after={}, predicted_gain=0.0,
        twin_error=0.0, predicted_attainment=None, stride=False,
    )  # fmt: skip
    slo = Slo((Target("ttft", bound_s, 0.9),))
    before = _window(rows, PUSH_S)
    for now_s in np.arange(PUSH_S + CYCLE_S, SPAN_S, CYCLE_S):
        seen = SimpleNamespace(
            now_s=float(now_s), window=_window(rows, float(now_s)), slo=slo, verify_s=VERIFY_S, observed=Observed()
        )
        found = check(trial, before, cast("Seen", seen), OPTIONS, None)
        if found.keeps or found.verdict is Verdict.WORSE:
            return found.verdict, (float(now_s) - PUSH_S) / 60.0
    return NONE


def _window(rows: RequestRows, now_s: float) -> Window:
    kept = rows.select((rows.finish_s <= now_s) & (rows.finish_s >= now_s - MOST_BEFORE * VERIFY_S - VERIFY_S))
    return Window(MOST_BEFORE * VERIFY_S, boot_id="b", now_s=now_s, requests=kept)


def by_five_looks(run: Run, gain: float) -> Judged:
    """Growing windows, few looks, blocks of a minute."""
    rows, bound_s = run.pushed(gain), run.bound_s
    lengths = [FIRST_LOOK_S * 2**k for k in range(8) if FIRST_LOOK_S * 2**k <= SPAN_S - PUSH_S - SETTLE_S]
    was, was_variance, was_blocks = _share(rows, bound_s, PUSH_S - MOST_BEFORE * VERIFY_S, PUSH_S, BLOCK_S)
    for length_s in lengths:
        from_s = PUSH_S + SETTLE_S
        now, variance, blocks = _share(rows, bound_s, from_s, from_s + length_s, min(BLOCK_S, length_s / 4.0))
        both = variance + was_variance
        degrees = both**2 / (variance**2 / (blocks - 1) + was_variance**2 / (was_blocks - 1) + 1e-30)
        half = float(t.ppf(1.0 - FALSE_SHARE / len(lengths) / 2.0, degrees)) * math.sqrt(both)
        if abs(now - was) > half:
            return (Verdict.BETTER if now > was else Verdict.WORSE), (length_s + SETTLE_S) / 60.0
    return NONE


def by_switchback(run: Run, gain: float) -> Judged:
    """Old and new setting in pairs of blocks, each pair in random order."""
    since_s, last = run.rows.arrival_s - PUSH_S - SETTLE_S, PAIRS[-1]
    block = np.floor(since_s / BLOCK_S).astype(np.int64)
    inside = (block >= 0) & (block < 2 * last)
    pair = np.where(inside, block // 2, 0)
    new_first = np.random.default_rng(len(block)).integers(0, 2, last)
    new = inside & (block % 2 != new_first[pair])
    counted = inside & (since_s % BLOCK_S >= CARRY_OVER_S)
    good = (run.raised(gain, new).ttft_s <= run.bound_s).astype(float)
    shares = []
    for kept in (counted & new, counted & ~new):
        count = np.bincount(pair[kept], minlength=last)
        shares.append(np.bincount(pair[kept], weights=good[kept], minlength=last) / np.maximum(count, 1))
    for looked in PAIRS:
        found = (shares[0] - shares[1])[:looked]
        half = (
            float(t.ppf(1.0 - FALSE_SHARE / len(PAIRS) / 2.0, looked - 1))
            * float(found.std(ddof=1))
            / math.sqrt(looked)
        )
        if abs(found.mean()) > half:
            verdict = Verdict.BETTER if found.mean() > 0 else Verdict.WORSE
            return verdict, (SETTLE_S + 2 * BLOCK_S * looked) / 60.0
    return NONE


def _share(
    rows: RequestRows, bound_s: float, from_s: float, until_s: float, block_s: float
) -> tuple[float, float, int]:
    """Share of good requests by arrival, its variance from whole blocks, and their number."""
    blocks = int((until_s - from_s) / block_s + 1e-9)
    inside = (rows.arrival_s >= from_s) & (rows.arrival_s < from_s + blocks * block_s)
    block = ((rows.arrival_s[inside] - from_s) / block_s).astype(np.int64)
    count: FloatArray = np.bincount(block, minlength=blocks).astype(float)
    good = np.bincount(block, weights=(rows.ttft_s[inside] <= bound_s).astype(float), minlength=blocks)
    share = float(good.sum() / count.sum())
    rest = good - share * count
    return share, float((rest @ rest) / count.sum() ** 2 * blocks / (blocks - 1)), blocks


Test = Callable[[Run, float], Judged]
TESTS: dict[str, Test] = {"today": by_controller, "five_looks": by_five_looks, "switchback": by_switchback}


def bench(short: bool) -> Iterator[Figure]:
    """See the module."""
    kinds, trials = (list(KINDS)[2:4], 4) if short else (list(KINDS), 20)
    runs = [run_of(kind, seed) for kind in kinds for seed in range(trials)]
    base: dict[str, float] = {}
    for name, test in TESTS.items():
        yield from _figures(name, test, runs, base)


def _figures(name: str, test: Test, runs: list[Run], base: dict[str, float]) -> Iterator[Figure]:
    def figure(what: str, value: float, unit: str) -> Figure:
        base.setdefault(what, value)
        return Figure(f"{what}_{name}", value, unit, base[what] if name != "today" else None)

    wrong = [test(one, 0.0)[0] for one in runs]
    yield figure("false_verdict_share", 1.0 - wrong.count(Verdict.INCONCLUSIVE) / len(runs), "share")
    minutes: list[float] = []
    for gain in GAINS:
        found: list[Any] = [test(one, gain) for one in runs]
        missed = sum(verdict is not Verdict.BETTER for verdict, _ in found) / len(runs)
        yield figure(f"missed_gain_{round(gain * 100)}_points_share", missed, "share")
        minutes += [at for verdict, at in found if verdict is Verdict.BETTER]
    yield figure("median_minutes_to_verdict", median(minutes) if minutes else math.nan, "min")
