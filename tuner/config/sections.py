"""The parts of the configuration. A key that ends in ``_s`` takes seconds, or a text with a unit such as 5m."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rooftune.policies.envelope import KNOB_NAMES, SEARCHED
from rooftune.policies.guard import GuardLimits, WeekSpan
from rooftune.policies.lease import MAX_LEASE_S
from rooftune.policies.slo import Metric, Target
from rooftune.tuner.config.values import (
    BoundText,
    Name,
    Seconds,
    SecondsOrNone,
    Span,
    Url,
    duration_s,
    week_spans,
    wrong,
)

LEASE_CYCLES = 3  # a lease outlives this many cycles, so that one failed cycle does not end it
MEGABYTE = 1_000_000
Requests = Annotated[int, Field(ge=1, le=1_000_000)]


class Section(BaseModel):
    """Frozen, strict, and nothing that is not named."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class EngineSection(Section):
    """The one engine that is tuned. name: in logs and metrics (default: host and port of the address)."""

    url: Url
    name: Name | None = None
    token_file: Path | None = Field(default=None, description="the tuning token of the engine, read at every use")
    ca_file: Path | None = Field(default=None, description="certificates (PEM) to trust for https")
    timeout_s: Seconds = Field(default=5.0, description="longest wait for one answer of the engine")

    @property
    def shown_name(self) -> str:
        return self.name or self.url.partition("://")[2] or self.url


class TargetSection(Section):
    """At least share ``quantile`` of ``metric`` within ``bound``, such as 2s or 30ms."""

    metric: Metric
    quantile: Annotated[float, Field(gt=0, le=1)] = 0.99
    bound: BoundText

    def target(self) -> Target:
        return Target(self.metric, duration_s(self.bound), self.quantile)


class CadenceSection(Section):
    """When what happens, and how much data each step of it wants. Requests: ended ones."""

    cycle_s: Annotated[Seconds, Field(ge=0.05, description="from the start of one cycle to that of the next")] = 15.0
    window_s: Seconds = Field(default=600.0, description="how far back a search looks at most")
    search_every_s: Seconds = Field(default=900.0, description="longest time between two searches on steady traffic")
    search_requests: Requests = Field(default=100, description="requests that a search needs")
    lease_s: Annotated[Seconds, Field(le=MAX_LEASE_S, description="how long a push holds without renewal")] = 120.0
    settle_s: SecondsOrNone = Field(default=5.0, description="start of a turn that does not count")
    verify_s: Seconds = Field(default=60.0, description="a pair of turns of old and new setting")
    verify_min_requests: Requests = Field(default=20, description="requests that a verdict on a push needs")

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        least_s = LEASE_CYCLES * self.cycle_s
        if self.lease_s < least_s:
            bound = f"at least {least_s:g} ({LEASE_CYCLES} x cadence.cycle_s, which is {self.cycle_s:g})"
            raise wrong(self.lease_s, bound, "raise it, or make cycles shorter", "cadence.lease_s")
        for name, cycles in (("window_s", 1), ("search_every_s", 1), ("verify_s", 2)):
            if getattr(self, name) < cycles * self.cycle_s:
                bound = f"at least {cycles} x cadence.cycle_s, which is {self.cycle_s:g}"
                raise wrong(getattr(self, name), bound, "raise it, or make cycles shorter", f"cadence.{name}")
        if self.settle_s >= self.verify_s / 2.0:
            bound = f"below half of cadence.verify_s, which is {self.verify_s:g}"
            raise wrong(self.settle_s, bound, "shorten it", "cadence.settle_s")
        return self


class SearchSection(Section):
    """Limits of the child process that holds twin and search."""

    trials: Annotated[int, Field(ge=2, le=100_000)] = Field(default=100, description="settings tried in one search")
    timeout_s: Seconds = Field(default=180.0, description="longest time for one search, then the child is ended")
    memory_bytes: Annotated[int, Field(ge=300 * MEGABYTE, le=10**13)] = Field(
        default=2_000 * MEGABYTE, description="most memory of the child"
    )
    nice: Annotated[int, Field(ge=0, le=19)] = Field(default=10, description="how far the child stands back")
    idle_exit_s: Seconds = Field(default=60.0, description="the child ends after so long without work")
    horizon_s: Annotated[Seconds, Field(ge=60, le=86_400)] = Field(
        default=600.0, description="how long the twin watches a queue before it says that it does not grow"
    )
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0


class GuardSection(Section):
    """``rooftune.policies.guard.GuardLimits`` but for the windows of the week. Gains are shares of requests, 0..1."""

    largest_ratio: Annotated[float, Field(gt=1, le=1e6)] = Field(
        default=GuardLimits.largest_ratio, description="a push moves a knob at most by this factor"
    )
    dwell_s: SecondsOrNone = Field(default=GuardLimits.dwell_s, description="least time between two pushes")
    min_gain: Annotated[float, Field(ge=0, le=1)] = Field(
        default=GuardLimits.min_gain, description="least predicted gain in attainment that is worth a push"
    )
    exploration_slo_s_per_day: SecondsOrNone = Field(
        default=GuardLimits.exploration_slo_s_per_day,
        description="what trials may cost a day, in seconds in which every request misses its targets",
    )
    max_metrics_age_s: Seconds = Field(
        default=GuardLimits.max_metrics_age_s, description="no push on data older than this"
    )
    max_inconclusive_s: SecondsOrNone = Field(
        default=GuardLimits.max_inconclusive_s, description="a push without a verdict is taken back after this time"
    )
    kv_full: Annotated[float, Field(gt=0, le=1)] = Field(
        default=GuardLimits.kv_full, description="KV usage from which preemptions count as KV bound"
    )
    min_shadow_s: SecondsOrNone = Field(
        default=GuardLimits.min_shadow_s, description="time in shadow before a push is allowed in live mode"
    )
    headroom: Annotated[float, Field(ge=0, le=10)] = Field(
        default=GuardLimits.headroom, description="a setting must carry the offered rate and this share of it more"
    )


class RollbackSection(Section):
    """``RollbackThresholds`` of policies/verify.py: what is never accepted. A key that is left out has no threshold."""

    gap_p99_s: Seconds | None = None
    queue_p99_s: Seconds | None = None
    preemptions_per_s: Annotated[float, Field(ge=0, le=1e9)] | None = None
    failed_share: Annotated[float, Field(ge=0, le=1)] | None = None


class MaintenanceSection(Section):
    """Windows of the week in the operator's zone. push_only: when any are given, pushes happen inside them alone."""

    timezone: Name = "UTC"
    no_push: Annotated[tuple[Span, ...], Field(max_length=100)] = ()
    push_only: Annotated[tuple[Span, ...], Field(max_length=100)] = ()

    @model_validator(mode="after")
    def _zone_exists(self) -> Self:
        try:
            ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            remedy = "correct it, or install the time zones (package tzdata)"
            raise wrong(self.timezone, "a time zone such as Europe/Berlin", remedy, "maintenance.timezone") from None
        return self

    @property
    def zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone)

    def spans(self, texts: tuple[str, ...]) -> tuple[WeekSpan, ...]:
        return tuple(span for text in texts for span in week_spans(text))


class RetentionSection(Section):
    """How much of the past the state file keeps: whichever of the two is less. Pushes are kept ten times as long."""

    days: Annotated[float, Field(gt=0, le=3650)] = 14.0
    rows: Annotated[int, Field(ge=10, le=10_000_000)] = Field(default=100_000, description="cycles kept")
    studies_bytes: Annotated[int, Field(ge=MEGABYTE, le=10**12)] = Field(
        default=200 * MEGABYTE, description="a start replaces studies.db once it is larger"
    )


class LogSection(Section):
    """One line an outcome on standard error, in logfmt or JSON."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["logfmt", "json"] = "logfmt"


if TYPE_CHECKING:
    SearchKnob = str
else:
    SearchKnob = Literal[tuple(name for name in KNOB_NAMES if name in SEARCHED)]
