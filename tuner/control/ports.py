"""Protocols for the loop's searcher and store; see also ``tuner.ports.base.Port`` and ``tuner.clock.Clock``."""

from collections.abc import Callable
from typing import Protocol

from rooftune.tuner.control.job import Answer, Job
from rooftune.tuner.control.outcome import CycleRecord


class Searcher(Protocol):
    """Twin and search in a child process, one job at a time; no method waits for it."""

    def ask(self, job: Job) -> bool:
        """Starts a job; False, and no change, while another runs."""
        ...

    def answer(self) -> Answer | None:
        """The answer to the latest job, once; None while it runs or without one.

        Raises WorkerError once when the child died, timed out, ran out of memory or answered nonsense.
        """
        ...

    @property
    def busy(self) -> bool: ...

    def close(self) -> None: ...


class Store(Protocol):
    """The state file. Every method raises StoreError (tuner.control.state) when the disk fails."""

    @property
    def instance(self) -> str:
        """A short name, made once per state folder; "rooftune/" + instance is the actor of every push."""
        ...

    def next_number(self) -> int:
        """The number of a new cycle; ascends over restarts."""
        ...

    def note_push(self, number: int, changes: str) -> None:
        """Call before a push leaves; changes: JSON text, for the case that the controller dies in between."""
        ...

    def put(self, record: CycleRecord) -> None: ...

    def last(self, count: int, before: int | None = None) -> list[CycleRecord]:
        """The latest records, newest first; before: only numbers below it."""
        ...

    def get(self, number: int) -> CycleRecord | None: ...

    def value(self, key: str) -> str | None:
        """JSON text kept over restarts, such as the accepted step model."""
        ...

    def keep(self, key: str, value: str) -> None: ...

    def change(self, key: str, make: Callable[[str | None], str]) -> None:
        """keep(key, make(value(key))) without another writer in between; an exception in ``make`` changes nothing."""
        ...
