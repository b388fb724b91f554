"""Causal masks for chunks that do not start at position 0: slices of one buffer for each window."""

import torch

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
