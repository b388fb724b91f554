"""What goes between a running engine and its HTTP server: requests, events, records, refusals. No torch, no HTTP.

Sinks and observers are called by the loop's one thread (or by whatever ``RunningEngine.deliver_with`` names); they must
be quick and must not raise. Times are seconds on the engine's own monotonic clock.
"""

from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from rooftune.engine.step import GREEDY, Sampling
from rooftune.policies import wire
from rooftune.policies.errors import InputError, RefusedError, bad_value


class FinishReason(StrEnum):
    """Why a request got no further token."""

    STOP = "stop"  # an end-of-sequence or stop token, which is the last one delivered
    LENGTH = "length"  # max_tokens
    CANCELLED = "cancelled"  # a caller used ``cancel`` and gave no other reason
    FAILED = "failed"  # the engine stopped or broke


class RejectReason(StrEnum):
    """Why a request was not taken."""

    BUSY = "busy"
    TOO_LONG = "too_long"
    STOPPING = "stopping"
    INVALID = "invalid"  # a token id outside the vocabulary; over HTTP also any other error in a request


class Busy(RefusedError):
    """The queue is full (HTTP 429). retry_after_s: whole seconds after which a place is likely, at least 1."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Stopping(RefusedError):
    """The engine drains, has stopped or has broken (HTTP 503)."""


class TooLong(InputError):
    """Prompt and output together can never fit the model or the KV pool (HTTP 400)."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate. Raises InputError for an empty prompt or max_tokens below 1.

    prompt_token_ids: at least one. max_tokens: most tokens to produce. stop_token_ids: end the answer like an
    end-of-sequence token does (and are delivered like one). ignore_eos: the model's own end-of-sequence tokens do
    not end it; stop_token_ids still do.
    """

    prompt_token_ids: Sequence[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if len(self.prompt_token_ids) == 0:
            raise InputError("the prompt is empty; give at least one token")
        if self.max_tokens < 1:
            raise bad_value("max_tokens", self.max_tokens, "at least 1", "set it to 1 or more")


class TokenEvent(NamedTuple):
    """What one step produced for a request. token_ids: new tokens, in order; may be empty only with ``finished``.

    cached_tokens: prompt tokens that the prefix cache spared at its first admission. No event follows ``finished``.
    (A tuple, because one is made for every token and it costs a third.)
    """

    request_id: int
    token_ids: tuple[int, ...]
    finished: FinishReason | None
    cached_tokens: int


Sink = Callable[[TokenEvent], None]
# All events of one step at once, so that an event loop is woken once a step and not once a token.
Deliver = Callable[[Iterable[tuple[Sink, TokenEvent]]], None]


# One step as it ran, and one request in flight. Tuples, because many are made at once: a frozen dataclass takes five
# times as long.
if TYPE_CHECKING:
    StepRecord: TypeAlias = wire.Step[int, float, float]
    FlightRecord: TypeAlias = wire.Flight[str, int, float, float | None, bool]
else:
    StepRecord = namedtuple("StepRecord", wire.STEP_COLUMNS)
    FlightRecord = namedtuple("FlightRecord", wire.FLIGHT_COLUMNS)
# What is in flight, as in ``wire.FlightColumns``: the first rows, and how many more there are.
Flights = tuple[list[FlightRecord], int]


@dataclass(frozen=True, slots=True)
class RequestRecord(wire.Request[int, float, float | None, FinishReason]):
    """One request that has ended. gap_over: gaps strictly above each of the engine's gap bounds."""

    finish_s: float
    gap_over: tuple[int, ...]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.finish_s - self.arrival_s - self.ttft_s) / (self.output_tokens - 1)


class ChangeKind(StrEnum):
    """What moved the knobs."""

    PUSHED = "pushed"
    REVERTED = "reverted"
    RESUMED = "resumed"
    LEASE_ENDED = "lease_ended"


class Observer(Protocol):
    """Receives events for metrics. Called between two steps or at the end of one; ``on_rejected`` and ``on_change``
    also by the thread that called the engine. Must not call the engine."""

    def on_step(self, record: StepRecord) -> None: ...

    def on_first_token(self, ttft_s: float, queue_s: float, prompt_tokens: int, cached_tokens: int) -> None:
        """queue_s: arrival to first scheduling."""
        ...

    def on_gaps(self, gaps_s: Sequence[float]) -> None:
        """The gaps that this step closed, one for every request that got a token other than its first."""
        ...

    def on_finished(self, record: RequestRecord) -> None:
        """Also cancelled and failed ones."""
        ...

    def on_rejected(self, reason: RejectReason) -> None: ...

    def on_change(self, kind: ChangeKind, revision: int, actor: str, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's current state, for gauges.

    waiting: taken but not running. kv_used: 0..1. preemptions: since start. budget_configured_tokens: step_tokens
    of the setting in force; budget_in_force_tokens: what the latest step was allowed (policies lower it).
    lease_left_s: 0 without a lease. healthy: False once the loop has broken. accepting: False while it drains.
    """

    step: int
    running: int
    waiting: int
    partial_prefills: int
    kv_used: float
    preemptions: int
    budget_configured_tokens: int
    budget_in_force_tokens: int
    lease_left_s: float
    revision: int
    blocked: bool
    healthy: bool
    accepting: bool
