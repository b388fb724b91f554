"""What the commands that replay without searching print with ``--json``: one schema and version each."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue
from rooftune.tuner.record import (
    Count,
    EnginePart,
    MarginPart,
    Part,
    Some,
    StepModelPart,
    TargetPart,
    TrafficPart,
    TrialPart,
    Words,
)


class ReplayRecord(Part):
    """What ``simulate`` (one row) and ``sweep`` print with ``--json``: the same traffic under each setting."""

    schema_name: Literal["rooftune.replays"] = Field(alias="schema")
    version: Literal[2]
    objective: Literal["goodput", "tokens_per_s"]
    targets: tuple[TargetPart, ...]
    traffic: TrafficPart
    step_model: StepModelPart
    engine: EnginePart
    rows: tuple[TrialPart, ...]

    def values(self) -> dict[str, JsonValue]:
        """The record as JSON values, keys in the order of this page."""
        values: dict[str, JsonValue] = self.model_dump(mode="json", by_alias=True)
        return values


class SharesPart(Part):
    """Shares of the time of the worst minute just above the capacity; see ``rooftune.tuner.search.capacity.Shares``."""

    at_budget: Annotated[float, Field(ge=0, le=1)]
    prefill: Annotated[float, Field(ge=0, le=1)]
    sequences_full: Annotated[float, Field(ge=0, le=1)]
    kv_blocked: Annotated[float, Field(ge=0, le=1)]
    kv_peak: Annotated[float, Field(ge=0)]
    over_by_prompts: Annotated[float, Field(ge=0, le=1)]


class CapacityRecord(Part):
    """What one engine carries. scale, rate_rps: highest rate tried that meets every target, null for none.

    above_scale: lowest rate tried that does not, null when all did. breaks: index into ``targets`` of the one that
    fails first, with its margins just above. at: the replay at ``scale``. Everything is simulated.
    """

    schema_name: Literal["rooftune.capacity"] = Field(alias="schema")
    version: Literal[1]
    targets: tuple[TargetPart, ...]
    traffic: TrafficPart
    step_model: StepModelPart
    engine: EnginePart
    setting: dict[str, Annotated[int | float, Field(ge=0)]]
    searched: bool
    scale: Annotated[float, Field(gt=0)] | None
    rate_rps: Annotated[float, Field(gt=0)] | None
    above_scale: Annotated[float, Field(gt=0)] | None
    at: TrialPart | None
    breaks: Count | None
    above_margins: tuple[MarginPart, ...]
    resource: Words
    shares: SharesPart | None
    levers: tuple[Words, ...]
    replays: Some

    def values(self) -> dict[str, JsonValue]:
        """The record as JSON values, keys in the order of this page."""
        values: dict[str, JsonValue] = self.model_dump(mode="json", by_alias=True)
        return values
