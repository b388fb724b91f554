"""The loop with a fake model: the right tokens to the right caller in every case, and no leaks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftune.engine.interface import Busy, FinishReason, Stopping, TooLong
from rooftune.policies.errors import InputError
from rooftune.policies.request import Setting
from tests.engine.fake_tokens import expected_tokens
from tests.engine.loop_harness import BOOT, Callers, check_books, check_nothing_left, engine, push

SETTINGS = [
    {"step_tokens": 64},
    {"step_tokens": 1},
    {"step_tokens": 9, "chunk_cap_tokens": 3},
    {"chunk_cap_tokens": 0, "max_running": 2},
    {"max_partial_prefills": 1, "max_running": 8},
    {"max_long_partial_prefills": 1, "long_prompt_tokens": 20, "chunk_cap_tokens": 5},
]


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
@settings(max_examples=12)
def test_right_tokens_and_no_leak_with_knobs_and_callers_in_flight(seed: int, caching: bool, scarce: bool) -> None:
    chance = random.Random(seed)
    subject, _, _ = engine(kv_blocks=36 if scarce else 200, prefix_caching=caching, reserve_whole_prompt=not scarce)
    callers = Callers(subject)
    gone = set()
    for _ in range(60):
        if chance.random() < 0.3:
            callers.submit_some(chance, chance.randint(1, 4))
        if chance.random() < 0.2:
            push(subject, **chance.choice(SETTINGS))
        if chance.random() < 0.2 and callers.open:
            number = chance.choice(callers.open)
            subject.cancel(number)
            gone.add(number)
        subject.step()
        check_books(subject)
    while subject.step():
        pass
    for number in callers.requests:
        callers.check_tokens(number)
        wanted = FinishReason.CANCELLED if number in gone else FinishReason.LENGTH
        assert callers.finished(number) is wanted
    check_nothing_left(subject)
    assert len(subject.requests_after(-1).sequence) == len(callers.requests)


def test_scarce_blocks_preempt_and_the_records_count_it() -> None:
    subject, _, _ = engine(kv_blocks=24, reserve_whole_prompt=False)
    callers = Callers(subject)
    for seed in (5, 6):  # the second wave takes slots that preempted requests had
        callers.submit_some(random.Random(seed), 30, most_tokens=40)
        while subject.step():
            check_books(subject)
    for number in callers.requests:
        callers.check_tokens(number)
    steps, requests = subject.steps_after(-1), subject.requests_after(-1)
    assert sum(steps.preemptions) == sum(requests.preemptions) == subject.snapshot().preemptions > 5


def test_a_shared_prefix_is_computed_once_and_reported() -> None:
    subject, _, runner = engine(kv_blocks=200)
    callers = Callers(subject)
    prompt = list(range(50))
    first = callers.submit(prompt, 10)
    while subject.step():
        pass
    before = runner.computed_tokens
    answer = callers.tokens(first)
    # A second turn: the first answer is part of the prompt, and its whole blocks are known as well.
    second = callers.submit([*prompt, *answer, 1, 2, 3], 2)
    while subject.step():
        pass
    assert before == 50 + 9
    assert callers.events[first][0].cached_tokens == 0
    assert callers.events[second][-1].cached_tokens == 56  # 59 tokens were computed, in blocks of 4
    assert runner.computed_tokens - before == 63 - 56 + 1
    assert subject.requests_after(-1).cached_tokens == (0, 56)


def test_the_same_block_after_another_prefix_is_different_content() -> None:
    subject, _, _ = engine(kv_blocks=200)
    callers = Callers(subject)
    for beginning, following in ((1, 9), (2, 8), (1, 8), (1, 1)):
        number = callers.submit([beginning] * 4 + [following] * 4 + [3], 5)
        while subject.step():
            pass
        callers.check_tokens(number)
    assert subject.requests_after(-1).cached_tokens == (0, 0, 4, 4)


def test_without_prefix_caching_nothing_is_found() -> None:
    subject, _, _ = engine(kv_blocks=200, prefix_caching=False)
    callers = Callers(subject)
    for _ in range(2):
        callers.submit(list(range(50)), 2)
        while subject.step():
            pass
    assert subject.requests_after(-1).cached_tokens == (0, 0)


@pytest.mark.parametrize("how", ["stop", "eos", "ignored eos", "stop although eos is ignored"])
def test_an_end_token_ends_the_answer_and_frees_everything(how: str) -> None:
    prompt = [1, 2, 3, 4, 5]
    sampled = expected_tokens(prompt, 20)
    subject, _, runner = engine()
    ends = "eos" not in how or "stop" in how
    if "eos" in how:
        object.__setattr__(runner.facts, "eos_token_ids", (sampled[6],))
    callers = Callers(subject)
    number = callers.submit(
        prompt,
        20,
        stop_token_ids=frozenset([sampled[6]]) if "stop" in how else frozenset(),
        ignore_eos="ignored" in how,
    )
    other = callers.submit([7, 8], 30)
    while subject.step():
        check_books(subject)
    assert callers.tokens(number) == (sampled[:7] if ends or how == "eos" else sampled)
    assert callers.finished(number) is (FinishReason.STOP if ends or how == "eos" else FinishReason.LENGTH)
    assert len(callers.tokens(other)) == 30
    check_nothing_left(subject)


def test_a_request_that_can_never_fit_is_refused_and_the_largest_that_fits_is_served() -> None:
    subject, _, _ = engine(kv_blocks=10, block_tokens=4)
    assert subject.max_request_tokens == 41
    callers = Callers(subject)
    with pytest.raises(TooLong, match="42, must be at most 41"):
        callers.submit([1] * 22, 20)
    number = callers.submit([1] * 21, 20)
    while subject.step():
        pass
    callers.check_tokens(number)
    assert len(callers.tokens(number)) == 20


def test_bad_requests_change_nothing() -> None:
    subject, _, _ = engine()
    callers = Callers(subject)
    for prompt, max_tokens in (([], 1), ([1], 0), ([-1], 1), ([1 << 40], 1)):
        with pytest.raises(InputError):
            callers.submit(prompt, max_tokens)
    assert not subject.step() and subject.snapshot().waiting == 0


def test_a_full_engine_is_busy_until_a_request_ends() -> None:
    subject, _, _ = engine(Setting(step_tokens=64, max_running=2), max_queue=3)
    callers = Callers(subject)
    for _ in range(5):
        callers.submit([1, 2, 3], 4)
    with pytest.raises(Busy) as busy:
        callers.submit([1, 2, 3], 4)
    assert busy.value.retry_after_s >= 1
    assert subject.snapshot().waiting == 5
    while not any(callers.finished(number) for number in callers.requests):
        assert subject.step()
    callers.submit([1, 2, 3], 4)
    while subject.step():
        pass
    assert not callers.open


def test_cancel_before_the_first_step_twice_unknown_and_after_the_end() -> None:
    subject, _, runner = engine()
    callers = Callers(subject)
    early = callers.submit([1, 2, 3], 4)
    for number in (early, early, 999):
        subject.cancel(number)
    assert not subject.step()
    assert callers.finished(early) is FinishReason.CANCELLED and runner.steps == 0
    done = callers.submit([1, 2, 3], 1)
    subject.step()
    subject.cancel(done)
    subject.step()
    assert callers.finished(done) is FinishReason.LENGTH
    assert subject.requests_after(-1).ended == ("aborted", "finished")
    check_nothing_left(subject)


def test_stop_releases_every_request_and_accepts_none() -> None:
    subject, _, _ = engine()
    callers = Callers(subject)
    callers.submit_some(random.Random(1), 20)
    subject.step()
    callers.submit([1], 1)
    subject.stop()
    assert {callers.finished(number) for number in callers.requests} <= {FinishReason.FAILED, FinishReason.LENGTH}
    assert not callers.open and "failed" in subject.requests_after(-1).ended
    with pytest.raises(Stopping):
        callers.submit([1], 1)
    check_nothing_left(subject)


def test_keys_are_recycled_as_new_contents_arrive() -> None:
    subject, _, _ = engine(kv_blocks=50, read_all=False)
    callers, chance = Callers(subject), random.Random(2)
    most = 0
    for _ in range(60):
        callers.submit_some(chance, 5)
        while subject.step():
            most = max(most, len(subject._loop._keys._digest_of))
    # 300 requests of some 15 blocks; at most 5 of them name keys at one time.
    assert most <= 2 * 50 + 5 * 144 // 4
    check_nothing_left(subject)


def test_the_boot_setting_defaults_to_the_ceiling() -> None:
    subject, _, _ = engine(BOOT, ceiling_tokens=512, max_running=16)
    assert subject.tuning_state().envelope.ceiling_tokens == 512
    push(subject, step_tokens=512, max_running=16)
