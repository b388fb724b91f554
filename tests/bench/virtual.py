"""Virtual time for benches: the controller with every stage and a real search, and our engine on a clock they turn.

The same arrivals are served by the untouched default, by the default once more with other chance in its step times
(what those two differ by is noise), and under the controller. A request is good when it had met every target by the
end of the run; one that was refused or not yet served is not.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from time import monotonic

import numpy as np

from rooftune.engine.options import GAP_TARGETS_S
from rooftune.policies.outcomes import BoolArray
from rooftune.policies.request import FloatArray, Setting
from rooftune.policies.slo import Slo, Target, good
from rooftune.tuner.bench.mixes import AZURE_CONV, DEFAULT, ENGINE, MODEL
from rooftune.tuner.config import Config
from rooftune.tuner.config.sections import CadenceSection, EngineSection, GuardSection, SearchSection, TargetSection
from rooftune.tuner.control.options import LoopOptions, options_of
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.observe.rows import RequestRows
from rooftune.tuner.sim.noise import StepNoise
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.traffic.generate import document_mix
from rooftune.tuner.traffic.traces import load_traffic
from rooftune.tuner.traffic.workload import Traffic
from tests.control import live
from tests.control.twin_searcher import twin_rig

DOCUMENTS, CONVERSATIONS, MILD = "document mix", "azure-conv", "document mix, mild"
# The default's long steps break the first target on gaps at any load; these it can meet, so there is something to lose.
MILD_GAP_S = 0.15
NOISE_SIGMAS = 2.58
LEAST_WINDOW = 10  # requests, below which a window says nothing
EVEN = 1.0


def targets(mix: str) -> Slo:
    """First token within 2 s; at most 1 % of a request's gaps above 30 ms, or above 150 ms for the mild ones."""
    gap_s = MILD_GAP_S if mix == MILD else 0.03
    return Slo((Target("ttft", 2.0, 0.99), Target("gap", gap_s, 0.99)))


@cache
def _conversations() -> Traffic:
    return load_traffic(AZURE_CONV)


def mix_at(mix: str, rate_rps: float, span_s: float, seed: int) -> Traffic:
    """Poisson arrivals within the span; the trace lends its lengths, drawn anew for each seed."""
    if mix != CONVERSATIONS:
        return document_mix(seed, rate_rps, span_s, 8, (16_000, 32_000))
    chance, whole = np.random.default_rng(seed), _conversations()
    arrival_s = np.cumsum(chance.exponential(1.0 / rate_rps, int(rate_rps * span_s * 1.2) + 50))
    arrival_s = arrival_s[arrival_s < span_s]
    taken = chance.integers(0, len(whole), len(arrival_s))
    none = np.zeros(len(taken), dtype=np.int64)
    return Traffic(arrival_s, whole.prompt_tokens[taken], whole.output_tokens[taken], none, none, name=mix)


@dataclass(frozen=True)
class _Listed(live.Traffic):
    rows: Traffic | None = None

    def requests(self, seed: int, from_s: float = 0.0) -> Iterator[tuple[float, int, int]]:
        assert self.rows is not None
        columns = (self.rows.arrival_s + from_s, self.rows.prompt_tokens, self.rows.output_tokens)
        yield from zip(*(column.tolist() for column in columns), strict=True)
        yield inf, 1, 1


def engine_for(traffic: Traffic, setting: Setting = DEFAULT, seed: int = 1) -> live.LiveEngine:
    """Our engine with these arrivals, booted with the setting; its queue takes them all."""
    options = {"ceiling_tokens": ENGINE.boot.ceiling_tokens, "max_running": DEFAULT.max_running}
    return live.LiveEngine(
        _Listed(rows=traffic), setting, seed, MODEL, ENGINE.kv_blocks,
        model_tokens=int((traffic.prompt_tokens + traffic.output_tokens).max()) + 1,
        options=options | {"gap_bounds_s": GAP_TARGETS_S, "max_queue": len(traffic)},
    )  # fmt: skip


Pace = Callable[[float], float]  # seconds from the start -> factor on the time of steps


def even(at_s: float) -> float:
    """Never slower."""
    return EVEN


@dataclass(frozen=True, eq=False)
class Served:
    """good: by arrival. records: of every cycle, with its instant in seconds from the start."""

    arrival_s: FloatArray
    good: BoolArray
    records: tuple[tuple[float, CycleRecord], ...] = ()

    @property
    def share(self) -> float:
        return float(self.good.mean())


class Collector:
    """Reads an engine's requests before its ring drops them."""

    def __init__(self, engine: live.LiveEngine) -> None:
        self._engine, self._after, self._from_s = engine, -1, engine.clock.now_s
        self.pages: list[RequestRows] = []

    def read(self) -> None:
        while (page := self._engine.running.requests_after(self._after)).sequence:
            self.pages.append(RequestRows.from_wire(page))
            self._after = page.next

    def served(self, traffic: Traffic, slo: Slo, records: Sequence[tuple[float, CycleRecord]]) -> Served:
        self.read()
        met = np.zeros(len(traffic), dtype=np.bool_)
        if self.pages:
            rows = RequestRows.join(self.pages)
            place = np.searchsorted(traffic.arrival_s + self._from_s, rows.arrival_s - 1e-9)
            met[place] = good(rows.outcomes(), slo)
        return Served(traffic.arrival_s, met, tuple(records))


JITTER, DRAWS = 0.02, 9973
CELL_S = 60.0


def fixed(
    traffic: Traffic, span_s: float, slo: Slo, setting: Setting = DEFAULT, seed: int = 1, pace: Pace = even
) -> Served:
    """One setting from the start to the end: the twin, which plans as the engine does and is far faster."""
    factors = np.random.default_rng(seed).lognormal(0.0, JITTER, (1, DRAWS))
    cells = np.array([pace(float(at_s)) for at_s in np.arange(0.0, 4.0 * span_s, CELL_S)])
    noise = StepNoise(np.zeros(0), factors, cells, CELL_S)
    outcomes = simulate(traffic, ENGINE, setting, MODEL, gap_bounds_s=slo.gap_bounds(), noise=noise).outcomes
    return Served(traffic.arrival_s, good(outcomes, slo) & (outcomes.finish_s <= span_s))


def operator_options(slo: Slo, seed: int, trials: int, cadence: Mapping[str, float]) -> LoopOptions:
    """Live at once, with the knobs of budget, cap and order, and otherwise the configuration's defaults."""
    config = Config(
        engine=EngineSection(url="http://engine.test"),
        mode="live",
        targets=tuple(
            TargetSection(metric=one.metric, quantile=one.quantile, bound=f"{one.bound_s:g}s") for one in slo.targets
        ),
        knobs=("step_tokens", "chunk_cap_tokens", "order_policy"),
        cadence=CadenceSection(**cadence),  # type: ignore[arg-type]  # pydantic checks them
        guard=GuardSection(min_shadow_s=0.0, dwell_s=cadence["verify_s"]),
        search=SearchSection(trials=trials, seed=seed),
    )
    return options_of(config, None)


def controlled(traffic: Traffic, span_s: float, options: LoopOptions, seed: int = 1, pace: Pace = even) -> Served:
    """Under the controller from the start to the end. Searches take no virtual time but the cycle they end in."""
    run = twin_rig(engine=engine_for(traffic, seed=seed), options=options)
    seen, records = Collector(run.engine), []
    for at_s in np.arange(0.0, span_s, options.cycle_s):
        run.engine.slow = pace(float(at_s))
        made = run.run(1)
        records.append((float(at_s) + options.cycle_s, made[0]))
        seen.read()
    return seen.served(traffic, options.slo, records)


@cache
def capacity_rps(mix: str, requests: int = 2000) -> float:
    """What the default serves per second while requests never run out, between a quarter and three quarters of them."""
    traffic = mix_at(mix, 4.0, requests / 4.0, seed=0)
    at_once = replace(traffic, arrival_s=np.arange(len(traffic)) * 1e-6)
    ended = np.sort(simulate(at_once, ENGINE, DEFAULT, MODEL).outcomes.finish_s)
    first, last = len(ended) // 4, 3 * len(ended) // 4
    return (last - first) / float(ended[last] - ended[first])


@dataclass(frozen=True, eq=False)
class Windows:
    """Sliding windows over the same arrivals: the end of each in seconds, its requests, and how many fewer were good
    in ``other`` than in ``one`` (negative: more), and in how many requests they differ."""

    end_s: FloatArray
    requests: FloatArray
    lost: FloatArray
    differ: FloatArray


def windows(one: Served, other: Served, length_s: float, step_s: float, span_s: float) -> Windows:
    """Every window that lies within the span."""
    end_s = np.arange(length_s, span_s + step_s / 2.0, step_s)
    low, high = np.searchsorted(one.arrival_s, end_s - length_s), np.searchsorted(one.arrival_s, end_s)

    def total(values: FloatArray) -> FloatArray:
        sums = np.concatenate([[0.0], np.cumsum(values)])
        found: FloatArray = sums[high] - sums[low]
        return found

    lost = one.good.astype(float) - other.good
    return Windows(end_s, (high - low).astype(float), total(lost), total(np.abs(lost)))


def below(found: Windows, same: Windows) -> BoolArray:
    """Windows with fewer good requests beyond noise: more than chance gives requests that differ independently, and
    a greater share than any window loses between two runs of one setting (``same``), where backlogs carry chance on.
    """
    enough = found.requests >= LEAST_WINDOW
    by_chance = found.lost <= NOISE_SIGMAS * np.sqrt(found.differ)
    usual = float(np.max(np.abs(same.lost) / np.maximum(same.requests, LEAST_WINDOW), initial=0.0))
    result: BoolArray = enough & ~by_chance & (found.lost > usual * found.requests)
    return result


class Progress:
    """One line on standard error for each thing done."""

    def __init__(self, bench: str, total: int) -> None:
        self._bench, self._total, self._done, self._began_s = bench, total, 0, monotonic()

    def tell(self, what: str) -> None:
        self._done += 1
        passed_s = monotonic() - self._began_s
        left_min = passed_s / self._done * (self._total - self._done) / 60.0
        print(
            f"{self._bench}: {self._done} of {self._total}, {what} ({passed_s:.0f} s, about {left_min:.0f} min left)",
            file=sys.stderr, flush=True,
        )  # fmt: skip
