"""Groups decodes of similar length to read them together, and advances the groups from step to step."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from rooftune.engine.step import IntArray
from rooftune.engine.torch.kv_store import KvStore, Numbers, as_numpy

# One gather of decode keys and values should stay in the second-level cache (2 MiB and more on current
# server cores), so that attention reads it from there: measured, the copy then costs next to nothing.
GROUP_BYTES = 3 << 19
# Decodes share a group only while the shortest is at least this part of the longest: padding is wasted work.
GROUP_SHORTEST = 0.5
# A group that goes on may grow by this part of its width, at least a block, before all groups are made again.
GROWTH = 0.25


class DecodeGroup(NamedTuple):
    """``size`` requests, ``keys`` padded keys each.

    blocks: (size * keys / block_tokens,). mask: (size, 1, 1, keys), 0 where a key counts and -inf elsewhere.
    """

    size: int
    keys: int
    blocks: torch.Tensor
    mask: torch.Tensor


def cuts(held: list[int], store: KvStore) -> tuple[list[int], list[int]]:
    """Decodes of each group and blocks that its longest reads, from the blocks of each decode, ascending."""
    # On an accelerator launches cost more than padding: one group for all of similar length.
    most_blocks = GROUP_BYTES // store.block_bytes if store.device.type == "cpu" else 1 << 40
    counts, widths = [], []
    first, longest = 0, held[0]
    for index, blocks in enumerate(held):
        if index > first and (blocks * (index + 1 - first) > most_blocks or held[first] < GROUP_SHORTEST * blocks):
            counts.append(index - first)
            widths.append(longest)
            first = index
        longest = blocks
    counts.append(len(held) - first)
    widths.append(longest)
    return counts, widths


class GrowingGroups:
    """The groups of one step, for the steps in which every request has one key more. On a CPU, without a window.

    groups: of the latest step. newest: the column of each request's own key, in the order of the groups.
    A step changes one number of each request's mask; a block that begins changes the table of its group, and only
    where that makes the group wider are its tensors made again. All in numpy, because the first call of a torch
    operation after a forward costs tens of microseconds.
    """

    def __init__(self, groups: Sequence[DecodeGroup], newest: IntArray, block_tokens: int) -> None:
        self.groups = list(groups)
        self._size = block_tokens
        self._dtype = groups[0].mask.dtype
        self._tables: list[IntArray] = []  # of each group: (size, width), the memory of its blocks
        self._masks: list[Numbers] = []  # of each group: (size, 1, 1, room * block_tokens), of one memory
        self._held: list[int] = (newest // block_tokens + 1).tolist()
        self._place: list[tuple[int, int]] = []  # of each request: its group, and its row there
        rooms = [(width := group.keys // block_tokens) + max(1, int(GROWTH * width)) for group in groups]
        cells = [group.size * room * block_tokens for group, room in zip(groups, rooms, strict=True)]
        memory = torch.full((sum(cells),), float("-inf"), dtype=self._dtype)
        self._memory = as_numpy(memory)
        self._cells = newest.copy()  # of each request: where its newest key stands in the memory
        at = 0
        for number, (group, room) in enumerate(zip(groups, rooms, strict=True)):
            behind, row_cells = at + cells[number], room * block_tokens
            memory[at:behind].view(group.size, 1, 1, row_cells)[..., : group.keys] = group.mask
            self._masks.append(self._memory[at:behind].reshape(group.size, 1, 1, row_cells))
            first = len(self._place)
            self._place += [(number, row) for row in range(group.size)]
            self._cells[first : len(self._place)] += np.arange(at, behind, row_cells)
            self._tables.append(group.blocks.numpy().reshape(group.size, -1))
            self._renew(number)
            at = behind

    def advance(self, begun: Sequence[tuple[int, int]]) -> bool:
        """Let every request read one more key; begun: requests whose key begins a block, and that block. False: no
        room, and the groups are of no more use."""
        for request, block in begun:
            number, row = self._place[request]
            place = self._held[request]
            if place == self._tables[number].shape[1]:
                if (place + 1) * self._size > self._masks[number].shape[3]:
                    return False
                self._widen(number)
            self._tables[number][row, place:] = block
            self._held[request] = place + 1
        self._cells += 1
        self._memory[self._cells] = 0  # of a number of any width, 0.0
        return True

    def _widen(self, number: int) -> None:
        """Room for one more block; until it is used, each request reads its own last block there, never another's."""
        table = self._tables[number]
        count, width = table.shape
        wider = self._tables[number] = np.empty((count, width + 1), dtype=np.int64)
        wider[:, :width] = table
        wider[:, width] = table[:, width - 1]
        self._renew(number)

    def _renew(self, number: int) -> None:
        table = self._tables[number]
        count, width = table.shape
        mask = torch.from_numpy(self._masks[number][..., : width * self._size])
        if mask.dtype != self._dtype:
            mask = mask.view(self._dtype)
        self.groups[number] = DecodeGroup(count, width * self._size, torch.from_numpy(table.reshape(-1)), mask)
