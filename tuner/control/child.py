"""The child process: ``python -m tuner.control.child``. Jobs come in by line, replies go out by line.

It ends when nobody has sent a job for a while, at once when its standard input closes (the controller is gone, however
that came about), and by itself when a job takes longer than the controller allows.
"""

import argparse
import os
import queue
import resource
import sys
import threading
import time
from contextlib import suppress
from typing import BinaryIO

from policies.errors import RooftuneError
from tuner.control.child_lines import (
    IDLE_EXIT,
    MAX_JOB_BYTES,
    OUT_OF_MEMORY_EXIT,
    Order,
    Reply,
    decoded,
    encoded,
)

_GONE_EXIT = 0
_LATE_EXIT = 75
_NONSENSE_EXIT = 76


def main(argv: list[str] | None = None) -> int:
    """Serve jobs until idle."""
    args = _parser().parse_args(argv)
    _limit(args.memory_bytes, args.nice, args.cpus)
    # Whatever a library prints goes to standard error: standard output carries replies alone.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        return _serve(sys.stdin.buffer, out, args.idle_exit_s)
    except MemoryError:
        return OUT_OF_MEMORY_EXIT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tuner.control.child", description="twin and search, by line")
    parser.add_argument("--idle-exit-s", type=float, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--nice", type=int, required=True)
    parser.add_argument("--cpus", type=int, required=True)
    return parser


def _limit(memory_bytes: int, nice: int, cpus: int) -> None:
    """Private memory, not address space: LLVM and thread stacks reserve far more than they use."""
    for kind, most in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    os.nice(nice)
    allowed = sorted(os.sched_getaffinity(0))
    with suppress(OSError):  # a container may forbid it; its own CPU limit holds then
        os.sched_setaffinity(0, allowed[-cpus:])


def _serve(source: BinaryIO, out: BinaryIO, idle_exit_s: float) -> int:
    orders: queue.Queue[Order] = queue.Queue()
    threading.Thread(target=_read, args=(source, orders), daemon=True).start()
    while True:
        try:
            order = orders.get(timeout=idle_exit_s)
        except queue.Empty:
            return IDLE_EXIT
        late = threading.Timer(order.limit_s, os._exit, (_LATE_EXIT,))
        late.daemon = True
        late.start()
        _work(order, out)
        late.cancel()


def _read(source: BinaryIO, orders: "queue.Queue[Order]") -> None:
    """Runs beside the work, so that a controller that dies in the middle of a job leaves no orphan."""
    while raw := source.readline(MAX_JOB_BYTES + 1):
        order = decoded(Order, raw)
        if order is None:
            print("a line that is no order", file=sys.stderr, flush=True)
            os._exit(_NONSENSE_EXIT)
        orders.put(order)
    os._exit(_GONE_EXIT)


def _work(order: Order, out: BinaryIO) -> None:
    started_s = time.monotonic()
    said: list[str] = []

    def tell(stage: str, done: int, total: int) -> None:
        if said[-1:] != [stage]:
            said.append(stage)
            _say(out, Reply(number=order.number, stage=stage, done=done, total=total))

    tell("starting", 0, 1)
    # Imported here, so that the controller hears that the job has begun before numba and Optuna are loaded.
    from tuner.control.child_run import run_job

    try:
        answer = run_job(order.job, tell, lambda: time.monotonic() - started_s)
    except RooftuneError as error:
        _say(out, Reply(number=order.number, refused=str(error)[:2000]))
    else:
        _say(out, Reply(number=order.number, answer=answer))


def _say(out: BinaryIO, reply: Reply) -> None:
    out.write(encoded(reply))
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
