"""Push: what leaves for the engine, always under a lease, and what its answers mean for the cycle."""

from dataclasses import dataclass

from pydantic import ValidationError

from rooftune.policies import wire
from rooftune.policies.envelope import BUDGET_KNOBS, ORDER_KNOBS
from rooftune.policies.errors import InputError
from rooftune.policies.guard import Reason, changes
from rooftune.policies.request import FCFS, FIXED_BUDGET, PRESSURE, SHORTEST_FIRST, STEP_TIME_TARGET, Setting
from rooftune.policies.step_time import StepModel
from rooftune.tuner.ports.base import Port, PortError, PortFault
from rooftune.tuner.record import first_problem

FAULTS: dict[PortFault, Reason] = {
    PortFault.UNAUTHORIZED: Reason.UNAUTHORIZED,
    PortFault.READ_ONLY: Reason.REFUSED,
    PortFault.NO_PROTOCOL: Reason.NO_PROTOCOL,
    PortFault.PROTOCOL_MISMATCH: Reason.NO_PROTOCOL,
    PortFault.GARBAGE: Reason.GARBAGE,
}
REFUSALS: dict[str, Reason] = {
    "conflict_revision": Reason.CONFLICT,
    "held_by_other": Reason.HELD_BY_OTHER,
    "blocked_by_revert": Reason.BLOCKED_AFTER_REVERT,
}


def fault_reason(error: PortError) -> Reason:
    """What a failed request means for the cycle: any fault without a name of its own is "unreachable"."""
    return FAULTS.get(error.fault, Reason.UNREACHABLE)


@dataclass(frozen=True)
class Sent:
    """What became of a request. revision: in force afterwards; reason None: it was done; detail: for people."""

    revision: int | None
    reason: Reason | None
    detail: str = ""

    @property
    def unknown(self) -> bool:
        """Whether the engine may have done it all the same: it did not say no."""
        return self.reason is not None and self.revision is None


def push_request(
    before: Setting,
    after: Setting,
    *,
    lease_s: float,
    revision: int,
    actor: str,
    why: str,
    model: StepModel | None = None,
) -> wire.PushRequest:
    """The push that turns ``before`` into ``after``; equal settings renew (or claim) the lease.

    model: constants for a budget policy that predicts step times. Raises InputError without them, and for a value
    without a place in the protocol.
    """
    moved = changes(before, after)
    knobs = {name: value for name, value in moved.items() if name in wire.Knobs.model_fields}
    if "adaptive_chunk_cap" in knobs:
        knobs["adaptive_chunk_cap"] = bool(knobs["adaptive_chunk_cap"])
    values: dict[str, object] = {
        "knobs": knobs,
        "lease_s": lease_s,
        "expected_revision": revision,
        "actor": actor,
        "reason": why,
    }
    if BUDGET_KNOBS & moved.keys():
        values["budget_policy"] = _budget_policy(after, model)
    if ORDER_KNOBS & moved.keys():
        values["order_policy"] = _order_policy(after)
    try:
        return wire.PushRequest.model_validate(values)
    except ValidationError as error:
        raise first_problem(error, "a push", "this setting has no place in the protocol") from None


def _budget_policy(after: Setting, model: StepModel | None) -> dict[str, object]:
    if after.budget_policy == STEP_TIME_TARGET:
        if model is None:
            raise InputError("step_time_target counts with a step model and none is known; wait for a fit")
        return {
            "kind": "step_time_target",
            "target_s": after.budget_target_s,
            "floor_tokens": after.budget_floor_tokens,
            "step_model": model._asdict(),
        }
    if after.budget_policy == PRESSURE:
        return {"kind": "pressure", "tokens": after.pressure_tokens, "prefills": after.pressure_prefills}
    assert after.budget_policy == FIXED_BUDGET
    return {"kind": "fixed"}


def _order_policy(after: Setting) -> dict[str, object]:
    if after.order_policy == FCFS:
        return {"kind": "fcfs"}
    if after.order_policy == SHORTEST_FIRST:
        return {"kind": "shortest_first", "aging_s": after.aging_s}
    return {
        "kind": "deadline",
        "aging_s": after.aging_s,
        "ttft_target_s": after.ttft_target_s,
        "prefill_s_per_token": after.prefill_s_per_token,
    }


def send(port: Port, request: wire.PushRequest | wire.RevertRequest | wire.ResumeRequest) -> Sent:
    """Push, revert or resume. A fault says nothing about whether the engine did it: the next reading does."""
    try:
        if isinstance(request, wire.PushRequest):
            answer = port.push(request)
        elif isinstance(request, wire.RevertRequest):
            answer = port.revert(request)
        else:
            answer = port.resume(request)
    except PortError as error:
        return Sent(None, fault_reason(error), one_line(str(error)))
    if isinstance(answer, wire.Refusal):
        said = "; ".join([answer.message, *(f"{b.knob} {b.value} ({b.broken})" for b in answer.breaches)])
        return Sent(answer.revision, REFUSALS.get(answer.code, Reason.REFUSED), one_line(said))
    return Sent(answer.revision, None)


def one_line(text: str) -> str:
    """Text for a record: no line breaks, not too long."""
    return " ".join(text.split())[:1000]
