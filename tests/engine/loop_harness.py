"""An engine with the fake runner on a stopped clock, its callers, and checks of its internals for leaks."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rooftune.engine.fake import FAKE_FACTS, FakeRunner, ManualClock
from rooftune.engine.interface import FinishReason, GenerationRequest, TokenEvent
from rooftune.engine.options import EngineOptions
from rooftune.engine.running import RunningEngine
from rooftune.engine.step import Sampling
from rooftune.policies import request as r
from rooftune.policies import wire
from rooftune.policies.request import Setting, State
from rooftune.policies.step_time import NAMED_MODELS
from tests.engine.fake_tokens import expected_tokens
from tests.properties.block_check import check_blocks

BOOT = Setting(step_tokens=64, max_running=8)


def engine(
    setting: Setting = BOOT, *, kv_blocks: int = 60, block_tokens: int = 4, read_all: bool = True, **options: Any
) -> tuple[RunningEngine, ManualClock, FakeRunner]:
    """Steps take the time of ``8b-2tbs``: 9.5 ms and more."""
    clock = ManualClock()
    facts = replace(FAKE_FACTS, max_model_tokens=400, eos_token_ids=())
    runner = FakeRunner(
        NAMED_MODELS["8b-2tbs"],
        clock,
        kv_blocks=kv_blocks,
        block_tokens=block_tokens,
        facts=facts,
        read_all=read_all,
    )
    return RunningEngine(runner, EngineOptions(setting, **({"max_queue": 100} | options)), clock), clock, runner


class Callers:
    """Submits requests and collects their events."""

    def __init__(self, engine: RunningEngine) -> None:
        self.engine = engine
        self.requests: dict[int, GenerationRequest] = {}
        self.events: dict[int, list[TokenEvent]] = {}

    def submit(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> int:
        request = GenerationRequest(prompt, max_tokens, **more)
        number = self.engine.submit(request, self._hear)
        self.requests[number] = request
        self.events.setdefault(number, [])
        return number

    def submit_some(self, chance: random.Random, count: int, most_tokens: int = 60) -> list[int]:
        """Random prompts, every other one with a shared prefix."""
        numbers = []
        for _ in range(count):
            common = list(range(chance.choice([0, 0, 8, 24])))
            prompt = common + [chance.randrange(1000) for _ in range(chance.randint(1, most_tokens))]
            sampling = Sampling(seed=chance.randrange(3))
            numbers.append(self.submit(prompt, chance.randint(1, most_tokens), sampling=sampling))
        return numbers

    def _hear(self, event: TokenEvent) -> None:
        heard = self.events.setdefault(event.request_id, [])
        assert not heard or heard[-1].finished is None, "an event after the last one"
        assert event.token_ids or event.finished is not None
        heard.append(event)

    def tokens(self, number: int) -> list[int]:
        return [token for event in self.events[number] for token in event.token_ids]

    def finished(self, number: int) -> FinishReason | None:
        return self.events[number][-1].finished if self.events[number] else None

    @property
    def open(self) -> list[int]:
        return [number for number in self.requests if self.finished(number) is None]

    def check_tokens(self, number: int) -> None:
        """The events match the model, and are complete unless the request was stopped."""
        request, got = self.requests[number], self.tokens(number)
        assert got == expected_tokens(request.prompt_token_ids, len(got), request.sampling.seed)
        if self.finished(number) is FinishReason.LENGTH:
            assert len(got) == request.max_tokens


def push(engine: RunningEngine, lease_s: float = 1000.0, actor: str = "test", **changes: Any) -> wire.PushAnswer:
    """A push that must be accepted; ``budget_policy`` and ``order_policy`` as on the wire, beside the knobs."""
    policies = {name: changes.pop(name) for name in ("budget_policy", "order_policy") if name in changes}
    answer = engine.push(
        wire.PushRequest.model_validate(
            {
                "knobs": changes,
                **policies,
                "lease_s": lease_s,
                "expected_revision": engine.tuning_state().revision,
                "actor": actor,
                "reason": "a test",
            }
        )
    )
    assert isinstance(answer, wire.PushAnswer), answer
    return answer


def state_of(engine: RunningEngine) -> State:
    """The scheduler's state as arrays, copied."""
    parts = {
        name: part if isinstance(part, np.ndarray) else np.array(part.tolist() if hasattr(part, "tolist") else part)
        for name, part in engine._loop._state._asdict().items()
    }
    return State(**parts)


def check_books(engine: RunningEngine) -> None:
    """Between two steps: blocks, lists, slots, keys and ids add up. Not amid a run of decodes, which writes to the
    books when it is over."""
    loop, state = engine._loop, state_of(engine)
    if loop._run is not None and loop._run._begun:
        return
    running = state.running[: state.counters[r.RUNNING_COUNT]].tolist()
    waiting, request = [], int(state.counters[r.WAITING_HEAD])
    while request >= 0:
        waiting.append(request)
        request = int(state.requests[request, r.NEXT])
    assert len(waiting) == state.counters[r.WAITING_COUNT]
    check_blocks(state, loop._boot, running, waiting, engine.facts.kv_blocks)
    taken = sorted(slot for slot, flight in enumerate(loop._flights) if flight is not None)
    assert taken == sorted(running + waiting) == sorted(loop._slot_of.values())
    assert sorted(taken + loop._free_slots) == list(range(len(loop._flights)))
    named = [key for key in state.keys.tolist() if key >= 0]
    assert sum(loop._keys._named_by) == len(named) == sum(loop._flights[slot].named for slot in taken)
    assert len(loop._keys._key_of) + len(loop._keys._free) == len(loop._keys._digest_of)


def check_nothing_left(engine: RunningEngine) -> None:
    """Nothing in flight: everything is freed, and only blocks that may be found again keep a key."""
    check_books(engine)
    loop, state = engine._loop, state_of(engine)
    assert state.counters[r.FREE_BLOCKS] == engine.facts.kv_blocks and not loop._slot_of and engine._intake.live == 0
    for _ in range(len(loop._keys._line)):  # in service each new key checks two
        loop._keys._look_at_one()
    assert not any(loop._keys._named_by)
    assert len(loop._keys._key_of) == len({key for key in state.blocks[:, r.KEY].tolist() if key >= 0})
