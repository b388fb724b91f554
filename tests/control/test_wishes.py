"""What people ask for: kept over restarts, in order, and never lost to one another."""

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from rooftune.tuner.control.state import operator as wishes
from rooftune.tuner.control.state.store import StateFile, StoreError


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateFile]:
    with StateFile.own(tmp_path) as found:
        yield found


def test_nobody_asked_for_anything(state: StateFile) -> None:
    assert not wishes.paused(state) and not wishes.blocked(state)
    assert wishes.pending(state) == (None, None)


def test_a_pause_holds_over_a_restart_until_a_resume(tmp_path: Path) -> None:
    with StateFile.own(tmp_path) as state:
        wishes.pause(state, "me", "lunch", 5.0)
    with StateFile.own(tmp_path) as state:
        asked = wishes.read(state).paused
        assert asked is not None and (asked.actor, asked.reason, asked.at_s) == ("me", "lunch", 5.0)
        wishes.resume(state, "you", "back", 6.0)
        assert not wishes.paused(state)


def test_a_revert_blocks_until_a_resume_and_is_done_once(state: StateFile) -> None:
    asked = wishes.ask_revert(state, "me", "bad night", 1.0)
    assert wishes.blocked(state) and wishes.pending(state) == (asked, None)
    wishes.done(state, asked)
    assert wishes.pending(state) == (None, None) and wishes.is_done(state, asked)
    assert wishes.blocked(state)
    resumed = wishes.resume(state, "me", "fine", 2.0)
    assert not wishes.blocked(state) and wishes.pending(state) == (None, resumed)
    wishes.done(state, resumed)
    assert wishes.pending(state) == (None, None)


def test_a_revert_and_a_resume_before_the_loop_looked_are_both_done_in_that_order(state: StateFile) -> None:
    reverted, resumed = wishes.ask_revert(state, "a", "x", 1.0), wishes.resume(state, "b", "y", 2.0)
    assert wishes.pending(state) == (reverted, resumed)


def test_a_revert_takes_an_unfinished_resume_back(state: StateFile) -> None:
    wishes.resume(state, "b", "y", 1.0)
    reverted = wishes.ask_revert(state, "a", "x", 2.0)
    assert wishes.pending(state) == (reverted, None) and wishes.blocked(state)


def test_a_wish_that_comes_while_the_loop_does_another_is_not_lost(state: StateFile) -> None:
    first = wishes.ask_revert(state, "a", "x", 1.0)
    second = wishes.ask_revert(state, "a", "x", 1.0)
    wishes.done(state, first)
    assert wishes.pending(state) == (second, None)


def test_what_is_done_is_remembered_for_a_few_wishes_only(state: StateFile) -> None:
    asked = [wishes.ask_revert(state, "a", "x", float(count)) for count in range(20)]
    for wish in asked:
        wishes.done(state, wish)
    assert wishes.pending(state) == (None, None)
    assert len(state.value(wishes.DONE_KEY) or "") < 100


def test_a_revert_that_was_done_is_not_done_again_however_many_pauses_and_resumes_follow(state: StateFile) -> None:
    wishes.done(state, wishes.ask_revert(state, "a", "x", 0.0))
    for turn in range(6):
        wishes.pause(state, "a", "x", float(turn))
        wishes.done(state, wishes.resume(state, "a", "x", float(turn)))
        assert wishes.pending(state) == (None, None)
    assert not wishes.blocked(state)


def test_wishes_that_cannot_be_read_are_not_the_absence_of_any(state: StateFile) -> None:
    state.keep(wishes.KEY, '{"paused": 1}')
    with pytest.raises(StoreError, match="rooftune pause or resume"):
        wishes.paused(state)
    wishes.ask_revert(state, "me", "x", 1.0)  # a person's next word makes it whole, still paused
    assert wishes.paused(state) and wishes.blocked(state)
    wishes.resume(state, "me", "x", 2.0)
    assert not wishes.paused(state)


def test_two_who_ask_at_once_both_get_what_they_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause over HTTP while somebody types a revert: whoever writes second does not undo the first."""
    with StateFile.own(tmp_path) as state, StateFile.visit(tmp_path) as other:
        known = wishes._parsed
        threads: list[Thread] = []

        def while_it_is_read(text: str | None) -> wishes.Wishes | None:
            if not threads:
                threads.append(Thread(target=wishes.ask_revert, args=(other, "ann", "now", 1.0)))
                threads[0].start()
                threads[0].join(0.3)  # it must wait for the writer that is at it
            return known(text)

        monkeypatch.setattr(wishes, "_parsed", while_it_is_read)
        wishes.pause(state, "bob", "lunch", 1.0)
        threads[0].join()
        asked = wishes.read(state)
        assert asked.paused is not None and asked.blocked is not None and asked.revert is not None
