"""The engine behind the tuning routes: one in this process or in another.

Answers are JSON text already, so that an answer from another process is passed on as it came.
"""

import asyncio
from collections.abc import Callable
from typing import Literal, Protocol

from rooftune.engine.protocol import TuningDesk
from rooftune.policies import wire

Read = Literal["state", "steps", "requests", "in-flight"]
Change = Literal["push", "revert", "resume"]

CHANGES: dict[str, type[wire.Message]] = {
    "push": wire.PushRequest,
    "revert": wire.RevertRequest,
    "resume": wire.ResumeRequest,
}


class TuningSource(Protocol):
    """Status and JSON text of one answer; raises ApiError when the engine cannot be reached."""

    async def read(self, what: Read, after: int) -> str: ...

    async def change(self, what: Change, message: wire.Message) -> tuple[int, str]: ...


def read(desk: TuningDesk, what: str, after: int) -> str:
    """The JSON of one read; raises KeyError for another name."""
    reads: dict[str, Callable[[], wire.Message]] = {
        "state": desk.tuning_state,
        "steps": lambda: desk.steps_after(after),
        "requests": lambda: desk.requests_after(after),
        "in-flight": desk.in_flight,
    }
    return reads[what]().model_dump_json()


def change(desk: TuningDesk, message: wire.Message) -> tuple[int, str]:
    """HTTP status and JSON of one change; raises ValueError for another message."""
    if isinstance(message, wire.PushRequest):
        answer = desk.push(message)
    elif isinstance(message, wire.RevertRequest):
        answer = desk.revert(message)
    elif isinstance(message, wire.ResumeRequest):
        answer = desk.resume(message)
    else:
        raise ValueError(f"no such change: {type(message).__name__}")
    status = wire.REFUSAL_STATUS[answer.code] if isinstance(answer, wire.Refusal) else 200
    return status, answer.model_dump_json()


class OwnEngine:
    """An engine in this process; runs in a thread, so that no stream waits while up to a thousand rows are written."""

    def __init__(self, desk: TuningDesk) -> None:
        self._desk = desk

    async def read(self, what: Read, after: int) -> str:
        return await asyncio.to_thread(read, self._desk, what, after)

    async def change(self, what: Change, message: wire.Message) -> tuple[int, str]:
        return await asyncio.to_thread(change, self._desk, message)
