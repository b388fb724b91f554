"""Bookkeeping done once for a run of decodes equals bookkeeping in each step."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftune.engine.decode_run import DecodeRun
from rooftune.engine.flight import Gaps
from rooftune.engine.interface import TokenEvent
from rooftune.engine.running import RunningEngine
from rooftune.policies.request import Setting
from tests.engine.fake_tokens import expected_tokens
from tests.engine.loop_harness import Callers, check_books, check_nothing_left, engine, push

BOUNDS_S = (0.009, 0.01, 0.0105)
KNOBS: list[dict[str, Any]] = [
    {"step_tokens": 64},
    {"step_tokens": 3},
    {"step_tokens": 40, "chunk_cap_tokens": 4},
    {"max_running": 3},
    {"order_policy": {"kind": "shortest_first", "aging_s": 0.05}},
    {"order_policy": {"kind": "fcfs"}},
]


def turned(seed: int, scarce: bool, caching: bool) -> tuple[RunningEngine, Callers, int]:
    """One random life of an engine; how many of its steps followed the one before."""
    chance = random.Random(seed)
    subject, _, runner = engine(
        kv_blocks=36 if scarce else 200,
        prefix_caching=caching,
        reserve_whole_prompt=not scarce,
        gap_bounds_s=BOUNDS_S,
    )
    callers = Callers(subject)
    followed, run = 0, runner.run

    def counting(step: Any) -> list[int]:
        nonlocal followed
        followed += step.follows
        return run(step)

    runner.run = counting  # type: ignore[method-assign]  # to see what the loop says of its steps
    for _ in range(150):
        if chance.random() < 0.06:
            stops = frozenset(chance.sample(expected_tokens([1, 2], 40), 2)) if chance.random() < 0.3 else frozenset()
            callers.submit([1, 2], chance.randint(1, 40), stop_token_ids=stops)
            callers.submit_some(chance, chance.randint(0, 2), most_tokens=40)
        if chance.random() < 0.05:
            push(subject, **chance.choice(KNOBS))
        if chance.random() < 0.04 and callers.open:
            subject.cancel(chance.choice(callers.open))
        subject.step()
        if chance.random() < 0.1:
            subject._loop._end_run()
        check_books(subject)
    while subject.step():
        pass
    check_nothing_left(subject)
    return subject, callers, followed


@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
@settings(max_examples=15)
def test_the_same_events_and_records_as_without_runs(seed: int, scarce: bool, caching: bool) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DecodeRun, "plan", lambda self, setting, model: False)
        one_by_one, theirs, none = turned(seed, scarce, caching)
    subject, ours, _ = turned(seed, scarce, caching)
    assert none == 0
    assert ours.events == theirs.events
    drop = {"boot_id"}
    columns: list[Callable[[RunningEngine], Any]] = [lambda e: e.steps_after(-1), lambda e: e.requests_after(-1)]
    for read in columns:
        mine, others = (read(each).model_dump(exclude=drop) for each in (subject, one_by_one))
        for name, column in mine.items():
            assert column == pytest.approx(others[name]) if name == "now_s" else column == others[name], name
    for number in ours.requests:
        ours.check_tokens(number)


def test_most_steps_of_a_full_batch_follow_the_one_before() -> None:
    assert turned(3, scarce=False, caching=True)[2] > 50


def test_a_lone_request_that_preempts_itself_starts_over() -> None:
    """Its plan may look like the previous one: one token, in the same place."""
    subject, _, _ = engine(Setting(step_tokens=64, max_running=8), kv_blocks=12, reserve_whole_prompt=False)
    callers = Callers(subject)
    numbers = [callers.submit([first] * 9, 30) for first in (1, 2, 3)]
    while subject.step():
        check_books(subject)
    for number in numbers:
        callers.check_tokens(number)
    assert sum(subject.requests_after(-1).preemptions) > 2


def test_gap_counts_of_parts_add_up() -> None:
    instants_s = [0.0, 1.0, 1.5, 4.0, 4.1, 9.0]
    whole, first, later = Gaps(0.0, (0.4, 1.0)), Gaps(0.0, (0.4, 1.0)), Gaps(1.5, (0.4, 1.0))
    for now_s in instants_s[1:]:
        whole.close(now_s)
        (first if now_s <= 1.5 else later).close(now_s)
    first.add(later)
    for name in Gaps.__slots__:
        assert getattr(first, name) == getattr(whole, name), name
    first.add(Gaps(9.0, (0.4, 1.0)))
    assert (first.count, first.longest_s, first.over) == (5, 4.9, [1, 2, 2])


def test_an_event_of_a_run_is_a_token_event() -> None:
    subject, _, _ = engine()
    heard: list[TokenEvent] = []
    callers = Callers(subject)
    callers.submit([1, 2, 3], 5)
    while subject.step():
        heard = callers.events[0]
    assert [type(event) for event in heard] == [TokenEvent] * 5 and all(len(event.token_ids) == 1 for event in heard)
