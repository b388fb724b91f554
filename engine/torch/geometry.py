"""Where the tokens of one step stand: rows of the packed forward, slots to write, blocks to read.

Made once a step, shared by all layers. Layers with another sliding window read other blocks, so what
depends on the window is made at its first use and kept for the layers that follow. A step that decodes one
token further changes the geometry of the step before in place: ``rooftune.engine.torch.groups``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from rooftune.engine.step import IntArray, Segment
from rooftune.engine.torch.groups import DecodeGroup, GrowingGroups, cuts
from rooftune.engine.torch.kv_store import KvStore

# Queries of a chunk that one call masks together: bounds the mask to this many rows.
TILE_TOKENS = 512
_FIRST_PREFIX = 1024


class CausalMasks:
    """Masks of one runner, in its dtype and on its device.

    The buffer of a window lets row i see columns up to ``prefix + i``, so a chunk with p keys before its first
    query is the slice from column ``prefix - p`` on. It grows by doubling to the longest prefix seen.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._buffers: dict[int, torch.Tensor] = {}
        self._blocks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def get(self, window: int, prefix: int, queries: int) -> torch.Tensor:
        """(queries, prefix + queries): 0 where a query sees a key, -inf elsewhere.

        window: keys a query sees, its own included (0: all before it). queries: at most TILE_TOKENS.
        """
        held = self._buffers[window].shape[1] - TILE_TOKENS if window in self._buffers else -1
        if prefix > held:
            held = max(_FIRST_PREFIX, 1 << (prefix - 1).bit_length() if prefix else 0)
            self._buffers[window] = self._make(window, held)
        mask = self._buffers[window][:queries, held - prefix : held + queries]
        # CUDA kernels load masks in aligned pieces, and a slice may begin anywhere.
        return mask if self._device.type == "cpu" else mask.clone(memory_format=torch.contiguous_format)

    def of_blocks(self, size: int, seen: torch.Tensor, gone: torch.Tensor | None = None) -> torch.Tensor:
        """(blocks, size): 0 where a query sees a key of a block of ``size`` keys, -inf elsewhere.

        seen: (blocks,), how many keys from the block's start it sees, 0..size; gone: how many of them lie before its
        window.
        """
        if size not in self._blocks:
            keys = torch.arange(size, device=self._device)
            counts = torch.arange(size + 1, device=self._device)[:, None]
            zeros = torch.zeros((size + 1, size), dtype=self._dtype, device=self._device)
            behind = zeros.masked_fill(keys >= counts, float("-inf"))
            self._blocks[size] = behind, zeros.masked_fill(keys < counts, float("-inf"))
        behind, before = self._blocks[size]
        mask = behind.index_select(0, seen)
        return mask if gone is None else mask + before.index_select(0, gone)

    def _make(self, window: int, prefix: int) -> torch.Tensor:
        rows = torch.arange(prefix, prefix + TILE_TOKENS, device=self._device)
        distance = rows[:, None] - torch.arange(prefix + TILE_TOKENS, device=self._device)[None, :]
        seen = distance >= 0
        if window:
            seen &= distance < window
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~seen, float("-inf"))


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


class Reads(NamedTuple):
    """What attention reads for one window. decode_rows: rows of the step in the order of the groups."""

    decode_rows: torch.Tensor
    groups: Sequence[DecodeGroup]
    chunks: Sequence[Chunk]


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
    logits are wanted. unwritten: in every block that this step begins, the slots behind its last new token: the first
    and how many. packed: (3, tokens), the memory of token_ids, positions and slots where the device is a CPU. Raises
    ValueError when a block table is too short or names a block outside the store: a bug in the loop that would
    otherwise overwrite another request's entries.

    All is computed for all segments at once, because a step of a small model leaves no time for a loop over requests.
    """

    def __init__(self, segments: Sequence[Segment], store: KvStore, masks: CausalMasks) -> None:
        self.store = store
        self.masks = masks
        size = store.block_tokens
        lengths_of = [len(segment.token_ids) for segment in segments]
        starts_of = [segment.start for segment in segments]
        if min(lengths_of) < 1 or min(starts_of) < 0:
            raise ValueError(f"segments of {lengths_of} tokens at {starts_of}: each needs 1 or more at >= 0")
        self._lengths = lengths = np.array(lengths_of)
        self._starts = starts = np.array(starts_of)
        ends = starts + lengths
        self._held = held = (ends + (size - 1)) // size
        self._blocks = blocks = _checked_blocks(segments, held, store)
        self._blocks_at = blocks_at = held.cumsum() - held
        self._rows_at = rows_at = lengths.cumsum() - lengths
        tokens = sum(lengths_of)
        self.packed = packed = np.empty((3, tokens), dtype=np.int64)
        packed[0] = np.fromiter(chain.from_iterable([segment.token_ids for segment in segments]), np.int64, tokens)
        if tokens == len(segments):
            positions, begins = starts, blocks_at
        else:
            positions = np.arange(tokens) + (starts - rows_at).repeat(lengths)
            begins = blocks_at.repeat(lengths)
        packed[1] = positions
        block = positions // size
        packed[2] = blocks[begins + block] * size + (positions - block * size)
        on_device = self._tensor(packed)  # one transfer for all three
        self.token_ids, self.positions, slots = on_device.unsqueeze(1).unbind()
        self.slots = slots[0]
        wanted = [segment.sample for segment in segments]
        self._last = (rows_at + lengths - 1)[wanted]
        self.last_rows = self._tensor(self._last)
        self.unwritten = self._unwritten(ends)
        self._reads: dict[int, Reads] = {}
        self._ragged: Ragged | None = None
        self._onward = False

    @property
    def next_positions(self) -> IntArray:
        """Where the tokens that come out of the step will stand, one for each of ``last_rows``."""
        positions: IntArray = self.packed[1, self._last] + 1
        return positions

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows used so far; none where the variable-length kernel computes attention."""
        return tuple(self._reads)

    def reads(self, window: int) -> Reads:
        """Groups and chunks for layers that see the last ``window`` positions (0: all of them)."""
        if window not in self._reads:
            if self._onward:
                raise RuntimeError(f"window {window} was first used after the step had advanced in place")
            self._reads[window] = self._make_reads(window)
        return self._reads[window]

    def go_on(self, reads: Reads) -> None:
        """From now on ``packed`` and these reads change in place; no other reads may be made from this geometry."""
        self._onward = True
        self._reads = {0: reads}

    def ragged(self) -> Ragged:
        """The step for a variable-length kernel; the kernel itself applies a window."""
        if self._ragged is None:
            self._ragged = self._make_ragged()
        return self._ragged

    def _unwritten(self, ends: IntArray) -> list[tuple[int, int]]:
        size = self.store.block_tokens
        filled = ends % size
        begun = ((filled > 0) & (self._starts <= (self._held - 1) * size)).nonzero()[0]
        last = self._blocks[self._blocks_at[begun] + self._held[begun] - 1]
        return [(block * size + at, size - at) for block, at in zip(last.tolist(), filled[begun].tolist(), strict=True)]

    def _make_reads(self, window: int) -> Reads:
        size = self.store.block_tokens
        first = np.maximum(self._starts - window + 1, 0) // size if window else 0 * self._starts
        held = self._held - first
        at = self._blocks_at + first
        chunks = [
            Chunk(
                int(self._rows_at[index]),
                int(self._lengths[index]),
                int(self._starts[index]),
                int(first[index]) * size,
                self._tensor(self._blocks[at[index] : at[index] + held[index]]),
            )
            for index in (self._lengths > 1).nonzero()[0].tolist()
        ]
        singles = (self._lengths == 1).nonzero()[0]
        if len(singles) == 0:
            return Reads(self._tensor(singles), (), tuple(chunks))
        singles = singles[held[singles].argsort(kind="stable")]
        newest = self._starts[singles] - first[singles] * size
        groups = self._groups(held[singles], at[singles], newest, window)
        return Reads(self._tensor(self._rows_at[singles]), groups, tuple(chunks))

    def _groups(self, held: IntArray, at: IntArray, newest: IntArray, window: int) -> tuple[DecodeGroup, ...]:
        """Decodes, sorted by the blocks they read: ``held`` from ``at`` on; the own key stands in column ``newest``."""
        size = self.store.block_tokens
        counts, widths = cuts(held.tolist(), self.store)
        width = np.array(widths).repeat(counts)
        owner = np.arange(len(held)).repeat(width)
        column = np.arange(len(owner)) - (width.cumsum() - width)[owner]
        seen = newest[owner] - column * size + 1  # keys from the start of each block to the query's own
        packed = np.empty((3 if window else 2, len(owner)), dtype=np.int64)
        # Padding reads the request's own last block, never another request's.
        packed[0] = self._blocks[at[owner] + np.minimum(column, held[owner] - 1)]
        packed[1] = np.minimum(np.maximum(seen, 0), size)
        if window:
            packed[2] = np.minimum(np.maximum(seen - window, 0), size)
        on_device = self._tensor(packed)
        blocks, *seen_of = on_device.unbind()
        cells = [count * most for count, most in zip(counts, widths, strict=True)]
        masks = self.masks.of_blocks(size, *seen_of).split(cells)
        return tuple(
            DecodeGroup(count, most * size, read, mask.view(count, 1, 1, most * size))
            for count, most, read, mask in zip(counts, widths, blocks.split(cells), masks, strict=True)
        )

    def _make_ragged(self) -> Ragged:
        size = self.store.block_tokens
        keys = self._starts + self._lengths
        position = np.arange(int(keys.sum())) - (keys.cumsum() - keys).repeat(keys)
        block = position // size
        return Ragged(
            query_ends=self._tensor(_ends(self._lengths)).to(torch.int32),
            key_ends=self._tensor(_ends(keys)).to(torch.int32),
            max_queries=int(self._lengths.max()),
            max_keys=int(keys.max()),
            slots=self._tensor(self._blocks[self._blocks_at.repeat(keys) + block] * size + position % size),
        )

    def _tensor(self, array: IntArray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.store.device.type == "cpu" else tensor.to(self.store.device, non_blocking=True)


def _ends(counts: IntArray) -> IntArray:
    ends: IntArray = np.concatenate((np.zeros(1, dtype=np.int64), counts.cumsum()))
    return ends


def _checked_blocks(segments: Sequence[Segment], held: IntArray, store: KvStore) -> IntArray:
    """The blocks that each segment needs, behind one another."""
    wanted = held.tolist()
    tables = [segment.block_table[:needed] for segment, needed in zip(segments, wanted, strict=True)]
    blocks: IntArray = np.concatenate(tables, dtype=np.int64)
    if len(blocks) < sum(wanted):
        short = next(len(table) for table, needed in zip(tables, wanted, strict=True) if len(table) < needed)
        raise ValueError(f"block table of {short} blocks, too short for the positions of its segment")
    least, most = blocks.min(), blocks.max()
    if least < 0 or most >= store.blocks:
        raise ValueError(f"block table names {least} to {most}, the store has 0 to {store.blocks - 1}")
    return blocks


class Onward:
    """Advances the geometry of a decode-only step by one token per request, while the set of requests stays the same.

    The tensors that the model gets stay the same objects; a few numbers in them change. segments: those of the step
    that ``geometry`` was made for; their block tables are read again when a block begins.
    """

    def __init__(self, geometry: StepGeometry, segments: Sequence[Segment]) -> None:
        self.geometry = geometry
        self._tables = [segment.block_table for segment in segments]
        self._size = size = geometry.store.block_tokens
        self._token_ids, positions, self._slots = geometry.packed
        self._counts = geometry.packed[1:]
        self._starts: list[int] = positions.tolist()
        self._steps = 0
        # Rows that begin a block, by number of steps modulo the block size.
        self._begins: list[list[int]] = [[] for _ in range(size)]
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
        """Advance to the next step with these tokens; False: this object is of no more use, make another."""
        self._steps += 1
        self._token_ids[:] = token_ids
        self._counts += 1
        size, begun, unwritten = self._size, [], []
        for row in self._begins[self._steps % size]:
            place, table = (self._starts[row] + self._steps) // size, self._tables[row]
            block = int(table[place]) if place < len(table) else -1
            if not 0 <= block < self.geometry.store.blocks:
                return False  # making the geometry from the segments then raises the error
            self._slots[row] = block * size
            begun.append((self._place[row], block))
            if size > 1:
                unwritten.append((block * size + 1, size - 1))
        self.geometry.unwritten = unwritten
        return self._groups.advance(begun)
