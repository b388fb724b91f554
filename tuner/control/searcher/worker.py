"""Twin and search in a child process: niced, limited, gone when idle. The parent loads neither numba nor Optuna."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from rooftune.tuner.clock import Clock, SystemClock
from rooftune.tuner.control.job import Answer, Job, Limits, WorkerError, WorkerFault
from rooftune.tuner.control.searcher.child import (
    IDLE_EXIT,
    LATE_EXIT,
    LIMITS,
    MAX_JOB_BYTES,
    MAX_REPLY_BYTES,
    OUT_OF_MEMORY_EXIT,
    Order,
    Reply,
    decoded,
    encoded,
)

MODULE = "rooftune.tuner.control.searcher.child"
# After the limit that the child keeps by itself, the parent waits this much longer before it ends it.
GRACE_S = 5.0
# What C++ libraries say when they end the process by themselves.
_MEMORY_WORDS = ("MemoryError", "out of memory", "bad_alloc", "Cannot allocate memory")
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
_LAST_WORDS = 20  # lines of standard error that are kept
_MOST_REPLIES = 10_000  # waiting to be read; a child that says more talks nonsense


def child_command(limits: Limits) -> list[str]:
    """The command line of a child with these limits."""
    return [sys.executable, "-m", MODULE, LIMITS.dump_json(limits).decode()]


class _Child:
    """One process and the threads at its pipes: no caller ever waits for a pipe."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # its own process group: a ^C at the controller is not for it
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin = self._process.stdin
        self.replies: queue.Queue[bytes | None] = queue.Queue(_MOST_REPLIES)
        self._last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._said = threading.Thread(target=self._read_words, args=(self._process.stderr,), daemon=True)
        self._said.start()
        threading.Thread(target=self._read_replies, args=(self._process.stdout,), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, line: bytes) -> None:
        threading.Thread(target=self._write, args=(line,), daemon=True).start()

    def exit_code(self) -> int | None:
        """None while it lives; negative: ended by that signal."""
        return self._process.poll()

    def settled_exit_code(self) -> int | None:
        """The exit code of a child whose pipe has closed, which comes a moment later; None: it lives on, mute."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=2.0)
        return None

    def last_words(self) -> str:
        self._said.join(timeout=1.0)
        return " ".join(list(self._last_words)[-3:])[-500:]

    def end(self) -> None:
        """Kill it and whatever it started, and wait until it is gone."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with suppress(OSError):
            self._stdin.close()

    def _write(self, line: bytes) -> None:
        with suppress(OSError, ValueError):  # a pipe without a reader: the exit code says what happened
            self._stdin.write(line)
            self._stdin.flush()

    def _read_replies(self, pipe: IO[bytes]) -> None:
        with suppress(OSError, ValueError), pipe:
            while line := pipe.readline(MAX_REPLY_BYTES):
                try:
                    self.replies.put_nowait(line)
                except queue.Full:
                    break
        with suppress(queue.Full):
            self.replies.put_nowait(None)

    def _read_words(self, pipe: IO[bytes]) -> None:
        with suppress(OSError, ValueError), pipe:
            while line := pipe.readline(10_000):
                self._last_words.append(" ".join(line.decode(errors="replace").split()))


class ChildSearcher:
    """``rooftune.tuner.control.ports.Searcher`` in a process of its own. Not for several threads at once.

    The child is started with the first job, kept for the next ones, ends by itself when idle, and is started again when
    needed. command: the child's command line, for tests.
    """

    def __init__(
        self, limits: Limits | None = None, *, clock: Clock | None = None, command: Sequence[str] | None = None
    ) -> None:
        self._limits = limits or Limits()
        self._clock = clock or SystemClock()
        self._command = list(command) if command is not None else child_command(self._limits)
        self._child: _Child | None = None
        self._order: Order | None = None
        self._sent_at_s = 0.0
        self._begun = False  # the child works on the order
        self._again = False  # a second child has been started for the order
        self._number = 0
        self.stage = ""  # the latest one that the child reported

    @property
    def busy(self) -> bool:
        """Whether a job was sent whose answer (or error) has not been taken."""
        return self._order is not None

    @property
    def child_pid(self) -> int | None:
        """Process id while a child lives; None when there is none."""
        child = self._child
        return child.pid if child is not None and child.exit_code() is None else None

    def ask(self, job: Job) -> bool:
        """Start on a job; False while one runs. Raises WorkerError(REFUSED) for one too large to be sent."""
        if self.busy:
            return False
        self._number += 1
        order = Order(number=self._number, job=job)
        line = encoded(order)
        if len(line) > MAX_JOB_BYTES:
            raise WorkerError(
                WorkerFault.REFUSED,
                f"the job has {len(line)} bytes, must be at most {MAX_JOB_BYTES}; give a shorter window",
            )
        self._order = order
        self._send(line)
        return True

    def answer(self) -> Answer | None:
        """See ``Searcher.answer``; never waits."""
        if self._order is None or self._child is None:
            if self._child is not None and self._child.exit_code() is not None:
                self._drop()  # gone by itself, being idle: nothing is left of it
            return None
        while True:
            try:
                raw = self._child.replies.get_nowait()
            except queue.Empty:
                break
            if raw is None:
                self._ended(self._child)
                return None
            found = self._take(raw, self._order)
            if found is not None:
                self._order = None
                return found
        if self._clock.now_s() - self._sent_at_s > self._limits.timeout_s + GRACE_S:
            raise self._late()
        return None

    def close(self) -> None:
        """End the child, whatever it is at."""
        self._order = None
        self._drop()

    def _send(self, line: bytes) -> None:
        self._begun, self._again, self.stage = False, False, "starting"
        self._sent_at_s = self._clock.now_s()
        if self._child is not None and self._child.exit_code() is not None:
            self._drop()
        if self._child is None:
            try:
                self._child = _Child(self._command)
            except OSError as error:
                self._order = None
                raise WorkerError(WorkerFault.DIED, f"the child process does not start: {error.strerror}") from None
        self._child.send(line)

    def _take(self, raw: bytes, order: Order) -> Answer | None:
        reply = decoded(Reply, raw)
        whole = reply is not None and sum(p is not None for p in (reply.stage, reply.answer, reply.refused)) == 1
        if reply is None or not whole or reply.number > order.number:
            raise self._failed(WorkerFault.NONSENSE, f"the child said {raw[:80]!r}, which is no reply")
        if reply.number < order.number:
            return None  # of a job that was given up
        if reply.stage is not None:
            self._begun, self.stage = True, reply.stage
        if reply.refused is not None:
            self._order = None  # the child is well
            raise WorkerError(WorkerFault.REFUSED, reply.refused)
        return reply.answer

    def _ended(self, child: _Child) -> None:
        """The child's pipe has closed in the middle of a job."""
        code, order = child.settled_exit_code(), self._order
        if code == IDLE_EXIT and not self._begun and not self._again and order is not None:
            # It went to sleep at the very instant at which the job was sent: a new one takes it.
            self._drop()
            self._send(encoded(order))
            self._again = True
            return
        if code == LATE_EXIT:
            raise self._late()
        words, bound = child.last_words(), f"{self._limits.memory_bytes >> 20} MiB"
        if code == OUT_OF_MEMORY_EXIT or any(word in words for word in _MEMORY_WORDS):
            raise self._failed(
                WorkerFault.OUT_OF_MEMORY,
                f"the child needs more than {bound} of memory; raise it or shorten the window",
            )
        how = "closed its pipe" if code is None else f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was ended by signal {-code}"
            if -code in _CRASHES:
                how += f" (libraries crash when they get no memory; the bound is {bound})"
        raise self._failed(WorkerFault.DIED, f"the child {how}" + (f": {words}" if words else ""))

    def _late(self) -> WorkerError:
        bound = f"{self._limits.timeout_s:g} s"
        return self._failed(
            WorkerFault.TIMED_OUT, f"no answer within {bound}; raise the limit or shorten window and trials"
        )

    def _failed(self, fault: WorkerFault, message: str) -> WorkerError:
        self._order = None
        self._drop()
        return WorkerError(fault, message)

    def _drop(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None
