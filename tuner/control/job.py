"""The child process's job and its answer: JSON, so that nothing is pickled; pydantic checks both strictly."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rooftune.policies.errors import RefusedError, bad_value
from rooftune.policies.guard import GuardLimits
from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo
from rooftune.policies.step_time import StepModel
from rooftune.tuner.control.outcome import LoadPart, ProposalPart, TwinPart
from rooftune.tuner.record import Count, Part, Share, Some
from rooftune.tuner.search.lessons import LiveResult
from rooftune.tuner.sim.engine import Engine


class WorkerFault(StrEnum):
    """How a child failed."""

    DIED = "died"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    NONSENSE = "nonsense"
    REFUSED = "refused"  # the child's own InputError, with its message


class WorkerError(RefusedError):
    """The child process gave no answer; says nothing about any setting."""

    def __init__(self, fault: WorkerFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True)
class Limits:
    """What a child may use.

    timeout_s: for one job, the first one compiles the twin (10 to 20 s). idle_exit_s: without a job, then it is gone.
    memory_bytes: private memory of the child (RLIMIT_DATA). nice: 0..19. cpus: most cores that it may run on.
    """

    timeout_s: float = 180.0
    idle_exit_s: float = 120.0
    memory_bytes: int = 2 << 30
    nice: int = 15
    cpus: int = 2

    def __post_init__(self) -> None:
        for name in ("timeout_s", "idle_exit_s"):
            if not 0.0 < getattr(self, name) < 1e6:
                raise bad_value(name, getattr(self, name), "above 0 s and below 1e6 s", "correct it")
        if self.memory_bytes < 1 << 20:
            raise bad_value("memory_bytes", self.memory_bytes, "at least 1 MiB", "the twin takes about 300 MB")
        if not 0 <= self.nice <= 19 or self.cpus < 1:
            raise bad_value("nice, cpus", (self.nice, self.cpus), "within 0..19, and at least 1", "correct them")


class WindowPart(Part):
    """The window's requests by arrival, as columns; instants in seconds since the window's start.

    Those that arrived before it, below 0 s, were in the engine when it began. scheduled_s: first scheduling, or the
    arrival where the engine does not tell. longest_gap_s: 0 for requests without gaps. gap_over: a row of counts for
    each of gap_bounds_s. produced_tokens: output so far; empty: all have ended. A request with less than its
    output_tokens has not: these are assumed, finish_s is the instant of its latest token, and an instant that it has
    not reached is null.
    """

    arrival_s: tuple[float, ...]
    scheduled_s: tuple[float | None, ...]
    ttft_s: tuple[float | None, ...]
    finish_s: tuple[float | None, ...]
    longest_gap_s: tuple[float, ...]
    prompt_tokens: tuple[Some, ...]
    cached_tokens: tuple[Count, ...]
    output_tokens: tuple[Some, ...]
    gap_count: tuple[Count, ...]
    gap_bounds_s: tuple[float, ...] = ()
    gap_over: tuple[tuple[Count, ...], ...] = ()
    produced_tokens: tuple[Count, ...] = ()


# (start_s, from_s, until_s): a block begins at start_s with what is in the engine; its requests arrive from from_s on.
Span = tuple[float, float, float]


class Job(Part):
    """One window to judge and to search; with ``expect``, to foretell blocks of a trial instead.

    draws: other step models that the data allows. noise_modelled_s, noise_measured_s: the same steps twice, for the
    twin's step noise (empty: none). base: the setting in force, under which the window ran and from which the search
    goes out; boot: without a lease. bounds: knob -> (least, greatest) within envelope, operator's bounds and trust
    region; other knobs are not searched. study, storage: name and Optuna URL of the trials (None: memory). live:
    settings that ran live, newest first. headroom, horizon_s, largest_ratio: see ``Question`` of
    tuner/search/live.py. expect: blocks of the window, on its clock, to foretell under ``base`` and ``after``.
    """

    window: WindowPart
    engine: Engine
    model: StepModel
    draws: tuple[StepModel, ...] = ()
    noise_modelled_s: tuple[float, ...] = ()
    noise_measured_s: tuple[float, ...] = ()
    slo: Slo
    base: Setting
    boot: Setting
    bounds: dict[str, tuple[float, float]]
    trials: Some = 100
    seed: Count = 0
    study: str = "live"
    storage: str | None = None
    live: tuple[LiveResult, ...] = ()
    headroom: Annotated[float, Field(ge=0)] = GuardLimits.headroom
    horizon_s: Annotated[float, Field(gt=0)] = 600.0
    largest_ratio: Annotated[float, Field(gt=1)] = GuardLimits.largest_ratio
    expect: tuple[Span, ...] = ()
    after: Setting | None = None


class SearchAnswer(Part):
    """twin: how well it predicts the window. proposal: None when the twin was not good enough to search on; load: then,
    and for a window without a rate, None, too."""

    twin: TwinPart
    proposal: ProposalPart | None
    load: LoadPart | None = None


class Expected(Part):
    """The answer to ``Job.expect``: for each block the share of its requests that are good on the twin, the mean of
    both settings; None for a block without requests."""

    shares: tuple[Share | None, ...]


Answer = SearchAnswer | Expected
