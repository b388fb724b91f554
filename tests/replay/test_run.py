"""The open loop: requests are sent on time, whatever the answers do."""

import asyncio
import time

import numpy as np
import pytest

from rooftune.policies.errors import RefusedError
from rooftune.tuner.replay.run import Send, prepare_bodies, send_all
from rooftune.tuner.replay.stream import Flight


def run(planned_s: list[float], send: Send, stop: asyncio.Event | None = None) -> tuple[list[Flight], list[int]]:
    """The flights, and the progress reports."""
    progress: list[int] = []
    zero_s = time.monotonic()

    async def main() -> list[Flight]:
        bodies = prepare_bodies(len(planned_s), lambda index: str(index).encode(), prepared_bytes=2)
        halt = stop or asyncio.Event()
        return await send_all(
            np.array(planned_s), bodies, send, lambda: time.monotonic() - zero_s, halt, progress.append
        )

    return asyncio.run(main()), progress


def test_a_slow_answer_delays_no_other_request() -> None:
    """The first answer comes only once the last request was sent."""
    sent: list[tuple[int, bytes]] = []
    last = asyncio.Event()

    async def send(flight: Flight, content: bytes) -> None:
        flight.sent_s = float(len(sent))
        sent.append((flight.index, content))
        if flight.index == 19:
            last.set()
        await asyncio.wait_for(last.wait(), 30)  # a loop that waits for answers fails here
        flight.ended, flight.failure = True, None

    flights, progress = run([0.01 * at for at in range(20)], send)
    assert sent == [(at, str(at).encode()) for at in range(20)]
    assert [flight.failure for flight in flights] == [None] * 20 and progress[-1] == 20


def test_nothing_is_sent_early_and_late_requests_are_sent_at_once() -> None:
    zero_s = time.monotonic()
    planned = [0.0, 0.0, 0.05, 0.15, 0.15]

    async def send(flight: Flight, content: bytes) -> None:
        flight.sent_s = time.monotonic() - zero_s
        if flight.index == 1:
            time.sleep(0.2)  # the whole client stands still
        flight.ended, flight.failure = True, None

    flights, _ = run(planned, send)
    assert [flight.index for flight in flights] == [0, 1, 2, 3, 4]
    assert all(flight.sent_s >= flight.planned_s for flight in flights)
    assert flights[2].sent_s >= 0.2  # and it shows as lateness of the client


def test_a_stop_keeps_partial_results() -> None:
    stop = asyncio.Event()

    async def send(flight: Flight, content: bytes) -> None:
        flight.sent_s = 1.0
        if flight.index == 0:
            flight.ended, flight.failure = True, None
            return
        stop.set()
        await asyncio.sleep(60)

    flights, _ = run([0.0, 0.02, 50.0], send, stop)
    assert [(flight.index, flight.failure) for flight in flights] == [(0, None), (1, "interrupted")]


@pytest.mark.parametrize("error", [RefusedError("wrong key"), ZeroDivisionError("defect")])
def test_an_error_ends_the_run_and_is_reported(error: Exception) -> None:
    async def send(flight: Flight, content: bytes) -> None:
        flight.sent_s = 1.0
        if flight.index == 1:
            raise error
        await asyncio.sleep(60)

    with pytest.raises(type(error), match=str(error)):
        run([0.0, 0.01, 50.0], send)
