"""The step-time formula of DESIGN section 4: how long one step takes, from what it computes.

    step_time_s = overhead_s + sequence_s * sequences
                + softmax_p(floor_s + kv_s_per_token * context_tokens,
                            slope_s_per_token * computed_tokens + attention_s * attention_work)

``softmax_p(a, b) = (a**p + b**p) ** (1/p)``, the soft maximum with sharpness p; p = 0 stands for the
hard maximum, its limit for p to infinity. All functions here are plain scalar Python, so that the
twin compiles the very same code.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


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


class StepCost(NamedTuple):
    """What a twin prices steps with: the formula, or measured tables where they are given.

    base_s: seconds by computed tokens (index 0 unused), shape (most tokens + 1,); empty: the formula prices steps.
    With it the parts add up: base_s[computed tokens] + sequences_s[sequences] (empty: sequence_s each)
    + kv_decode_s, kv_prefill_s per context token of decodes and of prefill prefixes + attention_s per attention work.
    formula: also what a budget policy predicts with, in the engine as in the twin.
    """

    formula: StepModel
    base_s: FloatArray
    sequences_s: FloatArray
    sequence_s: float
    kv_decode_s: float
    kv_prefill_s: float
    attention_s: float


def priced(model: "StepModel | StepCost") -> StepCost:
    """A step model as a StepCost."""
    if isinstance(model, StepCost):
        return model
    nothing = np.zeros(0, dtype=np.float64)
    return StepCost(model, nothing, nothing, 0.0, 0.0, 0.0, 0.0)


def step_cost(
    cost: StepCost,
    computed_tokens: int,
    sequences: int,
    context_decode_tokens: float,
    context_prefill_tokens: float,
    attention_work: float,
) -> float:
    """Duration of one step in seconds; the last entry of a table holds for everything beyond it."""
    if len(cost.base_s) == 0:
        return step_time(
            cost.formula,
            float(computed_tokens),
            float(sequences),
            context_decode_tokens + context_prefill_tokens,
            attention_work,
        )
    last = len(cost.base_s) - 1
    total_s = cost.base_s[computed_tokens if computed_tokens < last else last]
    if len(cost.sequences_s) == 0:
        total_s += cost.sequence_s * sequences
    else:
        last = len(cost.sequences_s) - 1
        total_s += cost.sequences_s[sequences if sequences < last else last]
    return float(
        total_s
        + cost.kv_decode_s * context_decode_tokens
        + cost.kv_prefill_s * context_prefill_tokens
        + cost.attention_s * attention_work
    )


def chunk_attention_work(chunk_tokens: float, already_computed: float) -> float:
    """Attention work of one prefill chunk: query-key pairs under a causal mask."""
    return chunk_tokens * (already_computed + 0.5 * chunk_tokens)


def knee_tokens(model: StepModel, context_tokens: float = 0.0) -> float:
    """Tokens per step at which the flat part meets the growing part; inf when nothing grows.

    At zero context: floor_s / slope_s_per_token. At a live context the flat part is higher.
    """
    if model.slope_s_per_token <= 0.0:
        return float("inf")
    return (model.floor_s + model.kv_s_per_token * context_tokens) / model.slope_s_per_token
