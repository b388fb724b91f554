"""The tuning protocol over HTTP (docs/tuning-protocol.md): our own engine, and vLLM with the hook."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from rooftune.policies import wire
from rooftune.policies.errors import InputError
from rooftune.tuner.clock import Clock
from rooftune.tuner.ports.base import PortError, PortFault
from rooftune.tuner.ports.fetch import Fetcher, Reply, Timeouts

__all__ = ["PREFIX", "HttpPort", "Timeouts"]

PREFIX = "/tuning/v1"
_REFUSALS = frozenset(wire.REFUSAL_STATUS.values())
_NOT_HERE = (
    PortFault.NO_PROTOCOL,
    ": no tuning protocol here; is the hook loaded, the port right, a token file set?",
)
_FAULTS = {
    401: (PortFault.UNAUTHORIZED, ": token missing or wrong; see --token-file"),
    403: (PortFault.READ_ONLY, ": it takes no pushes; start it with a token file for tuning"),
    404: _NOT_HERE,
    405: _NOT_HERE,
}

_UNTOLD = (PortFault.NO_PROTOCOL, PortFault.TIMEOUT, PortFault.SERVER_ERROR)

M = TypeVar("M", bound=wire.Message)
R = TypeVar("R", wire.StepColumns, wire.RequestColumns)


class HttpPort:
    """``rooftune.tuner.ports.base.Port`` for one engine.

    base_url: http, https or ``unix:/path``. token_file: read again for every request. ca_file: certificates (PEM) to
    trust for https instead of the system's. Raises InputError when one of them cannot be used; afterwards only
    PortError.
    """

    def __init__(
        self,
        base_url: str,
        token_file: Path | None = None,
        timeouts: Timeouts | None = None,
        *,
        ca_file: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._fetcher = Fetcher(base_url, token_file, timeouts, ca_file=ca_file, clock=clock)

    @property
    def address(self) -> str:
        return str(self._fetcher.where)

    def state(self) -> wire.State:
        return self._read(wire.State, f"{PREFIX}/state")

    def steps_after(self, after: int) -> wire.StepColumns:
        return self._rows(wire.StepColumns, "steps", after)

    def requests_after(self, after: int) -> wire.RequestColumns:
        return self._rows(wire.RequestColumns, "requests", after)

    def in_flight(self) -> wire.FlightColumns | None:
        """An engine of the release before answers 404; one in a long step does not answer in time."""
        try:
            return self._read(wire.FlightColumns, f"{PREFIX}/in-flight")
        except PortError as error:
            if error.fault in _UNTOLD:
                return None
            raise

    def push(self, request: wire.PushRequest) -> wire.PushAnswer | wire.Refusal:
        return self._change("PUT", f"{PREFIX}/knobs", request)

    def revert(self, request: wire.RevertRequest) -> wire.PushAnswer | wire.Refusal:
        return self._change("DELETE", f"{PREFIX}/lease", request)

    def resume(self, request: wire.ResumeRequest) -> wire.PushAnswer | wire.Refusal:
        return self._change("POST", f"{PREFIX}/resume", request)

    def close(self) -> None:
        self._fetcher.close()

    def _read(self, kind: type[M], path: str) -> M:
        reply = self._fetcher.ask("GET", path, limit_bytes=wire.MAX_ANSWER_BYTES)
        if reply.status != 200:
            raise self._status_error(reply, path)
        return self._parse(kind, reply.body)

    def _rows(self, kind: type[R], name: str, after: int) -> R:
        page = self._read(kind, f"{PREFIX}/{name}?after={after}")
        if page.after != after:
            raise self._garbage(f"rows after {after} were requested and rows after {page.after} came")
        return page

    def _change(self, method: str, path: str, request: wire.Message) -> wire.PushAnswer | wire.Refusal:
        body = request.model_dump_json().encode()
        reply = self._fetcher.ask(method, path, body, limit_bytes=wire.MAX_ANSWER_BYTES)
        if reply.status == 200:
            return self._parse(wire.PushAnswer, reply.body)
        if reply.status in _REFUSALS:
            return self._refusal(reply, path)
        raise self._status_error(reply, path)

    def _refusal(self, reply: Reply, path: str) -> wire.Refusal:
        """A 503 without one comes from something in between; a 409 or 422 without one is nonsense."""
        try:
            refusal = self._parse(wire.Refusal, reply.body)
        except PortError as error:
            if reply.status == 503 and error.fault is PortFault.GARBAGE:
                raise self._status_error(reply, path) from error
            raise
        if wire.REFUSAL_STATUS[refusal.code] != reply.status:
            raise self._garbage(f"refusal {refusal.code!r} came with status {reply.status}")
        return refusal

    def _status_error(self, reply: Reply, path: str) -> PortError:
        if 300 <= reply.status < 400:
            fault = PortFault.NO_PROTOCOL
            hint = f" to {reply.location!r}: redirects are not followed; name that address"
        else:
            fault, hint = _FAULTS.get(reply.status, (PortFault.SERVER_ERROR, "; see the engine's log"))
        return self._fetcher.fail(fault, f"{path.partition('?')[0]} answers {reply.status}{hint}")

    def _parse(self, kind: type[M], body: bytes) -> M:
        try:
            return wire.parse(kind, body, wire.MAX_ANSWER_BYTES)
        except InputError as error:
            version = _version(body)
            if version not in (None, wire.PROTOCOL_VERSION):
                raise self._fetcher.fail(
                    PortFault.PROTOCOL_MISMATCH,
                    f"it speaks protocol version {version}, this is {wire.PROTOCOL_VERSION}; use matching releases",
                ) from error
            raise self._garbage(str(error)) from error

    def _garbage(self, what: str) -> PortError:
        return self._fetcher.fail(PortFault.GARBAGE, " ".join(what.split())[:500])


class _Peek(BaseModel):
    protocol_version: int


def _version(body: bytes) -> int | None:
    """The version that an answer names, whatever else it says."""
    try:
        return _Peek.model_validate_json(body).protocol_version
    except ValidationError:
        return None
