"""A port without an engine: rows as a test writes them, kept in rings, served in pages, failing on demand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rooftune.policies import wire
from rooftune.tuner.ports.base import PortError, PortFault
from tests.ports.samples import state

_STEP: dict[str, Any] = {
    "start_s": 0.0, "duration_s": 0.01, "budget_tokens": 512, "prefill_tokens": 0, "decode_tokens": 1, "sequences": 1,
    "prefills": 0, "decode_context_tokens": 10, "prefill_context_tokens": 0, "attention_work": 0.0,
    "partial_prefills": 0, "running": 1, "waiting": 0, "kv_used": 0.1, "preemptions": 0, "revision": 0,
}  # fmt: skip
_REQUEST: dict[str, Any] = {
    "arrival_s": 0.0, "scheduled_s": 0.0, "ttft_s": 0.01, "finish_s": 0.02, "prompt_tokens": 10, "cached_tokens": 0,
    "output_tokens": 2, "gap_count": 1, "longest_gap_s": 0.01, "preemptions": 0, "ended": "finished",
}  # fmt: skip
_FLIGHT: dict[str, Any] = {
    "scheduled_s": None, "first_token_s": None, "last_token_s": None, "prompt_tokens": 10, "cached_tokens": 0,
    "computed_tokens": 0, "output_tokens": 0, "running": False,
}  # fmt: skip


@dataclass
class FakePort:
    """Rows are numbered from 0 for each start; ``capacity``: of each ring; ``page_rows``: of one answer.

    before: called ahead of every request with its name; it may change the engine or raise.
    """

    capacity: int = 1000
    page_rows: int = 100
    now_s: float = 100.0
    boot_id: str = "first"
    begun: int = 0
    revision: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    flights: list[dict[str, Any]] | None = None
    left_out: int = 0
    bounds_s: tuple[float, ...] = (0.03,)
    before: Callable[[str], None] = lambda name: None
    received: list[str] = field(default_factory=list)

    address = "http://fake"

    def step(self, **columns: object) -> None:
        """A step that has ended; by default it began now and the clock moves to its end."""
        row = {"start_s": self.now_s} | columns
        self.steps.append(_STEP | row)
        self.begun = len(self.steps)
        self.now_s = max(self.now_s, self.steps[-1]["start_s"] + self.steps[-1]["duration_s"])

    def ended(self, **columns: object) -> None:
        """A request that has ended, by default now."""
        arrival_s = columns.get("arrival_s", self.now_s - 0.02)
        self.requests.append(
            _REQUEST | {"arrival_s": arrival_s, "scheduled_s": arrival_s, "finish_s": self.now_s} | columns
        )

    def flies(self, **columns: object) -> None:
        """A request in flight, by default waiting since now."""
        row = _FLIGHT | {"request_id": str(len(self.flights or ())), "arrival_s": self.now_s} | columns
        self.flights = [*(self.flights or ()), row]

    def restart(self, boot_id: str) -> None:
        self.boot_id, self.begun, self.steps, self.requests, self.now_s = boot_id, 0, [], [], 1.0

    def state(self) -> wire.State:
        self._ask("state")
        return state(boot_id=self.boot_id, now_s=self.now_s, step=self.begun, revision=self.revision)

    def steps_after(self, after: int) -> wire.StepColumns:
        self._ask("steps")
        return wire.StepColumns.model_validate(self._page(after, "step", self.steps, _STEP))

    def requests_after(self, after: int) -> wire.RequestColumns:
        self._ask("requests")
        page = self._page(after, "sequence", self.requests, _REQUEST)
        over = tuple(tuple(0 for _ in page["sequence"]) for _ in self.bounds_s)
        return wire.RequestColumns.model_validate(page | {"gap_bounds_s": self.bounds_s, "gap_over": over})

    def in_flight(self) -> wire.FlightColumns | None:
        self._ask("in-flight")
        if self.flights is None:
            return None
        columns = {name: tuple(row[name] for row in self.flights) for name in wire.FLIGHT_COLUMNS}
        return wire.FlightColumns.model_validate(
            {"boot_id": self.boot_id, "now_s": self.now_s, "left_out": self.left_out} | columns
        )

    def push(self, request: wire.PushRequest) -> wire.PushAnswer:
        raise NotImplementedError

    def revert(self, request: wire.RevertRequest) -> wire.PushAnswer:
        raise NotImplementedError

    def resume(self, request: wire.ResumeRequest) -> wire.PushAnswer:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def _ask(self, name: str) -> None:
        self.received.append(name)
        self.before(name)

    def _page(self, after: int, key: str, rows: Sequence[dict[str, Any]], columns: dict[str, Any]) -> dict[str, Any]:
        oldest = max(0, len(rows) - self.capacity)
        first = max(after + 1, oldest)
        numbers = list(range(first, min(first + self.page_rows, len(rows))))
        return {
            "boot_id": self.boot_id,
            "now_s": self.now_s,
            "after": after,
            "next": numbers[-1] if numbers else after,
            "lost": max(0, oldest - after - 1),
            key: tuple(numbers),
        } | {name: tuple(rows[number][name] for number in numbers) for name in columns}


def broken(fault: PortFault = PortFault.TIMEOUT) -> PortError:
    return PortError(fault, "the test broke it")
