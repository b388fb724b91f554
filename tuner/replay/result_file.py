"""The result of a replay: what was asked, what the client saw, what the engine says, and how targets judge both.

One JSON file with a schema and a version. Times of the client are seconds since the start of the replay (the zero of
the traffic's arrivals); times of the engine are seconds on its own clock, which stood ``clock_offset_s`` ahead of the
client's. Null: not reached, or not known; never zero. The two sides are kept apart because a client that shares its
cores with the engine reads many tokens at once: then only the engine knows the gaps.
"""

import json
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from rooftune.tuner.files import write_text
from rooftune.tuner.record import (
    Count,
    MarginPart,
    Part,
    Seconds,
    Share,
    Some,
    TargetPart,
    TrafficPart,
    Words,
)

SCHEMA: Final = "rooftune.replay"
VERSION: Final = 1

Since = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0)]
INTERRUPTED: Final = "interrupted"


class RequestPart(Part):
    """One request that was sent, as the client saw it.

    index: row in the traffic that was replayed. planned_s, sent_s: when it was to be sent and when it was. ttft_s: from
    sent_s to the first token; finish_s: its last token. gaps_s: one between neighbouring output events. tpot_s:
    (finish - first) / (output - 1), null below two tokens. asked_tokens: output tokens that were asked for;
    output_tokens: that came. failure: null, or a word (http_429, timeout, cut_short, interrupted, ...); detail: what
    the server said.
    """

    index: Count
    tenant: Words
    planned_s: Since
    sent_s: Since
    ttft_s: Since | None
    finish_s: Since | None
    tpot_s: Since | None
    prompt_tokens: Some
    asked_tokens: Some
    output_tokens: Count
    cached_tokens: Count | None
    gaps_s: tuple[Since, ...]
    failure: Words | None
    detail: Words | None

    @model_validator(mode="after")
    def _consistent(self) -> "RequestPart":
        if self.failure is None and (self.ttft_s is None or self.finish_s is None):
            raise ValueError(f"request {self.index} has neither a failure nor a finish")
        if len(self.gaps_s) >= max(self.output_tokens, 1):
            raise ValueError(f"request {self.index} has {len(self.gaps_s)} gaps for {self.output_tokens} tokens")
        return self


class EngineRequestPart(Part):
    """The same request as the engine saw it. gap_over: gaps above each of ``gap_bounds_s``; sequence: its number."""

    index: Count
    sequence: Count
    arrival_s: Since
    scheduled_s: Since | None
    ttft_s: Since
    finish_s: Since
    output_tokens: Count
    cached_tokens: Count
    gap_count: Count
    longest_gap_s: Since | None
    gap_over: tuple[Count, ...]
    preemptions: Count


class EnginePart(Part):
    """What the tuning protocol told. lost: rows overwritten before they were read; missing: requests that the client
    saw finish and no row was found for; others: rows of requests that are not ours."""

    clock_offset_s: float
    gap_bounds_s: tuple[Since, ...]
    lost: Count
    missing: Count
    others: Count
    requests: tuple[EngineRequestPart, ...]

    @model_validator(mode="after")
    def _whole(self) -> "EnginePart":
        if any(len(row.gap_over) != len(self.gap_bounds_s) for row in self.requests):
            raise ValueError("gap_over must hold a count for each of gap_bounds_s")
        return self


class ClientPart(Part):
    """The client's own doing. late: actual minus planned sending. shared_reads: share of the gaps that are unknown
    to it because both tokens came in one read. bottleneck: why its times are not the server's, empty when they are."""

    late_p50_s: Since
    late_p99_s: Since
    late_max_s: Since
    shared_reads: Share
    short_answers: Count
    events_of_many: Count
    bottleneck: tuple[Words, ...]


class VerdictPart(Part):
    """One side's times against the targets. judged: requests counted (interrupted ones are not); failed: of these.
    span_s: first arrival to last finish. Null: no samples, or a figure that this side cannot give."""

    side: Literal["client", "engine"]
    judged: Count
    failed: Count
    span_s: Annotated[float, Field(gt=0)]
    attainment: Share | None
    goodput_rps: Rate | None
    tokens_per_s: Rate
    ttft_p50_s: Seconds
    ttft_p95_s: Seconds
    ttft_p99_s: Seconds
    gap_p50_s: Seconds
    gap_p99_s: Seconds
    longest_gap_p99_s: Seconds
    tpot_p95_s: Seconds
    margins: tuple[MarginPart, ...]
    not_judged: Words | None


class ReplayResult(Part):
    """One replay. made_at: UTC, ISO 8601. unsent: requests of the traffic that an interruption kept back.
    engine: null when the engine was not asked, or (engine_error) could not tell."""

    schema_name: Literal["rooftune.replay"] = Field(alias="schema")
    version: Literal[1]
    made_at: Words
    made_by: Words
    url: Words
    model: Words
    vocab_tokens: Some
    seed: Count
    interrupted: bool
    unsent: Count
    traffic: TrafficPart
    objective: Literal["goodput", "tokens_per_s"]
    targets: tuple[TargetPart, ...]
    client: ClientPart
    verdicts: tuple[VerdictPart, ...]
    failures: dict[str, Count]
    requests: tuple[RequestPart, ...]
    engine: EnginePart | None
    engine_error: Words | None

    @model_validator(mode="after")
    def _consistent(self) -> "ReplayResult":
        known = [row.index for row in self.requests]
        if len(set(known)) != len(known):
            raise ValueError("a request stands twice in requests")
        if self.engine is not None and not {row.index for row in self.engine.requests} <= set(known):
            raise ValueError("the engine has a request that the client did not send")
        return self


def write_result(path: str | Path, result: ReplayResult) -> None:
    """Whole or not at all. Raises InputError when it cannot be written."""
    write_text(path, json.dumps(result.model_dump(mode="json", by_alias=True), ensure_ascii=False) + "\n")


def summary_line(result: ReplayResult) -> str:
    """The result without its rows, one JSON object on one line."""
    values = result.model_dump(mode="json", by_alias=True, exclude={"requests": True, "engine": {"requests"}})
    return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"
