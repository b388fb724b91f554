"""``RunRecord``: everything that one recommendation came to, as plain values, in one JSON file with a version.

Reports are made from a record alone, so a record is also what a later report, another tool or a colleague reads.
Loading is strict: an unknown key, a missing one, another version or a value out of range is one clear line.

Numbers are in the unit that stands in their name. A latency that never came is the text ``"inf"`` (JSON has no
infinity), one without samples is null; neither is ever 0.
"""

import json
import math
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rooftune.policies.errors import InputError
from rooftune.policies.request import Setting
from rooftune.policies.step_time import StepModel

Source = Literal["measured", "simulated", "assumed", "given"]
BARS: Final = 240  # of a step timeline
Verdict = Literal["change", "keep", "infeasible"]

Seconds = Annotated[float, Field(ge=0)] | Literal["inf"] | None
Number = float | Literal["inf"] | None
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Some = Annotated[int, Field(ge=1)]
Words = Annotated[str, Field(max_length=2000)]


def digits(value: float, most: int = 9) -> float:
    """The value to at most that many digits: more would only be noise of the arithmetic."""
    return float(f"{value:.{most}g}")


def plain(value: float) -> Number:
    """A number for the record: at most nine digits, ``"inf"`` for infinity, None for NaN (no samples)."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "inf"
    return digits(value)


def finite(value: float, most: int = 9) -> float | None:
    """None for what is endless or has no samples."""
    return digits(value, most) if math.isfinite(value) else None


class Part(BaseModel):
    """Frozen, strict, and nothing that is not named."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TrafficPart(Part):
    """The requests that were replayed. changes: what was done to the file's times, in words."""

    name: Words
    changes: tuple[Words, ...]
    requests: Some
    span_s: Annotated[float, Field(ge=0)]
    prompt_p50_tokens: Some
    prompt_p99_tokens: Some
    prompt_max_tokens: Some
    output_p50_tokens: Some
    output_p99_tokens: Some
    output_max_tokens: Some
    prompt_share_cached: Share | None
    tenants: Some
    source: Source


class StepModelPart(Part):
    """The step-time model. knee_tokens: at zero context; "inf" when nothing grows with the tokens.

    tables: steps were priced by measured tables, and the coefficients are the formula beside them.
    """

    name: Words
    source: Source
    origin: Words
    coefficients: dict[str, Annotated[float, Field(ge=0)]]
    knee_tokens: Number
    tables: bool = False
    codes: tuple[Words, ...] = ()
    errors: dict[str, float] = {}

    @model_validator(mode="after")
    def _complete(self) -> "StepModelPart":
        if set(self.coefficients) != set(StepModel._fields):
            raise ValueError(f"coefficients must be exactly {', '.join(StepModel._fields)}")
        return self


class EnginePart(Part):
    """The engine as the twin knows it; sources: for each of these values, where it came from."""

    ceiling_tokens: Some
    kv_tokens: Some
    block_tokens: Some
    max_seqs: Some
    prefix_caching: bool
    decodes_kept_moving: bool
    sources: dict[str, Source]


class TargetPart(Part):
    """At least share ``quantile`` of ``metric`` within ``bound_s``; applies_to: which requests, in words."""

    metric: Words
    quantile: Annotated[float, Field(gt=0, le=1)]
    bound_s: Annotated[float, Field(gt=0)]
    applies_to: Words


class MarginPart(Part):
    """One target over a run, in the order of ``RunRecord.targets``: met when margin <= 0, null without samples."""

    measured_s: Seconds
    margin: Number
    samples: Count


class TrialPart(Part):
    """One setting replayed on the twin. setting: budget, chunk cap, sequence cap and whatever is not at its default.

    whole_traffic: False for a first look at a few windows of it; rates per second mean nothing there and are null.
    """

    role: Words
    setting: dict[str, Annotated[int | float, Field(ge=0)]]
    margins: tuple[MarginPart, ...]
    feasible: bool
    attainment: Share | None
    goodput_rps: Annotated[float, Field(ge=0)] | None
    tokens_per_s: Annotated[float, Field(ge=0)] | None
    violation: Annotated[float, Field(ge=0)] | Literal["inf"] | None
    ttft_p50_s: Seconds
    ttft_p95_s: Seconds
    ttft_p99_s: Seconds
    gap_p50_s: Seconds
    gap_p99_s: Seconds
    longest_gap_p99_s: Seconds
    tpot_p95_s: Seconds
    longest_wait_s: Seconds
    simulated_steps: Count
    preempted: Count
    refused: Count
    whole_traffic: bool

    @property
    def step_tokens(self) -> int:
        """The token budget."""
        return int(self.setting["step_tokens"])

    @property
    def chunk_cap_tokens(self) -> int:
        """The chunk cap, 0 for none."""
        return int(self.setting.get("chunk_cap_tokens", 0))

    @model_validator(mode="after")
    def _known_knobs(self) -> "TrialPart":
        unknown = sorted(set(self.setting) - set(Setting._fields))
        if unknown:
            raise ValueError(f"setting holds {unknown[0]!r}, must hold only knobs: {', '.join(Setting._fields)}")
        if self.setting.get("step_tokens", 0) < 1:
            raise ValueError("setting must hold step_tokens of at least 1")
        for name in ("budget_policy", "order_policy"):
            if self.setting.get(name, 0) not in (0, 1, 2):
                raise ValueError(f"setting holds {name} {self.setting[name]}, must be 0, 1 or 2")
        if not self.whole_traffic and (self.goodput_rps is not None or self.tokens_per_s is not None):
            raise ValueError("goodput_rps and tokens_per_s must be null when whole_traffic is false")
        return self


class GroupFigures(Part):
    """Requests of one group under one setting. longest_wait_s: for a first token; it and ``unfinished`` are unknown in
    a record of the release before."""

    attainment: Share
    ttft_p50_s: Seconds
    ttft_p99_s: Seconds
    longest_gap_p99_s: Seconds
    longest_wait_s: Seconds = None
    unfinished: Count | None = None


class GroupPart(Part):
    """Before and after for one group of requests; dimension: by what they were grouped."""

    dimension: Words
    group: Words
    requests: Some
    current: GroupFigures
    best: GroupFigures


class SearchPart(Part):
    """What the search cost. random_*: the random search that was given as many simulated steps.

    knobs: fields of Setting that were searched. window_trials: trials of either search that were judged on a few
    windows of the traffic only; what leads there was replayed on all of it.
    """

    sampler: Words
    knobs: tuple[Words, ...]
    window_trials: Count
    seed: Count
    trials: Count
    simulated_steps: Count
    random_trials: Count
    random_simulated_steps: Count


class CurvePart(Part):
    """Time of one step by its tokens, for the plot. idle_s: one fresh prompt; live_s: with the decodes that ran.

    running_mean, context_mean_tokens: requests being answered and the KV entries they read, on average over the run
    of the setting in force. knee_live_tokens: the knee at that context ("inf": nothing grows with the tokens).
    """

    tokens: tuple[Some, ...]
    idle_s: tuple[float, ...]
    live_s: tuple[float, ...]
    running_mean: Annotated[float, Field(ge=0)]
    context_mean_tokens: Annotated[float, Field(ge=0)]
    knee_live_tokens: Number

    @model_validator(mode="after")
    def _even(self) -> "CurvePart":
        if not len(self.tokens) == len(self.idle_s) == len(self.live_s):
            raise ValueError("tokens, idle_s and live_s must be of one length")
        return self


class BarsPart(Part):
    """Steps in a row, at most BARS bars, as columns. A bar is ``steps`` neighbouring steps: when the first began, how
    long all took, decode and prefill tokens of one of them on average, and the longest of them.
    """

    start_s: tuple[float, ...]
    duration_s: tuple[Annotated[float, Field(gt=0)], ...]
    steps: tuple[Some, ...]
    decode_tokens: tuple[Annotated[float, Field(ge=0)], ...]
    prefill_tokens: tuple[Annotated[float, Field(ge=0)], ...]
    longest_s: tuple[Annotated[float, Field(ge=0)], ...]

    @model_validator(mode="after")
    def _even(self) -> "BarsPart":
        names = ("start_s", "duration_s", "steps", "decode_tokens", "prefill_tokens", "longest_s")
        if len({len(getattr(self, name)) for name in names}) != 1 or len(self.start_s) > BARS:
            raise ValueError(f"the columns must be of one length, at most {BARS}")
        return self


class TimelinePart(Part):
    """The stretch in which most went wrong with the setting in force, step by step, before and after.

    minute_start_s, minute_s: the window in which most requests arrived that missed a target; bad_current, bad_best:
    how many of them did, under each setting. start_s, length_s: the part of it that is shown. exact: False when the
    steps come from a replay that began in mid-traffic.
    """

    minute_start_s: Annotated[float, Field(ge=0)]
    minute_s: Annotated[float, Field(gt=0)]
    requests: Count
    bad_current: Count
    bad_best: Count
    start_s: Annotated[float, Field(ge=0)]
    length_s: Annotated[float, Field(gt=0)]
    exact: bool
    current: BarsPart
    best: BarsPart


class FeasiblePart(Part):
    """The rate at which ``best`` would meet every target, by bisection: scale times the traffic's own rate.

    Null when it missed one at every rate tried. width: how far the next rate tried above is, relative.
    """

    scale: Annotated[float, Field(gt=0)] | None
    rate_rps: Annotated[float, Field(gt=0)] | None
    width: Annotated[float, Field(ge=0)] | None
    lowest_scale: Annotated[float, Field(gt=0)]
    replays: Some


class RunRecord(Part):
    """One recommendation. made_at: UTC, ISO 8601. noise: half-width of the 90 % interval of the change in attainment.

    current_source: whether the setting in force was given or assumed (the engine's default). binding: index into
    ``targets`` of the target that limits the outcome. twin_error: relative error of the twin's quantiles against
    measured ones by name; empty when the twin has not been compared with the engine. burst_attainment: good share of
    ``best`` when the same requests come with a burst (twice as fast, for a tenth of the time). feasible: only when
    nothing meets every target.
    """

    schema_name: Literal["rooftune.run-record"] = Field(alias="schema")
    version: Literal[2]
    made_at: Words
    made_by: Words
    verdict: Verdict
    objective: Literal["goodput", "tokens_per_s"]
    profile: Words | None
    targets: tuple[TargetPart, ...]
    traffic: TrafficPart
    step_model: StepModelPart
    engine: EnginePart
    current: TrialPart
    current_source: Source
    best: TrialPart
    random_best: TrialPart
    noise: Share | None
    burst_attainment: Share | None
    binding: Count | None
    feasible: FeasiblePart | None
    curve: CurvePart
    timeline: TimelinePart | None
    search: SearchPart
    trials: tuple[TrialPart, ...]
    groups: tuple[GroupPart, ...]
    twin_error: dict[str, float]

    @property
    def moves(self) -> bool:
        """Whether there is anything to set."""
        return self.best.setting != self.current.setting

    @model_validator(mode="after")
    def _consistent(self) -> "RunRecord":
        if self.binding is not None and self.binding >= len(self.targets):
            raise ValueError(f"binding is {self.binding}, must be below the number of targets {len(self.targets)}")
        if not (self.current.whole_traffic and self.best.whole_traffic and self.random_best.whole_traffic):
            raise ValueError("current, best and random_best must be judged on the whole traffic")
        for trial in (self.current, self.best, self.random_best, *self.trials):
            if len(trial.margins) != len(self.targets):
                raise ValueError(f"a trial has {len(trial.margins)} margins, must be {len(self.targets)}, one a target")
        return self


def json_text(part: Part, *, indent: int | None = None) -> str:
    """A part as JSON, keys in the order of its fields, on one line unless ``indent`` is given; ends in a newline."""
    values = part.model_dump(mode="json", by_alias=True)
    return json.dumps(values, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def first_problem(error: ValidationError, where: str, remedy: str) -> InputError:
    """The first thing that a schema refused, as one line: file, key, what is wrong with the value, what to do."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(step) for step in first["loc"]) or "the file"
    return InputError(f"{where}: {place}: {first['msg']}; {remedy}")
