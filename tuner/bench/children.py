"""Commands of ours run as processes beside us: an engine, a client, a controller; and all of them gone afterwards."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from rooftune.policies.errors import MissingDataError, UnreachableError

T = TypeVar("T")

MAIN = "rooftune.tuner.cli.main"
PACKAGES = ("policies", "engine", "tuner")
PROJECT = Path(__file__).resolve().parents[2]
POLL_S = 0.1
# An engine lets answers in flight come to their end; a controller gives its lease back.
POLITE_S = 15.0
_ANSWERS = re.compile(r"answers at (\S+?)/v1$", re.MULTILINE)
_TUNING = re.compile(r"tuning protocol at (\S+?)/tuning/v1 ", re.MULTILINE)


def say(text: str) -> None:
    """A line of progress on standard error, also where that is no terminal: some benches take an hour."""
    print(f"  {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Child:
    """One process and the files that its output goes to."""

    name: str
    process: "subprocess.Popen[bytes]"
    out: Path
    err: Path

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def last_words(self) -> str:
        """The last line of its output, for a message."""
        lines = (_text(self.err) or _text(self.out)).strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def stop(self, kind: signal.Signals = signal.SIGTERM, polite_s: float = POLITE_S) -> int:
        """Ask it to end, then make it; returns its exit code. Harmless when it has ended."""
        if not self.ended:
            self.process.send_signal(kind)
            try:
                self.process.wait(polite_s)
            except subprocess.TimeoutExpired:
                _signal_group(self.process, signal.SIGKILL)
        code = self.process.wait()
        _signal_group(self.process, signal.SIGKILL)  # whatever it started and left behind
        return code


def _signal_group(process: "subprocess.Popen[bytes]", kind: signal.Signals) -> None:
    try:
        os.killpg(process.pid, kind)
    except (ProcessLookupError, PermissionError):  # all gone
        pass


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class Children:
    """Processes that end with the ``with`` block, the latest first. Each leads a group of its own, so that Ctrl-C at
    the terminal reaches only us and we say in which order they end. logs: folder for their output."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._started: list[Child] = []

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *unused: object) -> None:
        for child in reversed(self._started):
            child.stop()

    def start(self, name: str, words: Sequence[str], env: Mapping[str, str] | None = None) -> Child:
        """``rooftune WORDS`` with this interpreter, its output in files."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        return self.run(name, [sys.executable, "-m", MAIN, *words], environment)

    def run(self, name: str, command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> Child:
        """Any command, its output in files. env: all of its environment."""
        out = self._logs / f"{name}.out"
        self._logs.mkdir(parents=True, exist_ok=True)
        with out.open("wb") as to_out:
            return self._spawn(name, command, env, (subprocess.DEVNULL, to_out), out, cwd)

    def talk(self, name: str, words: Sequence[str]) -> "Talker":
        """``python WORDS``, line by line over its standard input and output."""
        self._logs.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        pipes = (subprocess.PIPE, subprocess.PIPE)
        return Talker(self._spawn(name, [sys.executable, *words], env, pipes, self._logs / f"{name}.log"))

    def _spawn(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        streams: "tuple[int, int | BinaryIO]",
        out: Path,
        cwd: Path | None = None,
    ) -> Child:
        """streams: standard input and output; what goes to standard error lies in ``name``.log."""
        err = self._logs / f"{name}.log"
        stdin, stdout = streams
        with err.open("wb") as to_err:
            process = subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=to_err, env=env, cwd=cwd, process_group=0
            )
        self._started.append(Child(name, process, out, err))
        return self._started[-1]


@dataclass(frozen=True)
class Talker:
    """A process that takes a line and answers with a line."""

    child: Child

    def say(self, line: str) -> None:
        assert self.child.process.stdin is not None
        try:
            self.child.process.stdin.write(line.encode() + b"\n")
            self.child.process.stdin.flush()
        except BrokenPipeError:
            raise UnreachableError(f"{self.child.name} has ended: {self.child.last_words()}") from None

    def hear(self, expected: str, wait_s: float) -> None:
        """Raises UnreachableError when it says something else, ends or takes too long."""
        out = self.child.process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], wait_s)  # it says one line at a time, so nothing is held back
        line = out.readline().decode().strip() if ready else ""
        if line != expected:
            how = f"said {line!r}" if line else "has ended" if self.child.ended else f"is silent for {wait_s:g} s"
            raise UnreachableError(f"{self.child.name} {how} instead of {expected!r}: {self.child.last_words()}")


@dataclass(frozen=True)
class Served:
    """A running engine. base, tuning: addresses without a slash at the end."""

    child: Child
    base: str
    tuning: str


def serve(
    children: Children, words: Sequence[str], env: Mapping[str, str] | None = None, wait_s: float = 180.0
) -> Served:
    """``rooftune serve WORDS`` on free ports, once it answers. Raises UnreachableError with its last words."""
    child = children.start("engine", ["serve", "--port", "0", *words], env)
    found = wait_for(child, lambda: _addresses(child), wait_s)
    if found is None:
        raise UnreachableError(f"the engine did not come up: {child.last_words()}; see {child.out} and {child.err}")
    return Served(child, *found)


def one_core_left() -> dict[str, str]:
    """Threads that wait for each other on too few cores make every step long: one core stays for the others."""
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1))}


def _addresses(child: Child) -> tuple[str, str] | None:
    printed = _text(child.out)
    answers, tuning = _ANSWERS.search(printed), _TUNING.search(printed)
    return (answers[1], tuning[1]) if answers and tuning else None


def wait_for(child: Child, look: Callable[[], T | None], wait_s: float) -> T | None:
    """What ``look`` finds while the child lives; None when it ended or the time is over."""
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        found = look()
        if found is not None:
            return found
        if child.ended:
            return look()
        time.sleep(POLL_S)
    return None


@contextmanager
def hangup_is_interrupt() -> Iterator[None]:
    """A terminal that is closed ends the children as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGHUP, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def run_to_end(child: Child, wait_s: float) -> None:
    """Wait for a command that ends by itself. Raises UnreachableError unless it ended well in time."""
    try:
        code = child.process.wait(wait_s)
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{child.name} has not ended after {wait_s:g} s: {child.last_words()}") from None
    if code != 0:
        raise UnreachableError(f"{child.name} ended with {code}: {child.last_words()}")


Event = dict[str, Any]


class Follower:
    """A controller's log, line by line as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def new(self) -> Iterator[Event]:
        """Whole lines since the last call that are cycles."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        self._at += whole
        for line in data[:whole].splitlines():
            try:
                event = json.loads(line)
            except ValueError:  # a warning of a library, not a line of the log
                continue
            if isinstance(event, dict) and "cycle" in event:
                yield event


def link_packages(folder: Path) -> Path:
    """``folder`` as an entry of PYTHONPATH that leads to the packages of this checkout under their import name, for an
    interpreter in whose environment nothing of ours is installed."""
    links = folder / "rooftune"
    links.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        if not (links / name).exists():
            made = links / f".{name}-{os.getpid()}"  # others may make the same at the same time
            made.symlink_to(PROJECT / name, target_is_directory=True)
            made.replace(links / name)
    return folder


PROC = Path("/proc")
BYTES_PER_MB = 1e6


@dataclass(frozen=True)
class Cost:
    """rss_bytes: resident now; cpu_s: user and system time since its start."""

    rss_bytes: int
    cpu_s: float


def cost_of(pid: int, proc: Path = PROC) -> Cost | None:
    """None when there is no such process any more. Raises MissingDataError where there is no /proc."""
    if not proc.is_dir():
        raise MissingDataError("memory and processor time are read from /proc, which this system does not have")
    try:
        stat = (proc / str(pid) / "stat").read_text()
        pages = int((proc / str(pid) / "statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
    ticks = stat.rpartition(")")[2].split()  # the name before it may hold anything
    cpu_s = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
    return Cost(pages * os.sysconf("SC_PAGE_SIZE"), cpu_s)


def children_of(pid: int, proc: Path = PROC) -> list[int]:
    """Processes that it started and that live."""
    found = []
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == pid:
                found.append(int(entry.name))
    return found
