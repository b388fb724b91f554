"""The whole loop over a real model: greedy answers equal transformers' own, whatever changes while it runs."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch", reason="needs torch (make engine-env)")

from hypothesis import given, settings  # noqa: E402 - after the check for torch, as all below
from hypothesis import strategies as st  # noqa: E402

from rooftune.engine.interface import FinishReason  # noqa: E402
from rooftune.engine.options import EngineOptions  # noqa: E402
from rooftune.engine.running import RunningEngine  # noqa: E402
from rooftune.policies.request import Setting  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.engine.loop_harness import Callers, check_nothing_left, push  # noqa: E402

ORDERS: list[dict[str, Any]] = [
    {"order_policy": {"kind": "fcfs"}},
    {"order_policy": {"kind": "shortest_first", "aging_s": 1000.0}},
    {"order_policy": {"kind": "shortest_first", "aging_s": 0.01}},
    {"order_policy": {"kind": "deadline", "aging_s": 1000.0, "ttft_target_s": 0.02, "prefill_s_per_token": 1e-4}},
    {"order_policy": {"kind": "deadline", "aging_s": 0.0, "ttft_target_s": 10.0, "prefill_s_per_token": 0.0}},
]
NO_TIME = dict.fromkeys(
    ("overhead_s", "sequence_s", "floor_s", "kv_s_per_token", "slope_s_per_token", "attention_s", "sharpness"), 0.0
)
BUDGETS: list[dict[str, Any]] = [
    {"budget_policy": {"kind": "fixed"}},
    {"budget_policy": {"kind": "pressure", "tokens": 5, "prefills": 2}},
    {
        "budget_policy": {
            "kind": "step_time_target",
            "target_s": 0.02,
            "floor_tokens": 2,
            "step_model": NO_TIME | {"slope_s_per_token": 1e-3},
        }
    },
]
# Budget, caps and policies; the tokens are always the same.
KNOBS: list[dict[str, Any]] = [
    *ORDERS,
    *BUDGETS,
    {"step_tokens": 9, "lease_s": 1e-4, "order_policy": {"kind": "shortest_first", "aging_s": 1000.0}},
    {"step_tokens": 1},
    {"step_tokens": 7},
    {"step_tokens": 4096},
    {"step_tokens": 40, "chunk_cap_tokens": 3},
    {"chunk_cap_tokens": 0},
    {"chunk_cap_tokens": 64, "adaptive_chunk_cap": True},
    {"max_partial_prefills": 1},
    {"max_partial_prefills": 0, "max_long_partial_prefills": 1, "long_prompt_tokens": 30},
    {"max_running": 3},
    {"max_running": 64},
]


# For prompts of thousands of tokens, which small budgets would cut into thousands of steps.
LARGE_KNOBS: list[dict[str, Any]] = [
    *ORDERS[:2],  # those that ask no clock: the same plans in every run
    {"step_tokens": 4096},
    {"step_tokens": 1500},
    {"step_tokens": 4096, "chunk_cap_tokens": 700},
    {"chunk_cap_tokens": 0},
    {"max_partial_prefills": 1},
    {"max_partial_prefills": 0, "max_running": 3},
    {"max_running": 64},
]


def run_at_random(
    name: str,
    seed: int,
    requests: int,
    kv_blocks: int,
    reserve: bool,
    knobs: Sequence[dict[str, Any]] = KNOBS,
    own_tokens: tuple[int, int] = (1, 60),
) -> RunningEngine:
    """Requests arrive, cancel and share prefixes while every knob moves; all answers are checked.

    own_tokens: least and most prompt tokens of a request after its shared prefix.
    """
    chance = random.Random(seed)
    runner = tiny.runner(name, kv_blocks=kv_blocks)
    options = EngineOptions(Setting(step_tokens=4096, max_running=64), reserve_whole_prompt=reserve)
    engine = RunningEngine(runner, options)
    callers = Callers(engine)
    gone = set()
    left = requests
    common = [chance.randrange(tiny.VOCABULARY) for _ in range(70)]
    while left or callers.open:
        if left and chance.random() < 0.4:
            for _ in range(min(left, chance.randint(1, 8))):
                prompt = common[: chance.choice([0, 0, 16, 48, 70])]
                prompt = prompt + [chance.randrange(tiny.VOCABULARY) for _ in range(chance.randint(*own_tokens))]
                callers.submit(prompt, chance.randint(1, 30))
                left -= 1
        if chance.random() < 0.2:
            push(engine, **chance.choice(knobs))
        if chance.random() < 0.05 and callers.open:
            number = chance.choice(callers.open)
            engine.cancel(number)
            gone.add(number)
        engine.step()
    for number, request in callers.requests.items():
        got = callers.tokens(number)
        assert got == tiny.generated(tiny.reference(name), list(request.prompt_token_ids), len(got) or 1)[: len(got)]
        assert callers.finished(number) in (FinishReason.LENGTH, *([FinishReason.CANCELLED] if number in gone else []))
    check_nothing_left(engine)
    assert len(engine.requests_after(-1).sequence) == requests
    return engine


@given(st.integers(0, 2**32 - 1), st.sampled_from(["llama", "qwen3", "mistral-window"]), st.booleans(), st.booleans())
@settings(max_examples=5)
def test_equal_to_generate_with_knobs_and_callers_in_flight(seed: int, name: str, scarce: bool, reserve: bool) -> None:
    run_at_random(name, seed, 12, 28 if scarce else 300, reserve)


def test_also_with_prefixes_found_and_requests_preempted() -> None:
    requests = run_at_random("llama", 1, 30, 24, False).requests_after(-1)
    assert sum(requests.cached_tokens) > 0 and sum(requests.preemptions) > 2 and "aborted" in requests.ended


def overtakers(engine: RunningEngine) -> int:
    """Requests whose first token came before that of one which had arrived earlier."""
    rows = engine.requests_after(-1)
    arrived = sorted(zip(rows.arrival_s, rows.ttft_s, strict=True))
    first_s = [arrival_s + ttft_s for arrival_s, ttft_s in arrived if ttft_s is not None]
    return sum(later < max(first_s[:place], default=later) for place, later in enumerate(first_s))


def test_also_when_an_order_policy_lets_short_prompts_overtake() -> None:
    always = [move | {"step_tokens": 9} for move in (ORDERS[1], ORDERS[3])]
    assert overtakers(run_at_random("qwen3", 5, 24, 300, True, always)) > 3
    assert overtakers(run_at_random("qwen3", 5, 24, 300, True, [ORDERS[0] | {"step_tokens": 9}])) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_sixty_four_requests_at_once(name: str) -> None:
    run_at_random(name, 64, 64, 60, False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_chunks_of_up_to_4096_tokens(name: str) -> None:
    """Scarce blocks, so that long prompts are preempted half-read."""
    engine = run_at_random(name, 3, 10, 320, False, LARGE_KNOBS, (900, 4600))
    steps, requests = engine.steps_after(-1), engine.requests_after(-1)
    assert max(steps.prefill_tokens) > 3900 and sum(steps.preemptions) > 0
    assert max(requests.prompt_tokens) > 4096 and len(set(steps.revision)) > 3


def test_a_stop_token_ends_a_real_answer() -> None:
    prompt = [5, 9, 2, 7]
    answer = tiny.generated(tiny.reference("llama"), prompt, 12)
    engine = RunningEngine(tiny.runner("llama"), EngineOptions(Setting(step_tokens=64, max_running=4)))
    callers = Callers(engine)
    number = callers.submit(prompt, 12, stop_token_ids=frozenset([answer[5]]))
    while engine.step():
        pass
    assert callers.tokens(number) == answer[: answer.index(answer[5]) + 1]
    assert callers.finished(number) is FinishReason.STOP
