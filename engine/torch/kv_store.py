"""The KV entries of all requests: for each layer one tensor of blocks for the keys and one for the values."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt
import torch

from rooftune.policies.errors import bad_value

Numbers = npt.NDArray[Any]


def as_numpy(tensor: torch.Tensor) -> Numbers:
    """The same memory as a numpy array; dtypes that numpy lacks appear as integers of their bits."""
    numbers: Numbers = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return numbers


class KvStore:
    """``keys[layer]`` and ``values[layer]``: (blocks, block_tokens, kv_heads, head_dim).

    Slot ``block * block_tokens + offset`` holds one token. Attention reads whole blocks and masks the rest, and a
    masked weight of 0 times a NaN is still NaN: so the store starts zeroed, and ``clear`` zeroes the slots of a
    block that its new request has not written yet, so that an earlier request's values never reach it.

    clean: no number in the store is NaN or infinite, so that masking is enough and ``clear`` has nothing to do. The
    runner checks this every step and sets it to False for good when it fails. It starts False where the check costs
    more than clearing (a GPU would have to synchronize) or where finite rows can have infinite keys: float16 ends at
    65,504, and our families normalize what keys and values are made of.
    """

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if blocks < 1 or block_tokens < 1:
            raise bad_value("KV store", f"{blocks} blocks of {block_tokens}", "at least 1 of 1", "give --kv-blocks N")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        self.block_bytes = 2 * block_tokens * kv_heads * head_dim * dtype.itemsize  # keys and values of one layer
        self.clean = device.type == "cpu" and dtype != torch.float16
        entries = torch.zeros((2, layers, blocks, block_tokens, kv_heads, head_dim), dtype=dtype, device=device)
        self._slots = entries.flatten(2, 3)
        # For numpy, which zeroes in a fraction of the time that torch takes to begin, behind a forward.
        self._numbers = as_numpy(self._slots) if device.type == "cpu" else None
        self.keys: Sequence[torch.Tensor] = entries[0].unbind()
        self.values: Sequence[torch.Tensor] = entries[1].unbind()

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store one step's new entries of a layer; slots: (tokens,), key and value: (tokens, kv_heads, head_dim)."""
        shape = (self.blocks * self.block_tokens, self.kv_heads, self.head_dim)
        self.keys[layer].view(shape).index_copy_(0, slots, key)
        self.values[layer].view(shape).index_copy_(0, slots, value)

    def clear(self, runs: Iterable[tuple[int, int]]) -> None:
        """Zero slots in every layer, unless all is clean; runs: first and count of neighbours, within a block."""
        if self.clean:
            return
        for first, count in runs:
            if self._numbers is not None:
                self._numbers[:, :, first : first + count] = 0
            else:
                self._slots.narrow(2, first, count).zero_()

    def read_blocks(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the named blocks in order: two tensors (blocks * block_tokens, kv_heads, head_dim)."""
        shape = (len(blocks) * self.block_tokens, self.kv_heads, self.head_dim)
        # Rows of whole blocks: index_select then copies one long run for each block.
        keys = self.keys[layer].view(self.blocks, -1).index_select(0, blocks)
        values = self.values[layer].view(self.blocks, -1).index_select(0, blocks)
        return keys.view(shape), values.view(shape)

    def read_slots(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of single slots in order: two tensors (slots, kv_heads, head_dim)."""
        shape = (self.blocks * self.block_tokens, self.kv_heads, self.head_dim)
        keys, values = self.keys[layer].view(shape), self.values[layer].view(shape)
        return keys.index_select(0, slots), values.index_select(0, slots)
