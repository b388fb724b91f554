"""A port: how the controller talks to one engine. Values in, values or one typed error out; no HTTP here.

Every method raises a ``PortError`` (and nothing else) when the other side did not do what the protocol says.
"""

from enum import StrEnum
from typing import Protocol

from rooftune.policies import wire
from rooftune.policies.errors import RefusedError, UnreachableError


class PortFault(StrEnum):
    """Why there is no usable answer. None of these says anything about the setting in force."""

    UNREACHABLE = "unreachable"  # no connection, or it broke
    TIMEOUT = "timeout"  # connected, but no answer in time
    UNAUTHORIZED = "unauthorized"  # 401: token missing or wrong
    READ_ONLY = "read_only"  # 403: this engine takes no pushes
    NO_PROTOCOL = "no_protocol"  # 404, or a redirect: no tuning protocol at this address
    PROTOCOL_MISMATCH = "protocol_mismatch"  # another protocol version
    GARBAGE = "garbage"  # an answer that the schemas refuse, too large, or not JSON
    SERVER_ERROR = "server_error"  # any other status


# The engine answered, and said no.
REFUSALS = frozenset({PortFault.UNAUTHORIZED, PortFault.READ_ONLY, PortFault.NO_PROTOCOL, PortFault.PROTOCOL_MISMATCH})


class PortError(UnreachableError):
    """One request to an engine failed. ``fault`` says how, the message names address, value and remedy."""

    def __init__(self, fault: PortFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault
        if fault in REFUSALS:
            self.exit_code = RefusedError.exit_code


class Port(Protocol):
    """The tuning protocol (docs/tuning-protocol.md), one engine."""

    @property
    def address(self) -> str: ...

    def state(self) -> wire.State: ...

    def steps_after(self, after: int) -> wire.StepColumns: ...

    def requests_after(self, after: int) -> wire.RequestColumns: ...

    def in_flight(self) -> wire.FlightColumns | None:
        """None: this engine does not tell, now or ever."""
        ...

    def push(self, request: wire.PushRequest) -> wire.PushAnswer | wire.Refusal: ...

    def revert(self, request: wire.RevertRequest) -> wire.PushAnswer | wire.Refusal: ...

    def resume(self, request: wire.ResumeRequest) -> wire.PushAnswer | wire.Refusal: ...

    def close(self) -> None: ...
