"""The step-time formula (docs/architecture.md): the duration of a step from what it computes.

    step_time_s = overhead_s + sequence_s * sequences
                + softmax_p(floor_s + kv_s_per_token * context_tokens,
                            slope_s_per_token * computed_tokens + attention_s * attention_work)

``softmax_p(a, b) = (a**p + b**p) ** (1/p)``, the soft maximum with sharpness p; p = 0 stands for the hard maximum, its
limit for p to infinity. All functions are plain scalar Python, so that the twin compiles the same code.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Float4Array = np.ndarray[tuple[int, int, int, int], np.dtype[np.float64]]


class StepModel(NamedTuple):
    """Coefficients of one deployment. Times in seconds, per token, per sequence or per token pair.

    ``attention_s`` is per unit of attention work (chunk x (already computed + chunk / 2)).
    ``sharpness`` is 0 (hard maximum) or at least 1.
    """

    overhead_s: float
    sequence_s: float
    floor_s: float
    kv_s_per_token: float
    slope_s_per_token: float
    attention_s: float
    sharpness: float


NAMED_MODELS: dict[str, StepModel] = {
    # Teaching values, calculated and not measured: an 8B model in FP16 at 2 TB/s and 400 TFLOP/s.
    "8b-2tbs": StepModel(0.0015, 0.0, 0.008, 6e-8, 4e-5, 2e-10, 0.0),
    "teaching-lab": StepModel(0.0015, 0.0, 0.0, 0.0, 3.5e-5, 2e-10, 0.0),
}


def soft_max(a: float, b: float, sharpness: float) -> float:
    """Soft maximum of two times >= 0 (s); sharpness 0 is the hard maximum."""
    high = a if a > b else b
    if sharpness == 0.0 or high <= 0.0:
        return high
    low = b if a > b else a
    return float(high * (1.0 + (low / high) ** sharpness) ** (1.0 / sharpness))


def step_time(
    model: StepModel,
    computed_tokens: float,
    sequences: float,
    context_tokens: float,
    attention_work: float,
) -> float:
    """Duration of one step in seconds.

    computed_tokens: prefill and decode tokens together; sequences: requests in the step;
    context_tokens: KV entries read, by decodes and by the prefixes of prefill chunks;
    attention_work: sum over prefill chunks of chunk x (already computed + chunk / 2).
    """
    memory_s = model.floor_s + model.kv_s_per_token * context_tokens
    compute_s = model.slope_s_per_token * computed_tokens + model.attention_s * attention_work
    return model.overhead_s + model.sequence_s * sequences + soft_max(memory_s, compute_s, model.sharpness)


class AttentionTable(NamedTuple):
    """Measured attention seconds of a step, all layers together, on a grid; linear between and beyond its points.

    Axes, ascending, at least two points each: prefill_tokens, of all chunks; prior_tokens, KV entries before a chunk,
    such that prefill_tokens x (prior + prefill_tokens / 2) is the step's attention work (below 0 when several short
    chunks share a step); decodes; decode_context, KV entries of each.
    time_s: shape (prefill_tokens, prior_tokens, decodes, decode_context); empty: no table.
    """

    prefill_tokens: FloatArray
    prior_tokens: FloatArray
    decodes: FloatArray
    decode_context: FloatArray
    time_s: Float4Array


_NOTHING: FloatArray = np.zeros(0, dtype=np.float64)
NO_ATTENTION = AttentionTable(_NOTHING, _NOTHING, _NOTHING, _NOTHING, np.zeros((0, 0, 0, 0), dtype=np.float64))


class StepCost(NamedTuple):
    """A twin's step prices: the formula, or measured tables.

    base_s: seconds by computed tokens (index 0 unused), shape (most tokens + 1,); empty: the formula prices steps.
    With it the parts add up: base_s[computed tokens] + sequences_s[sequences] (empty: sequence_s each)
    + kv_decode_s, kv_prefill_s per context token of decodes and of prefill prefixes + attention_s per attention work
    + the attention table's time, if any.
    formula: also the prediction of budget policies, in engine and twin.
    """

    formula: StepModel
    base_s: FloatArray
    sequences_s: FloatArray
    sequence_s: float
    kv_decode_s: float
    kv_prefill_s: float
    attention_s: float
    attention: AttentionTable = NO_ATTENTION


def priced(model: "StepModel | StepCost") -> StepCost:
    if isinstance(model, StepCost):
        return model
    return StepCost(model, _NOTHING, _NOTHING, 0.0, 0.0, 0.0, 0.0)


def step_cost(
    cost: StepCost,
    computed_tokens: int,
    sequences: int,
    decodes: int,
    decode_context_tokens: float,
    prefill_context_tokens: float,
    attention_work: float,
) -> float:
    """Duration of one step in seconds; a table's last entry holds for all tokens or sequences beyond it.

    decodes: decodes among the computed tokens; otherwise as ``step_time``.
    """
    if len(cost.base_s) == 0:
        return step_time(
            cost.formula,
            float(computed_tokens),
            float(sequences),
            decode_context_tokens + prefill_context_tokens,
            attention_work,
        )
    last = len(cost.base_s) - 1
    total_s = cost.base_s[computed_tokens if computed_tokens < last else last]
    if len(cost.sequences_s) == 0:
        total_s += cost.sequence_s * sequences
    else:
        last = len(cost.sequences_s) - 1
        total_s += cost.sequences_s[sequences if sequences < last else last]
    if len(cost.attention.prefill_tokens) > 0:
        total_s += attention_time(
            cost.attention, computed_tokens - decodes, decodes, decode_context_tokens, attention_work
        )
    return float(
        total_s
        + cost.kv_decode_s * decode_context_tokens
        + cost.kv_prefill_s * prefill_context_tokens
        + cost.attention_s * attention_work
    )


def attention_time(
    table: AttentionTable, prefill_tokens: int, decodes: int, decode_context_tokens: float, attention_work: float
) -> float:
    """Attention of one step in seconds, never below 0; arguments as in ``step_cost``."""
    context = decode_context_tokens / decodes if decodes > 0 else 0.0
    decode, decode_share = _place(table.decodes, float(decodes))
    kv, kv_share = _place(table.decode_context, context)
    if prefill_tokens == 0:
        alone_s = _blend(table, 0, 0, decode, decode_share, kv, kv_share)
        return alone_s if alone_s > 0.0 else 0.0
    chunk, chunk_share = _place(table.prefill_tokens, float(prefill_tokens))
    before, before_share = _place(table.prior_tokens, attention_work / prefill_tokens - 0.5 * prefill_tokens)
    time_s = 0.0
    for step in range(2):
        weight = chunk_share if step == 1 else 1.0 - chunk_share
        low = _blend(table, chunk + step, before, decode, decode_share, kv, kv_share)
        high = _blend(table, chunk + step, before + 1, decode, decode_share, kv, kv_share)
        time_s += weight * (low + before_share * (high - low))
    return time_s if time_s > 0.0 else 0.0


def _place(axis: FloatArray, value: float) -> tuple[int, float]:
    """The axis point at or below ``value`` (at the ends the first or last but one), and the fraction to the next."""
    low, high = 0, len(axis) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if axis[middle] <= value:
            low = middle
        else:
            high = middle
    return low, float((value - axis[low]) / (axis[low + 1] - axis[low]))


def _blend(
    table: AttentionTable, chunk: int, before: int, decode: int, decode_share: float, kv: int, kv_share: float
) -> float:
    """Linear in decodes and their context, at one point of the other two axes (s)."""
    time_s = table.time_s
    fewer = time_s[chunk, before, decode, kv]
    fewer += kv_share * (time_s[chunk, before, decode, kv + 1] - fewer)
    more = time_s[chunk, before, decode + 1, kv]
    more += kv_share * (time_s[chunk, before, decode + 1, kv + 1] - more)
    return float(fewer + decode_share * (more - fewer))


def chunk_attention_work(chunk_tokens: float, already_computed: float) -> float:
    """Attention work of one prefill chunk: query-key pairs under a causal mask."""
    return chunk_tokens * (already_computed + 0.5 * chunk_tokens)


def knee_tokens(model: StepModel, context_tokens: float = 0.0) -> float:
    """Tokens per step at which the flat part meets the growing part; inf without growth.

    At zero context floor_s / slope_s_per_token; with context the flat part is higher.
    """
    if model.slope_s_per_token <= 0.0:
        return float("inf")
    return (model.floor_s + model.kv_s_per_token * context_tokens) / model.slope_s_per_token
