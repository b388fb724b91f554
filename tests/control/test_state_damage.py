"""A damaged state file: moved aside, replaced, nothing lost silently; and kills at any instant."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from rooftune.tuner.clock import ManualClock
from rooftune.tuner.control.state import operator
from rooftune.tuner.control.state.file import STATE_FILE
from rooftune.tuner.control.state.store import StateFile, StoreError, StoreFault
from tests.control.cycle_records import START_S, push

WRITER = """
import pathlib, sys
from tests.control.cycle_records import START_S, push
from rooftune.tuner.clock import ManualClock
from rooftune.tuner.control.state.store import StateFile
state = StateFile.own(pathlib.Path(sys.argv[1]), clock=ManualClock(wall_s=START_S))
print("ready", flush=True)
while True:
    number = state.next_number()
    state.note_push(number, '{"step_tokens": 1024}')
    state.put(push(number))
    state.keep("last", str(number))
    print(number, flush=True)
    if number % 20 == 0:
        state.prune()
"""


def _killed_while_writing(folder: Path, after: int, delay_s: float) -> int:
    """The last number that the writer reported as stored."""
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True, bufsize=1)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    said = [int(child.stdout.readline()) for _ in range(after)]
    time.sleep(delay_s)
    os.kill(child.pid, signal.SIGKILL)
    said += [int(line) for line in child.stdout.read().split("\n") if line.endswith(tuple("0123456789"))]
    child.stdout.close()
    child.wait()
    return said[-1]


@pytest.mark.parametrize("rounds", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_a_kill_at_any_instant_leaves_every_written_cycle_intact(tmp_path: Path, rounds: int) -> None:
    chance = random.Random(rounds)
    for _ in range(rounds):
        said = _killed_while_writing(tmp_path, chance.randrange(1, 6), chance.random() * 0.03)
        with StateFile.own(tmp_path) as state:
            assert state.notes == ()
            assert state._connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            records = state.last(100_000)
            latest = records[0].number
            # Everything reported as stored is there; at most the next cycle was under way.
            assert said <= latest <= said + 1
            noted, kept = state.pushes(1)[0], int(state.value("last") or 0)
            assert latest <= noted.number <= latest + 1 and said <= kept <= latest
            assert len(state.unfinished()) <= rounds
            assert state.next_number() > max(latest, noted.number)
            # Numbers may be skipped by a kill, never repeated.
            numbers = [record.number for record in records]
            assert numbers == sorted(set(numbers), reverse=True)
            # A cycle and the record of its push are one write.
            assert not {row.number for row in state.unfinished()} & set(numbers)
    assert sorted(path.name for path in tmp_path.iterdir() if "damaged" in path.name) == []


@pytest.mark.slow
def test_a_reader_sees_only_complete_cycles_during_a_write(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        seen = 0
        with StateFile.visit(tmp_path) as reader:
            while seen < 30:
                child.stdout.readline()
                noted = [row.number for row in reader.pushes(5)]
                records = reader.last(1000)
                numbers = [record.number for record in records]
                assert numbers == list(range(len(numbers), 0, -1))
                assert len(numbers) >= seen
                seen = len(numbers)
                assert all(number <= seen + 1 for number in noted)
    finally:
        child.kill()
        child.stdout.close()  # type: ignore[union-attr]  # a pipe was asked for
        child.wait()


def _damage(path: Path, how: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(path.read_bytes())
    if how == "header":
        data[:100] = b"\xa5" * 100
    elif how == "truncated":
        del data[len(data) // 2 :]
    elif how == "text":
        data = bytearray(b"this is not a database at all\n" * 400)
    else:  # a page of the table of cycles
        with closing(sqlite3.connect(path)) as connection:
            root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'cycles'").fetchone()[0]
            size = connection.execute("PRAGMA page_size").fetchone()[0]
        data[(root - 1) * size : root * size] = b"\xa5" * size
    path.write_bytes(bytes(data))


def _filled(folder: Path) -> StateFile:
    state = StateFile.own(folder, clock=ManualClock(wall_s=START_S))
    state._connection.execute("PRAGMA synchronous = OFF")
    for _ in range(8):
        state.put(push(state.next_number()))
    return state


@pytest.mark.parametrize("how", ["header", "truncated", "text", "page"])
def test_a_damaged_file_is_moved_aside_and_replaced(tmp_path: Path, how: str) -> None:
    with _filled(tmp_path):
        pass
    _damage(tmp_path / STATE_FILE, how)
    damaged = (tmp_path / STATE_FILE).read_bytes()
    with StateFile.own(tmp_path, clock=ManualClock(wall_s=START_S)) as state:
        assert len(state.notes) == 1 and "was damaged" in state.notes[0] and "\n" not in state.notes[0]
        (aside,) = [path for path in tmp_path.iterdir() if path.name == "state.db.damaged-20251130T000000Z"]
        assert str(aside) in state.notes[0]
        assert aside.read_bytes() == damaged
        assert state.last(5) == []
        state.put(push(state.next_number()))
    with StateFile.own(tmp_path, clock=ManualClock(wall_s=START_S)) as state:
        assert state.notes == () and len(state.last(5)) == 1


def test_readable_small_values_of_a_damaged_file_are_kept(tmp_path: Path) -> None:
    with _filled(tmp_path) as state:
        operator.revert(state, "me", "bad night", START_S)
        instance = state.instance
    _damage(tmp_path / STATE_FILE, "page")
    with StateFile.own(tmp_path) as state:
        assert "went over" in state.notes[0]
        assert operator.read(state).blocked and not operator.read(state).paused
        assert (state.instance, state.next_number()) == (instance, 9)


@pytest.mark.parametrize("how", ["header", "text"])
def test_a_new_file_starts_paused_if_the_pause_state_is_unreadable(tmp_path: Path, how: str) -> None:
    with _filled(tmp_path) as state:
        operator.pause(state, "me", "lunch", START_S)
    _damage(tmp_path / STATE_FILE, how)
    with StateFile.own(tmp_path) as state:
        assert "rooftune resume" in state.notes[0]
        assert operator.read(state).paused
        operator.resume(state, "me", "looked at it", START_S)
        assert not operator.read(state).paused


def test_a_second_damaged_file_in_the_same_second_gets_its_own_name(tmp_path: Path) -> None:
    for _ in range(2):
        with StateFile.own(tmp_path, clock=ManualClock(wall_s=START_S)):
            pass
        _damage(tmp_path / STATE_FILE, "text")
    StateFile.own(tmp_path, clock=ManualClock(wall_s=START_S)).close()
    assert len([path for path in tmp_path.iterdir() if ".damaged-" in path.name]) == 2


def test_a_second_process_leaves_a_damaged_file_in_place(tmp_path: Path) -> None:
    with _filled(tmp_path):
        pass
    _damage(tmp_path / STATE_FILE, "text")
    before = (tmp_path / STATE_FILE).read_bytes()
    with pytest.raises(StoreError, match="restart the controller") as caught:
        StateFile.visit(tmp_path)
    assert caught.value.fault is StoreFault.DAMAGED
    assert (tmp_path / STATE_FILE).read_bytes() == before


def test_an_empty_file_counts_as_new(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_bytes(b"")
    with StateFile.own(tmp_path) as state:
        assert state.notes == () and state.next_number() == 1
