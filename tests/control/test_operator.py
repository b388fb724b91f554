"""What people ask for: kept over restarts, in order, and never lost to one another."""

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from rooftune.tuner.control.state import operator
from rooftune.tuner.control.state.store import StateFile, StoreError


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateFile]:
    with StateFile.own(tmp_path) as found:
        yield found


def test_without_a_request_nothing_is_pending(state: StateFile) -> None:
    assert not operator.read(state).paused and not operator.read(state).blocked
    assert operator.pending(state) == (None, None)


def test_a_pause_holds_over_a_restart_until_a_resume(tmp_path: Path) -> None:
    with StateFile.own(tmp_path) as state:
        operator.pause(state, "me", "lunch", 5.0)
    with StateFile.own(tmp_path) as state:
        asked = operator.read(state).paused
        assert asked is not None and (asked.actor, asked.reason, asked.at_s) == ("me", "lunch", 5.0)
        operator.resume(state, "you", "back", 6.0)
        assert not operator.read(state).paused


def test_a_revert_blocks_until_a_resume_and_is_done_once(state: StateFile) -> None:
    asked = operator.revert(state, "me", "bad night", 1.0)
    assert operator.read(state).blocked and operator.pending(state) == (asked, None)
    operator.mark_done(state, asked)
    assert operator.pending(state) == (None, None) and operator.is_done(state, asked)
    assert operator.read(state).blocked
    resumed = operator.resume(state, "me", "fine", 2.0)
    assert not operator.read(state).blocked and operator.pending(state) == (None, resumed)
    operator.mark_done(state, resumed)
    assert operator.pending(state) == (None, None)


def test_a_revert_and_a_resume_before_the_loop_runs_are_done_in_order(state: StateFile) -> None:
    reverted, resumed = operator.revert(state, "a", "x", 1.0), operator.resume(state, "b", "y", 2.0)
    assert operator.pending(state) == (reverted, resumed)


def test_a_revert_cancels_an_unfinished_resume(state: StateFile) -> None:
    operator.resume(state, "b", "y", 1.0)
    reverted = operator.revert(state, "a", "x", 2.0)
    assert operator.pending(state) == (reverted, None) and operator.read(state).blocked


def test_a_request_that_comes_while_the_loop_does_another_is_not_lost(state: StateFile) -> None:
    first = operator.revert(state, "a", "x", 1.0)
    second = operator.revert(state, "a", "x", 1.0)
    operator.mark_done(state, first)
    assert operator.pending(state) == (second, None)


def test_what_is_done_is_remembered_for_a_few_requests_only(state: StateFile) -> None:
    asked = [operator.revert(state, "a", "x", float(count)) for count in range(20)]
    for request in asked:
        operator.mark_done(state, request)
    assert operator.pending(state) == (None, None)
    assert len(state.value(operator.DONE_KEY) or "") < 100


def test_a_done_revert_is_not_repeated_after_many_pauses_and_resumes(state: StateFile) -> None:
    operator.mark_done(state, operator.revert(state, "a", "x", 0.0))
    for turn in range(6):
        operator.pause(state, "a", "x", float(turn))
        operator.mark_done(state, operator.resume(state, "a", "x", float(turn)))
        assert operator.pending(state) == (None, None)
    assert not operator.read(state).blocked


def test_requests_that_cannot_be_read_are_not_the_absence_of_any(state: StateFile) -> None:
    state.keep(operator.KEY, '{"paused": 1}')
    with pytest.raises(StoreError, match="rooftune pause or resume"):
        operator.read(state)
    operator.revert(state, "me", "x", 1.0)  # a person's next word makes it whole, still paused
    assert operator.read(state).paused and operator.read(state).blocked
    operator.resume(state, "me", "x", 2.0)
    assert not operator.read(state).paused


def test_two_simultaneous_requests_are_both_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause over HTTP while an operator types a revert: the second write does not undo the first."""
    with StateFile.own(tmp_path) as state, StateFile.visit(tmp_path) as other:
        known = operator._parsed
        threads: list[Thread] = []

        def while_it_is_read(text: str | None) -> operator.OperatorRequests | None:
            if not threads:
                threads.append(Thread(target=operator.revert, args=(other, "ann", "now", 1.0)))
                threads[0].start()
                threads[0].join(0.3)  # it must wait for the writer that is at it
            return known(text)

        monkeypatch.setattr(operator, "_parsed", while_it_is_read)
        operator.pause(state, "bob", "lunch", 1.0)
        threads[0].join()
        asked = operator.read(state)
        assert asked.paused is not None and asked.blocked is not None and asked.revert is not None
