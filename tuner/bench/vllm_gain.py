"""Bench ``vllm-gain``: what the controller brings a running vLLM, against an honest sweep and against its default.

The rules and the judge of ``live-gain``, at a real vLLM server with our hook: a fixed list, every eighth prompt long,
at 60 to 85 % of the rate at which the default's queue grows; a request is good when its TTFT and its longest gap are
within the default's own p70. First every budget and cap in rounds of that list, interleaved; then a fresh server with
``rooftune run --mode live`` from cold, which may push ten times; the second half of its rounds counts. At the end the
controller is killed: the bench fails unless the server is at its boot setting when the lease has ended.
``short``: one server for all of it, two cells, a few rounds; it shows that the parts work together.
"""

import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import yaml

from rooftune.policies import wire
from rooftune.policies.commands import Figure
from rooftune.policies.errors import RefusedError, UnreachableError
from rooftune.policies.quantiles import quantile
from rooftune.policies.request import Setting
from rooftune.tuner.bench.children import Child, Children, Talker
from rooftune.tuner.bench.live_gain import Swept, rounds_with_trials
from rooftune.tuner.bench.live_gain_rounds import (
    Bed,
    Round,
    Sizes,
    at_once,
    listed,
    ratio_interval,
    share_of_best,
    trial_cost,
)
from rooftune.tuner.bench.vllm_bed import BOOT_TOKENS, DEFAULT, Ground, greatest_rps, vllm_python
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.state.store import StateFile
from rooftune.tuner.observe.rows import BoolArray, FloatArray

# Of the rate at which the queue grows at the default: the middle of 60 to 85 %.
LOAD = 0.72
TARGET_QUANTILE = 0.7
MOST_PUSHES = 10
# Beyond the end of the lease: the read that sees it, and a step in flight.
RETURN_SLACK_S = 5.0
POLL_S = 0.25


@dataclass(frozen=True)
class Size:
    """One form. budgets x caps (those below the budget) are swept ``repeats`` times; rounds: of the controller, and of
    the default before and after; cadence: of the controller, keys of the configuration."""

    sizes: Sizes
    span_s: float
    budgets: tuple[int, ...]
    caps: tuple[int, ...]
    repeats: int
    tuned_rounds: int
    default_rounds: int
    cadence: Mapping[str, float]
    trials: int

    @property
    def dwell_s(self) -> float:
        """So long between two pushes that there cannot be more of them than are allowed."""
        return self.tuned_rounds * self.span_s / MOST_PUSHES


SHORT = Size(
    sizes=Sizes((20, 120), (600, 1000), (8, 24)),
    span_s=1.5,
    budgets=(128, 2048),
    caps=(0,),
    repeats=1,
    tuned_rounds=6,
    default_rounds=1,
    cadence={"cycle_s": 0.5, "window_s": 12, "search_every_s": 10, "search_requests": 20, "settle_s": 0.3}
    | {"verify_s": 5, "verify_min_requests": 10, "lease_s": 4},
    trials=20,
)
FULL = Size(
    sizes=Sizes((20, 200), (1000, 3000), (8, 64)),
    span_s=16.0,
    budgets=(64, 128, 256, 512, 1024, 2048),
    caps=(0, 128, 256),
    repeats=2,
    tuned_rounds=16,
    default_rounds=3,
    cadence={"cycle_s": 2, "window_s": 90, "search_every_s": 60, "search_requests": 40, "settle_s": 2}
    | {"verify_s": 45, "verify_min_requests": 20, "lease_s": 20},
    trials=80,
)


@dataclass(frozen=True)
class Killed:
    """The end: setting in force when the controller was killed, the lease it left (s), and when the boot setting was
    seen again (s after the kill)."""

    setting: Setting
    lease_left_s: float
    returned_s: float


@dataclass(frozen=True, eq=False)
class Tuned:
    """good: of each round of the controller; default: of each round before and after; trial: rounds with a trial."""

    good: Sequence[BoolArray]
    default: Sequence[BoolArray]
    trial: Sequence[int]
    records: Sequence[CycleRecord]
    killed: Killed


def bench(short: bool) -> Iterator[Figure]:
    """share_of_best_sweep, ratio_to_default with its interval, and what they are made of."""
    python = vllm_python()
    size = SHORT if short else FULL
    with tempfile.TemporaryDirectory(prefix="rooftune-vllm-gain-") as folder, Children(Path(folder) / "logs") as beside:
        ground = Ground(python, Path(folder), beside)
        ground.make_model()
        with ground.bed("sweep") as bed:
            swept = sweep(bed, size)
            tuned = tune(bed, size, swept) if short else None
        if tuned is None:
            with ground.bed("tuned") as bed:
                tuned = tune(bed, size, swept)
    yield from figures(swept, tuned)


def sweep(bed: Bed, size: Size) -> Swept:
    """Greatest rate, list, targets, and every setting in rounds, interleaved."""
    first = at_once(listed(size.sizes, 4.0, 8.0, seed=1))
    rush = bed.client(first, "burst")
    most_rps = greatest_rps(bed, rush, first)
    rush.child.stop()
    requests = listed(size.sizes, LOAD * most_rps, size.span_s, seed=2)
    client = bed.client(requests)
    at_default = [bed.round(client, requests) for _ in range(2)]
    ttft_s, gap_s = targets(at_default)
    settings = cells(size)
    attainment = bed.shares(client, requests, settings, size.repeats, (ttft_s, gap_s))
    client.child.stop()
    bed.port.revert(wire.RevertRequest(actor="bench", reason="the sweep is over", block=False))
    load = len(requests) / float(requests.arrival_s[-1]) / most_rps
    return Swept(requests, ttft_s, gap_s, settings, attainment, load)


def cells(size: Size) -> tuple[Setting, ...]:
    """Every budget with every cap that binds under it."""
    return tuple(
        DEFAULT._replace(step_tokens=budget, chunk_cap_tokens=cap)
        for budget, cap in product(size.budgets, size.caps)
        if cap < budget
    )


def targets(at_default: Sequence[Round]) -> tuple[float, float]:
    """TTFT and longest gap that seven in ten requests keep at the default."""
    ttft_s = np.concatenate([one.ttft_s for one in at_default])
    gap_s = np.concatenate([one.longest_gap_s for one in at_default])
    return quantile(ttft_s, TARGET_QUANTILE), quantile(gap_s, TARGET_QUANTILE)


def tune(bed: Bed, size: Size, swept: Swept) -> Tuned:
    """The default, the controller live from cold until it is killed, the default again."""
    requests = swept.requests
    client = bed.client(requests, "tuned-client")
    bed.round(client, requests)  # a first time of everything; what the controller will see first is this and the next
    default = list(_rounds(bed, client, swept, size.default_rounds))
    config = bed.work / "rooftune.yaml"
    config.write_text(yaml.safe_dump(config_of(bed.served.tuning, size, swept.ttft_s, swept.gap_s)))
    controller = bed.children.start("controller", ["run", "--mode", "live", "--config", str(config)])
    good, times = list[BoolArray](), list[tuple[float, float]]()
    for _ in range(size.tuned_rounds):
        began_s = time.time()
        good.extend(_rounds(bed, client, swept, 1))
        times.append((began_s, time.time()))
        if controller.ended:
            raise UnreachableError(f"the controller ended early: {controller.last_words()}")
    killed = kill(controller, bed)
    default += list(_rounds(bed, client, swept, size.default_rounds))
    with StateFile.visit(bed.work / "state") as state:
        records = tuple(state.last(100_000)[::-1])
    client.child.stop()
    return Tuned(good, default, rounds_with_trials(times, records), records, killed)


def _rounds(bed: Bed, client: Talker, swept: Swept, count: int) -> Iterator[BoolArray]:
    for _ in range(count):
        yield bed.round(client, swept.requests).good(swept.ttft_s, swept.gap_s)


def kill(controller: Child, bed: Bed) -> Killed:
    """kill -9, and nothing more is done. Raises RefusedError unless the boot setting is back with the lease."""
    controller.stop(signal.SIGKILL)
    killed_s = time.monotonic()
    state = bed.port.state()
    setting, left_s = state.setting(), state.lease.left_s if state.lease is not None else 0.0
    while True:
        state = bed.port.state()
        passed_s = time.monotonic() - killed_s
        if state.lease is None and state.setting() == DEFAULT:
            return Killed(setting, left_s, passed_s)
        if passed_s > left_s + RETURN_SLACK_S:
            raise RefusedError(f"{passed_s:.1f} s after the kill {state.setting()} holds, the lease had {left_s:.1f} s")
        time.sleep(POLL_S)


def config_of(url: str, size: Size, ttft_s: float, gap_s: float) -> dict[str, object]:
    """The controller's configuration, as its file holds it."""
    return {
        "engine": {"url": url, "token_file": "token", "timeout_s": 20},
        "targets": [
            {"metric": "ttft", "quantile": 0.9, "bound": f"{ttft_s:.6f}s"},
            {"metric": "longest_gap", "quantile": 0.9, "bound": f"{gap_s:.6f}s"},
        ],
        "bounds": {"step_tokens": [min(size.budgets), BOOT_TOKENS], "chunk_cap_tokens": [0, BOOT_TOKENS]},
        "cadence": dict(size.cadence),
        "search": {"trials": size.trials, "timeout_s": 120},
        "guard": {"largest_ratio": 1_000_000, "dwell_s": size.dwell_s, "min_gain": 0.02, "min_shadow_s": 0},
        "listen": None,
        "state": "state",
    }


def figures(swept: Swept, tuned: Tuned) -> Iterator[Figure]:
    """The two figures first. Raises RefusedError for more pushes than are allowed."""
    pushes = sum(record.pushed is not None for record in tuned.records)
    if pushes > MOST_PUSHES:
        raise RefusedError(f"the controller pushed {pushes} times, {MOST_PUSHES} are allowed")
    second = _by_request(tuned.good[len(tuned.good) // 2 :])
    default = _by_request(tuned.default)
    share = float(second.mean())
    ratio, low, high = ratio_interval(second, default)
    relative = share_of_best(swept.attainment, share)
    yield Figure("share_of_best_sweep", relative, "ratio", 0.95)
    # By the mean of its repeats the best of many noisy cells looks better than it is: the true share lies between.
    luckiest = float(np.mean(np.array(swept.attainment), axis=0).max())
    yield Figure("share_of_luckiest_cell", share / max(luckiest, 1e-9), "ratio", 0.95)
    yield Figure("ratio_to_default", ratio, "ratio", 1.0)
    yield Figure("ratio_to_default_low", low, "ratio", 1.0)
    yield Figure("ratio_to_default_high", high, "ratio", 1.0)
    yield Figure("attainment_tuned", share, "share", share / relative if relative > 0.0 else None)
    yield Figure("attainment_default", float(default.mean()), "share")
    cost = trial_cost([tuned.good[at] for at in tuned.trial], default, len(tuned.good) * len(swept.requests))
    yield Figure("trial_cost", cost, "share", 0.01)
    yield Figure("pushes", float(pushes), "pushes", float(MOST_PUSHES))
    yield Figure("killed_with_budget", float(tuned.killed.setting.step_tokens), "tokens", float(BOOT_TOKENS))
    yield Figure("killed_with_chunk_cap", float(tuned.killed.setting.chunk_cap_tokens), "tokens")
    yield Figure("boot_setting_returned_s", tuned.killed.returned_s, "s", tuned.killed.lease_left_s or None)
    yield Figure("load_of_greatest_rate", swept.load, "share")
    yield Figure("requests_a_round", float(len(swept.requests)), "requests")
    yield Figure("target_ttft_s", swept.ttft_s, "s")
    yield Figure("target_longest_gap_s", swept.gap_s, "s")
    for at, setting in enumerate(swept.settings):
        shares = [repeat[at] for repeat in swept.attainment]
        name = f"sweep_b{setting.step_tokens}_cap{setting.chunk_cap_tokens}"
        yield Figure(name, float(np.mean(shares)), f"share, spread {max(shares) - min(shares):.2f}")


def _by_request(rounds: Sequence[BoolArray]) -> FloatArray:
    shares: FloatArray = np.mean(np.array(rounds, dtype=np.float64), axis=0)
    return shares
