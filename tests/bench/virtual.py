"""Virtual time for benches: the controller with every stage and a real search, and our engine on a clock they turn.

The same arrivals are served by the untouched default, by the default once more with other chance in its step times
(what those two differ by is noise), and under the controller. A request is good when it had met every target by the
end of the run; one that was refused or not yet served is not.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from time import monotonic

import numpy as np

from rooftune.engine.options import GAP_TARGETS_S
from rooftune.policies.outcomes import BoolArray
from rooftune.policies.request import FloatArray, Setting
from rooftune.policies.slo import good
from rooftune.tuner.bench.mixes import AZURE_CONV, DEFAULT, ENGINE, MODEL, SLO
from rooftune.tuner.config import Config
from rooftune.tuner.config.sections import CadenceSection, EngineSection, GuardSection, SearchSection, TargetSection
from rooftune.tuner.control.options import LoopOptions, options_of
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.observe.rows import RequestRows
from rooftune.tuner.traffic.generate import document_mix
from rooftune.tuner.traffic.traces import load_traffic
from rooftune.tuner.traffic.workload import Traffic
from tests.control import live
from tests.control.twin_searcher import twin_rig

DOCUMENTS, CONVERSATIONS = "document mix", "azure-conv"
NOISE_SIGMAS = 2.58
LEAST_WINDOW = 10  # requests, below which a window says nothing
EVEN = 1.0


def mixes() -> tuple[str, ...]:
    """The mixes whose data is here."""
    return (DOCUMENTS, CONVERSATIONS) if AZURE_CONV.is_file() else (DOCUMENTS,)


@cache
def _conversations() -> Traffic:
    return load_traffic(AZURE_CONV)


def mix_at(mix: str, rate_rps: float, span_s: float, seed: int) -> Traffic:
    """Poisson arrivals within the span; the trace lends its lengths, drawn anew for each seed."""
    if mix == DOCUMENTS:
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


class _Collector:
    """Reads an engine's requests before its ring drops them."""

    def __init__(self, engine: live.LiveEngine) -> None:
        self._engine, self._after, self._from_s = engine, -1, engine.clock.now_s
        self.pages: list[RequestRows] = []

    def read(self) -> None:
        while (page := self._engine.running.requests_after(self._after)).sequence:
            self.pages.append(RequestRows.from_wire(page))
            self._after = page.next

    def served(self, traffic: Traffic, records: Sequence[tuple[float, CycleRecord]] = ()) -> Served:
        self.read()
        met = np.zeros(len(traffic), dtype=np.bool_)
        if self.pages:
            rows = RequestRows.join(self.pages)
            place = np.searchsorted(traffic.arrival_s + self._from_s, rows.arrival_s - 1e-9)
            met[place] = good(rows.outcomes(), SLO)
        return Served(traffic.arrival_s, met, tuple(records))


READ_S = 60.0


def fixed(traffic: Traffic, span_s: float, setting: Setting = DEFAULT, seed: int = 1, pace: Pace = even) -> Served:
    """One setting from the start to the end."""
    engine = engine_for(traffic, setting, seed)
    seen = _Collector(engine)
    for at_s in np.arange(0.0, span_s, READ_S):
        engine.slow = pace(float(at_s))
        engine.advance(min(READ_S, span_s - float(at_s)))
        seen.read()
    return seen.served(traffic)


def operator_options(seed: int, **cadence: float) -> LoopOptions:
    """Live at once, with every knob of budget and order, and otherwise the configuration's defaults."""
    config = Config(
        engine=EngineSection(url="http://engine.test"),
        mode="live",
        targets=(
            TargetSection(metric="ttft", quantile=0.99, bound="2s"),
            TargetSection(metric="gap", quantile=0.99, bound="30ms"),
        ),
        knobs=("step_tokens", "chunk_cap_tokens", "order_policy"),
        cadence=CadenceSection(**cadence),  # type: ignore[arg-type]  # pydantic checks them
        guard=GuardSection(min_shadow_s=0.0, largest_ratio=4.0, dwell_s=60.0),
        search=SearchSection(trials=40, seed=seed),
    )
    assert config.slo() == SLO
    return options_of(config, None)


def controlled(traffic: Traffic, span_s: float, options: LoopOptions, seed: int = 1, pace: Pace = even) -> Served:
    """Under the controller from the start to the end. Searches take no virtual time but the cycle they end in."""
    run = twin_rig(engine=engine_for(traffic, seed=seed), options=options)
    seen, records = _Collector(run.engine), []
    for at_s in np.arange(0.0, span_s, options.cycle_s):
        run.engine.slow = pace(float(at_s))
        made = run.run(1)
        records.append((float(at_s) + options.cycle_s, made[0]))
        seen.read()
    return seen.served(traffic, records)


def capacity_rps(mix: str, requests: int) -> float:
    """What the default serves per second while requests never run out, between a quarter and three quarters of them."""
    traffic = mix_at(mix, 4.0, requests / 4.0, seed=0)
    at_once = replace(traffic, arrival_s=np.arange(len(traffic)) * 1e-6)
    engine = engine_for(at_once)
    seen = _Collector(engine)
    while sum(map(len, seen.pages)) < len(at_once):
        engine.advance(READ_S)
        seen.read()
    ended = np.concatenate([page.finish_s for page in seen.pages])
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
