"""Processes that a bench or the demo starts: errors are reported, and no process is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rooftune.policies.errors import MissingDataError, UnreachableError
from rooftune.tuner.bench.children import Child, Children, Served, children_of, cost_of, serve

# A process that starts another, reports it, and ignores SIGTERM.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid, flush=True)
time.sleep(300)
"""
POLITE = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    print("heard " + line.strip(), flush=True)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pid: int) -> bool:
    until_s = time.monotonic() + 20.0
    while alive(pid) and time.monotonic() < until_s:
        time.sleep(0.02)
    return not alive(pid)


def test_a_child_communicates_by_line_and_ends_with_the_block(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        talker = children.talk("polite", ["-c", POLITE])
        talker.hear("ready", 30.0)
        talker.say("go")
        talker.hear("heard go", 30.0)
        pid = talker.child.process.pid
        assert alive(pid)
    assert gone(pid)


def test_an_unexpected_line_or_exit_is_reported_with_the_last_output(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        talker = children.talk("broken", ["-c", "import sys; print('no', flush=True); sys.exit('out of luck')"])
        with pytest.raises(UnreachableError, match=r"broken said 'no' instead of 'ready'"):
            talker.hear("ready", 30.0)
        with pytest.raises(UnreachableError, match="out of luck"):
            talker.hear("ready", 30.0)


def test_a_child_that_ignores_sigterm_is_killed_with_its_descendants(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        talker = children.talk("stubborn", ["-c", STUBBORN])
        out = talker.child.process.stdout
        assert out is not None
        grandchild = int(out.readline())
        started_s = time.monotonic()
        assert talker.child.stop(polite_s=0.2) == -signal.SIGKILL
        assert time.monotonic() - started_s < 20.0
        assert gone(grandchild)


def test_an_error_ends_the_children_too(tmp_path: Path) -> None:
    pids = []

    def fail() -> None:
        with Children(tmp_path) as children:
            pids.extend(children.talk(name, ["-c", POLITE]).child.process.pid for name in ("one", "two"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


@pytest.mark.slow
def test_an_engine_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    with Children(tmp_path) as children, pytest.raises(UnreachableError, match="fake:nothing"):
        serve(children, ["--model", "fake:nothing"])


def test_cost_of_a_process_is_read_from_proc(tmp_path: Path) -> None:
    mine = cost_of(os.getpid())
    assert mine is not None and mine.rss_bytes > 5e6 and mine.cpu_s > 0.0
    until_s = time.process_time() + 0.3
    while time.process_time() < until_s:
        pass
    later = cost_of(os.getpid())
    assert later is not None and 0.1 < later.cpu_s - mine.cpu_s < 10.0
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        assert child.pid in children_of(os.getpid())
    finally:
        child.kill()
        child.wait()
    assert child.pid not in children_of(os.getpid())
    assert cost_of(child.pid) is None
    with pytest.raises(MissingDataError):
        cost_of(1, tmp_path / "none")


@pytest.mark.slow
def test_addresses_are_read_from_what_serve_prints(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        served = serve(children, ["--model", "fake:8b-2tbs", "--tuning-port", "0"])
        assert isinstance(served, Served) and isinstance(served.child, Child)
        assert served.base.startswith("http://127.0.0.1:") and served.tuning.startswith("http://127.0.0.1:")
        assert served.base != served.tuning
        pid = served.child.process.pid
    assert gone(pid)
