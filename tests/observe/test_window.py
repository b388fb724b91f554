"""``Window``: bounded, dropped at a restart, and correct about rows that have left and requests still open."""

import math

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.control.searcher.window import window_part
from rooftune.tuner.observe.protocol import ProtocolReader
from rooftune.tuner.observe.window import Window, arrived_between, settled
from tests.observe.fake_port import FakePort


class Watched:
    """A fake engine with a reader and a window."""

    def __init__(self, window: Window, **port: object) -> None:
        self.port = FakePort(**port)  # type: ignore[arg-type]  # fields of FakePort
        self.reader = ProtocolReader(self.port)
        self.window = window

    def read(self) -> Window:
        self.window = self.window.add(self.reader.read())
        return self.window


def test_rows_accumulate_over_reads() -> None:
    watched = Watched(Window(60.0))
    for _ in range(3):
        watched.port.step()
        watched.port.ended()
        watched.read()
    window = watched.read()
    assert window.steps.step.tolist() == [0, 1, 2] and window.requests.sequence.tolist() == [0, 1, 2]
    assert window.requests.gap_bounds_s == (0.03,) and window.requests.gap_over.shape == (3, 1)
    assert window.complete_from_s == window.steps_from_s == -math.inf


def test_old_rows_leave_the_window_and_are_counted() -> None:
    watched = Watched(Window(10.0))
    for _ in range(30):
        watched.port.step(duration_s=1.0)
        watched.port.ended(arrival_s=watched.port.now_s - 0.5)
        watched.read()
    window = watched.window
    assert window.steps.end_s.min() >= window.now_s - 10.0 and len(window.steps) == 11
    assert window.requests.finish_s.min() >= window.now_s - 10.0 and len(window.requests) == 11
    assert window.steps_from_s == window.now_s - 11.0 == window.complete_from_s


def test_rows_are_bounded_whatever_the_span() -> None:
    watched = Watched(Window(1e6, most_steps=5, most_requests=3))
    for _ in range(20):
        watched.port.step()
        watched.port.ended()
        watched.read()
    assert watched.window.steps.step.tolist() == list(range(15, 20))
    assert watched.window.requests.sequence.tolist() == [17, 18, 19]
    assert watched.window.complete_from_s == watched.port.requests[16]["finish_s"]


def test_a_window_is_empty_after_a_restart() -> None:
    watched = Watched(Window(60.0))
    watched.port.step()
    watched.port.ended()
    watched.read()
    watched.port.restart("second")
    watched.port.bounds_s = ()
    watched.port.step(revision=0)
    window = watched.read()
    assert window.boot_id == "second" and len(window.steps) == 1 and len(window.requests) == 0
    assert window.span_s == 60.0 and window.lost_steps == 0


def test_the_older_window_stays_as_it_was() -> None:
    watched = Watched(Window(60.0))
    watched.port.step()
    one = watched.read()
    watched.port.step()
    watched.read()
    assert len(one.steps) == 1


def test_lost_rows_are_counted_and_earlier_ones_are_incomplete() -> None:
    watched = Watched(Window(600.0), capacity=4)
    for _ in range(9):
        watched.port.step()
        watched.port.ended()
    window = watched.read()
    assert window.lost_steps == window.lost_requests == 0, "they ran before the first read"
    assert window.complete_from_s == window.requests.finish_s[0]
    for _ in range(6):
        watched.port.step()
        watched.port.ended()
    window = watched.read()
    assert window.lost_steps == window.lost_requests == 2
    assert window.complete_from_s == watched.port.requests[11]["finish_s"]
    assert window.steps_from_s == watched.port.steps[11]["start_s"]


def reign_of_three() -> Watched:
    """Revision 1 for 10 steps of a second from 100 s on, idle for 5 s, then revision 2, then 3, five steps each."""
    watched = Watched(Window(600.0))
    for number in range(20):
        if number == 10:
            watched.port.now_s += 5.0
        watched.port.step(duration_s=1.0, revision=1 if number < 10 else 2 if number < 15 else 3)
    return watched


def test_a_revision_is_in_force_from_the_last_step_of_the_one_before() -> None:
    window = reign_of_three().read()
    assert [window.in_force_from(revision) for revision in (1, 2, 3)] == [-math.inf, 110.0, 120.0]


def test_requests_since_an_instant_come_by_arrival() -> None:
    watched = reign_of_three()
    for arrival_s, finish_s in [(101.0, 109.0), (109.0, 116.0), (112.0, 118.0), (111.0, 119.0), (119.0, 121.0)]:
        watched.port.ended(arrival_s=arrival_s, finish_s=finish_s)
    watched.port.ended(arrival_s=121.0, finish_s=124.0, ended="aborted")
    window = watched.read()
    assert window.requests_since(112.0).arrival_s.tolist() == [112.0, 119.0, 121.0]


def test_a_revision_before_it_left_the_window_and_still_bounds_it() -> None:
    """Its steps are gone, so only the instant from which steps are here tells when the next one came at the latest."""
    watched = Watched(Window(10.0))
    watched.port.step(duration_s=1.0, revision=1)
    for _ in range(12):
        watched.port.step(duration_s=1.0, revision=2)
    window = watched.read()
    assert not (window.steps.revision == 1).any()
    assert window.in_force_from(2) == window.steps_from_s > 101.0


def test_requests_of_a_time_come_in_order_of_arrival() -> None:
    watched = Watched(Window(600.0))
    for arrival_s, finish_s, ended in [(5.0, 6.0, "finished"), (1.0, 7.0, "finished"), (3.0, 8.0, "failed")]:
        watched.port.ended(arrival_s=arrival_s, finish_s=finish_s, ended=ended)
    watched.port.ended(arrival_s=1.0, finish_s=9.0)
    watched.port.now_s = 20.0
    rows = watched.read().requests
    assert arrived_between(rows, 1.0, 5.0).sequence.tolist() == [1, 3]
    assert arrived_between(rows, 1.0, 5.1).arrival_s.tolist() == [1.0, 1.0, 5.0]


def test_settled_removes_the_longest_stay_while_requests_are_in_the_system() -> None:
    watched = Watched(Window(600.0))
    watched.port.ended(arrival_s=10.0, finish_s=14.0)
    watched.port.ended(arrival_s=13.0, finish_s=14.5, ended="failed")
    rows = watched.read().requests
    assert settled(rows, 20.0, 0) == 20.0
    assert settled(rows, 20.0, 3) == 16.0
    assert settled(rows, 20.0, 3, most_s=1.0) == 19.0
    assert settled(rows.select(np.array([], dtype=np.int64)), 20.0, 1) == -math.inf


def test_the_demand_of_a_window_is_not_short_of_long_requests() -> None:
    """Every second a short request (1 s) and every fourth a long one (20 s): one in five is long at any time.

    Finished requests alone would show fewer long ones at the new edge and more at the old one.
    """
    watched = Watched(Window(60.0))
    lives = sorted(
        (arrival + stay, arrival, stay)
        for arrival in range(100, 300)
        for stay in ([1.0, 20.0] if arrival % 4 == 0 else [1.0])
    )
    biased = 0
    for now in range(101, 300):
        watched.port.now_s = float(now - 1)
        here = sum(1 for finish, arrival, _ in lives if arrival < now - 1 and finish > now)
        ended = sum(1 for finish, arrival, _ in lives if now - 1 < finish <= now)
        watched.port.step(duration_s=1.0, running=here + ended)
        for finish, arrival, stay in lives:
            if now - 1 < finish <= now:
                watched.port.ended(arrival_s=float(arrival), finish_s=finish, output_tokens=int(stay) + 1)
        window = watched.read()
        if now > 200:
            assert window.in_system == here
            demand = window.demand()
            share = float(np.mean(demand.output_tokens == 21))
            assert len(demand) >= 25 and share == pytest.approx(0.2, abs=0.03)
            assert (demand.output_tokens == 21).sum() == np.isin(demand.arrival_s % 4, 0).sum() / 2, "none is missing"
            newest = window.requests_since(window.now_s - 15.0)
            biased += bool((newest.output_tokens == 2).all())
    assert biased == 99, "which the newest finished requests alone would be, every time"


def test_a_job_gets_finished_requests_by_arrival_from_the_start_of_the_window() -> None:
    watched = Watched(Window(600.0))
    watched.port.ended(arrival_s=105.0, finish_s=106.0)
    watched.port.ended(arrival_s=101.0, finish_s=107.0, output_tokens=1, gap_count=0, longest_gap_s=None)
    watched.port.ended(arrival_s=102.0, finish_s=108.0, ended="failed")
    watched.port.ended(arrival_s=103.0, finish_s=109.0, output_tokens=0, gap_count=0)
    watched.port.now_s = 110.0
    part = window_part(watched.read().requests, 100.0)
    assert part.arrival_s == (1.0, 5.0) and part.finish_s == (7.0, 6.0)
    assert part.longest_gap_s == (0.0, 0.01) and part.gap_count == (0, 1)
    assert part.gap_bounds_s == (0.03,) and part.gap_over == ((0, 0),)


@pytest.mark.parametrize("bad", [{"span_s": 0.0}, {"span_s": math.inf}, {"span_s": 1.0, "most_steps": 0}])
def test_a_window_of_invalid_size_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Window(**bad)  # type: ignore[arg-type]  # a number of rows may come as any number
