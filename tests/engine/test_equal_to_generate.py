"""Greedy output equals transformers' ``generate``, token for token, however the work is cut into steps."""

import random

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch", reason="needs torch (make engine-env)")

from hypothesis import given, settings  # noqa: E402 - after the check for torch, as all below
from hypothesis import strategies as st  # noqa: E402

from tests.engine import tiny  # noqa: E402
from tests.engine.harness import RandomSchedule, Request  # noqa: E402


def make_requests(seed: int, count: int, most_prompt: int, most_output: int) -> list[Request]:
    chance = random.Random(seed)
    return [
        Request(
            [chance.randrange(3, tiny.VOCABULARY) for _ in range(chance.randint(1, most_prompt))],
            chance.randint(1, most_output),
        )
        for _ in range(count)
    ]


def check(name: str, requests: list[Request]) -> None:
    for request in requests:
        assert request.output == tiny.generated(tiny.reference(name), request.prompt, request.output_tokens)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_every_family(name: str) -> None:
    requests = make_requests(7, count=8, most_prompt=90, most_output=16)
    schedule = RandomSchedule(tiny.runner(name), 11, most_chunk=40)
    schedule.run(requests)
    check(name, requests)
    assert schedule.mixed_steps > 5, "the schedule never mixed chunks with decodes"
    assert sum(request.drops for request in requests) > 0, "the schedule never dropped a request"
    assert len({token for request in requests for token in request.output}) > 20, "the model repeats itself"


@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(tiny.CONFIGS)),
    seed=st.integers(0, 2**32),
    count=st.integers(1, 10),
    most_chunk=st.sampled_from([1, 2, 7, 16, 33, 200]),
    block_tokens=st.sampled_from([1, 3, 16]),
    drop_share=st.sampled_from([0.0, 0.3]),
)
def test_any_schedule(name: str, seed: int, count: int, most_chunk: int, block_tokens: int, drop_share: float) -> None:
    requests = make_requests(seed, count, most_prompt=60, most_output=6)
    runner = tiny.runner(name, kv_blocks=count * (66 // block_tokens + 1), block_tokens=block_tokens)
    RandomSchedule(runner, seed, most_chunk=most_chunk, drop_share=drop_share).run(requests)
    check(name, requests)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_chunks_longer_than_a_mask_tile(name: str) -> None:
    requests = make_requests(3, count=2, most_prompt=2500, most_output=4)
    requests.append(Request([5 + index % 200 for index in range(2600)], 4))
    RandomSchedule(tiny.runner(name, kv_blocks=600), 5, most_chunk=1900, drop_share=0.0).run(requests)
    check(name, requests)


def test_sixty_four_at_once() -> None:
    requests = make_requests(9, count=64, most_prompt=120, most_output=8)
    schedule = RandomSchedule(tiny.runner("llama", kv_blocks=64 * 9), 1, most_chunk=64, idle_share=0.05)
    schedule.run(requests)
    check("llama", requests)
