"""A window of rows as a controller reads it, from our engine with a fake runner on a manual clock."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rooftune.engine.fake import FAKE_FACTS, FakeRunner, ManualClock
from rooftune.engine.interface import GenerationRequest
from rooftune.engine.options import EngineOptions
from rooftune.engine.running import RunningEngine
from rooftune.engine.step import StepBatch
from rooftune.policies import wire
from rooftune.policies.request import Setting
from rooftune.policies.step_time import NAMED_MODELS, StepModel
from rooftune.tuner.observe.rows import RequestRows, StepRows

MODEL = NAMED_MODELS["8b-2tbs"]
GAP_BOUNDS_S = (0.01, 0.03, 0.1)


class Ask(NamedTuple):
    """One request: arrival (s), tokens in, tokens out."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Window:
    """steps and requests of a run, and the state at its end."""

    steps: StepRows
    requests: RequestRows
    state: wire.State


class TimeRunner(FakeRunner):
    """All tokens are equal: only step times matter here."""

    def run(self, step: StepBatch) -> list[int]:
        assert self._clock is not None
        self._clock.advance(self.duration_s(step))
        return [self.facts.vocab_tokens - 1 for segment in step.segments if segment.sample]


Look = Callable[[RunningEngine, FakeRunner, ManualClock], None]


def run(
    asks: Sequence[Ask],
    setting: Setting,
    *,
    kv_tokens: int = 400_000,
    until_s: float = float("inf"),
    model: StepModel = MODEL,
    before_step: Look | None = None,
) -> Window:
    """The engine on these requests until all have ended or ``until_s``; steps take what ``model`` says."""
    clock = ManualClock()
    facts = replace(FAKE_FACTS, max_model_tokens=200_000)
    runner = TimeRunner(model, clock, kv_blocks=kv_tokens // 16, block_tokens=16, facts=facts, read_all=False)
    options = EngineOptions(setting, max_queue=2000, prefix_caching=False, gap_bounds_s=GAP_BOUNDS_S)
    engine = RunningEngine(runner, options, clock)
    left = sorted(asks)
    while clock.now_s < until_s:
        if before_step is not None:
            before_step(engine, runner, clock)
        while left and left[0].at_s <= clock.now_s:
            at_s, prompt, output = left.pop(0)
            request = GenerationRequest(range(1, prompt + 1), output, ignore_eos=True)
            engine.submit(request, lambda _: None, at_s)
        if not engine.step():
            if not left:
                break
            clock.now_s = max(clock.now_s, left[0].at_s)
    return Window(_steps(engine), _requests(engine), engine.tuning_state())


def _steps(engine: RunningEngine) -> StepRows:
    pages, after = [], -1
    while True:
        page = engine.steps_after(after)
        pages.append(StepRows.from_wire(page))
        if not page.step:
            return StepRows.join(pages)
        after = page.next


def _requests(engine: RunningEngine) -> RequestRows:
    pages, after = [], -1
    while True:
        page = engine.requests_after(after)
        pages.append(RequestRows.from_wire(page))
        if not page.sequence:
            return RequestRows.join(pages)
        after = page.next


def chat(seed: int, rate_rps: float, span_s: float, prompt: tuple[int, int] = (50, 600), output: int = 60) -> list[Ask]:
    """Poisson arrivals, prompts even between the bounds, outputs exponential with that mean."""
    chance = random.Random(seed)
    asks, at_s = [], 0.0
    while (at_s := at_s + chance.expovariate(rate_rps)) < span_s:
        asks.append(Ask(at_s, chance.randint(*prompt), 2 + min(int(chance.expovariate(1.0 / output)), 8 * output)))
    return asks
