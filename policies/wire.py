"""The tuning protocol's messages between controller and engine. The only policies module with pydantic.

Frozen; unknown fields are errors; no coercion ("1" is not 1, true is not 1), no NaN and no infinity (null: not reached
or unknown); every list and text is bounded. Parse bytes with ``parse``, never loose objects. Times are seconds on the
engine's monotonic clock unless a name says otherwise; ``now_s`` is its current time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    create_model,
    model_serializer,
    model_validator,
)

from rooftune.policies.envelope import KNOB, KNOB_NAMES, KNOBS, Knob, Unit, Violation
from rooftune.policies.errors import InputError
from rooftune.policies.lease import MAX_LEASE_S, REFUSALS, LeaseOutcome, Push
from rooftune.policies.request import Setting
from rooftune.policies.step_time import StepModel

PROTOCOL_VERSION: Literal[1] = 1
MAX_BODY_BYTES = 65_536  # of a request
MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_ROWS = 20_000
MAX_IN_FLIGHT = 4000  # requests of one answer
MAX_HASHES = 32  # of one request
MAX_GAP_BOUNDS = 16
MAX_NOTES = 16
MAX_TOKENS = 10_000_000
MAX_SECONDS = 1e12

Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0.0, le=MAX_SECONDS)]
Duration = Annotated[float, Field(ge=0.0, le=3600.0)]
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
Counts = Annotated[tuple[Count, ...], Field(max_length=MAX_ROWS)]
Times = Annotated[tuple[Seconds, ...], Field(max_length=MAX_ROWS)]
MaybeTimes = Annotated[tuple[Seconds | None, ...], Field(max_length=MAX_ROWS)]
Shares = Annotated[tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...], Field(max_length=MAX_ROWS)]
Ends = Annotated[tuple[Literal["finished", "failed", "aborted"], ...], Field(max_length=MAX_ROWS)]

Names = Annotated[tuple[Text, ...], Field(max_length=MAX_IN_FLIGHT)]
Flags = Annotated[tuple[bool, ...], Field(max_length=MAX_IN_FLIGHT)]
BlockHash = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
BlockHashes = Annotated[tuple[BlockHash, ...], Field(max_length=MAX_HASHES)]

# Kinds of columns. An engine's record holds one value per column, a message a tuple, the controller an array.
Whole = TypeVar("Whole")
Real = TypeVar("Real")
Fraction = TypeVar("Fraction")  # 0..1
Instant = TypeVar("Instant")  # s; None or NaN: not reached
End = TypeVar("End")  # how a request ended
Name = TypeVar("Name")
Flag = TypeVar("Flag")


@dataclass(frozen=True, slots=True)
class Step(Generic[Whole, Real, Fraction]):
    """The columns of a step, for engine, wire and controller. They count what was computed, not what was due."""

    step: Whole  # its number since the start of the engine
    start_s: Real
    duration_s: Real  # taking arrivals to publishing, so that steps in a row add up to the time they took
    budget_tokens: Whole  # most that it was allowed to compute
    prefill_tokens: Whole
    decode_tokens: Whole
    sequences: Whole  # prefills and decodes
    prefills: Whole
    decode_context_tokens: Whole  # KV entries that decodes read
    prefill_context_tokens: Whole  # KV entries before the prefill chunks
    attention_work: Real  # token pairs: sum over prefill chunks of chunk x (already computed + chunk / 2)
    partial_prefills: Whole  # running requests with prompt tokens left
    running: Whole
    waiting: Whole
    kv_used: Fraction  # of the KV blocks
    preemptions: Whole  # in this step
    revision: Whole  # of the setting that it ran under


@dataclass(frozen=True, slots=True)
class Request(Generic[Whole, Real, Instant, End]):
    """The columns of an ended request; ``gap_over`` is kept beside them, a row of counts per request or gap bound."""

    sequence: Whole  # its place in the order of ends
    arrival_s: Real
    scheduled_s: Instant  # first scheduling
    ttft_s: Instant  # from arrival to first token
    finish_s: Instant
    prompt_tokens: Whole
    cached_tokens: Whole  # prompt tokens that the prefix cache spared at its first admission
    output_tokens: Whole
    gap_count: Whole
    longest_gap_s: Instant
    preemptions: Whole
    ended: End


@dataclass(frozen=True, slots=True)
class Flight(Generic[Name, Whole, Real, Instant, Flag]):
    """The columns of a request that has not ended."""

    request_id: Name  # the engine's
    arrival_s: Real
    scheduled_s: Instant  # first scheduling
    first_token_s: Instant
    last_token_s: Instant
    prompt_tokens: Whole
    cached_tokens: Whole  # as in ``Request``
    computed_tokens: Whole  # with KV entries, those of a step under way included; 0 while it waits
    output_tokens: Whole  # so far
    running: Flag


STEP_COLUMNS = tuple(field.name for field in fields(Step))
REQUEST_COLUMNS = tuple(field.name for field in fields(Request))
FLIGHT_COLUMNS = tuple(field.name for field in fields(Flight))


class Wire(BaseModel):
    """Base of every message part."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Message(Wire):
    """Base of every whole message; another protocol version is refused."""

    protocol_version: Literal[1] = PROTOCOL_VERSION


def _wire_type(knob: Knob) -> Any:
    if knob.unit is Unit.SWITCH:
        return bool
    return Annotated[int if knob.whole else float, Field(ge=knob.least, le=knob.most(MAX_TOKENS, MAX_TOKENS))]


if TYPE_CHECKING:
    KnobName = str

    class Knobs(Wire):
        def __init__(self, **knobs: int | float | bool | None) -> None: ...

        def __getattr__(self, name: str) -> int | float | bool | None: ...
else:
    KnobName = Literal[KNOB_NAMES]
    Knobs = create_model(
        "Knobs",
        __base__=Wire,
        __doc__="Knobs to move; one that is absent or null stays as it is. 0 = no limit for every cap.",
        **{name: (_wire_type(knob) | None, None) for name, knob in KNOB.items() if knob.policy is None},
    )


class StepConstants(Wire):
    """``StepModel`` on the wire: seconds, seconds per token or token pair; sharpness 0 or >= 1."""

    overhead_s: Duration
    sequence_s: Duration
    floor_s: Duration
    kv_s_per_token: Duration
    slope_s_per_token: Duration
    attention_s: Duration
    sharpness: Annotated[float, Field(ge=0.0, le=1000.0)]

    @model_validator(mode="after")
    def _sharp_enough(self) -> "StepConstants":
        if 0.0 < self.sharpness < 1.0:
            raise ValueError("sharpness must be 0 or at least 1")
        return self


class FixedBudget(Wire):
    kind: Literal["fixed"]


class StepTimeTargetBudget(Wire):
    kind: Literal["step_time_target"]
    target_s: Annotated[float, Field(gt=0.0, le=3600.0)]
    floor_tokens: Tokens
    step_model: StepConstants


class PressureBudget(Wire):
    kind: Literal["pressure"]
    tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    prefills: Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class FcfsOrder(Wire):
    kind: Literal["fcfs"]


class _AgingOrder(Wire):
    """What an engine does that does not know a part is its default, which is not written."""

    aging_s: Duration
    aged_share: Annotated[float, Field(ge=KNOB["aged_share"].least, le=1.0)] = 1.0

    wait_tokens_per_s: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0

    @model_serializer(mode="wrap")
    def _without_defaults(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        defaults = {"aged_share": 1.0, "wait_tokens_per_s": 0.0}
        return {name: value for name, value in whole(self).items() if value != defaults.get(name)}


class ShortestFirstOrder(_AgingOrder):
    kind: Literal["shortest_first"]


class DeadlineOrder(_AgingOrder):
    kind: Literal["deadline"]
    ttft_target_s: Annotated[float, Field(gt=0.0, le=3600.0)]
    prefill_s_per_token: Annotated[float, Field(ge=0.0, le=1.0)]


BudgetPolicy = Annotated[FixedBudget | StepTimeTargetBudget | PressureBudget, Field(discriminator="kind")]
OrderPolicy = Annotated[FcfsOrder | ShortestFirstOrder | DeadlineOrder, Field(discriminator="kind")]


class PushRequest(Message):
    """PUT /tuning/v1/knobs: all or nothing, for ``lease_s`` seconds."""

    knobs: Knobs = Knobs()
    budget_policy: BudgetPolicy | None = None
    order_policy: OrderPolicy | None = None
    lease_s: Annotated[float, Field(gt=0.0, le=MAX_LEASE_S)]
    expected_revision: Count
    actor: Text
    reason: Text

    def to_push(self) -> Push:
        """The request for ``rooftune.policies.lease.push``."""
        changes: dict[str, int | float] = {
            name: int(value) if isinstance(value, bool) else value for name, value in self.knobs if value is not None
        }
        constants: StepModel | None = None
        for name, policy in (("budget_policy", self.budget_policy), ("order_policy", self.order_policy)):
            if policy is not None:
                changes |= _policy_changes(name, policy)
            if isinstance(policy, StepTimeTargetBudget):
                constants = StepModel(**policy.step_model.model_dump())
        return Push(changes, self.lease_s, self.expected_revision, self.actor, self.reason, constants)


def _policy_changes(name: str, policy: Wire) -> dict[str, int | float]:
    """The knobs in a policy's message, the policy itself included."""
    values = dict(policy)
    kinds = [choice.kind for choice in KNOB[name].choices]
    parts = {knob.name: values[knob.part] for knob in KNOBS if knob.policy == name and knob.part in values}
    return {name: kinds.index(values["kind"])} | parts


class PushAnswer(Message):
    """200: in force from that step on. Also answers a revert and a resume."""

    revision: Count
    effective_from_step: Count


class RevertRequest(Message):
    """DELETE /tuning/v1/lease; block: no push until a resume, for an operator who stops the tuner."""

    actor: Text = "unnamed"
    reason: Text = "not stated"
    block: bool = True


class ResumeRequest(Message):
    """POST /tuning/v1/resume: allows pushes again after a blocking revert."""

    actor: Text
    reason: Text


class Breach(Wire):
    """A value outside the envelope; null: not finite. limit: the broken bound, null without one."""

    knob: Annotated[str, Field(max_length=64)]
    value: float | None
    broken: Literal["minimum", "maximum", "needs_restart", "absent", "unknown", "kind"]
    limit: float | None = None


class Refusal(Message):
    """409, 422 or 503 (see ``REFUSAL_STATUS``); the request changed nothing. revision: the one in force."""

    code: Literal[
        "conflict_revision", "blocked_by_revert", "held_by_other", "lease_length", "outside_envelope",
        "needs_step_model", "clock_unreadable", "malformed",
    ]  # fmt: skip
    revision: Count
    message: Annotated[str, Field(max_length=1000)]
    breaches: Annotated[tuple[Breach, ...], Field(max_length=64)] = ()


REFUSAL_STATUS: dict[str, int] = {
    "conflict_revision": 409,
    "blocked_by_revert": 409,
    "held_by_other": 409,
    "lease_length": 422,
    "outside_envelope": 422,
    "needs_step_model": 422,
    "malformed": 422,
    "clock_unreadable": 503,
}


class KnobState(Wire):
    """A knob; value, boot, min and max are null when it is absent (adaptive_chunk_cap: 0 or 1)."""

    name: KnobName
    mode: Literal["live", "restart", "absent"]
    value: int | float | None = None
    boot: int | float | None = None
    min: int | float | None = None
    max: int | float | None = None

    @model_validator(mode="after")
    def _whole_or_absent(self) -> "KnobState":
        parts = (self.value, self.boot, self.min, self.max)
        known = [part is not None for part in parts]
        if any(known) == (self.mode == "absent") or any(known) != all(known):
            raise ValueError("a knob that is absent has no numbers, any other has all four")
        if KNOB[self.name].whole and any(isinstance(part, float) for part in parts):
            raise ValueError(f"{self.name} counts, so its numbers must be whole")
        return self


class BootEnvelope(Wire):
    """What the engine fixed at start; null: not reported.

    plan_ahead: a step is planned while the one before it runs (vLLM's async scheduling).
    """

    ceiling_tokens: Tokens
    max_running: Tokens
    model_tokens: Tokens | None
    kv_blocks: Count | None
    kv_block_tokens: Count | None
    chunking: bool
    plan_ahead: bool = False


class LeaseState(Wire):
    actor: Text
    reason: Text
    left_s: Seconds
    length_s: Seconds


class State(Message):
    """GET /tuning/v1/state. boot_id changes with every start of the engine; step: steps since then.

    notes: one line each for the tuner: why the engine is read-only, which knob is absent and why.
    """

    engine: Text
    engine_version: Text
    model: Text
    boot_id: Text
    now_s: Seconds
    envelope: BootEnvelope
    knobs: Annotated[tuple[KnobState, ...], Field(max_length=len(KNOB_NAMES))]
    revision: Count
    blocked: bool
    lease: LeaseState | None
    step: Count
    notes: Annotated[tuple[Text, ...], Field(max_length=MAX_NOTES)] = ()

    @model_validator(mode="after")
    def _each_knob_once(self) -> "State":
        names = [knob.name for knob in self.knobs]
        if len(set(names)) != len(names):
            raise ValueError("a knob is named twice")
        return self

    def setting(self) -> Setting:
        """The setting in force; absent knobs keep their defaults. Raises InputError without step_tokens."""
        values = {knob.name: knob.value for knob in self.knobs if knob.value is not None}
        if "step_tokens" not in values:
            raise InputError("the engine reports no step_tokens; its hook is too old or not active")
        return Setting(**values)  # type: ignore[arg-type]  # names are the Literal above, numbers checked there


class Columns(Message):
    """Rows of a ring buffer as columns of one length. after: as requested; next: the ``after`` of the next request;
    lost: rows after ``after`` that were overwritten unread."""

    boot_id: Text
    now_s: Seconds
    after: Annotated[int, Field(ge=-1, le=2**53)]
    next: Annotated[int, Field(ge=-1, le=2**53)]
    lost: Count

    def _check_rows(self, key: tuple[int, ...]) -> None:
        for name, column in self:
            if isinstance(column, tuple) and name not in ("gap_bounds_s", "gap_over") and len(column) != len(key):
                raise ValueError(f"column {name} has {len(column)} rows, must have {len(key)}")
        if any(later <= earlier for earlier, later in pairwise(key)):
            raise ValueError("rows must ascend")
        if key and not (key[0] > self.after and key[-1] == self.next):
            raise ValueError("rows must lie after `after` and end at `next`")
        if self.next < self.after:
            raise ValueError("next must not lie before after")


def _with_columns(record: type[Any], kinds: Mapping[Any, Any], base: type[Message] = Columns) -> Any:
    """``base`` with a column per field of a record."""
    columns: dict[str, Any] = {field.name: (kinds[field.type], ...) for field in fields(record)}
    return create_model(record.__name__, __base__=base, **columns)


if TYPE_CHECKING:  # a type checker cannot follow create_model
    _Steps: TypeAlias = Step[Counts, Times, Shares]
    _Requests: TypeAlias = Request[Counts, Times, MaybeTimes, Ends]
    _Flights: TypeAlias = Flight[Names, Counts, Times, MaybeTimes, Flags]
else:
    _Steps = _with_columns(Step, {Whole: Counts, Real: Times, Fraction: Shares})
    _Requests = _with_columns(Request, {Whole: Counts, Real: Times, Instant: MaybeTimes, End: Ends})
    _Flights = _with_columns(
        Flight, {Name: Names, Whole: Counts, Real: Times, Instant: MaybeTimes, Flag: Flags}, Message
    )


class StepColumns(_Steps, Columns):  # type: ignore[misc]  # both are frozen, each in its own way
    """GET /tuning/v1/steps."""

    @model_validator(mode="after")
    def _rows(self) -> "StepColumns":
        self._check_rows(self.step)
        return self


class RequestColumns(_Requests, Columns):  # type: ignore[misc]  # as above
    """GET /tuning/v1/requests: finished, failed and aborted requests in the order of their end.

    Null: instant not reached. gap_over: per bound of gap_bounds_s (ascending) a row of n counts, the request's gaps
    strictly above it.
    """

    gap_bounds_s: Annotated[tuple[Duration, ...], Field(max_length=MAX_GAP_BOUNDS)] = ()
    gap_over: Annotated[tuple[Counts, ...], Field(max_length=MAX_GAP_BOUNDS)] = ()

    @model_validator(mode="after")
    def _rows(self) -> "RequestColumns":
        self._check_rows(self.sequence)
        if len(self.gap_over) != len(self.gap_bounds_s) or any(len(row) != len(self.sequence) for row in self.gap_over):
            raise ValueError("gap_over must have a row for each bound and in it a count for each request")
        if any(later <= earlier for earlier, later in pairwise(self.gap_bounds_s)):
            raise ValueError("gap_bounds_s must ascend")
        return self


class FlightColumns(_Flights, Message):  # type: ignore[misc]  # as above
    """GET /tuning/v1/in-flight: what has not ended, running requests by admission, then waiting ones in their order.

    left_out: requests that came after the last row. block_hashes: of each request's leading KV blocks, the first eight
    bytes of each hash; empty where the engine does not tell them.
    """

    boot_id: Text
    now_s: Seconds
    left_out: Count
    block_hashes: Annotated[tuple[BlockHashes, ...], Field(max_length=MAX_IN_FLIGHT)] = ()

    @model_validator(mode="after")
    def _rows(self) -> "FlightColumns":
        rows = len(self.request_id)
        for name in FLIGHT_COLUMNS:
            if len(getattr(self, name)) != rows:
                raise ValueError(f"column {name} has {len(getattr(self, name))} rows, must have {rows}")
        if len(self.block_hashes) not in (0, rows):
            raise ValueError("block_hashes must be empty or have a row for each request")
        if any(later and not earlier for earlier, later in pairwise(self.running)):
            raise ValueError("running requests must come first")
        return self


SCHEMAS: tuple[type[Message], ...] = (
    State, PushRequest, PushAnswer, RevertRequest, ResumeRequest, Refusal, StepColumns, RequestColumns,
    FlightColumns,
)  # fmt: skip

M = TypeVar("M", bound=Message)


def parse(kind: type[M], body: bytes, limit_bytes: int = MAX_BODY_BYTES) -> M:
    """A message from JSON bytes. Raises InputError, one line with field and rule, for anything else."""
    if len(body) > limit_bytes:
        raise InputError(f"{kind.__name__} is {len(body)} bytes, must be at most {limit_bytes}; send less")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise InputError(f"{kind.__name__}: {where}: {first['msg']}; see the schema of the tuning protocol") from None


def malformed(revision: int, why: str) -> Refusal:
    """The answer to a request that cannot be read. revision: the one in force."""
    return Refusal(code="malformed", revision=revision, message=why[:1000])


def refusal(outcome: LeaseOutcome) -> Refusal:
    """The body of a refused ``LeaseOutcome``. Raises InputError for one that was not refused."""
    if not outcome.refused:
        raise InputError(f"outcome {outcome.reason} is not a refusal; answer it with 200")
    message = REFUSALS[outcome.reason]
    breaches = tuple(_breach(violation) for violation in outcome.violations[:64])
    return Refusal.model_validate(
        {"code": outcome.reason.value, "revision": outcome.revision, "message": message, "breaches": breaches}
    )


def _breach(violation: Violation) -> Breach:
    value = float(violation.value) if isinstance(violation.value, int | float) else math.nan
    known = value if math.isfinite(value) else None
    return Breach(knob=violation.knob[:64], value=known, broken=violation.broken.value, limit=violation.limit)
