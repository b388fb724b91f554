"""Records of cycles for tests of what reads them."""

from typing import Any

from rooftune.policies.guard import Action, Reason
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.control.outcome import (
    CycleRecord,
    Figures,
    FitPart,
    ProposalPart,
    SignalPart,
    Stage,
    TwinPart,
    VerifyPart,
)

START_S = 1_764_460_800.0  # Sunday, 30 November 2025, 00:00 UTC


def figures(**changes: Any) -> Figures:
    plain: dict[str, Any] = {
        "requests": 420, "span_s": 60.0, "attainment": 0.9, "goodput_rps": 6.3, "ttft_p50_s": 0.2, "ttft_p95_s": 1.25,
        "ttft_p99_s": 2.5, "queue_p99_s": 1.0, "tpot_p95_s": 0.02, "longest_gap_p50_s": 0.015,
        "longest_gap_p99_s": 0.31, "failed": 0, "preemptions": 0,
    }  # fmt: skip
    return Figures(**(plain | changes))


def fit(**changes: Any) -> FitPart:
    plain: dict[str, Any] = {
        "coefficients": dict(NAMED_MODELS["8b-2tbs"]._asdict()), "knee_tokens": 200.0, "knee_low_tokens": 180.0,
        "knee_high_tokens": 230.0, "steps": 4096, "spread": 0.03, "seen_low_tokens": 1.0, "seen_high_tokens": 2048.0,
        "codes": (),
    }  # fmt: skip
    return FitPart(**(plain | changes))


def twin(**changes: Any) -> TwinPart:
    errors = {"ttft p95": 0.06, "longest gap p99": -0.04}
    plain: dict[str, Any] = {"verdict": "good", "worst_error": 0.06, "attainment_error": 0.01, "errors": errors}
    return TwinPart(**(plain | changes))


def proposal(**changes: Any) -> ProposalPart:
    plain: dict[str, Any] = {
        "setting": {"step_tokens": 512, "chunk_cap_tokens": 256}, "verdict": "change", "attainment_now": 0.9,
        "attainment_proposed": 0.97, "gain": 0.07, "noise": 0.01, "binding": "gap p99 <= 30 ms", "trials": 100,
        "simulated_steps": 250_000,
    }  # fmt: skip
    return ProposalPart(**(plain | changes))


def verify(push_cycle: int, **changes: Any) -> VerifyPart:
    plain: dict[str, Any] = {
        "push_cycle": push_cycle, "verdict": "better", "reason": "gain_shown", "predicted_gain": 0.07,
        "observed_gain": 0.064, "half_width": 0.021, "requests": 380, "prediction_held": True,
    }  # fmt: skip
    return VerifyPart(**(plain | changes))


def hold(number: int, reason: Reason = Reason.SEARCHING, **changes: Any) -> CycleRecord:
    """A cycle that held."""
    plain: dict[str, Any] = {
        "number": number, "started_at_s": START_S + 15.0 * number, "mode": "live", "action": Action.HOLD,
        "reason": reason, "took_s": {Stage.OBSERVE: 0.02, Stage.FIT: 0.05}, "engine": "chat-eu-1", "boot_id": "b1",
        "revision": 4, "in_force": {"step_tokens": 2048, "chunk_cap_tokens": 0}, "lease_left_s": 98.0,
        "metrics_age_s": 0.2, "observed": figures(),
    }  # fmt: skip
    return CycleRecord(**(plain | changes))


def push(number: int, **changes: Any) -> CycleRecord:
    """A cycle that pushed, with all that led to it."""
    plain: dict[str, Any] = {
        "action": Action.PUSH, "pushed": {"step_tokens": 1024, "chunk_cap_tokens": 256}, "fit": fit(), "twin": twin(),
        "proposal": proposal(), "signals": (SignalPart(code="queue_growing", evidence={"growth_rps": 0.4}),),
        "trust": 2.0, "spent_slo_s": 12.5,
    }  # fmt: skip
    return hold(number, changes.pop("reason", Reason.STEP_LIMITED), **(plain | changes))
