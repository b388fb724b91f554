"""Turns an engine with the fake runner by hand, on traffic as the twin gets it, and keeps what happened."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from rooftune.engine.fake import VOCAB_TOKENS, FakeRunner, ManualClock
from rooftune.engine.interface import GenerationRequest, TokenEvent, TooLong
from rooftune.engine.options import EngineOptions
from rooftune.engine.running import RunningEngine
from rooftune.engine.step import Sampling, StepBatch
from rooftune.policies import wire
from rooftune.policies.request import Setting
from rooftune.policies.step_time import StepCost, StepModel, priced
from rooftune.tuner.traffic.workload import Traffic
from tests.twin.random_runs import Run

PRIVATE = VOCAB_TOKENS // 4  # prompt tokens from here on are unique to one request


@dataclass
class Log:
    """What the engine did. plan: (step, request, tokens) as the twin logs it; the instants by request, NaN: never."""

    n: int
    plan: list[tuple[int, int, int]] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    token_s: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    scheduled_s: list[float] = field(default_factory=list)
    refused: int = 0
    stalled: bool = False

    def __post_init__(self) -> None:
        self.token_s = [[] for _ in range(self.n)]
        self.tokens = [[] for _ in range(self.n)]
        self.scheduled_s = [float("nan")] * self.n


class LoggingRunner(FakeRunner):
    """Notes every segment. A request is known by its seed, which is its place in the traffic."""

    log: Log
    clock: ManualClock

    def run(self, step: StepBatch) -> list[int]:
        start_s, number = self.clock.now_s, self.steps
        answer = super().run(step)
        for segment in step.segments:
            request = segment.sampling.seed
            self.log.plan.append((number, request, len(segment.token_ids)))
            self.log.ends_s.append(self.clock.now_s)
            if np.isnan(self.log.scheduled_s[request]):
                self.log.scheduled_s[request] = start_s
        return answer


def consistent(traffic: Traffic) -> Traffic:
    """Traffic whose prefix keys mean content, as a trie: equal keys only where everything before is equal too."""
    ids: dict[tuple[int, int], int] = {}
    keys = traffic.prefix_keys.copy()
    for request in range(len(traffic)):
        before = -1
        for at in range(traffic.prefix_offsets[request], traffic.prefix_offsets[request + 1]):
            before = keys[at] = ids.setdefault((before, int(keys[at])), len(ids))
    return replace(traffic, prefix_keys=keys)


def prompts_of(traffic: Traffic) -> list[list[int]]:
    """Tokens with the content that the traffic's prefix keys say, and one of its own everywhere else."""
    span = traffic.prefix_span_tokens
    prompts = []
    for request in range(len(traffic)):
        keys = traffic.prefix_keys[traffic.prefix_offsets[request] : traffic.prefix_offsets[request + 1]]
        shared = [int(key) * span + offset for key in keys for offset in range(span)][: traffic.prompt_tokens[request]]
        own = range(len(shared), int(traffic.prompt_tokens[request]))
        prompts.append(shared + [PRIVATE + request * 1_000_000 + position for position in own])
    return prompts


def push_of(setting: Setting, model: StepModel | StepCost, revision: int) -> wire.PushRequest:
    """The push that produces exactly this setting."""
    budgets = [
        {"kind": "fixed"},
        {
            "kind": "step_time_target",
            "target_s": max(setting.budget_target_s, 1e-9),
            "floor_tokens": setting.budget_floor_tokens,
            "step_model": priced(model).formula._asdict(),
        },
        {"kind": "pressure", "tokens": setting.pressure_tokens, "prefills": setting.pressure_prefills},
    ]
    aging = {
        "aging_s": setting.aging_s,
        "aged_share": setting.aged_share,
        "wait_tokens_per_s": setting.wait_tokens_per_s,
    }
    late = {"ttft_target_s": setting.ttft_target_s, "prefill_s_per_token": setting.prefill_s_per_token}
    orders = [{"kind": "fcfs"}, {"kind": "shortest_first", **aging}, {"kind": "deadline", **aging, **late}]
    knobs = {name: getattr(setting, name) for name in wire.Knobs.model_fields}
    return wire.PushRequest.model_validate(
        {
            "knobs": knobs | {"adaptive_chunk_cap": bool(setting.adaptive_chunk_cap)},
            "budget_policy": budgets[setting.budget_policy],
            "order_policy": orders[setting.order_policy],
            "lease_s": 80_000.0,
            "expected_revision": revision,
            "actor": "test",
            "reason": "the twin changes too",
        }
    )


def replay(run: Run, *, prefix_caching: bool, after_step: Callable[[RunningEngine], None] | None = None) -> Log:
    """The engine on the traffic of ``run``, its setting and changes by push, until it is idle."""
    traffic, clock = run.traffic, ManualClock()
    log = Log(len(traffic))
    boot = run.engine.boot
    runner = LoggingRunner(run.model, clock, kv_blocks=run.engine.kv_blocks, block_tokens=boot.block_tokens)
    runner.log, runner.clock = log, clock
    most = run.engine.sequence_ceiling
    options = EngineOptions(
        Setting(step_tokens=boot.ceiling_tokens, max_running=most),
        max_queue=len(traffic),
        prefix_caching=prefix_caching,
        reserve_whole_prompt=bool(boot.reserve_whole_prompt),
    )
    engine = RunningEngine(runner, options, clock)
    prompts = prompts_of(traffic)
    pending = [(0.0, run.setting), *((change.at_s, change.setting) for change in run.changes)]
    arrived = 0

    def sink_of(request: int) -> Callable[[TokenEvent], None]:
        def sink(event: TokenEvent) -> None:
            log.tokens[request].extend(event.token_ids)
            log.token_s[request].extend([clock.now_s] * len(event.token_ids))

        return sink

    while True:
        while pending and pending[0][0] <= clock.now_s:
            answer = engine.push(push_of(pending.pop(0)[1], run.model, engine.tuning_state().revision))
            assert isinstance(answer, wire.PushAnswer), answer
        while arrived < len(traffic) and traffic.arrival_s[arrived] <= clock.now_s:
            request = GenerationRequest(
                prompts[arrived], int(traffic.output_tokens[arrived]), Sampling(seed=arrived), ignore_eos=True
            )
            try:
                engine.submit(request, sink_of(arrived), float(traffic.arrival_s[arrived]))
            except TooLong:
                log.refused += 1
            arrived += 1
        if engine.step():
            if after_step is not None:
                after_step(engine)
            continue
        live = engine.snapshot().running + engine.snapshot().waiting
        wake = [at_s for at_s, _ in pending[:1] if live] + [float(at_s) for at_s in traffic.arrival_s[arrived:][:1]]
        if not wake:
            log.stalled = live > 0
            return log
        clock.now_s = max(clock.now_s, min(wake))
