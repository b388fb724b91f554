"""Bench ``live-gain``: what the controller brings a running engine, against an honest sweep and against the default.

A fixed list, every eighth prompt long, at 60 to 85 % of the rate at which the default's queue grows; a request is good
when its TTFT and its longest gap are within the default's own p70. First every budget and cap in rounds of that list,
twice, interleaved; then a fresh engine with the controller live and cold, and the second half of its rounds counts;
then the default again. Times are the engine's own. ``short``: an engine without a model, fewer settings, once.
"""

import importlib.util
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import yaml

from rooftune.policies.commands import Figure
from rooftune.policies.errors import MissingDataError, RefusedError, UnreachableError
from rooftune.policies.quantiles import quantile
from rooftune.policies.request import Setting
from rooftune.tuner.bench.children import Child, Children, run_to_end, serve
from rooftune.tuner.bench.live_gain_rounds import (
    Bed,
    Listed,
    Sizes,
    at_once,
    best_of,
    listed,
    ratio_interval,
    trial_cost,
)
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.state.store import StateFile
from rooftune.tuner.observe.rows import BoolArray, FloatArray
from rooftune.tuner.ports.http import HttpPort

BOOT_TOKENS = 2048
MAX_RUNNING = 32
DEFAULT = Setting(BOOT_TOKENS, max_running=MAX_RUNNING)
# Of the rate at which the queue grows at the default: the middle of 60 to 85 %.
LOAD = 0.72
TARGET_QUANTILE = 0.7
# A first list, to find the engine's greatest rate with.
FIRST_RPS = 4.0
STALE_MODEL_S = 240.0


@dataclass(frozen=True)
class Size:
    """One form of the bench. budgets x caps are swept ``repeats`` times; rounds: of the controller, and of the default
    after it; cadence: of the controller, keys of the configuration."""

    model: str
    sizes: Sizes
    span_s: float
    budgets: tuple[int, ...]
    caps: tuple[int, ...]
    repeats: int
    tuned_rounds: int
    default_rounds: int
    cadence: Mapping[str, float]
    trials: int


SHORT = Size(
    model="fake:8b-2tbs",
    sizes=Sizes((50, 300), (2000, 5000), (6, 16)),
    span_s=1.3,
    budgets=(256, 2048),
    caps=(0, 128),
    repeats=1,
    tuned_rounds=18,
    default_rounds=1,
    cadence={"cycle_s": 0.5, "window_s": 12, "search_every_s": 10, "search_requests": 30, "settle_s": 0.3}
    | {"verify_s": 5, "verify_min_requests": 20, "lease_s": 10},
    trials=30,
)
FULL = Size(
    model="small",
    sizes=Sizes((20, 120), (1000, 1800), (8, 32)),
    span_s=15.0,
    budgets=(32, 64, 128, 256, 384, 512, 1024, 2048),
    caps=(0, 32, 128, 256),
    repeats=2,
    tuned_rounds=16,
    default_rounds=3,
    cadence={"cycle_s": 2, "window_s": 90, "search_every_s": 60, "search_requests": 40, "settle_s": 2}
    | {"verify_s": 45, "verify_min_requests": 20, "lease_s": 30},
    trials=80,
)


def bench(short: bool) -> Iterator[Figure]:
    """share_of_best_sweep, ratio_to_default with its interval, trial_cost, and what they are made of."""
    size = SHORT if short else FULL
    with tempfile.TemporaryDirectory(prefix="rooftune-live-gain-") as folder, Children(Path(folder)) as children:
        work = Path(folder)
        model = size.model if short else _made_model(children, work, size.model)
        swept = _sweep(children, work, model, size)
        tuned = _tuned(children, work, model, size, swept)
    yield from _figures(swept, tuned)


@dataclass(frozen=True)
class Swept:
    """requests: the list; ttft_s, gap_s: targets; attainment: [repeat][setting]; load: of the greatest rate."""

    requests: Listed
    ttft_s: float
    gap_s: float
    settings: tuple[Setting, ...]
    attainment: tuple[tuple[float, ...], ...]
    load: float


@dataclass(frozen=True)
class Tuned:
    """good: of each round of the controller; default: of each round before and after; trial: rounds with a trial."""

    good: tuple[BoolArray, ...]
    default: tuple[BoolArray, ...]
    trial: tuple[int, ...]
    records: tuple[CycleRecord, ...]


def _bed(children: Children, work: Path, model: str, name: str) -> Bed:
    folder = work / name
    folder.mkdir()
    token = folder / "token"
    token.write_text(secrets.token_hex(16))
    knobs = ["--max-step-tokens", str(BOOT_TOKENS), "--max-running", str(MAX_RUNNING), "--max-queue", "5000"]
    words = [
        "--model",
        model,
        *knobs,
        "--served-name",
        "bench",
        "--no-prefix-caching",
        "--tuning-token-file",
        str(token),
    ]
    served = serve(children, words, {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1))})
    return Bed(children, served, HttpPort(served.tuning, token), "bench", folder)


def _sweep(children: Children, work: Path, model: str, size: Size) -> Swept:
    """Greatest rate, list, targets, and every setting in rounds, interleaved."""
    bed = _bed(children, work, model, "sweep")
    first = listed(size.sizes, FIRST_RPS, size.span_s * 3, seed=1)
    burst = at_once(first)
    rush = bed.client(burst, "burst")
    bed.round(rush, burst)  # a first time of everything
    most_rps = len(burst) / bed.makespan_s(rush, burst)
    rush.child.stop()
    requests = listed(size.sizes, LOAD * most_rps, size.span_s, seed=2)
    client = bed.client(requests)
    at_default = [bed.round(client, requests) for _ in range(2)]
    ttft_s = quantile(_finished([one.ttft_s for one in at_default]), TARGET_QUANTILE)
    gap_s = quantile(_finished([one.longest_gap_s for one in at_default]), TARGET_QUANTILE)
    settings = tuple(DEFAULT._replace(step_tokens=b, chunk_cap_tokens=c) for b, c in product(size.budgets, size.caps))
    attainment = bed.shares(client, requests, settings, size.repeats, (ttft_s, gap_s))
    client.child.stop()
    bed.served.child.stop()
    bed.port.close()
    load = len(requests) / float(requests.arrival_s[-1]) / most_rps
    return Swept(requests, ttft_s, gap_s, settings, attainment, load)


def _tuned(children: Children, work: Path, model: str, size: Size, swept: Swept) -> Tuned:
    """A fresh engine: the default, the controller live from cold, the default again."""
    bed = _bed(children, work, model, "tuned")
    requests = swept.requests
    client = bed.client(requests, "tuned-client")

    def rounds(count: int) -> Iterator[BoolArray]:
        for _ in range(count):
            yield bed.round(client, requests).good(swept.ttft_s, swept.gap_s)

    default = list(rounds(size.default_rounds))
    config = bed.work / "rooftune.yaml"
    config.write_text(yaml.safe_dump(_config(bed, size, swept)))
    controller = children.start("controller", ["run", "--config", str(config)])
    good, times = list[BoolArray](), list[tuple[float, float]]()
    for _ in range(size.tuned_rounds):
        began_s = time.time()
        good.extend(rounds(1))
        times.append((began_s, time.time()))
        _alive(controller)
    controller.stop()  # gives its lease back
    default += list(rounds(size.default_rounds))
    with StateFile.visit(bed.work / "state") as state:
        records = tuple(state.last(100_000)[::-1])
    client.child.stop()
    bed.served.child.stop()
    bed.port.close()
    return Tuned(tuple(good), tuple(default), rounds_with_trials(times, records), records)


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


def _config(bed: Bed, size: Size, swept: Swept) -> dict[str, object]:
    return {
        "engine": {"url": bed.served.tuning, "token_file": "token"},
        "mode": "live",
        "targets": [
            {"metric": "ttft", "quantile": 0.9, "bound": f"{swept.ttft_s:.6f}s"},
            {"metric": "longest_gap", "quantile": 0.9, "bound": f"{swept.gap_s:.6f}s"},
        ],
        "bounds": {"step_tokens": [min(size.budgets), BOOT_TOKENS], "chunk_cap_tokens": [0, BOOT_TOKENS]},
        "cadence": dict(size.cadence),
        "search": {"trials": size.trials, "timeout_s": 120},
        "guard": {"largest_ratio": 1_000_000, "dwell_s": 2, "min_gain": 0.02, "min_shadow_s": 0},
        "listen": None,
        "state": "state",
    }


def _figures(swept: Swept, tuned: Tuned) -> Iterator[Figure]:
    second = tuned.good[len(tuned.good) // 2 :]
    share = float(np.mean([good.mean() for good in second]))
    best = best_of(swept.attainment)
    if best <= 0.0:
        raise RefusedError("no setting of the sweep met the targets once; the machine is too busy to measure on")
    default = _by_request(tuned.default)
    ratio, low, high = ratio_interval(_by_request(second), default)
    cost = trial_cost([tuned.good[at] for at in tuned.trial], default, len(tuned.good) * len(swept.requests))
    pushes = sum(record.pushed is not None for record in tuned.records)
    yield Figure("share_of_best_sweep", share / best, "ratio", 1.0)
    yield Figure("ratio_to_default", ratio, "ratio", 1.0)
    yield Figure("ratio_to_default_low", low, "ratio", 1.0)
    yield Figure("ratio_to_default_high", high, "ratio", 1.0)
    yield Figure("trial_cost", cost, "share", 0.01)
    yield Figure("attainment_tuned", share, "share", best)
    yield Figure("attainment_default", float(default.mean()), "share")
    yield Figure("load_of_greatest_rate", swept.load, "share")
    yield Figure("requests_a_round", float(len(swept.requests)), "requests")
    yield Figure("pushes", float(pushes), "pushes")


def _by_request(rounds: Sequence[BoolArray]) -> FloatArray:
    shares: FloatArray = np.mean(np.array(rounds, dtype=np.float64), axis=0)
    return shares


def _finished(columns: Sequence[FloatArray]) -> FloatArray:
    whole = np.concatenate(columns)
    return whole[np.isfinite(whole)]


def _alive(child: Child) -> None:
    if child.ended:
        raise UnreachableError(f"the {child.name} ended early: {child.last_words()}")


def _made_model(children: Children, work: Path, size: str) -> str:
    """A model with random weights. Raises MissingDataError without torch."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDataError("live-gain serves a real model and needs torch: make engine-env, or --short without it")
    folder = work / "model"
    run_to_end(children.start("make-model", ["make-model", str(folder), "--size", size]), STALE_MODEL_S)
    return str(folder)
