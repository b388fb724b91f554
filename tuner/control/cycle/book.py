"""The loop's memory while it runs, and how it gets into the store: before a push leaves, and at the end of a cycle."""

from typing import Unpack

from rooftune.tuner.control.memory import Memory, MemoryChanges, Moved, Trust, recall, remember
from rooftune.tuner.control.ports import Store


class Book:
    """memory: as it is now, saved or not."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._memory: Memory | None = None
        self._saved: Memory | None = None

    @property
    def memory(self) -> Memory:
        """Raises StoreError while it has never been read."""
        if self._memory is None:
            self._memory = self._saved = recall(self._store)
        return self._memory

    def change(self, **changes: Unpack[MemoryChanges]) -> None:
        self._memory = self.memory.but(**changes)

    def save(self) -> None:
        """Raises StoreError; then what was saved before still stands."""
        memory = self.memory
        if memory != self._saved:
            remember(self._store, memory)
            self._saved = memory

    def about(self, model: str) -> None:
        """What was tried with another model, and how its predictions held, says nothing of this one."""
        if self.memory.model not in ("", model):
            self.change(tried=(), trust=Trust())
        if self.memory.model != model:
            self.change(model=model)

    def spent_slo_s(self, day: str) -> float:
        """SLO-seconds of that day, the running trial's among them."""
        return self.memory.account.spent(day) + self.memory.running_slo_s

    def moved(self, boot_id: str, at_s: float) -> None:
        """The setting changed by our doing, on the engine's clock."""
        self.change(moved=Moved(boot_id=boot_id, at_s=at_s))
