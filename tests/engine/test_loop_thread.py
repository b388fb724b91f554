"""The loop on its own thread: calls from many threads, draining, stopping, and a runner that breaks."""

import random
import threading
from dataclasses import replace
from itertools import count, pairwise

import pytest

from rooftune.engine.fake import FAKE_FACTS, FakeRunner
from rooftune.engine.interface import FinishReason, RejectReason, Stopping
from rooftune.engine.options import EngineOptions
from rooftune.engine.running import RunningEngine
from rooftune.engine.step import StepBatch
from rooftune.policies import wire
from rooftune.policies.errors import RooftuneError
from rooftune.policies.request import Setting
from tests.engine.loop_harness import Callers, check_nothing_left, push

LONG_S = 60.0  # reached only if something is broken


class SlowEnough(FakeRunner):
    """On request, holds every step until it is released."""

    gate: threading.Event | None = None
    breaks_after = 1 << 60

    def run(self, step: StepBatch) -> list[int]:
        if self.gate is not None:
            assert self.gate.wait(LONG_S)
        if self.steps >= self.breaks_after:
            raise ValueError("broken on purpose")
        return super().run(step)


def running(**options: int) -> tuple[RunningEngine, SlowEnough]:
    runner = SlowEnough(kv_blocks=60, block_tokens=4, facts=replace(FAKE_FACTS, max_model_tokens=300))
    ticks = count()
    # Every read of the clock costs a microsecond: time passes outside the runner too.
    engine = RunningEngine(
        runner,
        EngineOptions(Setting(step_tokens=64, max_running=8), **({"max_queue": 1000} | options)),
        lambda: next(ticks) * 1e-6,
    )
    return engine, runner


def test_the_threaded_loop_is_an_engine() -> None:
    engine, _ = running()
    assert engine.facts.name == "fake" and engine.max_request_tokens == 241


def test_callers_on_many_threads_get_their_own_tokens_and_nothing_leaks() -> None:
    engine, _ = running()
    engine.start()
    everybody = [Callers(engine) for _ in range(6)]

    def call(callers: Callers, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(8):
            numbers = callers.submit_some(chance, 3, most_tokens=30)
            if chance.random() < 0.5:
                engine.cancel(chance.choice(numbers))
            if seed == 0:
                push(engine, step_tokens=chance.choice([3, 20, 64]))

    threads = [threading.Thread(target=call, args=(callers, seed)) for seed, callers in enumerate(everybody)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert engine.drain(LONG_S)
    for callers in everybody:
        assert len(callers.requests) == 24 and not callers.open
        for number in callers.requests:
            callers.check_tokens(number)
    assert len(engine.requests_after(-1).sequence) == 6 * 24
    with pytest.raises(Stopping):
        everybody[0].submit([1], 1)
    assert engine.snapshot().healthy and not engine.snapshot().accepting
    engine.stop()
    check_nothing_left(engine)


def test_records_of_steps_in_a_row_join_so_that_durations_add_up() -> None:
    engine, runner = running()
    runner.gate = threading.Event()
    engine.start()
    callers = Callers(engine)
    callers.submit_some(random.Random(1), 20, most_tokens=30)
    runner.gate.set()
    assert engine.drain(LONG_S)
    engine.stop()
    steps = engine.steps_after(-1)
    ends_s = [start_s + duration_s for start_s, duration_s in zip(steps.start_s, steps.duration_s, strict=True)]
    assert len(ends_s) > 30 and all(duration_s > 0.0 for duration_s in steps.duration_s)
    for end_s, (_, start_s) in zip(ends_s, pairwise(steps.start_s), strict=False):
        assert start_s == pytest.approx(end_s, abs=1e-12)


def test_a_push_while_a_step_runs_names_the_next_one() -> None:
    engine, runner = running()
    runner.gate = threading.Event()
    engine.start()
    callers = Callers(engine)
    callers.submit(list(range(200)), 5)
    while engine.snapshot().step == 0:
        pass  # the first step has begun, and waits at the gate
    answer = push(engine, step_tokens=7)
    assert answer.effective_from_step == 1
    runner.gate.set()
    assert engine.drain(LONG_S)
    steps = engine.steps_after(-1)
    assert steps.prefill_tokens[:3] == (64, 7, 7) and steps.revision[:3] == (0, 1, 1)
    engine.stop()


def test_an_idle_engine_ends_its_lease_and_wakes_for_a_request() -> None:
    engine, _ = running()
    engine.start()
    push(engine, lease_s=1e-4, step_tokens=7)
    for _ in range(200):
        if engine.tuning_state().lease is None:
            break
    assert engine.tuning_state().lease is None and engine.snapshot().budget_configured_tokens == 64
    callers = Callers(engine)
    callers.submit([1, 2], 3)
    assert engine.drain(LONG_S) and not callers.open
    engine.stop()


def test_drain_reports_unfinished_requests_and_stop_ends_them() -> None:
    engine, runner = running()
    runner.gate = threading.Event()
    engine.start()
    callers = Callers(engine)
    number = callers.submit([1, 2], 200)
    assert not engine.drain(0.01)
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    runner.gate.set()
    stopper.join(LONG_S)
    assert callers.finished(number) is FinishReason.FAILED
    callers.check_tokens(number)
    check_nothing_left(engine)


def test_a_failing_runner_fails_every_request_and_the_engine_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = running()
    seen: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    runner.breaks_after = 3
    callers = Callers(engine)
    callers.submit_some(random.Random(1), 20)
    engine.start()
    assert engine.drain(LONG_S)
    engine.stop()
    assert {callers.finished(number) for number in callers.requests} >= {FinishReason.FAILED} and not callers.open
    assert not engine.snapshot().healthy and [str(call.exc_value) for call in seen] == ["broken on purpose"]
    with pytest.raises(Stopping):
        callers.submit([1], 1)
    assert isinstance(engine.tuning_state(), wire.State)


def test_refusals_are_reported_to_the_observer() -> None:
    engine, _ = running(max_queue=0)

    class Reasons:
        def __init__(self) -> None:
            self.heard: list[RejectReason] = []

        def on_rejected(self, reason: RejectReason) -> None:
            self.heard.append(reason)

    reasons = Reasons()
    engine.observe_with(reasons)  # type: ignore[arg-type]  # nothing else happens
    callers = Callers(engine)
    for _ in range(8):
        callers.submit([1], 1)
    for prompt, tokens in (([1], 1), ([1], 900), ([-1], 1)):
        with pytest.raises(RooftuneError):
            callers.submit(prompt, tokens)
    assert reasons.heard == [RejectReason.BUSY, RejectReason.TOO_LONG, RejectReason.INVALID]
