"""Bench ``vllm-prediction``: settings that a running vLLM has never had, predicted, and then measured.

A real vLLM server with our hook under mixed load, every eighth prompt long. The step model, its scatter and the times
outside the step are learned from the tuning protocol's rows under one budget alone; four other budgets and two chunk
caps are predicted on the same list, and only then pushed and measured, twice, there and back. Nothing is restarted.
``short``: one other budget, once.
"""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from rooftune.policies.commands import Figure
from rooftune.policies.errors import UnreachableError
from rooftune.policies.request import Boot, Setting
from rooftune.policies.wire import State
from rooftune.tuner.bench.children import PROC, Talker, children_of, cost_of
from rooftune.tuner.bench.live_gain_rounds import Bed, Sizes, listed
from rooftune.tuner.bench.vllm_bed import DEFAULT, FIRST_SPAN_S, open_ground
from rooftune.tuner.model.samples import join
from rooftune.tuner.observe.protocol import ProtocolReader
from rooftune.tuner.observe.rows import RequestRows, StepRows
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.traffic.workload import Traffic
from tests.bench.vllm_prediction_twin import (
    Values,
    figures_of,
    judged,
    learn,
    outcomes,
    predictions,
    step_mape,
    traffic_of,
)
from tests.bench.vllm_sweep import Twin, speed_of
from tests.bench.vllm_sweep_judge import Judged

FITTED = DEFAULT._replace(step_tokens=512)
# Of the rate at which the queue grows at the default.
LOAD = 0.65
MEDIAN_AIM, STEP_AIM = 0.10, 0.08
# When the engine does not tell its pool, one that never fills.
UNKNOWN_KV_BLOCKS = 1 << 20


@dataclass(frozen=True)
class Size:
    """One form. others: predicted and measured ``repeats`` times; fit_rounds: of the list, under the fitted budget."""

    sizes: Sizes
    span_s: float
    fit_rounds: int
    others: tuple[Setting, ...]
    repeats: int
    seeds: int


def _caps(*pairs: tuple[int, int]) -> tuple[Setting, ...]:
    return tuple(DEFAULT._replace(step_tokens=budget, chunk_cap_tokens=cap) for budget, cap in pairs)


SHORT = Size(Sizes((20, 120), (600, 1000), (8, 24)), 5.0, 1, _caps((128, 0)), 1, 4)
FULL = Size(
    sizes=Sizes((20, 200), (1000, 3000), (8, 64)),
    span_s=50.0,
    fit_rounds=2,
    others=_caps((128, 0), (256, 0), (1024, 0), (2048, 0), (2048, 128), (2048, 256)),
    repeats=2,
    seeds=16,
)


@dataclass(frozen=True, eq=False)
class Rows:
    """What one round left at the engine. others_cpus: CPUs that other processes kept busy meanwhile."""

    steps: StepRows
    requests: RequestRows
    others_cpus: float | None = None

    @property
    def figures(self) -> Values:
        return figures_of(outcomes(self.steps, self.requests))


@dataclass(frozen=True, eq=False)
class Found:
    """predicted: before anything but the fitted budget was measured."""

    twin: Twin
    predicted: Mapping[Setting, list[Values]]
    measured: Mapping[Setting, list[Rows]]
    fitted: Rows
    at_own_speed: Mapping[Setting, list[Values]]


class Watched:
    """A bed whose rows are read as the controller reads them."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self._reader = ProtocolReader(bed.port)

    def round(self, client: Talker, requests: Traffic) -> Rows:
        """The list once. Raises UnreachableError when the engine's rings lost a row of it."""
        self._rows()
        before = busy()
        self.bed.round(client, requests)
        taken = others_cpus(before, busy())
        return replace(self._rows(), others_cpus=taken)

    def _rows(self) -> Rows:
        steps, requests = [StepRows.from_wire()], [RequestRows.from_wire()]
        while True:
            reading = self._reader.read()
            if not reading.first and (reading.lost_steps or reading.lost_requests or reading.restarted):
                raise UnreachableError("rows of the round are lost: it is too long for the rings of the engine")
            steps.append(reading.steps)
            if len(reading.requests):
                requests = [rows for rows in (*requests, reading.requests) if len(rows)]
            if not (reading.behind or reading.busy):
                return Rows(StepRows.join(steps), RequestRows.join(requests))


def bench(short: bool) -> Iterator[Figure]:
    """median_error, worst_error and step_mape over all settings but the fitted one, beside their aims."""
    with open_ground("rooftune-vllm-prediction-") as ground, ground.bed("server") as bed:
        found = measure(Watched(bed), SHORT if short else FULL)
    yield from figures(found)


def measure(watched: Watched, size: Size) -> Found:
    """Learn, predict, and then measure."""
    bed = watched.bed
    most_rps = bed.greatest_rps(size.sizes, FIRST_SPAN_S, times=2)
    requests = listed(size.sizes, LOAD * most_rps, size.span_s, seed=2)
    client = bed.client(requests)
    bed.push(FITTED)
    rounds = [watched.round(client, requests) for _ in range(size.fit_rounds)]
    twin = learn(
        StepRows.join(each.steps for each in rounds), RequestRows.join(each.requests for each in rounds), size.seeds
    )
    traffic = traffic_of(outcomes(rounds[-1].steps, rounds[-1].requests))
    engine = engine_of(bed.port.state())
    predicted = {setting: predictions(twin, traffic, engine, setting) for setting in (*size.others, FITTED)}
    measured: dict[Setting, list[Rows]] = {setting: [] for setting in size.others}
    for repeat in range(size.repeats):
        for setting in size.others[:: -1 if repeat % 2 else 1]:
            bed.push(setting)
            measured[setting].append(watched.round(client, requests))
    client.child.stop()
    own = {
        setting: [
            values
            for each in rows
            for values in predictions(twin, traffic, engine, setting, speed_of(twin, each.steps.samples()))
        ]
        for setting, rows in measured.items()
    }
    return Found(twin, predicted, measured, rounds[-1], own)


def engine_of(state: State) -> Engine:
    """The twin's engine, from what the hook tells of the real one."""
    envelope = state.envelope
    boot = Boot(
        envelope.ceiling_tokens,
        envelope.kv_block_tokens or 16,
        chunking=int(envelope.chunking),
        reserve_whole_prompt=1,
        contents=0,
        keep_decodes_moving=1,
        plan_ahead=int(envelope.plan_ahead),
    )
    return Engine(boot, envelope.kv_blocks or UNKNOWN_KV_BLOCKS, envelope.max_running)


def figures(found: Found) -> Iterator[Figure]:
    """The summary first, then every figure predicted, beside the measured one."""
    rows = [
        row
        for setting, rounds in found.measured.items()
        for row in judged(name_of(setting), found.predicted[setting], [each.figures for each in rounds])
    ]
    own = [
        row
        for setting, rounds in found.measured.items()
        for row in judged(name_of(setting), found.at_own_speed[setting], [each.figures for each in rounds])
    ]
    steps = join(each.steps.samples() for rounds in found.measured.values() for each in rounds)
    speeds = [speed_of(found.twin, each.steps.samples()) for rounds in found.measured.values() for each in rounds]
    yield from _summary(rows, "")
    yield Figure("step_mape", step_mape(found.twin, steps), "fraction", STEP_AIM)
    yield Figure("step_mape_fitted", step_mape(found.twin, found.fitted.steps.samples()), "fraction")
    yield Figure("least_speed_factor", min(speeds), "of the fitted rounds'")
    yield Figure("largest_speed_factor", max(speeds), "of the fitted rounds'")
    for name, rounds in (("fitted", (found.fitted,)), ("measured", tuple(chain(*found.measured.values())))):
        taken = [each.others_cpus for each in rounds if each.others_cpus is not None]
        if taken:
            yield Figure(f"others_cpus_{name}", max(taken), f"of {os.cpu_count()}, in the worst round", 0.0)
    yield from _summary(own, "_at_own_speed")
    outside = found.twin.outside
    yield Figure("before_scheduler_s", outside.before_s, f"s, {outside.idle_requests} requests")
    yield Figure("host_s", outside.host_s, "s a step")
    yield Figure("requests_a_round", float(len(found.fitted.requests)), "requests")
    for row in judged(name_of(FITTED) + "_fitted", found.predicted[FITTED], [found.fitted.figures]):
        yield Figure(f"{row.case}_{row.name}", row.predicted, "s", row.measured)
    for row in rows:
        mark = ", out of bounds" if row.out_of_bounds else ""
        yield Figure(f"{row.case}_{row.name}", row.predicted, f"s, spread {row.spread:.3g}{mark}", row.measured)


def _summary(rows: list[Judged], suffix: str) -> Iterator[Figure]:
    errors = [abs(row.error) for row in rows]
    yield Figure(f"median_error{suffix}", float(np.median(errors)), "fraction", MEDIAN_AIM)
    yield Figure(f"worst_error{suffix}", max(errors), "fraction", 0.25)
    yield Figure(f"figures_out_of_bounds{suffix}", sum(row.out_of_bounds for row in rows), f"of {len(rows)}")


def name_of(setting: Setting) -> str:
    """``b512`` or ``b2048_cap128``."""
    return f"b{setting.step_tokens}" + (f"_cap{setting.chunk_cap_tokens}" if setting.chunk_cap_tokens else "")


# How much of the machine other processes took while a round ran. On two cores a step beside them is a longer one, and a
# long step meets them more surely than a short one, which no fit of the steps before can know.


@dataclass(frozen=True)
class Busy:
    """At one instant: time_s on a monotonic clock, CPU seconds spent so far by all processes, and by this one and its
    children."""

    time_s: float
    all_s: float
    ours_s: float


def busy(proc: Path = PROC, pid: int | None = None) -> Busy | None:
    """None where the system does not tell (no /proc)."""
    try:
        words = (proc / "stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _wait, *interrupts = map(int, words[1:9])
    everything = user + nice + system + sum(interrupts)  # a hypervisor's share, the last of them, is lost to us as well
    return Busy(time.monotonic(), everything * tick_s, _ours_s(proc, os.getpid() if pid is None else pid))


def others_cpus(before: Busy | None, after: Busy | None) -> float | None:
    """CPUs that others kept busy between two instants, on average."""
    if before is None or after is None or after.time_s <= before.time_s:
        return None
    spent_s = (after.all_s - before.all_s) - (after.ours_s - before.ours_s)
    return max(0.0, spent_s / (after.time_s - before.time_s))


def _ours_s(proc: Path, pid: int) -> float:
    """Of ``pid`` and all below it that live."""
    cost = cost_of(pid, proc)
    below_s = sum(_ours_s(proc, child) for child in children_of(pid, proc))
    return below_s + (0.0 if cost is None else cost.cpu_s)
