"""The engine behind the tuning routes: one in this process or in another.

Answers are JSON text already, so that an answer from another process is passed on as it came.
"""

import asyncio
from typing import Literal, Protocol

from rooftune.engine.interface import Tuning
from rooftune.policies import wire

Read = Literal["state", "steps", "requests"]
Change = Literal["push", "revert", "resume"]

CHANGES: dict[str, type[wire.Message]] = {
    "push": wire.PushRequest,
    "revert": wire.RevertRequest,
    "resume": wire.ResumeRequest,
}


class TuningSource(Protocol):
    """Status and JSON text of one answer; raises ApiError when the engine cannot be reached."""

    async def read(self, what: Read, after: int) -> str: ...

    async def change(self, what: Change, wish: wire.Message) -> tuple[int, str]: ...

    async def revision(self) -> int: ...


def read(tuning: Tuning, what: str, after: int) -> str:
    """The JSON of one read; raises ValueError for another name."""
    if what == "state":
        return tuning.tuning_state().model_dump_json()
    if what == "steps":
        return tuning.steps_after(after).model_dump_json()
    if what == "requests":
        return tuning.requests_after(after).model_dump_json()
    raise ValueError(f"no such read: {what!r:.40}")


def change(tuning: Tuning, wish: wire.Message) -> tuple[int, str]:
    """HTTP status and JSON of one change; raises ValueError for another message."""
    if isinstance(wish, wire.PushRequest):
        answer = tuning.push(wish)
    elif isinstance(wish, wire.RevertRequest):
        answer = tuning.revert(wish)
    elif isinstance(wish, wire.ResumeRequest):
        answer = tuning.resume(wish)
    else:
        raise ValueError(f"no such change: {type(wish).__name__}")
    status = wire.REFUSAL_STATUS[answer.code] if isinstance(answer, wire.Refusal) else 200
    return status, answer.model_dump_json()


class OwnEngine:
    """An engine in this process; runs in a thread, so that no stream waits while up to a thousand rows are written."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning

    async def read(self, what: Read, after: int) -> str:
        return await asyncio.to_thread(read, self._tuning, what, after)

    async def change(self, what: Change, wish: wire.Message) -> tuple[int, str]:
        return await asyncio.to_thread(change, self._tuning, wish)

    async def revision(self) -> int:
        return self._tuning.tuning_state().revision
