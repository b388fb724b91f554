"""The codes of the signals. Each has a section of its name in deploy/runbook.md."""

import math
from enum import StrEnum
from typing import SupportsFloat

from rooftune.tuner.control.outcome import SignalPart


class Signal(StrEnum):
    """What is wrong or worth knowing; each code names one cause."""

    # The gap tail is far above the step time that the budget explains, because ...
    CHUNKING_BYPASSED = "chunking_bypassed"  # steps compute more than their budget although chunking is on
    CHUNKING_OFF = "chunking_off"  # chunking is off: prompts run whole
    CHUNKING_OFF_BY_MODEL = "chunking_off_by_model"  # chunks were requested, the engine switched them off
    GAP_TAIL_SLOW_STEPS = "gap_tail_slow_steps"  # single steps take far longer than what they compute explains
    GAP_TAIL_PAUSES = "gap_tail_pauses"  # nothing runs for a while although requests are there
    GAP_TAIL_LEFT_OUT = "gap_tail_left_out"  # steps leave out requests that are writing

    PARTIAL_PREFILLS_GROWING = "partial_prefills_growing"
    QUEUE_GROWING = "queue_growing"
    OVERLOAD = "overload"  # more arrives than what is in force carries, or than anything carries with headroom
    DECODES_CROWD_BUDGET = "decodes_crowd_budget"
    BUDGET_NEVER_REACHED = "budget_never_reached"
    LONG_PREFILL_BLOCKS = "long_prefill_blocks"
    GAPS_FOLLOW_PROMPTS = "gaps_follow_prompts"
    TTFT_SPREAD = "ttft_spread"
    STEP_MODEL_DRIFTED = "step_model_drifted"
    KV_BOUND = "kv_bound"
    THROUGHPUT_NOT_RECOVERED = "throughput_not_recovered"
    TWO_TPOT_LEVELS = "two_tpot_levels"
    STALLED = "stalled"
    HUNG = "hung"
    NO_REQUEST_ENDED = "no_request_ended"


def finding(code: Signal, **evidence: SupportsFloat) -> SignalPart:
    """A signal with its numbers, units in their names; one that is not finite is not known and left out."""
    return SignalPart(code=code.value, evidence={k: float(v) for k, v in evidence.items() if math.isfinite(v)})
