"""The loop's memory while it runs; the store gets it before a push leaves and at the end of a cycle."""

from typing import Unpack

from rooftune.tuner.control.memory import Memory, MemoryChanges, Moved, Trust, recall, remember
from rooftune.tuner.control.ports import Store


class Book:
    """memory: the current value, saved or not."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._memory: Memory | None = None
        self._saved: Memory | None = None

    @property
    def memory(self) -> Memory:
        """Raises StoreError until the first read succeeds."""
        if self._memory is None:
            self._memory = self._saved = recall(self._store)
        return self._memory

    def change(self, **changes: Unpack[MemoryChanges]) -> None:
        self._memory = self.memory.but(**changes)

    def save(self) -> None:
        """Raises StoreError and leaves the last saved memory in place."""
        memory = self.memory
        if memory != self._saved:
            remember(self._store, memory)
            self._saved = memory

    def serve_model(self, model: str) -> None:
        """Starts over for another model: old trials and predictions say nothing about it."""
        if self.memory.model not in ("", model):
            self.change(tried=(), trust=Trust())
        if self.memory.model != model:
            self.change(model=model)

    def spent_slo_s(self, day: str) -> float:
        """SLO-seconds spent on ``day``, the running trial's included."""
        return self.memory.account.spent(day) + self.memory.running_slo_s

    def moved(self, boot_id: str, at_s: float) -> None:
        """Notes that we changed the setting; at_s: on the engine's clock."""
        self.change(moved=Moved(boot_id=boot_id, at_s=at_s))
