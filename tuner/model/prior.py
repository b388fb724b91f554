"""What is known before the first step: the model's size and the card's bandwidth and arithmetic rate.

A step reads every weight once (floor) and spends two floating-point operations per parameter and token (slope).
An engine never reaches the datasheet, so the prior is wide and leads only where the data is silent.
"""

import math
from dataclasses import dataclass

from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.step_time import StepModel

PRECISION_BYTES: dict[str, float] = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True)
class Card:
    """One accelerator by its datasheet: memory bandwidth, dense 16-bit and 8-bit FLOP/s, memory size."""

    bandwidth_bytes_per_s: float
    flops_16bit: float
    flops_8bit: float
    memory_bytes: float


# Makers' datasheets, dense rates (without structured sparsity).
CARDS: dict[str, Card] = {
    "a10": Card(600e9, 125e12, 250e12, 24e9),
    "a100-40gb": Card(1555e9, 312e12, 624e12, 40e9),
    "a100-80gb": Card(2039e9, 312e12, 624e12, 80e9),
    "h100-pcie": Card(2000e9, 756e12, 1513e12, 80e9),
    "h100-sxm": Card(3350e9, 989e12, 1979e12, 80e9),
    "h200": Card(4800e9, 989e12, 1979e12, 141e9),
    "b200": Card(8000e9, 2250e12, 4500e12, 180e9),
    "l4": Card(300e9, 121e12, 242e12, 24e9),
    "l40s": Card(864e9, 362e12, 733e12, 48e9),
    "rtx-4090": Card(1008e9, 165e12, 330e12, 24e9),
    "rtx-5090": Card(1792e9, 209e12, 419e12, 32e9),
    "t4": Card(320e9, 65e12, 130e12, 16e9),
    "mi300x": Card(5300e9, 1307e12, 2615e12, 192e9),
}


def prior_sd(prior: StepModel, name: str) -> float:
    """Standard deviation of the log of a coefficient; inf (no opinion) where the prior holds none (0)."""
    if getattr(prior, name) <= 0.0:
        return math.inf
    return {"floor_s": 0.4, "slope_s_per_token": 0.5, "kv_s_per_token": 0.7}.get(name, 1.5)


def roofline_prior(
    parameters: float, weight_bytes: float, bandwidth_bytes_per_s: float, flops: float, overhead_s: float = 0.0015
) -> StepModel:
    """Floor and slope of a model from its size; cards in parallel add their rates before the call.

    parameters: weights read in a step; weight_bytes: bytes of one weight. Raises InputError for no or endless ones.
    """
    if not (math.isfinite(parameters) and parameters > 0.0):
        raise bad_value("parameters", parameters, "above 0 and finite", "give the model's figure")
    floor_s = parameters * weight_bytes / bandwidth_bytes_per_s
    return StepModel(overhead_s, 0.0, floor_s, 0.0, 2.0 * parameters / flops, 0.0, 0.0)


def card_prior(card_name: str, parameters: float, precision: str, cards: int = 1) -> StepModel:
    """Prior for a model on ``cards`` cards of one kind. Raises InputError on an unknown card or precision."""
    if precision not in PRECISION_BYTES:
        raise bad_value("precision", precision, "one of " + ", ".join(PRECISION_BYTES), "correct it")
    if not 1 <= cards <= 1024:
        raise bad_value("cards", cards, "within 1..1024", "correct it")
    if card_name not in CARDS:
        raise InputError(f"card {card_name!r} is not in the table; give one of {', '.join(sorted(CARDS))}")
    one = CARDS[card_name]
    flops = one.flops_8bit if precision in ("fp8", "int8") else one.flops_16bit
    return roofline_prior(parameters, PRECISION_BYTES[precision], cards * one.bandwidth_bytes_per_s, cards * flops)
