"""Bench ``live-gain``: what the controller brings a running engine, against an honest sweep and against the default.

A fixed list, every eighth prompt long, at 60 to 85 % of the rate at which the default's queue grows; a request is good
when its TTFT and its longest gap are within the default's own p70. First every budget and cap in rounds of that list,
twice, interleaved; then a fresh engine with the controller live and cold, and the second half of its rounds counts;
then the default again. Last a list at 1.2 times the greatest rate, at the default and beside a cold controller
(``live_overload``). Times are the engine's own. ``short``: an engine without a model, fewer settings, once.
"""

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np
import yaml

from rooftune.policies import wire
from rooftune.policies.commands import Figure
from rooftune.policies.errors import MissingDataError, RefusedError, UnreachableError
from rooftune.policies.quantiles import quantile
from rooftune.policies.request import Setting
from rooftune.tuner.bench.children import Child, Children, one_core_left, run_to_end, say
from rooftune.tuner.bench.live_gain_rounds import (
    Bed,
    Round,
    Sizes,
    best_of,
    listed,
    ratio_interval,
    serve_bed,
    trial_cost,
)
from rooftune.tuner.bench.live_overload import Pair, calm_bounds, pair
from rooftune.tuner.bench.live_overload import figures as overload_figures
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.state.store import StateFile
from rooftune.tuner.observe.rows import BoolArray, FloatArray
from rooftune.tuner.sim.twin import warm
from rooftune.tuner.traffic.workload import Traffic

T = TypeVar("T")
BOOT_TOKENS = 2048
MAX_RUNNING = 32
DEFAULT = Setting(BOOT_TOKENS, max_running=MAX_RUNNING)
# Of the rate at which the queue grows at the default: the middle of 60 to 85 %.
LOAD = 0.72
OVERLOAD = 1.2
TARGET_QUANTILE = 0.7
MAKE_S = 240.0


@dataclass(frozen=True)
class Size:
    """One form of a bench. settings are swept ``repeats`` times; rounds: of the controller, and of the default before
    and after it; cadence: of the controller, keys of the configuration; dwell_s: least time between two pushes;
    overload_s: how long an overload is offered."""

    sizes: Sizes
    span_s: float
    settings: tuple[Setting, ...]
    repeats: int
    tuned_rounds: int
    default_rounds: int
    cadence: Mapping[str, float]
    trials: int
    dwell_s: float = 2.0
    timeout_s: float = 5.0
    overload_s: float = 0.0


def cells(default: Setting, budgets: Sequence[int], caps: Sequence[int]) -> tuple[Setting, ...]:
    """Every budget with every cap."""
    return tuple(default._replace(step_tokens=budget, chunk_cap_tokens=cap) for budget, cap in product(budgets, caps))


SHORT = Size(
    sizes=Sizes((50, 300), (2000, 5000), (6, 16)),
    span_s=1.3,
    settings=cells(DEFAULT, (256, 2048), (0, 128)),
    repeats=1,
    tuned_rounds=30,
    default_rounds=1,
    cadence={"cycle_s": 0.5, "window_s": 20, "search_every_s": 4, "search_requests": 30, "settle_s": 0.2}
    | {"verify_s": 2.4, "verify_min_requests": 20, "lease_s": 10},
    trials=30,
    overload_s=30.0,
)
FULL = Size(
    sizes=Sizes((20, 120), (1000, 1800), (8, 32)),
    span_s=15.0,
    settings=cells(DEFAULT, (32, 64, 128, 256, 384, 512, 1024, 2048), (0, 32, 128, 256)),
    repeats=2,
    tuned_rounds=16,
    default_rounds=3,
    cadence={"cycle_s": 2, "window_s": 90, "search_every_s": 60, "search_requests": 40, "settle_s": 1}
    | {"verify_s": 16, "verify_min_requests": 20, "lease_s": 30},
    trials=80,
    overload_s=300.0,
)


def bench(short: bool) -> Iterator[Figure]:
    """share_of_best_sweep, ratio_to_default with its interval, trial_cost, and what they are made of."""
    size = SHORT if short else FULL
    warm()  # or the controller's child compiles it in rounds that count
    with tempfile.TemporaryDirectory(prefix="rooftune-live-gain-") as folder, Children(Path(folder)) as children:
        work = Path(folder)
        model = "fake:8b-2tbs" if short else _made_model(children, work)
        bed = bed_of(children, work / "sweep", model)
        most_rps = bed.greatest_rps(size.sizes, size.span_s * 3, times=1)
        swept = sweep(bed, size, most_rps)
        bed.close()
        bed = bed_of(children, work / "tuned", model)
        tuned, _ = tune(bed, size, swept, Child.stop)  # a controller that is stopped gives its lease back
        bed.close()
        bed = bed_of(children, work / "overload", model)
        overload = overloaded(bed, size, most_rps)
        bed.close()
    yield from _figures(swept, tuned)
    yield from overload_figures([overload])


def overloaded(bed: Bed, size: Size, most_rps: float) -> Pair:
    """More than the engine carries for ``size.overload_s``, at the default and beside a cold controller."""
    ttft_s, gap_s = calm_bounds(bed, size.sizes, most_rps, size.overload_s)

    def send(name: str, requests: Traffic) -> BoolArray:
        client = bed.client(requests, f"client-{name}")
        found = bed.round(client, requests).good(ttft_s, gap_s)
        client.child.stop()
        return found

    config = config_of(bed.served.tuning, size, ttft_s, gap_s)
    return pair(bed, config, OVERLOAD, listed(size.sizes, OVERLOAD * most_rps, size.overload_s, seed=3), send)


def bed_of(children: Children, work: Path, model: str) -> Bed:
    """Our engine on ``model``, at the benches' default."""
    knobs = ["--max-step-tokens", str(BOOT_TOKENS), "--max-running", str(MAX_RUNNING), "--max-queue", "5000"]
    return serve_bed(children, work, ["--model", model, *knobs, "--no-prefix-caching"], one_core_left())


@dataclass(frozen=True)
class Swept:
    """requests: the list; ttft_s, gap_s: targets; attainment: [repeat][setting]; load: of the greatest rate."""

    requests: Traffic
    ttft_s: float
    gap_s: float
    settings: tuple[Setting, ...]
    attainment: tuple[tuple[float, ...], ...]
    load: float


def sweep(bed: Bed, size: Size, most_rps: float) -> Swept:
    """List, targets, and every setting in rounds, interleaved. most_rps: the engine's greatest rate."""
    requests = listed(size.sizes, LOAD * most_rps, size.span_s, seed=2)
    client = bed.client(requests)
    say(f"the greatest rate is {most_rps:.2f} requests/s; a round takes about {size.span_s:g} s")
    ttft_s, gap_s = targets([bed.round(client, requests) for _ in range(2)])
    attainment = bed.shares(client, requests, size.settings, size.repeats, (ttft_s, gap_s))
    client.child.stop()
    bed.port.revert(wire.RevertRequest(actor="bench", reason="the sweep is over", block=False))
    load = len(requests) / float(requests.arrival_s[-1]) / most_rps
    return Swept(requests, ttft_s, gap_s, size.settings, attainment, load)


def targets(at_default: Sequence[Round]) -> tuple[float, float]:
    """TTFT and longest gap that seven in ten requests keep at the default."""
    ttft_s = np.concatenate([one.ttft_s for one in at_default])
    gap_s = np.concatenate([one.longest_gap_s for one in at_default])
    kept_ttft_s, kept_gap_s = (quantile(column[np.isfinite(column)], TARGET_QUANTILE) for column in (ttft_s, gap_s))
    return kept_ttft_s, kept_gap_s


@dataclass(frozen=True, eq=False)
class Tuned:
    """good: of each round of the controller; default: of each round before and after; trial: rounds with a trial."""

    good: Sequence[BoolArray]
    default: Sequence[BoolArray]
    trial: Sequence[int]
    records: Sequence[CycleRecord]

    @property
    def pushes(self) -> int:
        return sum(record.pushed is not None for record in self.records)


def tune(bed: Bed, size: Size, swept: Swept, end: Callable[[Child], T], first_rounds: int = 0) -> tuple[Tuned, T]:
    """The default, the controller live from cold until ``end`` ends it, the default again; and what ``end`` returns.

    first_rounds: at the default, before anything counts.
    """
    client = bed.client(swept.requests, "tuned-client")

    def rounds(count: int) -> list[BoolArray]:
        return [bed.round(client, swept.requests).good(swept.ttft_s, swept.gap_s) for _ in range(count)]

    rounds(first_rounds)
    default = rounds(size.default_rounds)
    say(f"the default before: {float(np.mean(default)):.0%} good; {size.tuned_rounds} rounds with the controller")
    config = bed.work / "rooftune.yaml"
    config.write_text(yaml.safe_dump(config_of(bed.served.tuning, size, swept.ttft_s, swept.gap_s)))
    controller = bed.children.start("controller", ["run", "--config", str(config)])
    good, times = list[BoolArray](), list[tuple[float, float]]()
    for _ in range(size.tuned_rounds):
        began_s = time.time()
        good += rounds(1)
        times.append((began_s, time.time()))
        say(f"round {len(times)} of {size.tuned_rounds}: {float(good[-1].mean()):.0%} good")
        if controller.ended:
            raise UnreachableError(f"the controller ended early: {controller.last_words()}")
    ended = end(controller)
    default += rounds(size.default_rounds)
    with StateFile.visit(bed.work / "state") as state:
        records = tuple(state.last(100_000)[::-1])
    client.child.stop()
    return Tuned(good, default, rounds_with_trials(times, records), records), ended


def rounds_with_trials(times: Sequence[tuple[float, float]], records: Sequence[CycleRecord]) -> tuple[int, ...]:
    """Rounds, by their begin and end on the wall clock, in which a push was in force that had not proved itself."""
    trials: list[tuple[float, float]] = []
    for record in records:
        if record.pushed is not None:
            trials.append((record.started_at_s, float("inf")))
        decided = record.verify is not None and record.verify.verdict != "inconclusive"
        if trials and (decided or record.action == "revert"):
            trials[-1] = (trials[-1][0], min(trials[-1][1], record.started_at_s))
    return tuple(
        at for at, (began_s, ended_s) in enumerate(times) if any(a < ended_s and b > began_s for a, b in trials)
    )


def config_of(url: str, size: Size, ttft_s: float, gap_s: float) -> dict[str, object]:
    """The controller's configuration, as its file holds it."""
    least_tokens = min(setting.step_tokens for setting in size.settings)
    return {
        "engine": {"url": url, "token_file": "token", "timeout_s": size.timeout_s},
        "mode": "live",
        "targets": [
            {"metric": "ttft", "quantile": 0.9, "bound": f"{ttft_s:.6f}s"},
            {"metric": "longest_gap", "quantile": 0.9, "bound": f"{gap_s:.6f}s"},
        ],
        "bounds": {"step_tokens": [least_tokens, BOOT_TOKENS], "chunk_cap_tokens": [0, BOOT_TOKENS]},
        "cadence": dict(size.cadence),
        "search": {"trials": size.trials, "timeout_s": 120},
        "guard": {"largest_ratio": 1_000_000, "dwell_s": size.dwell_s, "min_gain": 0.02, "min_shadow_s": 0},
        "listen": None,
        "state": "state",
    }


def _figures(swept: Swept, tuned: Tuned) -> Iterator[Figure]:
    share, best = second_half(tuned), best_of(swept.attainment)
    if best <= 0.0:
        raise RefusedError("no setting of the sweep met the targets once; the machine is too busy to measure on")
    yield Figure("share_of_best_sweep", share / best, "ratio", 1.0)
    yield from figures_beside_default(swept, tuned)
    yield Figure("attainment_tuned", share, "share", best)
    yield Figure("pushes", float(tuned.pushes), "pushes")


def second_half(tuned: Tuned) -> float:
    """Good share in the second half of the controller's rounds, the one that counts."""
    return float(_by_request(tuned.good[len(tuned.good) // 2 :]).mean())


def figures_beside_default(swept: Swept, tuned: Tuned) -> Iterator[Figure]:
    """What both benches of a gain print: against the default, the cost of trials, and the load."""
    default = _by_request(tuned.default)
    ratio, low, high = ratio_interval(_by_request(tuned.good[len(tuned.good) // 2 :]), default)
    cost = trial_cost([tuned.good[at] for at in tuned.trial], default, len(tuned.good) * len(swept.requests))
    yield Figure("ratio_to_default", ratio, "ratio", 1.0)
    yield Figure("ratio_to_default_low", low, "ratio", 1.0)
    yield Figure("ratio_to_default_high", high, "ratio", 1.0)
    yield Figure("trial_cost", cost, "share", 0.01)
    yield Figure("attainment_default", float(default.mean()), "share")
    yield Figure("load_of_greatest_rate", swept.load, "share")
    yield Figure("requests_a_round", float(len(swept.requests)), "requests")


def _by_request(rounds: Sequence[BoolArray]) -> FloatArray:
    shares: FloatArray = np.mean(np.array(rounds, dtype=np.float64), axis=0)
    return shares


def _made_model(children: Children, work: Path) -> str:
    """A model with random weights. Raises MissingDataError without torch."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDataError("live-gain serves a real model and needs torch: make engine-env, or --short without it")
    folder = work / "model"
    run_to_end(children.start("make-model", ["make-model", str(folder), "--size", "small"]), MAKE_S)
    return str(folder)
