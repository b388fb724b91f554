"""Attention over our KV blocks, registered with transformers under the name ``rooftune_paged``.

The model runs on one packed row of tokens, several requests behind each other. In every layer this function stores the
new keys and values, then lets each request's queries see only its own keys. On CUDA with half precision one
variable-length kernel does it; elsewhere one scaled-dot-product call for each group of decodes and for each chunk.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rooftune.engine.torch.geometry import TILE_TOKENS, Chunk, StepGeometry
from rooftune.engine.torch.groups import DecodeGroup

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # older torch: the calls for each segment still work
    varlen_attn = None

NAME = "rooftune_paged"
STEP_ARGUMENT = "rooftune_step"
allow_varlen = True  # a check of both ways switches it off
_NO_STEP = f"attention {NAME!r} was called without {STEP_ARGUMENT!r}; run the model through TorchRunner"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The interface of transformers' attention functions.

    query: (1, heads, tokens, head_dim); key, value: (1, kv_heads, tokens, head_dim), of this step only.
    Returns (1, tokens, heads, head_dim). The step comes as the keyword ``rooftune_step``, a StepGeometry.
    """
    step = kwargs.get(STEP_ARGUMENT)
    if not isinstance(step, StepGeometry):
        raise TypeError(_NO_STEP)
    layer: int = module.layer_idx
    window = sliding_window or 0
    step.store.write(layer, step.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    queries = query[0].transpose(0, 1)
    if has_varlen_kernel(query):
        return _varlen(step, layer, queries, scaling, window).unsqueeze(0), None
    return _by_segment(step, layer, queries, scaling, window).unsqueeze(0), None


def has_varlen_kernel(query: torch.Tensor) -> bool:
    """Whether torch's variable-length flash attention takes this tensor."""
    return (
        allow_varlen
        and varlen_attn is not None
        and query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device)[0] >= 8
    )


def _varlen(step: StepGeometry, layer: int, queries: torch.Tensor, scaling: float | None, window: int) -> torch.Tensor:
    """All segments in one kernel; causal, aligned at the last key of each segment."""
    ragged = step.ragged()
    # A gather, not the kernel's own block tables, which need blocks of 256 tokens on most cards.
    keys, values = step.store.read_slots(layer, ragged.slots)
    attended: torch.Tensor = varlen_attn(
        queries.contiguous(),
        keys,
        values,
        ragged.query_ends,
        ragged.key_ends,
        ragged.max_queries,
        ragged.max_keys,
        scale=scaling,
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return attended


def _by_segment(
    step: StepGeometry, layer: int, queries: torch.Tensor, scaling: float | None, window: int
) -> torch.Tensor:
    reads = step.reads(window)
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    if reads.groups:
        single = queries.index_select(0, reads.decode_rows)
        parts, at = [], 0
        for group in reads.groups:
            parts.append(_decode(step, layer, single[at : at + group.size], group, scaling))
            at += group.size
        out.index_copy_(0, reads.decode_rows, parts[0] if len(parts) == 1 else torch.cat(parts))
    for chunk in reads.chunks:
        _chunk(step, layer, queries, chunk, scaling, window, out)
    return out


def _decode(
    step: StepGeometry, layer: int, queries: torch.Tensor, group: DecodeGroup, scaling: float | None
) -> torch.Tensor:
    """(size, heads, head_dim) -> the same. Heads that share a key head become rows of one small query matrix."""
    size, heads, head_dim = queries.shape
    keys, values = step.store.read_blocks(layer, group.blocks)
    kv_heads = keys.shape[1]
    by_request = (size, group.keys, kv_heads, head_dim)
    attended = scaled_dot_product_attention(
        queries.view(size, kv_heads, heads // kv_heads, head_dim),
        keys.view(by_request).transpose(1, 2),
        values.view(by_request).transpose(1, 2),
        attn_mask=group.mask,
        scale=scaling,
    )
    return attended.reshape(size, heads, head_dim)


def _chunk(
    step: StepGeometry,
    layer: int,
    queries: torch.Tensor,
    chunk: Chunk,
    scaling: float | None,
    window: int,
    out: torch.Tensor,
) -> None:
    """One chunk of one request, written to its rows of ``out``."""
    keys, values = (kept.transpose(0, 1) for kept in step.store.read_blocks(layer, chunk.blocks))
    # From position 0 the kernel's own causal rule is enough, for any length.
    whole = chunk.start == 0 and (window == 0 or chunk.tokens <= window)
    tile = chunk.tokens if whole else TILE_TOKENS
    for offset in range(0, chunk.tokens, tile):
        count = min(tile, chunk.tokens - offset)
        position = chunk.start + offset
        first = max(0, position - window + 1) if window else 0
        seen = slice(first - chunk.first_key, position + count - chunk.first_key)
        rows = slice(chunk.row + offset, chunk.row + offset + count)
        attended = scaled_dot_product_attention(
            queries[rows].transpose(0, 1).unsqueeze(0),
            keys[:, seen].unsqueeze(0),
            values[:, seen].unsqueeze(0),
            attn_mask=None if whole else step.masks.get(window, position - first, count),
            is_causal=whole,
            scale=scaling,
            enable_gqa=queries.shape[1] != keys.shape[0],
        )
        out[rows] = attended[0].transpose(0, 1)


AttentionInterface.register(NAME, paged_attention)
