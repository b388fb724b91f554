"""The state file: what is kept, who may hold it, and what happens when the disk fails."""

import json
import resource
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from rooftune.policies.errors import InputError, RefusedError
from rooftune.policies.guard import Action, Reason
from rooftune.tuner.clock import ManualClock
from rooftune.tuner.config import RetentionSection
from rooftune.tuner.control.ports import Store
from rooftune.tuner.control.state import operator
from rooftune.tuner.control.state.file import STATE_FILE
from rooftune.tuner.control.state.store import PRUNE_ROWS, StateFile, StoreError, StoreFault, holder
from tests.control.cycle_records import START_S, fit, hold, proposal, push, verify


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateFile]:
    with StateFile.own(tmp_path / "s", clock=ManualClock(wall_s=START_S)) as found:
        found._connection.execute("PRAGMA synchronous = OFF")  # these tests are not about a loss of power
        yield found


def test_the_state_file_is_a_store(state: StateFile) -> None:
    store: Store = state
    assert store.instance == state.instance and len(store.instance) == 8


def test_records_round_trip_newest_first(state: StateFile) -> None:
    records = [hold(1), push(2), hold(3, Reason.VERIFYING), hold(4, verify=verify(2), fit=fit(knee_tokens=None))]
    for record in records:
        state.put(record)
    assert state.last(10) == records[::-1]
    assert state.last(2, before=4) == [records[2], records[1]]
    assert state.last(0) == [] and state.last(-5) == []
    assert state.get(2) == records[1] and state.get(5) is None


def test_a_push_keeps_prediction_and_outcome_side_by_side(state: StateFile) -> None:
    state.note_push(2, '{"step_tokens": 1024}')
    (row,) = state.pushes(5)
    assert (row.number, row.changes, row.ended, row.verdict) == (2, {"step_tokens": 1024}, None, None)
    assert [one.number for one in state.unfinished()] == [2]
    state.put(push(2, reason=Reason.OK, pushed=proposal().setting))
    assert state.unfinished() == []
    (row,) = state.pushes(5)
    assert (row.ended, row.predicted_gain, row.observed_gain) == ("ok", 0.07, None)
    state.put(
        hold(7, verify=verify(2, observed_gain=-0.03, verdict="worse", reason="loss_shown", prediction_held=False))
    )
    (row,) = state.pushes(5)
    assert (row.verdict, row.verified_in, row.observed_gain, row.half_width) == ("worse", 7, -0.03, 0.021)
    assert (row.requests, row.prediction_held) == (380, False)


def test_a_push_whose_answer_was_lost_shows_its_prediction(state: StateFile) -> None:
    state.note_push(2, json.dumps(proposal().setting))
    state.put(hold(2, Reason.UNREACHABLE, proposal=proposal()))
    (row,) = state.pushes(5)
    assert (row.ended, row.predicted_gain, row.verdict) == ("unreachable", 0.07, None)


def test_a_step_towards_a_proposal_has_no_prediction(state: StateFile) -> None:
    state.note_push(2, '{"step_tokens": 1024}')
    state.put(push(2))
    (row,) = state.pushes(5)
    assert (row.ended, row.predicted_gain) == ("step_limited", None)


def test_a_refused_push_is_marked_refused(state: StateFile) -> None:
    state.note_push(2, '{"step_tokens": 1024}')
    state.put(push(2, action=Action.HOLD, reason=Reason.DWELL, pushed=None))
    assert [row.ended for row in state.pushes(5)] == ["dwell"]


def test_fits_in_a_file_of_the_release_before_change_nothing(tmp_path: Path) -> None:
    """That release kept a row of each fit; this one writes none and leaves the table, so that either opens the file."""
    with StateFile.own(tmp_path) as state:
        state.put(hold(1, fit=fit()))
        state._connection.execute("INSERT INTO fits VALUES (1, 0.0, 200.0, 150.0, 260.0, 400, 0.01, '{}')")
    with StateFile.own(tmp_path) as state:
        state.put(hold(2, fit=fit(steps=800)))
        state.prune()
        assert [record.fit for record in state.last(5)] == [fit(steps=800), fit()]
        assert state._connection.execute("SELECT number FROM fits").fetchall() == [(1,)]


def test_numbers_ascend_over_restarts_even_after_rows_are_deleted(tmp_path: Path) -> None:
    with StateFile.own(tmp_path) as first:
        name = first.instance
        assert [first.next_number(), first.next_number()] == [1, 2]
    with StateFile.own(tmp_path) as second:
        assert (second.instance, second.next_number()) == (name, 3)
    other = StateFile.own(tmp_path / "other")
    assert other.instance != name
    other.close()


def test_values_are_kept_over_restarts(tmp_path: Path) -> None:
    with StateFile.own(tmp_path) as first:
        assert first.value("trust") is None
        first.keep("trust", "2.0")
        first.keep("trust", "4.0")
    with StateFile.own(tmp_path) as second:
        assert second.value("trust") == "4.0"


def test_a_second_controller_is_refused_with_the_holders_pid(tmp_path: Path) -> None:
    clock = ManualClock()
    code = (
        "import sys, pathlib; from rooftune.tuner.clock import SystemClock\n"
        "from rooftune.tuner.control.state.lock import FolderLock\n"
        "lock = FolderLock.take(pathlib.Path(sys.argv[1]), SystemClock()); print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    assert holder(tmp_path) == str(child.pid)
    with pytest.raises(RefusedError, match=rf"held by a controller \(pid {child.pid}\).*--state") as caught:
        StateFile.own(tmp_path, clock=clock)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    child.kill()  # SIGKILL: nothing cleans up
    child.wait()
    assert holder(tmp_path) is None
    StateFile.own(tmp_path, clock=clock).close()
    child.stdin.close()
    child.stdout.close()


def test_a_failed_open_releases_the_lock(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / STATE_FILE)
    connection.execute("CREATE TABLE somebody_elses (x)")
    connection.close()
    for _ in range(2):
        with pytest.raises(InputError, match="a database of something else"):
            StateFile.own(tmp_path)
    assert holder(tmp_path) is None


def test_a_file_of_another_release_is_refused_and_left_alone(tmp_path: Path) -> None:
    StateFile.own(tmp_path).close()
    connection = sqlite3.connect(tmp_path / STATE_FILE)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    before = sorted(path.name for path in tmp_path.iterdir())
    for way in (StateFile.own, StateFile.visit):
        with pytest.raises(InputError, match="schema version 9, this release reads 1"):
            way(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be used"):
        StateFile.own(tmp_path / "file" / "s")
    with pytest.raises(InputError, match="no state in"):
        StateFile.visit(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_second_process_reads_and_writes_while_the_controller_runs(state: StateFile) -> None:
    state.put(hold(1))
    with StateFile.visit(state.path.parent) as visitor:
        assert [record.number for record in visitor.last(5)] == [1]
        operator.pause(visitor, "me", "lunch", 1.0)
        state.put(hold(2))
        assert [record.number for record in visitor.last(5)] == [2, 1]
    assert operator.read(state).paused


def test_threads_share_the_store(state: StateFile) -> None:
    failures: list[Exception] = []

    def write(first: int) -> None:
        try:
            for number in range(first, first + 10):
                state.put(hold(number))
                state.keep(f"k{number}", str(number))
        except Exception as error:  # noqa: BLE001 - whatever a thread raises is to be seen by the test
            failures.append(error)

    threads = [threading.Thread(target=write, args=(first,)) for first in (1, 101, 201)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        state.last(5)
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(state.last(100)) == 30


# --- the disk fails ----------------------------------------------------------------


def test_a_lock_of_another_process_is_an_error_only_while_it_lasts(state: StateFile) -> None:
    state._connection.execute("PRAGMA busy_timeout = 50")
    other = sqlite3.connect(state.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for act in (lambda: state.put(hold(1)), state.next_number, lambda: state.keep("a", "1")):
        with pytest.raises(StoreError, match=r"state\.db.*locked; another process holds it") as caught:
            act()
        assert caught.value.fault is StoreFault.LOCKED
    assert state.last(1) == []  # readers are not held up
    other.execute("ROLLBACK")
    other.close()
    state.put(hold(1))
    assert len(state.last(1)) == 1


def _put_pushes(state: StateFile, numbers: Iterable[int]) -> None:
    for number in numbers:
        state.put(push(number))


def test_a_full_disk_keeps_the_old_records(state: StateFile) -> None:
    state.put(push(1))
    pages = state._connection.execute("PRAGMA page_count").fetchone()[0]
    state._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match="full; free space") as caught:
        _put_pushes(state, range(2, 500))
    assert caught.value.fault is StoreFault.FULL
    numbers = [record.number for record in state.last(500)]
    stored = numbers[0]
    assert stored > 1 and numbers == list(range(stored, 0, -1))
    state._connection.execute("PRAGMA max_page_count = 100000")
    state.put(push(stored + 1))
    assert state.last(1)[0].number == stored + 1


@pytest.mark.slow
def test_a_truncated_write_leaves_the_file_intact(tmp_path: Path) -> None:
    code = (
        "import pathlib, resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from tests.control.cycle_records import push\n"
        "from rooftune.tuner.control.state.store import StateFile, StoreError\n"
        "state = StateFile.own(pathlib.Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "try:\n"
        "    for number in range(1, 3000):\n"
        "        state.put(push(number))\n"
        "except StoreError as error:\n"
        "    print(number - 1, error.fault)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    stored, fault = done.stdout.split()
    assert fault == StoreFault.FULL
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 200_000
    with StateFile.own(tmp_path) as state:
        assert state.notes == ()
        assert [record.number for record in state.last(5000)] == list(range(int(stored), 0, -1))


def test_a_closed_store_raises_a_store_error(state: StateFile) -> None:
    state.close()
    with pytest.raises(StoreError):
        state.put(hold(1))
    with pytest.raises(StoreError):
        state.last(1)


def test_an_unreadable_row_is_named(state: StateFile) -> None:
    state.put(hold(1))
    state._connection.execute("UPDATE cycles SET record = x'00'")
    with pytest.raises(StoreError, match="cycle 1 cannot be read") as caught:
        state.get(1)
    assert "\n" not in str(caught.value)


# --- retention -----------------------------------------------------------------------------------


def _filled(tmp_path: Path, clock: ManualClock, count: int, **limits: float) -> StateFile:
    state = StateFile.own(tmp_path, RetentionSection(**limits), clock)
    state._connection.execute("PRAGMA synchronous = OFF")  # the test is about rows, not about the disk
    for number in range(1, count + 1):
        if number % 10 == 0:
            state.note_push(number, "{}")
        state.put(push(number, fit=fit(steps=number)) if number % 10 == 0 else hold(number))
    return state


def test_rows_are_bounded_and_pushes_are_kept_longer(tmp_path: Path) -> None:
    with _filled(tmp_path, ManualClock(wall_s=START_S), 260, days=3650, rows=20) as state:
        while state.prune():
            pass
        assert [record.number for record in state.last(500)] == list(range(260, 240, -1))
        assert [row.number for row in state.pushes(500)] == list(range(260, 60, -10))


def test_the_file_does_not_grow_once_the_retention_is_reached(tmp_path: Path) -> None:
    with _filled(tmp_path, ManualClock(wall_s=START_S), 400, days=3650, rows=100) as state:
        size = state._connection.execute("PRAGMA page_count").fetchone()[0]
        for number in range(401, 801):
            state.put(hold(number))
        assert state._connection.execute("PRAGMA page_count").fetchone()[0] <= size * 1.2
        assert len(state.last(5000)) < 160


def test_old_rows_are_deleted(tmp_path: Path) -> None:
    clock = ManualClock(wall_s=START_S)
    with _filled(tmp_path, clock, 100, days=1, rows=100_000) as state:
        clock.jump(86_400.0 + 15.0 * 61)
        state.prune()
        assert [record.number for record in state.last(500)] == list(range(100, 60, -1))


def test_a_temporary_clock_jump_does_not_empty_the_history(tmp_path: Path) -> None:
    clock = ManualClock(wall_s=START_S)
    with _filled(tmp_path, clock, PRUNE_ROWS + 150, days=1, rows=100_000) as state:
        clock.jump(10 * 365 * 86_400.0)
        assert state.prune() == PRUNE_ROWS
        clock.jump(-10 * 365 * 86_400.0)
        assert len(state.last(1000)) == 150


def test_oversized_studies_are_replaced_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "studies.db").write_bytes(b"x" * 2_000_000)
    with StateFile.own(tmp_path, RetentionSection(studies_bytes=3_000_000)) as state:
        assert state.notes == () and (tmp_path / "studies.db").exists()
    with StateFile.own(tmp_path, RetentionSection(studies_bytes=1_000_000)) as state:
        assert len(state.notes) == 1 and "started a new one" in state.notes[0]
        assert not (tmp_path / "studies.db").exists()


def test_the_latest_cycles_are_kept_however_old_they_look(tmp_path: Path) -> None:
    clock = ManualClock(wall_s=START_S)
    with _filled(tmp_path, clock, 30, days=1, rows=100_000) as state:
        clock.jump(10 * 365 * 86_400.0)
        while state.prune():
            pass
        assert [record.number for record in state.last(100)] == list(range(30, 20, -1))
