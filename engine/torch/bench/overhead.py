"""Bench ``engine-overhead``: what a step costs beside the model's forward, 32 decodes of SmolLM2 under a lease.

The whole step is timed, and in it the forward: the model's layers with our attention, and the rows that go through
the vocabulary. The rest is overhead: arrivals, lease, plan, index tensors, sampling, booking, metrics, records.
Baseline is the step itself, in the same run, so the ratio is the share of a step that is not the model. Events go to an
event loop on a thread of its own, as in ``rooftune serve``; what that thread does with them is not the step's.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from threading import Thread

import torch

from rooftune.engine.interface import Deliver, GenerationRequest, TokenEvent
from rooftune.engine.metrics import Metrics
from rooftune.engine.options import EngineOptions
from rooftune.engine.running import RunningEngine
from rooftune.engine.server.stream import deliver_on
from rooftune.engine.torch.bench.models import bench_model
from rooftune.engine.torch.geometry import StepGeometry
from rooftune.engine.torch.linear import SlicedHead
from rooftune.engine.torch.load import load_runner
from rooftune.engine.torch.runner import TorchRunner
from rooftune.engine.torch.sampling import greedy
from rooftune.policies import wire
from rooftune.policies.commands import Figure
from rooftune.policies.request import Setting

BATCH = 32
PROMPT_TOKENS = (100, 300)
STEPS = 300
STEPS_SHORT = 60


class TimedRunner(TorchRunner):
    """Notes how long the latest forward took. forward_s: wall time; forward_cpu_s: CPU time of the loop's thread."""

    forward_s = forward_cpu_s = 0.0

    @classmethod
    def over(cls, runner: TorchRunner) -> "TimedRunner":
        """The same runner, with its model and its KV store."""
        timed = cls.__new__(cls)
        timed.__dict__.update(runner.__dict__)
        return timed

    def forward(self, geometry: StepGeometry) -> torch.Tensor | None:
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        logits = super().forward(geometry)
        self.forward_s = time.perf_counter() - begun_s
        self.forward_cpu_s = time.thread_time() - begun_cpu_s
        return logits

    def behind_the_layers(self, rounds: int) -> Iterator[Figure]:
        """On the rows of the latest step, in turn: the part of the overhead that no scheduler can save, and the
        product with the vocabulary, ours against the model's own."""
        rows, head = self._hidden, self._head
        ours_s, argmax_s, theirs_s = [], [], []
        with torch.inference_mode():
            for _ in range(rounds):
                begun_s = time.thread_time()
                logits = head(rows)
                product_s = time.thread_time()
                greedy(logits)
                done_s = time.thread_time()
                if isinstance(head, SlicedHead):
                    head.whole(rows)
                    theirs_s.append(time.thread_time() - done_s)
                ours_s.append(product_s - begun_s)
                argmax_s.append(done_s - product_s)
        yield Figure("argmax_cpu_ms_batch32", 1e3 * median(argmax_s), "ms")
        if theirs_s:
            yield Figure("head_cpu_ms_batch32", 1e3 * median(ours_s), "ms", baseline=1e3 * median(theirs_s))


def bench(short: bool) -> Iterator[Figure]:
    """Medians over the steps. short: fewer steps."""
    with bench_model() as folder:
        loaded = load_runner(str(folder), device="cpu", kv_blocks=BATCH * (sum(PROMPT_TOKENS) + STEPS) // 16)
    runner = TimedRunner.over(loaded)
    with serving() as deliver:
        steps_s, overheads_s, cpu_s = measure(runner, STEPS_SHORT if short else STEPS, deliver)
    step_ms, overhead_ms = 1e3 * median(steps_s), 1e3 * median(overheads_s)
    yield Figure("overhead_ms_batch32", overhead_ms, "ms", baseline=step_ms)
    # The same by the thread's own clock, which stops while another process has the core.
    yield Figure("overhead_cpu_ms_batch32", 1e3 * median(cpu_s), "ms", baseline=step_ms)
    yield from runner.behind_the_layers(5 if short else 15)


@contextmanager
def serving() -> Iterator[Deliver]:
    """An event loop that receives tokens."""
    events = asyncio.new_event_loop()
    thread = Thread(target=events.run_forever, name="event-loop", daemon=True)
    thread.start()
    try:
        yield deliver_on(events)
    finally:
        events.call_soon_threadsafe(events.stop)
        thread.join()
        events.close()


def measure(runner: TimedRunner, steps: int, deliver: Deliver) -> tuple[list[float], list[float], list[float]]:
    """Wall seconds of each step, wall seconds beside its forward, and the same of the loop's thread alone."""
    engine = RunningEngine(runner, EngineOptions(Setting(step_tokens=4096, max_running=2 * BATCH)))
    engine.observe_with(Metrics(engine.snapshot))
    engine.deliver_with(deliver)
    chance = random.Random(0)
    for _ in range(BATCH):
        prompt = [chance.randrange(runner.facts.vocab_tokens) for _ in range(chance.randint(*PROMPT_TOKENS))]
        engine.submit(GenerationRequest(prompt, steps + 10, ignore_eos=True), _ignore)
    engine.push(
        wire.PushRequest(
            knobs=wire.Knobs(step_tokens=2048),
            lease_s=3600.0,
            expected_revision=0,
            actor="bench",
            reason="the measured steps run under a lease",
        )
    )
    while engine.steps_after(-1).next < 0 or engine.snapshot().waiting or engine.snapshot().partial_prefills:
        engine.step()
    engine.step()
    steps_s, overheads_s, cpu_s = [], [], []
    for _ in range(steps):
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        engine.step()
        took_s, took_cpu_s = time.perf_counter() - begun_s, time.thread_time() - begun_cpu_s
        steps_s.append(took_s)
        overheads_s.append(took_s - runner.forward_s)
        cpu_s.append(took_cpu_s - runner.forward_cpu_s)
    engine.stop()
    return steps_s, overheads_s, cpu_s


def _ignore(event: TokenEvent) -> None:
    """A sink that drops its events."""
