"""What the loop is put together from, as protocols, so that each part is built and tried by itself.

The port is ``rooftune.tuner.ports.base.Port``, the clock ``rooftune.tuner.clock.Clock``.
"""

from collections.abc import Callable
from typing import Protocol

from rooftune.tuner.control.job import Job, SearchAnswer
from rooftune.tuner.control.outcome import CycleRecord


class Searcher(Protocol):
    """Twin and search in a process of their own. One job at a time; ``ask`` never waits for it."""

    def ask(self, job: Job) -> bool:
        """Start on a job; False when one is running already (then nothing has changed)."""
        ...

    def answer(self) -> SearchAnswer | None:
        """The answer to the latest job, once; None while it runs or when none was asked for.

        Raises WorkerError (tuner.control.job) once when the child died, hung, ran out of memory or answered nonsense.
        """
        ...

    @property
    def busy(self) -> bool: ...

    def close(self) -> None: ...


class Store(Protocol):
    """The state file. Every method raises StoreError (tuner.control.state) when the disk does not take part."""

    @property
    def instance(self) -> str:
        """A short name made once for this state folder: the actor of every push is "rooftune/" + instance."""
        ...

    def next_number(self) -> int:
        """The number of the cycle that begins now; ascends over restarts."""
        ...

    def note_push(self, number: int, changes: str) -> None:
        """Written before a push leaves: what a controller that dies in between meant to do (JSON text)."""
        ...

    def put(self, record: CycleRecord) -> None: ...

    def last(self, count: int, before: int | None = None) -> list[CycleRecord]:
        """Newest first; before: only numbers below it."""
        ...

    def get(self, number: int) -> CycleRecord | None: ...

    def value(self, key: str) -> str | None:
        """A small value kept over restarts (JSON text): paused, accepted step model, trust region."""
        ...

    def keep(self, key: str, value: str) -> None: ...

    def change(self, key: str, make: Callable[[str | None], str]) -> None:
        """keep(key, make(value(key))) with no writer in between. What ``make`` raises leaves the value as it was."""
        ...
