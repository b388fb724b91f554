"""Bench ``twin-speed``: how long the twin takes for an hour of traffic, on one core and after compilation.

Every feature that costs time is on: KV blocks, chunk cap, both partial-prefill caps, the rule that keeps decodes
moving, gaps counted against two bounds. What is timed is the whole call, from traffic to result. Beside it, in the
same run, the PyPI package sched-sim 0.2 with its chunked scheduler on the first requests of the same traffic.
"""

import time
from collections.abc import Iterator

from sched_sim.core.event_engine import Simulator
from sched_sim.core.request import Request
from sched_sim.hardware.latency_model import RooflineLatencyModel
from sched_sim.hardware.presets import PRESETS
from sched_sim.memory.block_manager import BlockManager
from sched_sim.memory.preemption import PreemptionHandler
from sched_sim.schedulers.chunked import ChunkedPrefillScheduler

from rooftune.policies.commands import Figure
from rooftune.policies.request import Boot, Setting
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.bench.mixes import AZURE_CONV
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.traffic.generate import Poisson, generate, named_mix
from rooftune.tuner.traffic.traces import load_traffic
from rooftune.tuner.traffic.workload import Traffic

BUDGET_TOKENS = 2_048
MAX_RUNNING = 256
BLOCK_TOKENS = 16
GAP_BOUNDS_S = (0.03, 0.1)
BASELINE_REQUESTS = 1_000

COUNTED = Boot(BUDGET_TOKENS, BLOCK_TOKENS, chunking=1, reserve_whole_prompt=1, contents=0, keep_decodes_moving=1)
SETTING = Setting(
    step_tokens=BUDGET_TOKENS,
    chunk_cap_tokens=1_024,
    max_partial_prefills=4,
    max_long_partial_prefills=2,
    long_prompt_tokens=4_000,
    max_running=MAX_RUNNING,
)


def bench(short: bool) -> Iterator[Figure]:
    """Figures of the twin's speed. short: 5 repeats instead of 30, and a smaller part for sched-sim."""
    name, traffic = _traffic()
    repeats = 5 if short else 30
    result, seconds = _times(traffic, COUNTED, repeats)
    least = min(seconds)
    yield Figure(f"{name}_s", least, "s")
    yield Figure(f"{name}_spread", (max(seconds) - least) / least, "of the least")
    yield Figure(f"{name}_steps", result.steps, "steps")
    yield Figure(f"{name}_requests", len(traffic), "requests")
    _, with_contents = _times(traffic, COUNTED._replace(contents=1), max(repeats // 3, 2))
    yield Figure(f"{name}_with_block_contents_s", min(with_contents), "s")
    size, runs = (BASELINE_REQUESTS // 5, 1) if short else (BASELINE_REQUESTS, 3)
    other = max(_sched_sim_steps_per_s(traffic, size) for _ in range(runs))
    yield Figure("steps_per_s", result.steps / least, "1/s", baseline=other)


def _traffic() -> tuple[str, Traffic]:
    """The public trace where it is at hand, else made traffic of the same size under another name."""
    if AZURE_CONV.exists():
        return "azure_conv_hour", load_traffic(AZURE_CONV)
    return "made_chat_hour", generate(Poisson(5.5), named_mix("chat"), 3_500.0, seed=1)


def _times(traffic: Traffic, boot: Boot, repeats: int) -> tuple[RunResult, list[float]]:
    """The result, and wall seconds of each repeat; the first call, which may compile, does not count."""
    engine = Engine(boot, kv_blocks=600_000 // BLOCK_TOKENS, sequence_ceiling=MAX_RUNNING)
    model = NAMED_MODELS["8b-2tbs"]
    result = simulate(traffic, engine, SETTING, model, gap_bounds_s=GAP_BOUNDS_S)
    seconds = []
    for _ in range(repeats):
        before = time.perf_counter()
        simulate(traffic, engine, SETTING, model, gap_bounds_s=GAP_BOUNDS_S)
        seconds.append(time.perf_counter() - before)
    return result, seconds


def _sched_sim_steps_per_s(traffic: Traffic, requests: int) -> float:
    """Steps a second of sched-sim on the first requests, same budget, sequence cap and block size."""
    hardware = PRESETS["a100"]
    blocks = BlockManager(hardware, block_size=BLOCK_TOKENS)
    latency = RooflineLatencyModel(hardware)
    scheduler = ChunkedPrefillScheduler(
        blocks, latency, PreemptionHandler(blocks, latency), max_batch_size=MAX_RUNNING, max_token_budget=BUDGET_TOKENS
    )
    simulator = Simulator(hardware, scheduler, block_size=BLOCK_TOKENS)
    arrivals, prompts, outputs = (
        column[:requests].tolist() for column in (traffic.arrival_s, traffic.prompt_tokens, traffic.output_tokens)
    )
    simulator.submit_workload(
        [
            Request(request_id=str(index), arrived_at=arrival, prompt_tokens=prompt, output_tokens=output)
            for index, (arrival, prompt, output) in enumerate(zip(arrivals, prompts, outputs, strict=True))
        ]
    )
    before = time.perf_counter()
    simulator.run(max_duration_s=arrivals[-1] + 600.0)
    return len(simulator.iteration_records) / (time.perf_counter() - before)
