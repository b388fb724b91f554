"""``ProtocolReader``: every row once or counted as lost, restarts detected, and stale distinguished from idle."""

import math
import random

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.observe.protocol import ProtocolReader, Reading
from rooftune.tuner.observe.window import Window
from rooftune.tuner.ports.base import PortError, PortFault
from tests.observe.fake_port import FakePort, broken


def reader(port: FakePort, max_pages: int = 64) -> ProtocolReader:
    return ProtocolReader(port, max_pages)


def steps_of(reading: Reading) -> list[int]:
    return reading.steps.step.tolist()


def test_the_first_read_returns_everything_and_the_next_what_is_new() -> None:
    port = FakePort(page_rows=7)
    for _ in range(20):
        port.step()
        port.ended()
    one = reader(port)
    first = one.read()
    assert first.first and not first.restarted and not first.behind
    assert steps_of(first) == list(range(20)) and first.requests.sequence.tolist() == list(range(20))
    port.step()
    second = one.read()
    assert not second.first and steps_of(second) == [20] and len(second.requests) == 0
    assert second.lost_steps == second.lost_requests == 0
    nothing = one.read()
    assert len(nothing.steps) == len(nothing.requests) == 0 and nothing.boot_id == "first"


def test_random_rows_pages_and_failures_lose_and_repeat_nothing() -> None:
    for seed in range(8):
        chance = random.Random(seed)
        port = FakePort(page_rows=chance.randint(1, 9))

        def trouble(name: str, chance: random.Random = chance) -> None:
            if chance.random() < 0.1:
                raise broken()

        port.before = trouble
        one, steps, requests = reader(port, chance.randint(1, 4)), list[int](), list[int]()
        for turn in range(60):
            for _ in range(chance.randint(0, 12) if turn < 40 else 0):
                port.step()
                if chance.random() < 0.5:
                    port.ended()
            if turn == 40:
                port.before = lambda name: None
            try:
                reading = one.read()
            except PortError:
                continue
            assert reading.lost_steps == reading.lost_requests == 0
            steps += steps_of(reading)
            requests += reading.requests.sequence.tolist()
            if turn >= 40 and not reading.behind and not len(reading.steps):
                break
        while reading.behind:
            reading = one.read()
            steps += steps_of(reading)
            requests += reading.requests.sequence.tolist()
        assert steps == list(range(len(port.steps))) and requests == list(range(len(port.requests)))


def test_rows_that_were_overwritten_are_counted() -> None:
    port = FakePort(capacity=10, page_rows=4)
    one = reader(port)
    one.read()
    for _ in range(25):
        port.step()
        port.ended()
    late = one.read()
    assert steps_of(late) == list(range(15, 25))
    assert late.lost_steps == 15 and late.lost_requests == 15
    port.step()
    assert one.read().lost_steps == 0


def test_a_read_stops_at_its_page_limit_and_reports_it() -> None:
    port = FakePort(page_rows=5)
    for _ in range(12):
        port.step()
    one = reader(port, max_pages=2)
    first = one.read()
    assert first.behind and steps_of(first) == list(range(10))
    second = one.read()
    assert not second.behind and steps_of(second) == [10, 11]


def test_a_busy_engine_does_not_keep_a_read_from_ending() -> None:
    port = FakePort()

    def work(name: str) -> None:
        if name != "state":
            port.step()
            port.ended()

    port.before = work
    one = reader(port)
    reading = one.read()
    assert not reading.behind and len(port.received) <= 5
    seen = steps_of(reading) + steps_of(one.read())
    assert seen == list(range(len(seen)))


def test_a_failed_read_leaves_its_rows_for_the_next() -> None:
    port = FakePort(page_rows=2)
    one = reader(port)
    one.read()
    for _ in range(6):
        port.step()
        port.ended()
    for place in range(1, 8):
        count = 0

        def fail(name: str, place: int = place) -> None:
            nonlocal count
            count += 1
            if count == place:
                raise broken(PortFault.GARBAGE)

        port.before = fail
        with pytest.raises(PortError) as caught:
            one.read()
        assert caught.value.fault is PortFault.GARBAGE
    port.before = lambda name: None
    after = one.read()
    assert len(after.steps) == len(after.requests) == 6 and not after.restarted


def test_after_a_restart_only_rows_of_the_new_boot_are_read() -> None:
    port = FakePort()
    port.step()
    one = reader(port)
    one.read()
    port.restart("second")
    port.step(revision=0)
    port.ended()
    again = one.read()
    assert again.restarted and not again.first and again.boot_id == "second"
    assert steps_of(again) == [0] and len(again.requests) == 1
    assert not one.read().restarted


@pytest.mark.parametrize("during", ["steps", "requests"])
def test_a_restart_in_the_middle_of_a_read(during: str) -> None:
    port = FakePort()
    for _ in range(3):
        port.step()
    one = reader(port)
    one.read()
    port.step()

    def end(name: str) -> None:
        if name == during and port.boot_id == "first":
            port.restart("second")
            port.step()

    port.before = end
    reading = one.read()
    assert reading.restarted and reading.boot_id == "second" and steps_of(reading) == [0]


def test_an_engine_that_keeps_restarting_gives_no_rows_and_is_a_restart() -> None:
    port = FakePort()
    port.step()
    one, window = reader(port), Window(60.0)
    window = window.add(one.read())
    starts = iter(range(1000))

    def end(name: str) -> None:
        if name == "steps":
            port.restart(f"start {next(starts)}")

    port.before = end
    reading = one.read()
    assert reading.restarted and len(reading.steps) == len(reading.requests) == 0 and len(port.received) < 20
    window = window.add(reading)
    assert len(window.steps) == 0
    port.before = lambda name: None
    port.step()
    port.ended()
    after = one.read()
    assert after.restarted and steps_of(after) == [0] and len(window.add(after).requests) == 1


# --- idle, working, stalled, hung ---


def test_an_idle_engine_is_not_stale() -> None:
    port = FakePort()
    one = reader(port)
    assert one.read().metrics_age_s == 0.0
    port.step(running=2)
    port.ended()
    port.ended()
    port.now_s += 3600.0
    idle = one.read()
    assert idle.metrics_age_s == 0.0 and not idle.busy and idle.in_system == 0


def test_a_request_row_read_before_its_step_row_counts() -> None:
    port = FakePort()
    one = reader(port)
    port.step(running=1, decode_tokens=1)
    one.read()
    port.now_s += 0.01
    port.ended()  # of the step whose row comes later
    one.read()
    port.step(running=1, start_s=port.now_s - 0.01)
    port.now_s += 50.0
    reading = one.read()
    assert not reading.busy and reading.metrics_age_s == 0.0


def test_open_requests_without_a_step_make_it_stale() -> None:
    port = FakePort()
    one = reader(port)
    port.step(running=2, waiting=1)
    port.ended()
    port.now_s += 5.0
    reading = one.read()
    assert reading.busy and reading.in_system == 2 and reading.metrics_age_s == pytest.approx(5.0)
    port.now_s += 5.0
    assert one.read().metrics_age_s == pytest.approx(10.0)


def test_ends_of_the_previous_step_do_not_count_for_the_newest() -> None:
    """vLLM's steps join: the one ends, with its request, at the instant at which the next begins."""
    port = FakePort()
    port.step(running=2)
    port.ended(finish_s=port.now_s)
    port.step(running=1, start_s=port.now_s)
    port.now_s += 2.0
    reading = reader(port).read()
    assert reading.in_system == 1 and reading.metrics_age_s == pytest.approx(2.0)


def test_the_end_of_a_step_that_took_no_time_counts_for_it() -> None:
    port = FakePort()
    port.step(duration_s=0.0)
    port.ended(finish_s=port.now_s)
    port.now_s += 60.0
    assert not reader(port).read().busy


def test_a_hung_step_ages_from_its_earliest_possible_start() -> None:
    port = FakePort()
    one = reader(port)
    port.step()
    port.ended()
    one.read()
    port.now_s += 1000.0  # idle for long
    one.read()
    port.now_s += 4.0
    port.begun += 1  # an arrival: the next step has begun and does not end
    reading = one.read()
    assert reading.busy and reading.in_system == 1 and reading.metrics_age_s == pytest.approx(4.0)
    port.now_s += 4.0
    assert one.read().metrics_age_s == pytest.approx(8.0)
    port.step(start_s=port.now_s - 5.0, duration_s=5.0)
    port.begun += 1
    assert one.read().metrics_age_s == pytest.approx(0.0), "that one ended and the next began"


def test_a_step_in_flight_at_the_first_read_has_no_known_age() -> None:
    port = FakePort()
    port.begun = 1
    one = reader(port)
    assert math.isnan(one.read().metrics_age_s)
    port.now_s += 7.0
    assert math.isnan(one.read().metrics_age_s), "missing is not zero"


def test_a_request_without_an_end_instant_counts_as_ended() -> None:
    port = FakePort()
    port.step()
    port.ended(ended="aborted", finish_s=None, ttft_s=None, longest_gap_s=None, scheduled_s=None)
    port.now_s += 60.0
    assert reader(port).read().metrics_age_s == 0.0


def test_max_pages_below_one_is_refused() -> None:
    with pytest.raises(InputError, match="max_pages"):
        reader(FakePort(), 0)


def test_what_is_in_flight_is_asked_for_when_it_is_wanted_and_there_is_some() -> None:
    port = FakePort()
    reader = ProtocolReader(port)
    assert reader.read(flights=True).in_flight is None and "in-flight" not in port.received, "nothing is there"
    port.step(running=1)
    port.flies(running=True, computed_tokens=4)
    assert reader.read().in_flight is None and "in-flight" not in port.received
    found = reader.read(flights=True).in_flight
    assert found is not None and found.running.tolist() == [True] and found.computed_tokens.tolist() == [4]
    port.step(running=1, waiting=1)
    port.flies()
    found = reader.read(flights=True).in_flight
    assert found is not None and found.request_id.tolist() == ["0", "1"] and np.isnan(found.scheduled_s).all()


def test_a_list_of_another_start_or_with_rows_left_out_is_not_used() -> None:
    port = FakePort()
    reader = ProtocolReader(port)
    port.step(running=1, waiting=1)
    port.flies()
    port.left_out = 1
    assert reader.read(flights=True).in_flight is None
    port.left_out = 0
    port.step(running=1, waiting=1)
    port.before = lambda name: setattr(port, "boot_id", "second") if name == "in-flight" else None
    assert reader.read(flights=True).in_flight is None
