"""Decodes that go on together: the index tensors of one step, taken further in place for the next."""

from collections.abc import Sequence

import numpy as np
from rooftune.engine.step import IntArray, Segment
from rooftune.engine.torch.geometry import StepGeometry
from rooftune.engine.torch.groups import GrowingGroups


class Onward:
    """Takes the geometry of decodes alone further, one token each, as long as nobody comes or goes.

    The tensors that the model gets stay the same objects; a few numbers in them change. segments: of the step that
    ``geometry`` was made for; their block tables are looked at again when a block is begun.
    """

    def __init__(self, geometry: StepGeometry, segments: Sequence[Segment]) -> None:
        self.geometry = geometry
        self._tables = [segment.block_table for segment in segments]
        self._size = size = geometry.store.block_tokens
        self._token_ids, positions, self._slots = geometry.packed
        self._counts = geometry.packed[1:]
        self._starts: list[int] = positions.tolist()
        self._steps = 0
        self._begins: list[list[int]] = [[] for _ in range(size)]  # rows that begin a block after so many steps
        for row, start in enumerate(self._starts):
            self._begins[-start % size].append(row)
        reads = geometry.reads(0)
        order: IntArray = reads.decode_rows.numpy()
        self._place: list[int] = np.argsort(order).tolist()  # of each row, in the order of the groups
        self._groups = GrowingGroups(reads.groups, positions[order], size)
        geometry.go_on(reads._replace(groups=self._groups.groups))

    @staticmethod
    def can_take(geometry: StepGeometry, segments: Sequence[Segment]) -> bool:
        """Whether this was a step of decodes alone, all sampled, on a CPU, and without a sliding window."""
        return (
            geometry.store.device.type == "cpu"
            and geometry.windows == (0,)
            and len(segments) == len(geometry.slots) == len(geometry.last_rows)
        )

    def advance(self, token_ids: Sequence[int]) -> bool:
        """The geometry of the next step, whose tokens are these; False: it is of no use any more, make another."""
        self._steps += 1
        self._token_ids[:] = token_ids
        self._counts += 1
        size, begun, unwritten = self._size, [], []
        for row in self._begins[self._steps % size]:
            place, table = (self._starts[row] + self._steps) // size, self._tables[row]
            block = int(table[place]) if place < len(table) else -1
            if not 0 <= block < self.geometry.store.blocks:
                return False  # whoever makes the geometry from the segments says what is wrong
            self._slots[row] = block * size
            begun.append((self._place[row], block))
            if size > 1:
                unwritten.append((block * size + 1, size - 1))
        self.geometry.unwritten = unwritten
        return self._groups.advance(begun)
