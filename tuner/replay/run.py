"""The replay itself: an open loop that sends each request at its time, however slow the answers are."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

from rooftune.policies.errors import RooftuneError
from rooftune.tuner.replay.stream import Flight
from rooftune.tuner.traffic.workload import FloatArray

# Bodies made before the start; beyond it each is made just before its time, while nothing else is due.
PREPARED_BYTES = 256 * 1024 * 1024
_TICK_S = 0.5

Send = Callable[[Flight, bytes], Coroutine[Any, Any, None]]


def prepare_bodies(count: int, make: Callable[[int], bytes], prepared_bytes: int = PREPARED_BYTES) -> Iterator[bytes]:
    """Request bodies in order, made now as far as memory allows, and then one before it is due."""
    ready: list[bytes] = []
    held = 0
    while len(ready) < count and held <= prepared_bytes:
        ready.append(make(len(ready)))
        held += len(ready[-1])
    return chain(ready, map(make, range(len(ready), count)))


async def send_all(
    planned_s: FloatArray,
    bodies: Iterator[bytes],
    send: Send,
    since_start: Callable[[], float],
    stop: asyncio.Event,
    progress: Callable[[int], None],
) -> list[Flight]:
    """Send request i at planned_s[i] seconds and wait for every end; a set ``stop`` ends both at once.

    send: sends and fills the flight; when it raises, everything is stopped and the first error is raised here.
    Gives the requests that were sent, in that order; those that a stop cut off keep the failure ``interrupted``.
    """
    flights: list[Flight] = []
    tasks: set[asyncio.Task[None]] = set()
    errors: list[BaseException] = []

    def ended(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            errors.append(error)
            stop.set()

    ticker = asyncio.create_task(_tick(lambda: progress(len(flights) - len(tasks))))
    try:
        for index, (due_s, content) in enumerate(zip(planned_s.tolist(), bodies, strict=True)):
            if await _stopped_before(due_s, since_start, stop):
                break
            flight = Flight(index, due_s)
            flights.append(flight)
            task = asyncio.create_task(send(flight, content))
            tasks.add(task)
            task.add_done_callback(ended)
        await _until_empty(tasks, stop)
    finally:
        ticker.cancel()
        left = list(tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(ticker, *left, return_exceptions=True)
    _raise_first(errors)
    progress(len(flights))
    return [flight for flight in flights if not math.isnan(flight.sent_s)]


async def _stopped_before(due_s: float, since_start: Callable[[], float], stop: asyncio.Event) -> bool:
    """Wait until it is due (at least one turn of the loop, so that what is late cannot starve the reading)."""
    left_s = due_s - since_start()
    if left_s <= 0.0:
        await asyncio.sleep(0)
    else:
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), left_s)
    return stop.is_set()


async def _until_empty(tasks: set[asyncio.Task[None]], stop: asyncio.Event) -> None:
    halt = asyncio.create_task(stop.wait())
    try:
        while tasks and not stop.is_set():
            await asyncio.wait({halt, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        halt.cancel()


async def _tick(report: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        report()


def _raise_first(errors: list[BaseException]) -> None:
    """Ours first: a refusal explains what broke; anything else is a defect."""
    for error in sorted(errors, key=lambda one: not isinstance(one, RooftuneError)):
        raise error
