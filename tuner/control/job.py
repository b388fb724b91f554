"""What the controller asks its child process, and what it answers: JSON values, so that nothing is pickled."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rooftune.policies.errors import RefusedError
from rooftune.tuner.control.outcome import Figures, Knobs, ProposalPart, TwinPart
from rooftune.tuner.record import Count, Part, Share, Some


class WorkerFault(StrEnum):
    """How a child failed."""

    DIED = "died"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    NONSENSE = "nonsense"
    REFUSED = "refused"  # the child's own InputError: the message says what


class WorkerError(RefusedError):
    """The child process did not answer. Nothing follows from it about any setting."""

    def __init__(self, fault: WorkerFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class WindowPart(Part):
    """Finished requests of the window in order of arrival, as columns; times in seconds from ``start`` of the window.

    Instants count on the engine's clock. longest_gap_s: 0 for requests without gaps. gap_over: a row of counts for
    each of gap_bounds_s.
    """

    arrival_s: tuple[float, ...]
    ttft_s: tuple[float, ...]
    finish_s: tuple[float, ...]
    longest_gap_s: tuple[float, ...]
    prompt_tokens: tuple[Some, ...]
    cached_tokens: tuple[Count, ...]
    output_tokens: tuple[Some, ...]
    gap_count: tuple[Count, ...]
    gap_bounds_s: tuple[float, ...] = ()
    gap_over: tuple[tuple[Count, ...], ...] = ()


class EngineFacts(Part):
    """The twin's engine as it runs now: see ``Engine`` of tuner/sim/engine.py and ``Boot`` of policies/request.py."""

    ceiling_tokens: Some
    kv_blocks: Some
    block_tokens: Some
    sequence_ceiling: Some
    chunking: bool = True
    keep_decodes_moving: bool = True
    plan_ahead: bool = False
    outside_first_s: Annotated[float, Field(ge=0)] = 0.0
    outside_token_s: Annotated[float, Field(ge=0)] = 0.0


class TargetRow(Part):
    """One target: metric of ``rooftune.policies.slo.Metric``, bound in seconds, quantile in 0..1."""

    metric: str
    bound_s: Annotated[float, Field(gt=0)]
    quantile: Annotated[float, Field(gt=0, le=1)]


class OverrideRow(Part):
    """Targets of their own for some requests: see ``Override``; prompt and output limits inclusive."""

    min_prompt_tokens: Count | None = None
    max_prompt_tokens: Count | None = None
    min_output_tokens: Count | None = None
    max_output_tokens: Count | None = None
    cached: bool | None = None
    targets: tuple[TargetRow, ...]


class LiveTrial(Part):
    """A setting that ran live for a window: told to the study, marked as live, never mixed with twin trials."""

    setting: Knobs
    attainment: Share
    goodput_rps: Annotated[float, Field(ge=0)]
    requests: Count
    twin_attainment: Share | None


class Job(Part):
    """One window to judge and to search.

    model, draws: coefficients of ``rooftune.policies.step_time.StepModel``; draws: other models that the data allows.
    noise_modelled_s, noise_measured_s: the same steps twice, for the twin's step noise (empty: none).
    current: the setting under which the window ran. base: the setting to search from (the one in force now).
    bounds: knob -> (least, greatest) allowed, the meet of envelope, operator's bounds and trust region; a knob that
    is not named is not searched. study, storage: name and Optuna URL for trials to be kept under (None: memory).
    """

    window: WindowPart
    engine: EngineFacts
    model: dict[str, Annotated[float, Field(ge=0)]]
    draws: tuple[dict[str, Annotated[float, Field(ge=0)]], ...] = ()
    noise_modelled_s: tuple[float, ...] = ()
    noise_measured_s: tuple[float, ...] = ()
    targets: tuple[TargetRow, ...]
    overrides: tuple[OverrideRow, ...] = ()
    current: Knobs
    base: Knobs
    bounds: dict[str, tuple[float, float]]
    trials: Some = 100
    seed: Count = 0
    study: str = "live"
    storage: str | None = None
    live: tuple[LiveTrial, ...] = ()


class Answer(Part):
    """twin: how well it predicts the window. proposal: None when the twin was not good enough to search on.

    predicted_now, predicted_proposed: the window replayed under ``current`` and under the proposal.
    """

    twin: TwinPart
    proposal: ProposalPart | None
    predicted_now: Figures | None
    predicted_proposed: Figures | None
    took_s: Annotated[float, Field(ge=0)]
