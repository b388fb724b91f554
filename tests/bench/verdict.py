"""Bench ``verdict``: how often the verdict on a push is wrong, and how long it takes.

The twin serves ten kinds of traffic for 45 minutes. Steps scatter by 3 %, and the machine's speed drifts by 10 %
(standard deviation, correlated over five minutes). A trial begins at minute 15 and has 30 minutes. In an A/A trial both
settings are the same; in an A/B trial the share of good requests under the new one is higher by a known number of
points: a milder bound on the first token, chosen from the same run, so that all else is as it was. ``restless`` trials
are A/A while the load steps up or down, or goes beyond what the machine carries. In ``carry_over`` trials the twin
really changes its budget from block to block, near the capacity of the smaller one, so that a backlog goes from block
to block; the true gain is that of long runs.

before_after: one look of 2.58 sigma in every cycle at a sliding window, as Rooftune judged until it took turns.
switchback: ``policies/proof/switchback.py``; ``_60s``: in blocks of 60 s instead of 30 s. always_valid: the same pairs,
looked at after each, by the mixture test that avinf offers (Lindon et al. 2022). ``_twin``: adjusted by a twin that is
right but for the drift; ``_poor_twin``: by one that is 25 % too fast. ``short``: two kinds, six trials each.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from statistics import median

import numpy as np

from rooftune.policies.commands import Figure
from rooftune.policies.outcomes import BoolArray
from rooftune.policies.proof.switchback import PAIRS, Block, harmful, judge_pairs, schedule
from rooftune.policies.request import Boot, FloatArray, IntArray, Setting
from rooftune.policies.step_time import NAMED_MODELS, StepModel
from rooftune.policies.verify import Verdict
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.noise import QUIET, StepNoise
from rooftune.tuner.sim.twin import Change, simulate
from rooftune.tuner.traffic.generate import Day, document_mix, generate, named_mix
from rooftune.tuner.traffic.workload import Traffic

MODEL = NAMED_MODELS["8b-2tbs"]
FAST = StepModel(*(0.75 * value for value in MODEL[:6]), MODEL.sharpness)
ENGINE = Engine(Boot(16_384, 16, 1, 1, 0, 0), 600_000 // 16, 256)
SETTING, SMALL = Setting(2048, max_running=256), Setting(256, max_running=256)
PUSH_S, SPAN_S, BEFORE_S = 900.0, 2700.0, 600.0
BLOCK_S, SETTLE_S = 30.0, 5.0
GOOD_SHARE, QUIET_SHARE = 0.5, 0.9  # the first where the share scatters most, the second before a restless trial
GAINS, HARM = (0.05, 0.15, 0.40), -0.30
DRIFT, DRIFT_S, CELL_S, SCATTER = 0.10, 300.0, 10.0, 0.03
CARRY_RATE_RPS, CARRY_BOUND_S = 7.0, 1.0  # the small budget carries about 7.5 requests/s
NO_TWIN, RIGHT, POOR = 0, 1, 2  # whose twin: a row of Run.ttft_s


def _documents(
    rate_rps: float, one_in: float = 8.0, long_range: tuple[int, int] = (8_000, 16_000), **more: float
) -> Callable[[int], Traffic]:
    return lambda seed: document_mix(seed, rate_rps, SPAN_S, one_in, long_range, **more)


def _stepping(before_rps: float, after_rps: float, at_s: float) -> Callable[[int], Traffic]:
    """The document mix at one rate until ``at_s``, and at another one from then on."""

    def traffic(seed: int) -> Traffic:
        most = max(before_rps, after_rps)
        one = document_mix(seed, most, SPAN_S, 8.0, (8_000, 16_000))
        passed_s = [0.0, at_s * before_rps / most, (at_s * before_rps + (SPAN_S - at_s) * after_rps) / most]
        arrival_s = np.interp(one.arrival_s, passed_s, [0.0, at_s, SPAN_S], right=math.inf)
        kept = np.isfinite(arrival_s)
        columns = (one.prompt_tokens, one.output_tokens, one.cached_tokens, one.tenant)
        return Traffic(arrival_s[kept], *(column[kept] for column in columns))

    return traffic


KINDS: dict[str, Callable[[int], Traffic]] = {
    "chat_6": _documents(6.0, 1e6),
    "chat_8": _documents(8.0, 1e6),
    "chat_9": _documents(9.0, 1e6),
    "documents_2": _documents(2.0),
    "documents_3": _documents(3.0),
    "bursts_of_documents": _documents(3.0, burst_cv=3.0),
    "bursts_of_chat": _documents(6.0, 1e6, burst_cv=3.0),
    "giants": _documents(2.0, 30.0, (30_000, 60_000)),
    "rag": lambda seed: generate(Day(2.0, 1.5, 1800.0, 7200.0), named_mix("rag"), SPAN_S, seed),
    "long_answers": _documents(2.0, 1e6, output_mean=800.0),
}
RESTLESS = {
    "step_up_with_the_push": _stepping(3.0, 6.0, PUSH_S),
    "step_up": _stepping(3.0, 6.0, PUSH_S + 240.0),
    "step_down": _stepping(6.0, 3.0, PUSH_S + 240.0),
    "overload": _stepping(6.0, 10.4, PUSH_S),  # 1.1 of what the machine carries
}


@dataclass(frozen=True, eq=False)
class Run:
    """One run by arrival. ttft_s: on the drifting machine, by the right and by the poor twin, shape (3, n).

    share: of good requests, over the whole run (A/A and A/B) or before the trial (restless).
    """

    arrival_s: FloatArray
    ttft_s: FloatArray
    share: float
    counts_s: float

    def good(self, gain: float) -> FloatArray:
        """1 for each request within the bound that ``share`` + ``gain`` meet on the machine and by each twin."""
        return (self.ttft_s <= _bounds_s(self, gain)[:, None]).astype(float)


@cache
def _bounds_s(run: Run, gain: float) -> FloatArray:
    counted = run.ttft_s[:, run.arrival_s < run.counts_s]
    bounds_s: FloatArray = np.quantile(counted, run.share + gain, axis=1)
    return bounds_s


@cache
def run_of(kind: str, seed: int) -> Run:
    """One kind of traffic on the drifting machine, and what two twins foretell."""
    traffic = (KINDS | RESTLESS)[kind](seed)
    replays = ((MODEL, _machine(seed)), (MODEL, QUIET), (FAST, QUIET))
    ttft_s = np.array([_ttft_s(traffic, SETTING, model, noise) for model, noise in replays])
    restless = kind in RESTLESS
    share, counts_s = (QUIET_SHARE, PUSH_S) if restless else (GOOD_SHARE, SPAN_S)
    return Run(traffic.arrival_s, ttft_s, share, counts_s)


def _ttft_s(
    traffic: Traffic, setting: Setting, model: StepModel, noise: StepNoise, changes: Sequence[Change] = ()
) -> FloatArray:
    """Time to the first token of each request; inf without one."""
    outcomes = simulate(traffic, ENGINE, setting, model, noise=noise, changes=changes).outcomes
    return np.nan_to_num(outcomes.first_token_s - outcomes.arrival_s, nan=math.inf)


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
Test = Callable[[Run, float, int], Judged]


def before_after(run: Run, gain: float, seed: int, twin: int = NO_TWIN) -> Judged:
    """A look in every cycle at up to two minutes after the push, against up to four times as long before it."""
    was, raised = run.good(0.0), run.good(gain)
    residue = np.where(run.arrival_s >= PUSH_S, raised[0], was[0])
    covariate = (was + raised)[twin] / 2.0 if twin else np.zeros(len(residue))
    for now_s in np.arange(PUSH_S + SETTLE_S + 15.0, SPAN_S, 15.0):
        length_s = min(float(now_s) - PUSH_S - SETTLE_S, 120.0)
        ends = np.searchsorted(run.arrival_s, [PUSH_S - 4.0 * length_s, PUSH_S, now_s - length_s, now_s])
        sides = [slice(ends[0], ends[1]), slice(ends[2], ends[3])]
        if min(side.stop - side.start for side in sides) < 30:
            continue
        slope = _slope(residue[sides[0]], covariate[sides[0]])
        (share, variance), (now, now_variance) = (_mean(residue[s] - slope * covariate[s]) for s in sides)
        if abs(now - share) > 2.58 * math.sqrt(variance + now_variance):
            return (Verdict.BETTER if now > share else Verdict.WORSE), (float(now_s) - PUSH_S) / 60.0
    return NONE


def _mean(values: FloatArray) -> tuple[float, float]:
    """Mean and its variance, by 24 blocks of neighbouring requests."""
    starts = np.arange(24) * len(values) // 24
    means = np.add.reduceat(values, starts) / np.diff(starts, append=len(values))
    return float(values.mean()), float(means.var(ddof=1)) / len(means)


def _slope(values: FloatArray, covariate: FloatArray) -> float:
    spread = float(covariate.var())
    return float(np.mean((values - values.mean()) * (covariate - covariate.mean()))) / spread if spread else 0.0


def blocks_of(
    run: Run, gain: float, seed: int, twin: int = NO_TWIN, block_s: float = BLOCK_S
) -> tuple[list[Block], list[Block]]:
    """A trial's blocks and those of the ten minutes before it."""
    before, pairs = int(BEFORE_S / block_s), int((SPAN_S - PUSH_S) / block_s) // 2
    arms = np.array((False,) * before + schedule(seed)[: 2 * pairs])
    block, counted = _placed(run.arrival_s, len(arms), block_s)
    was, raised = run.good(0.0), run.good(gain)
    good = np.where(arms[block], raised[0], was[0])
    expected = (was + raised)[twin] / 2.0 if twin else np.full(len(block), math.nan)
    blocks = _tallied(arms, block[counted], good[counted], expected[counted])
    return blocks[before:], blocks[:before]


def _placed(arrival_s: FloatArray, count: int, block_s: float = BLOCK_S) -> tuple[IntArray, BoolArray]:
    """Block of each request and whether it counts there."""
    since_s = arrival_s - PUSH_S + BEFORE_S
    block = np.floor(since_s / block_s).astype(np.int64)
    counted = (block >= 0) & (block < count) & (since_s % block_s >= SETTLE_S)
    return np.clip(block, 0, count - 1), counted


def _tallied(arms: BoolArray, block: IntArray, good: FloatArray, expected: FloatArray) -> list[Block]:
    judged, well, foretold = (
        np.bincount(block, weights=one, minlength=len(arms)) for one in (np.ones(len(block)), good, expected)
    )
    shares = foretold / np.maximum(judged, 1.0)
    columns = (arms.tolist(), well.tolist(), judged.tolist(), shares.tolist())
    return [Block(*row) for row in zip(*columns, strict=True)]


def switchback(run: Run, gain: float, seed: int, twin: int = NO_TWIN, block_s: float = BLOCK_S) -> Judged:
    """Both settings take turns."""
    return first_verdict(*blocks_of(run, gain, seed, twin, block_s), block_s)


def first_verdict(blocks: Sequence[Block], history: Sequence[Block], block_s: float = BLOCK_S) -> Judged:
    for pairs in PAIRS:
        verdict = judge_pairs(blocks[: 2 * pairs], history).verdict
        if verdict is not Verdict.INCONCLUSIVE:
            return verdict, 2 * block_s * pairs / 60.0
    return NONE


def always_valid(run: Run, gain: float, seed: int) -> Judged:
    """The pairs of the switchback, looked at after each by an always-valid t test (error 5 %, mixture weight 1)."""
    blocks, _ = blocks_of(run, gain, seed)
    share = [block.good / max(block.judged, 1.0) * (1 if block.new else -1) for block in blocks]
    paired = np.array(share[::2]) + np.array(share[1::2])
    for pairs in range(2, len(paired) + 1):
        seen, keep = paired[:pairs], 1.0 / (1.0 + pairs)
        square = pairs * float(seen.mean()) ** 2 / max(float(seen.var(ddof=1)), 1e-12) / (pairs - 1.0)
        evidence = math.sqrt(keep) * ((1.0 + square) / (1.0 + keep * square)) ** (pairs / 2.0)
        if evidence >= 1.0 / 0.05:
            return (Verdict.BETTER if seen.mean() > 0.0 else Verdict.WORSE), 2 * BLOCK_S * pairs / 60.0
    return NONE


TESTS: dict[str, Test] = {
    "before_after": before_after,
    "before_after_twin": partial(before_after, twin=RIGHT),
    "always_valid": always_valid,
    "switchback_60s": partial(switchback, block_s=60.0),
    "switchback": switchback,
    "switchback_poor_twin": partial(switchback, twin=POOR),
    "switchback_twin": partial(switchback, twin=RIGHT),
}


def bench(short: bool) -> Iterator[Figure]:
    """See the module."""
    kinds, trials = (list(KINDS)[3:5], 6) if short else (list(KINDS), 40)
    runs = {kind: [run_of(kind, seed) for seed in range(trials)] for kind in kinds}
    restless = {kind: [run_of(kind, seed) for seed in range(trials)] for kind in list(RESTLESS)[: len(kinds)]}
    base: dict[str, float] = {}

    def figure(what: str, name: str, value: float, unit: str = "share") -> Figure:
        base.setdefault(what, value)
        return Figure(f"{what}_{name}", value, unit, base[what] if name != "before_after" else None)

    for name, test in TESTS.items():
        wrong = {kind: _false(test, ours) for kind, ours in runs.items()}
        yield figure("false_verdict_share", name, float(np.mean(list(wrong.values()))))
        yield figure("false_verdict_share_worst_kind", name, max(wrong.values()))
        restless_wrong = {kind: _false(test, ours) for kind, ours in restless.items()}
        yield figure("false_verdict_share_restless", name, float(np.mean(list(restless_wrong.values()))))
        if name == "switchback":
            for kind, share in (wrong | restless_wrong).items():
                yield Figure(f"false_verdict_share_{kind}", share, "share")
        minutes: list[float] = []
        for gain in GAINS:
            found = [test(run, gain, seed) for ours in runs.values() for seed, run in enumerate(ours)]
            right = [at for verdict, at in found if verdict is Verdict.BETTER]
            yield figure(f"missed_gain_{round(gain * 100)}_points_share", name, 1.0 - len(right) / len(found))
            if right:
                yield figure(f"median_minutes_to_{round(gain * 100)}_points", name, median(right), "min")
            minutes += right
        if minutes:
            yield figure("median_minutes_to_verdict", name, median(minutes), "min")
    yield from _caution(runs)
    yield from _carry_over(trials)


def _false(test: Test, runs: list[Run]) -> float:
    return sum(test(run, 0.0, seed)[0] is not Verdict.INCONCLUSIVE for seed, run in enumerate(runs)) / len(runs)


def given_up(blocks: Sequence[Block], history: Sequence[Block]) -> float:
    """After how many blocks under the new setting caution ends the trial; inf: never."""
    for until, block in enumerate(blocks, 1):
        if block.new and harmful(blocks[:until], history):
            return float(sum(one.new for one in blocks[:until]))
    return math.inf


def _caution(runs: dict[str, list[Run]]) -> Iterator[Figure]:
    """How soon caution gives up a setting that costs 30 points, and how often one that costs nothing."""

    def blocks(gain: float) -> FloatArray:
        every = ((run, seed) for ours in runs.values() for seed, run in enumerate(ours))
        return np.array([given_up(*blocks_of(run, gain, seed)) for run, seed in every])

    yield Figure("harm_given_up_within_2_blocks_share", float((blocks(HARM) <= 2).mean()), "share")
    yield Figure("nothing_given_up_share", float(np.isfinite(blocks(0.0)).mean()), "share")
    yield Figure("gain_15_given_up_share", float(np.isfinite(blocks(0.15)).mean()), "share")


def _carry_over(trials: int) -> Iterator[Figure]:
    """The budget really changes from block to block; a twin foretells both budgets without turns."""
    alone = {s: [_share(_carried(s, seed, ())[0]) for seed in range(max(trials // 4, 3))] for s in (SMALL, SETTING)}
    true = float(np.mean(alone[SETTING]) - np.mean(alone[SMALL]))
    found: dict[str, list[Judged]] = {"switchback": [], "switchback_twin": []}
    gains = []
    for seed in range(trials):
        arms = schedule(seed)
        turns = [(k, new) for k, (was, new) in enumerate(pairwise((False, *arms))) if was is not new]
        changes = [Change(PUSH_S + k * BLOCK_S, SETTING if new else SMALL) for k, new in turns]
        good, expected, arrival_s = *_carried(SMALL, seed, changes), _carry_traffic(seed).arrival_s
        before = (False,) * int(BEFORE_S / BLOCK_S)
        block, counted = _placed(arrival_s, len(before) + len(arms))
        for name, known in (("switchback", np.full(len(block), math.nan)), ("switchback_twin", expected)):
            blocks = _tallied(np.array(before + arms), block[counted], good[counted], known[counted])
            found[name].append(first_verdict(blocks[len(before) :], blocks[: len(before)]))
        gains.append(judge_pairs(blocks[len(before) :], blocks[: len(before)]).gain)
    yield Figure("carry_over_true_gain", true, "share")
    yield Figure("carry_over_measured_gain", float(np.mean(gains)), "share", true)
    for name, judged in found.items():
        right = [at for verdict, at in judged if verdict is Verdict.BETTER]
        yield Figure(f"carry_over_missed_gain_share_{name}", 1.0 - len(right) / len(judged), "share")
        if right:
            yield Figure(f"carry_over_median_minutes_{name}", median(right), "min")


def _carry_traffic(seed: int) -> Traffic:
    return document_mix(seed, CARRY_RATE_RPS, SPAN_S, 8.0, (8_000, 16_000))


def _carried(setting: Setting, seed: int, changes: Sequence[Change]) -> tuple[FloatArray, FloatArray]:
    """Good requests on the machine, and what the twin foretells under both budgets on average."""
    traffic = _carry_traffic(seed)
    live = _ttft_s(traffic, setting, MODEL, _machine(seed), changes) <= CARRY_BOUND_S
    twin = [_ttft_s(traffic, one, MODEL, QUIET) <= CARRY_BOUND_S for one in (SMALL, SETTING)] if changes else [live]
    return live.astype(float), np.mean(twin, axis=0)


def _share(good: FloatArray) -> float:
    """Without the first sixth, while the engine fills."""
    return float(good[len(good) // 6 :].mean())
