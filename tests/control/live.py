"""A live engine in the test's own process: the real loop and tuning desk, steps that take what a model says, traffic
that goes on while the controller sleeps. Everything on clocks that the test turns.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rooftune.engine.fake import FAKE_FACTS, FakeRunner
from rooftune.engine.fake import ManualClock as EngineClock
from rooftune.engine.interface import Busy, GenerationRequest, Stopping, TokenEvent, TooLong
from rooftune.engine.options import EngineOptions
from rooftune.engine.running import RunningEngine
from rooftune.engine.step import StepBatch
from rooftune.policies import wire
from rooftune.policies.request import Setting
from rooftune.policies.step_time import NAMED_MODELS, StepModel, step_cost
from rooftune.tuner.clock import ManualClock

# Five times slower than the teaching model, so that a second of traffic is few steps and a test is quick.
SLOW = StepModel(*(value * 5.0 for value in NAMED_MODELS["8b-2tbs"][:-1]), 0.0)
BOOT = Setting(step_tokens=2048, max_running=32)


@dataclass(frozen=True)
class Traffic:
    """Poisson arrivals. documents: one prompt in this many is long (0: none)."""

    rate_rps: float = 2.0
    prompt_tokens: int = 200
    output_tokens: int = 20
    documents: int = 8
    document_tokens: int = 4000

    def requests(self, seed: int, from_s: float = 0.0) -> Iterator[tuple[float, int, int]]:
        """(arrival, prompt tokens, output tokens), without end."""
        chance, at_s, number = random.Random(seed), from_s, 0
        while True:
            at_s += chance.expovariate(self.rate_rps)
            long = self.documents > 0 and number % self.documents == self.documents - 1
            prompt = self.document_tokens if long else max(1, round(self.prompt_tokens * chance.uniform(0.5, 1.5)))
            yield at_s, prompt, max(2, round(self.output_tokens * chance.uniform(0.5, 1.5)))
            number += 1


class QuickRunner(FakeRunner):
    """Time from the model, one token for all: no test reads them. Of a step that follows, only the context grows."""

    _decodes = 0
    _context = 0

    def run(self, step: StepBatch) -> list[int]:
        assert self._clock is not None
        self._clock.advance(self.duration_s(step))
        self.steps += 1
        sampled = self._decodes if step.follows else sum(segment.sample for segment in step.segments)
        return [self._facts.vocab_tokens // 2] * sampled

    def duration_s(self, step: StepBatch) -> float:
        if not step.follows:
            self._decodes = len(step.segments)
            self._context = sum(segment.end for segment in step.segments) - self._decodes
            return super().duration_s(step)
        assert self._cost is not None
        self._context += self._decodes
        return step_cost(self._cost, self._decodes, self._decodes, self._decodes, self._context, 0.0, 0.0)


@dataclass
class LiveEngine:
    """One engine with its traffic. slow: factor on every step's time, for an engine that drifts; jitter: deviation of
    a step's time, as a share."""

    traffic: Traffic = field(default_factory=Traffic)
    boot: Setting = BOOT
    seed: int = 1
    model: StepModel = SLOW
    kv_blocks: int = 4096
    ring_rows: int = 20_000
    options: dict[str, object] = field(default_factory=dict)
    slow: float = 1.0
    jitter: float = 0.02
    hung: bool = False
    model_tokens: int = 10_000
    rejected: int = 0
    after_step: Callable[["LiveEngine"], None] | None = None

    def __post_init__(self) -> None:
        self.clock = EngineClock(100.0)
        self._target_s = self.clock.now_s
        self._source = self.traffic.requests(self.seed, self.clock.now_s)
        self._next = next(self._source)
        self._live: list[int] = []
        self.start()

    def start(self) -> None:
        """An engine restart: another boot id, nothing in flight."""
        facts = replace(FAKE_FACTS, max_model_tokens=self.model_tokens)
        runner = QuickRunner(self.model, self.clock, kv_blocks=self.kv_blocks, facts=facts, read_all=False)
        runner.duration_s = self._drifting(runner.duration_s)  # type: ignore[method-assign]  # a test's own engine
        given = {"max_queue": 300, "gap_bounds_s": (0.05, 0.2), "prefix_caching": False} | self.options
        given.setdefault("ring_rows", self.ring_rows)
        self.running = RunningEngine(runner, EngineOptions(self.boot, **given), self.clock)  # type: ignore[arg-type]  # as given

    def _drifting(self, duration_s: Callable[..., float]) -> Callable[..., float]:
        chance = random.Random(self.seed)
        return lambda step: self.slow * duration_s(step) * chance.lognormvariate(0.0, self.jitter)

    def carry(self, traffic: Traffic) -> None:
        """Other traffic from now on."""
        self.traffic = traffic
        self._source = traffic.requests(self.seed + 1, self.clock.now_s)
        self._next = next(self._source)

    def silence(self) -> None:
        """No more arrivals."""
        self._next = (float("inf"), 1, 1)

    def advance(self, seconds: float) -> None:
        """Let this much time pass at the engine; a step that has begun is finished."""
        self._target_s += seconds
        if self.hung:  # arrivals pile up, no step ends
            self.clock.now_s = max(self.clock.now_s, self._target_s)
            self._arrive()
            return
        while self.clock.now_s < self._target_s:
            self._arrive()
            if self.running.step():
                if self.after_step is not None:
                    self.after_step(self)
                continue
            self.clock.now_s = min(max(self._next[0], self.clock.now_s + 1e-6), self._target_s)

    def abort_some(self, share: float) -> None:
        """Callers of this share of the requests in flight hang up."""
        for number in self._live[: max(1, round(len(self._live) * share))]:
            self.running.cancel(number)

    def _arrive(self) -> None:
        while self._next[0] <= self.clock.now_s:
            at_s, prompt, output = self._next
            self._next = next(self._source)
            self.submit(prompt, output, at_s)

    def submit(self, prompt: int, output: int, at_s: float | None = None) -> None:
        request = GenerationRequest([1] * prompt, output, ignore_eos=True)
        try:
            self._live.append(self.running.submit(request, self._hear, at_s))
        except (Busy, TooLong, Stopping):
            self.rejected += 1

    def _hear(self, event: TokenEvent) -> None:
        if event.finished is not None and event.request_id in self._live:
            self._live.remove(event.request_id)


class LiveClock(ManualClock):
    """The controller's clock: while it sleeps, the engines run."""

    def __init__(self, engines: Sequence[LiveEngine]) -> None:
        super().__init__()
        self.engines = engines

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        for engine in self.engines:
            engine.advance(seconds)


@dataclass
class LivePort:
    """A port directly into an engine. script: called with the name of each request; may raise a PortError or answer.

    calls: names of the requests, in order; pushes: every push sent.
    """

    engine: LiveEngine
    address: str = "http://engine.test"
    script: Callable[[str], object] | None = None
    calls: list[str] = field(default_factory=list)
    pushes: list[wire.PushRequest] = field(default_factory=list)
    tells: bool = True  # what is in flight

    def _scripted(self, name: str) -> object:
        self.calls.append(name)
        return self.script(name) if self.script is not None else None

    def state(self) -> wire.State:
        answer = self._scripted("state")
        return answer if isinstance(answer, wire.State) else self.engine.running.tuning_state()

    def steps_after(self, after: int) -> wire.StepColumns:
        self._scripted("steps")
        return self.engine.running.steps_after(after)

    def requests_after(self, after: int) -> wire.RequestColumns:
        self._scripted("requests")
        return self.engine.running.requests_after(after)

    def in_flight(self) -> wire.FlightColumns | None:
        self._scripted("in-flight")
        return self.engine.running.in_flight() if self.tells else None

    def push(self, request: wire.PushRequest) -> wire.PushAnswer | wire.Refusal:
        answer = self._scripted("push")
        self.pushes.append(request)
        return answer if isinstance(answer, wire.Refusal) else self.engine.running.push(request)

    def revert(self, request: wire.RevertRequest) -> wire.PushAnswer | wire.Refusal:
        self._scripted("revert")
        return self.engine.running.revert(request)

    def resume(self, request: wire.ResumeRequest) -> wire.PushAnswer | wire.Refusal:
        self._scripted("resume")
        return self.engine.running.resume(request)

    def close(self) -> None:
        self.calls.append("close")

    @property
    def moving(self) -> list[wire.PushRequest]:
        """Pushes that were more than the renewal of a lease."""
        plain = wire.Knobs()
        return [p for p in self.pushes if p.knobs != plain or p.budget_policy or p.order_policy]
