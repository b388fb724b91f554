"""The replay itself: an open loop that sends each request at its time, however slow the answers are."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rooftune.policies.errors import RooftuneError
from rooftune.tuner.replay.stream import Flight
from rooftune.tuner.traffic.workload import FloatArray

# Bodies made before the start; beyond it each is made just before its time, while nothing else is due.
PREPARED_BYTES = 256 * 1024 * 1024
_TICK_S = 0.5

Ask = Callable[[Flight, bytes], Awaitable[None]]


class Bodies:
    """Request bodies, made ahead as far as memory allows, and then one before it is due."""

    def __init__(self, count: int, make: Callable[[int], bytes], prepared_bytes: int = PREPARED_BYTES) -> None:
        self._make = make
        self._ready: dict[int, bytes] = {}
        held = 0
        for index in range(count):
            if held > prepared_bytes:
                break
            self._ready[index] = make(index)
            held += len(self._ready[index])

    def take(self, index: int) -> bytes:
        """Of request ``index``, once."""
        return self._ready.pop(index) if index in self._ready else self._make(index)


async def send_all(
    planned_s: FloatArray,
    bodies: Bodies,
    ask: Ask,
    since_start: Callable[[], float],
    stop: asyncio.Event,
    progress: Callable[[int], None],
) -> list[Flight]:
    """Send request i at planned_s[i] seconds and wait for every end; a set ``stop`` ends both at once.

    ask: sends and fills the flight; when it raises, everything is stopped and the first error is raised here.
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
        for index, due_s in enumerate(planned_s.tolist()):
            content = bodies.take(index)
            if await _stopped_before(due_s, since_start, stop):
                break
            flight = Flight(index, due_s)
            flights.append(flight)
            task = asyncio.create_task(_run(ask, flight, content))
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


async def _run(ask: Ask, flight: Flight, content: bytes) -> None:
    await ask(flight, content)


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
