"""The child process: ``python -m rooftune.tuner.control.searcher.child LIMITS``, LIMITS in JSON.

Jobs come in by line, replies go out by line.

It ends when no job has come for a while, at once when its standard input closes (the controller is gone, however
that came about), and by itself when a job takes longer than the controller allows.
"""

import os
import queue
import resource
import sys
import threading
import traceback
from contextlib import suppress
from typing import BinaryIO, Final, TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError

from rooftune.policies.errors import InputError, RooftuneError
from rooftune.tuner.control.job import Answer, Job, Limits
from rooftune.tuner.record import Count, Part, Words, first_problem

# A job of 100,000 requests is about 10 MB; a line beyond this is nonsense, and neither side keeps more of it in memory.
MAX_JOB_BYTES: Final = 64_000_000
MAX_REPLY_BYTES: Final = 4_000_000
OUT_OF_MEMORY_EXIT: Final = 77  # the child's exit code when a limit of memory ended it
LATE_EXIT: Final = 75  # when it gave up by itself, after Limits.timeout_s
IDLE_EXIT: Final = 0

Line = TypeVar("Line", bound=Part)
LIMITS = TypeAdapter(Limits)


class UncheckedOrder(Part):
    """An order with any job, so that a wrong one is refused under its number."""

    number: Count
    job: JsonValue


class Order(Part):
    """Parent to child. number: repeated in every reply."""

    number: Count
    job: Job


class Reply(Part):
    """Child to parent: exactly one of answer, refused and stage. stage: what the child is at, for people.

    refused: the child's own error, in words.
    """

    number: Count
    stage: Words | None = None
    answer: Answer | None = None
    refused: Words | None = None


def encoded(line: Part) -> bytes:
    """One line, with its end."""
    return line.model_dump_json(by_alias=True).encode() + b"\n"


def decoded(kind: type[Line], raw: bytes) -> Line | None:
    """A line as a value; None when it is none of this kind."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError:
        return None


def order_of(raw: bytes) -> Order:
    """Raises InputError for the first value that does not fit."""
    try:
        return Order.model_validate_json(raw)
    except ValidationError as error:
        raise first_problem(error, "the order", "start the controller again") from None


_GONE_EXIT = 0
_DEFECT_EXIT = 1
_NONSENSE_EXIT = 76


# How libraries say that memory ran out, where they do not raise MemoryError.
_MEMORY_WORDS = ("allocate memory", "failed to map segment", "can't start new thread", "out of memory")


def main(argv: list[str] | None = None) -> int:
    """Serve jobs until idle; the exit code of the process."""
    limits = LIMITS.validate_json((sys.argv[1:] if argv is None else argv)[0])
    _limit(limits)
    # Whatever a library prints goes to standard error: standard output carries replies alone.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        return _serve(sys.stdin.buffer, out, limits)
    except Exception as error:  # noqa: BLE001  # the border of the process: the controller hears a code and last words
        traceback.print_exc()
        return OUT_OF_MEMORY_EXIT if _memory_ran_out(error) else _DEFECT_EXIT


def _memory_ran_out(error: BaseException | None) -> bool:
    while error is not None:
        # SystemError: the interpreter itself, where it did not expect an allocation to fail.
        if isinstance(error, MemoryError | SystemError) or any(word in str(error).lower() for word in _MEMORY_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _limit(limits: Limits) -> None:
    """Private memory, not address space: LLVM and thread stacks reserve far more than they use."""
    for kind, most in ((resource.RLIMIT_DATA, limits.memory_bytes), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    os.nice(limits.nice)
    allowed = sorted(os.sched_getaffinity(0))
    with suppress(OSError):  # a container may forbid it; its own CPU limit holds then
        os.sched_setaffinity(0, allowed[-limits.cpus :])


def _serve(source: BinaryIO, out: BinaryIO, limits: Limits) -> int:
    orders: queue.Queue[Order | Reply] = queue.Queue()
    threading.Thread(target=_read, args=(source, orders), daemon=True).start()
    while True:
        try:
            order = orders.get(timeout=limits.idle_exit_s)
        except queue.Empty:
            return IDLE_EXIT
        if isinstance(order, Reply):
            _say(out, order)
            continue
        late = threading.Timer(limits.timeout_s, os._exit, (LATE_EXIT,))
        late.daemon = True
        late.start()
        _work(order, out)
        late.cancel()


def _read(source: BinaryIO, orders: "queue.Queue[Order | Reply]") -> None:
    """Runs beside the work, so that a controller that dies in the middle of a job leaves no orphan."""
    while raw := source.readline(MAX_JOB_BYTES + 1):
        try:
            orders.put(order_of(raw))
        except InputError as error:
            known = decoded(UncheckedOrder, raw)
            if known is None:
                print("a line that is no order", file=sys.stderr, flush=True)
                os._exit(_NONSENSE_EXIT)
            orders.put(_refusal(known.number, error))
    os._exit(_GONE_EXIT)


def _work(order: Order, out: BinaryIO) -> None:
    sent: list[str] = []

    def tell(stage: str, done: int, total: int) -> None:
        if sent[-1:] != [stage]:
            sent.append(stage)
            _say(out, Reply(number=order.number, stage=stage))

    tell("starting", 0, 1)
    # Imported here, so that the controller hears that the job has begun before numba and Optuna are loaded.
    from rooftune.tuner.control.searcher.run import answer_to

    try:
        answer = answer_to(order.job, tell)
    except RooftuneError as error:
        _say(out, _refusal(order.number, error))
    else:
        _say(out, Reply(number=order.number, answer=answer))


def _refusal(number: int, error: RooftuneError) -> Reply:
    return Reply(number=number, refused=str(error)[:2000])


def _say(out: BinaryIO, reply: Reply) -> None:
    out.write(encoded(reply))
    out.flush()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the thread at standard input sits in a read, and an orderly end would wait for it
