"""Push: requests to the engine, always under a lease, and what the answers mean for the cycle."""

from dataclasses import dataclass

from pydantic import ValidationError

from rooftune.policies import wire
from rooftune.policies.envelope import KNOB, KNOBS, Unit
from rooftune.policies.errors import InputError
from rooftune.policies.guard import Reason, changes
from rooftune.policies.request import Setting
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
    """The cycle's reason for a failed request; a fault not in FAULTS is "unreachable"."""
    return FAULTS.get(error.fault, Reason.UNREACHABLE)


@dataclass(frozen=True)
class Sent:
    """Result of a request. revision: in force afterwards; reason: None on success; detail: for people."""

    revision: int | None
    reason: Reason | None
    detail: str = ""

    @property
    def unknown(self) -> bool:
        """Whether the engine may have done it all the same: no refusal came."""
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
    """The push from ``before`` to ``after``; equal settings renew or claim the lease.

    model: for a budget policy that predicts step times. Raises InputError without it, and for a value that the
    protocol does not allow.
    """
    moved = changes(before, after)
    knobs = {
        name: bool(value) if KNOB[name].unit is Unit.SWITCH else value
        for name, value in moved.items()
        if KNOB[name].policy is None
    }
    values: dict[str, object] = {
        "knobs": knobs,
        "lease_s": lease_s,
        "expected_revision": revision,
        "actor": actor,
        "reason": why,
    }
    for policy in {KNOB[name].policy for name in moved}:
        if policy is not None:
            values[policy] = _policy(policy, after, model)
    try:
        return wire.PushRequest.model_validate(values)
    except ValidationError as error:
        raise first_problem(error, "a push", "the protocol does not allow this setting") from None


def _policy(name: str, after: Setting, model: StepModel | None) -> dict[str, object]:
    """A policy's whole message: its kind and every number that it reads."""
    read = [knob for knob in KNOBS if knob.policy == name and knob.under and knob.acts(after)]
    values: dict[str, object] = {"kind": KNOB[name].choices[getattr(after, name)].kind}
    values |= {knob.part: getattr(after, knob.name) for knob in read}
    if values["kind"] != "step_time_target":
        return values
    if model is None:
        raise InputError("step_time_target needs a step model and none is known; wait for a fit")
    return values | {"step_model": model._asdict()}


def send(port: Port, request: wire.PushRequest | wire.RevertRequest | wire.ResumeRequest) -> Sent:
    """Push, revert or resume. After a fault only the next reading shows whether the engine did it."""
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
        message = "; ".join([answer.message, *(f"{b.knob} {b.value} ({b.broken})" for b in answer.breaches)])
        return Sent(answer.revision, REFUSALS.get(answer.code, Reason.REFUSED), one_line(message))
    return Sent(answer.revision, None)


def one_line(text: str) -> str:
    """Text for a record: one line, at most 1000 characters."""
    return " ".join(text.split())[:1000]
