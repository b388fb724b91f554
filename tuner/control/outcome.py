"""A cycle's record: the loop returns it, the store keeps it, every page and command reads it.

Versioned JSON values. Reasons are codes; ``tuner.control.explain`` turns them into sentences. Missing is null, never 0.
Shares are 0..1.
"""

from enum import StrEnum
from typing import Annotated, Literal, TypedDict

from pydantic import Field

from rooftune.policies.guard import Action, Reason
from rooftune.tuner.record import Count, Part, Seconds, Share, Words

Knobs = dict[str, Annotated[int | float, Field(ge=0)]]  # fields of policies.request.Setting
Amount = float | None  # any finite number; null: unknown


class Stage(StrEnum):
    """The stages of a cycle; the keys of ``CycleRecord.took_s``."""

    OBSERVE = "observe"
    FIT = "fit"
    CALIBRATE = "calibrate"
    PROPOSE = "propose"
    DECIDE = "decide"
    PUSH = "push"
    VERIFY = "verify"


class Figures(Part):
    """A window's requests against the targets; goodput_rps: good requests per second of the window."""

    requests: Count
    span_s: Annotated[float, Field(ge=0)]
    attainment: Share | None
    goodput_rps: Annotated[float, Field(ge=0)] | None
    ttft_p50_s: Seconds
    ttft_p95_s: Seconds
    ttft_p99_s: Seconds
    queue_p99_s: Seconds
    tpot_p95_s: Seconds
    longest_gap_p50_s: Seconds
    longest_gap_p99_s: Seconds
    failed: Count
    preemptions: Count


class FitPart(Part):
    """The accepted step model. Null knee: the data does not show one (codes say why).

    intervals: coefficient -> (low, high) in its unit, nominal 95 %; null: unbounded.
    """

    coefficients: dict[str, Annotated[float, Field(ge=0)]]
    intervals: dict[str, tuple[Amount, Amount]] = Field(default_factory=dict)
    knee_tokens: Amount
    knee_low_tokens: Amount
    knee_high_tokens: Amount
    steps: Count
    spread: Annotated[float, Field(ge=0)]
    seen_low_tokens: Annotated[float, Field(ge=0)]
    seen_high_tokens: Annotated[float, Field(ge=0)]
    codes: tuple[Words, ...]
    drift_ratio: Amount = None  # measured over modelled step time since the model was accepted; null: no alarm


class FigurePart(Part):
    """What the twin foretold of one figure beside what was observed: seconds, or a share (``unit``).

    half_width: sampling error of their difference, in the same unit; null: unknown.
    """

    unit: Literal["s", "share"]
    foretold: Amount
    observed: Amount
    half_width: Amount
    verdict: Literal["good", "not_good", "too_few"]


class TwinPart(Part):
    """The twin compared with the window. errors: predicted / observed - 1 by name, such as "ttft p95".

    figures: what the verdict rests on, by name: the good share and each target's own quantile. worst_error: the largest
    absolute error among all judged latencies. missing_requests: what a window that is
    too small lacks, roughly.
    """

    verdict: Literal["good", "not_good", "too_few"]
    worst_error: Amount
    attainment_error: Amount  # predicted minus observed attainment of the setting in force
    errors: dict[str, float]
    figures: dict[str, FigurePart] = Field(default_factory=dict)
    missing_requests: Count | None = None


class Carries(Part):
    """What one setting carries, by the latest search; null: not known. busy_share: of the time of its window."""

    sustainable_rps: Annotated[float, Field(ge=0)] | None = None
    busy_share: Share | None = None


class LoadPart(Part):
    """Requests per second that arrive, and that settings carry: at which a queue does not grow.

    offered_rps: in this cycle's window, whether they have ended or not; in an answer of the child, in its window.
    proposed: of the search's proposal. overload: more arrives than anything carries with headroom, or (in a cycle) than
    what is in force carries.
    """

    offered_rps: Annotated[float, Field(ge=0)] | None
    in_force: Carries = Carries()
    boot: Carries = Carries()
    proposed: Carries = Carries()
    overload: bool = False


class ProposalPart(Part):
    """The search's result for this window. attainment_now, attainment_proposed: on the twin.

    gain: proposed minus in force, near live trials with the correction of docs/decisions/016-live-trials.md. Without
    targets gain and noise are relative, in tokens per second. trials, simulated_steps: of the Optuna search alone.
    live_trials: in the same study. random_attainment: the best of a random search with random_steps; equal_attainment:
    Optuna's best with the same number of steps; null without a search. path: the steps that pushes take towards a far
    proposal, each with its share on the twin, the proposal left out.
    """

    setting: Knobs
    verdict: Literal["change", "keep", "infeasible"]
    attainment_now: Share | None
    attainment_proposed: Share | None
    gain: Amount
    noise: Amount
    binding: Words | None  # the limiting target, in words
    trials: Count
    simulated_steps: Count
    live_trials: Count = 0
    random_trials: Count = 0
    random_steps: Count = 0
    random_attainment: Share | None = None
    equal_attainment: Share | None = None
    path: tuple[tuple[Knobs, Share], ...] = ()


class VerifyPart(Part):
    """A push compared with its prediction, see ``rooftune.policies.verify``. push_cycle: the cycle that pushed.

    pairs: that are counted; look_pairs: at which the next look is due, null after the last one. arm: the setting whose
    turn it is, null in a record of an earlier release; block of ``blocks``: 0 on the ramp. turn_left_s: until the other
    setting's turn, null when none follows. twin_slope: how far gain and half_width lean on what the twin says of each
    block's own arrivals, 0..1; null: not at all.
    """

    push_cycle: Count
    verdict: Literal["better", "worse", "inconclusive"]
    reason: Words
    predicted_gain: Amount
    observed_gain: Amount
    half_width: Amount
    requests: Count
    prediction_held: bool
    crossed: tuple[Words, ...] = ()
    pairs: Count = 0
    look_pairs: Count | None = None
    arm: Literal["ramp", "old", "new"] | None = None
    block: Count = 0
    blocks: Count = 0
    turn_left_s: Seconds = None
    twin_slope: Share | None = None


class ProbationPart(Part):
    """The kept setting against what was expected of it, see ``rooftune.policies.proof.probation``.

    push_cycle: the cycle that pushed it. observed: share of good requests in the latest block; boot: the boot
    setting's when last seen under like traffic; waiting: mean queue of the block; pace: measured over modelled time of
    decodes alone, against the first block.
    """

    push_cycle: Count
    standing: Literal["holds", "lower", "overload", "lost"]
    expected: Share | None
    observed: Share | None
    boot: Share | None
    waiting: Annotated[float, Field(ge=0)]
    offered_rps: Annotated[float, Field(ge=0)]
    pace: Amount = None


class SignalPart(Part):
    """One finding about the engine, with its evidence. code: a ``Signal``."""

    code: Words
    evidence: dict[str, float]


class CycleRecord(Part):
    """One cycle. number: ascends over restarts of the controller. reason: of ``action``.

    in_force: the setting at the end of the cycle, if known; pushed: the pushed changes (live only); would_push: those
    that shadow mode held back. boot_id, revision: the engine's, null when it was not read. trust: half-width of the
    trust region as a ratio (2.0: half to double the setting in force). spent_slo_s: SLO-seconds that trials cost today
    so far. probation: of a kept setting, in the cycle that ends a block. pause_left_s: without pushes after a kept
    setting was lost. detail: for people, one line.
    """

    schema_name: Literal["rooftune.cycle"] = Field(default="rooftune.cycle", alias="schema")
    version: Literal[1] = 1
    number: Count
    started_at_s: float  # wall clock, seconds since 1970
    mode: Literal["shadow", "live"]
    action: Action
    reason: Reason
    took_s: dict[Stage, Annotated[float, Field(ge=0)]]
    engine: Words
    boot_id: Words | None = None
    revision: Count | None = None
    in_force: Knobs | None = None
    pushed: Knobs | None = None
    would_push: Knobs | None = None
    lease_left_s: Seconds = None
    lost_steps: Count = 0
    lost_requests: Count = 0
    metrics_age_s: Seconds = None
    observed: Figures | None = None
    fit: FitPart | None = None
    twin: TwinPart | None = None
    proposal: ProposalPart | None = None
    load: LoadPart | None = None
    verify: VerifyPart | None = None
    probation: ProbationPart | None = None
    pause_left_s: Seconds = None
    signals: tuple[SignalPart, ...] = ()
    trust: Annotated[float, Field(ge=1)] | None = None
    spent_slo_s: Annotated[float, Field(ge=0)] = 0.0
    detail: Words = ""

    @property
    def predicted_gain(self) -> float | None:
        """Of the push, made or held back. None without one, and for a step: the twin predicted where it leads."""
        moved = self.would_push if self.pushed is None else self.pushed
        if self.proposal is None or moved is None:
            return None
        whole = all(self.proposal.setting.get(name) == value for name, value in moved.items())
        return self.proposal.gain if whole else None


class RecordParts(TypedDict, total=False):
    """The fields of ``CycleRecord`` that a running cycle fills in."""

    boot_id: str | None
    revision: int | None
    in_force: Knobs | None
    pushed: Knobs | None
    would_push: Knobs | None
    lease_left_s: float | None
    lost_steps: int
    lost_requests: int
    metrics_age_s: float | None
    observed: Figures | None
    fit: FitPart | None
    twin: TwinPart | None
    proposal: ProposalPart | None
    load: LoadPart | None
    verify: VerifyPart | None
    probation: ProbationPart | None
    pause_left_s: float | None
    signals: tuple[SignalPart, ...]
    trust: float | None
    spent_slo_s: float
