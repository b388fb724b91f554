"""Where the tokens of one step stand: rows of the packed forward, slots to write, blocks to read.

Made once a step, shared by all layers. Layers with another sliding window read other blocks, so what
depends on the window is made at its first use and kept for the layers that follow.
"""

from dataclasses import dataclass

import numpy as np
import torch

from engine.step import IntArray, Segment, StepBatch
from engine.torch.kv_store import KvStore
from engine.torch.masks import CausalMasks

# One gather of decode keys and values should stay in the second-level cache (2 MiB and more on current
# server cores), so that attention reads it from there: measured, the copy then costs next to nothing.
GROUP_BYTES = 1 << 20
# Decodes share a group only while the shortest is at least this part of the longest: padding is wasted work.
GROUP_SHORTEST = 0.5


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar length, read together: ``size`` requests, ``keys`` padded keys each.

    blocks: (size * keys / block_tokens,). mask: (size, 1, 1, keys), 0 where a key counts and -inf elsewhere.
    """

    size: int
    keys: int
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several tokens of one request: rows ``row`` to ``row + tokens`` of the step, from position ``start`` on.

    blocks: those that hold positions from ``first_key`` (a multiple of the block size) to the chunk's end.
    """

    row: int
    tokens: int
    start: int
    first_key: int
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class Reads:
    """What attention reads for one window. decode_rows: rows of the step in the order of the groups."""

    decode_rows: torch.Tensor
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Ragged:
    """The same for a variable-length kernel: cumulated query and key counts and the slots of all keys."""

    query_ends: torch.Tensor
    key_ends: torch.Tensor
    max_queries: int
    max_keys: int
    slots: torch.Tensor


class StepGeometry:
    """Index tensors of one step on the store's device.

    token_ids, positions: (1, tokens). slots: (tokens,), where the new KV entries go. last_rows: rows whose
    logits are wanted. Raises ValueError when a block table is too short or names a block that is not there:
    a defect of the loop that would otherwise overwrite another request's entries.
    """

    def __init__(self, step: StepBatch, store: KvStore, masks: CausalMasks) -> None:
        self.store = store
        self.masks = masks
        size = store.block_tokens
        tokens = step.computed_tokens
        token_ids = np.empty(tokens, dtype=np.int64)
        positions = np.empty(tokens, dtype=np.int64)
        slots = np.empty(tokens, dtype=np.int64)
        self._spans: list[tuple[int, Segment, IntArray]] = []
        last_rows = []
        row = 0
        for segment in step.segments:
            table = _checked_table(segment, store)
            after = row + len(segment.token_ids)
            token_ids[row:after] = segment.token_ids
            if after - row == 1:
                positions[row] = segment.start
                slots[row] = table[segment.start // size] * size + segment.start % size
            else:
                here = np.arange(segment.start, segment.end)
                positions[row:after] = here
                slots[row:after] = table[here // size] * size + here % size
            if segment.sample:
                last_rows.append(after - 1)
            self._spans.append((row, segment, table))
            row = after
        self.token_ids = self._tensor(token_ids).unsqueeze(0)
        self.positions = self._tensor(positions).unsqueeze(0)
        self.slots = self._tensor(slots)
        self.last_rows = self._tensor(np.array(last_rows, dtype=np.int64))
        self._reads: dict[int, Reads] = {}
        self._ragged: Ragged | None = None

    def reads(self, window: int) -> Reads:
        """Groups and chunks for layers that see the last ``window`` positions (0: all of them)."""
        if window not in self._reads:
            self._reads[window] = self._make_reads(window)
        return self._reads[window]

    def ragged(self) -> Ragged:
        """The step for a variable-length kernel; the kernel itself applies a window."""
        if self._ragged is None:
            self._ragged = self._make_ragged()
        return self._ragged

    def _make_reads(self, window: int) -> Reads:
        size = self.store.block_tokens
        singles: list[tuple[int, int, int, IntArray]] = []  # blocks to read, row, position, those blocks
        chunks = []
        for row, segment, table in self._spans:
            first_block = max(0, segment.start - window + 1) // size if window else 0
            blocks = table[first_block : -(-segment.end // size)]
            if len(segment.token_ids) == 1:
                singles.append((len(blocks), row, segment.start, blocks))
            else:
                chunk = Chunk(row, len(segment.token_ids), segment.start, first_block * size, self._tensor(blocks))
                chunks.append(chunk)
        singles.sort(key=lambda single: (single[0], single[1]))
        rows = self._tensor(np.array([single[1] for single in singles], dtype=np.int64))
        return Reads(rows, tuple(self._group(members, window) for members in self._similar(singles)), tuple(chunks))

    def _similar(self, singles: list[tuple[int, int, int, IntArray]]) -> list[list[tuple[int, int, int, IntArray]]]:
        """Cut decodes, sorted by length, into groups."""
        store = self.store
        block_bytes = 2 * store.block_tokens * store.kv_heads * store.head_dim * store.dtype.itemsize
        # On an accelerator launches cost more than padding: one group for all of similar length.
        most_bytes = GROUP_BYTES if store.device.type == "cpu" else 1 << 40
        groups: list[list[tuple[int, int, int, IntArray]]] = []
        for single in singles:
            group = groups[-1] if groups else []
            fits = single[0] * (len(group) + 1) * block_bytes <= most_bytes
            if group and fits and group[0][0] >= GROUP_SHORTEST * single[0]:
                group.append(single)
            else:
                groups.append([single])
        return groups

    def _group(self, members: list[tuple[int, int, int, IntArray]], window: int) -> DecodeGroup:
        size = self.store.block_tokens
        most = members[-1][0]
        blocks = np.empty((len(members), most), dtype=np.int64)
        newest = np.empty((len(members), 1), dtype=np.int64)  # column of the query's own key
        for index, (held, _, position, table) in enumerate(members):
            blocks[index, :held] = table
            blocks[index, held:] = table[-1]  # padding reads the request's own block, nobody else's
            newest[index] = position - (position // size + 1 - held) * size
        columns = np.arange(most * size)
        hidden = columns > newest
        if window:
            hidden |= columns <= newest - window
        mask = torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0.0)))
        mask = mask.to(self.store.device, self.store.dtype)[:, None, None, :]
        return DecodeGroup(len(members), most * size, self._tensor(blocks.reshape(-1)), mask)

    def _make_ragged(self) -> Ragged:
        size = self.store.block_tokens
        queries = [len(segment.token_ids) for _, segment, _ in self._spans]
        keys = [segment.end for _, segment, _ in self._spans]
        slots = []
        for _, segment, table in self._spans:
            here = np.arange(segment.end)
            slots.append(table[here // size] * size + here % size)
        return Ragged(
            query_ends=self._tensor(np.cumsum([0, *queries])).to(torch.int32),
            key_ends=self._tensor(np.cumsum([0, *keys])).to(torch.int32),
            max_queries=max(queries),
            max_keys=max(keys),
            slots=self._tensor(np.concatenate(slots)),
        )

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.store.device, non_blocking=True)


def _checked_table(segment: Segment, store: KvStore) -> IntArray:
    needed = -(-segment.end // store.block_tokens)
    table = np.asarray(segment.block_table, dtype=np.int64)
    if len(table) < needed:
        raise ValueError(f"block table of {len(table)} blocks, but positions up to {segment.end} need {needed}")
    table = table[:needed]
    if table.min() < 0 or table.max() >= store.blocks:
        raise ValueError(f"block table names {table.min()} to {table.max()}, the store has 0 to {store.blocks - 1}")
    return table
