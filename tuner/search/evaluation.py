"""What settings are tried on, what the search knows of each, and what it recommends. Values; nothing here runs."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from rooftune.policies.request import Setting
from rooftune.policies.slo import MarginRow, Slo
from rooftune.policies.step_time import StepCost, StepModel
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.noise import QUIET, StepNoise
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.traffic.reshape import scale_rate
from rooftune.tuner.traffic.workload import Traffic

Model = StepModel | StepCost


@dataclass(frozen=True)
class Case:
    """What settings are tried on. traffic: as that engine sees it. noise: of single steps."""

    traffic: Traffic
    engine: Engine
    model: Model
    slo: Slo
    noise: StepNoise = QUIET

    def at_rate(self, scale: float) -> Self:
        """The same with ``scale`` times the requests per second."""
        return replace(self, traffic=scale_rate(self.traffic, scale))


class Role(StrEnum):
    """Why a setting was tried."""

    CURRENT = "current"  # what the operator runs today, when stated
    DEFAULT = "engine_default"
    FORMULA = "formula"  # largest budget whose step time stays under the tightest gap or TPOT target
    KNEE = "knee"
    SWEEP = "sweep"  # budget sweep without a chunk cap, for the plot and as a baseline
    RANDOM = "random"  # the random-search baseline
    SEARCH = "search"  # Optuna


@dataclass(frozen=True)
class Evaluation:
    """One setting replayed on the twin under the traffic of the recommendation.

    margins: one row a target. missed: share of requests that miss each target by themselves, 0..1.
    feasible: every run-level margin <= 0. attainment: share of good requests, 0..1.
    goodput_rps: good requests per second of span. tokens_per_s: output tokens of finished requests per second.
    violation: sum of the positive margins, each capped (0 when feasible); the order among infeasible settings.
    Times in seconds. simulated_steps: steps the replay took (what the search pays). busy_share: of the replay's span,
    0..1. sustainable_rps: estimate of what the setting carries, NaN where nobody asked; carries: it is enough.
    """

    setting: Setting
    role: Role
    margins: tuple[MarginRow, ...]
    missed: tuple[float, ...]
    feasible: bool
    attainment: float
    goodput_rps: float
    tokens_per_s: float
    violation: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    longest_gap_p99_s: float
    tpot_p95_s: float
    longest_wait_s: float
    simulated_steps: int
    preempted: int
    refused: int
    busy_share: float = math.nan
    sustainable_rps: float = math.nan
    carries: bool = True
    whole_traffic: bool = True  # False: judged on a few windows of it, for a first look


class Advice(StrEnum):
    """What to do."""

    CHANGE = "change"  # the best setting beats the one in force by more than noise
    KEEP = "keep"  # the setting in force is within noise of the best
    INFEASIBLE = "infeasible"  # nothing meets every target; the least violating setting is named


@dataclass(frozen=True)
class Recommendation:
    """The outcome of one search.

    current: the setting in force (the engine's default unless the operator states another). best: the one to set
    (equal to ``current`` when the verdict is KEEP). evaluations: everything tried, in order. random_best: best of the
    random search given the same number of simulated steps. burst_attainment: good share of ``best`` when the
    traffic has a burst (see recommend). noise: half-width of the 90 % bootstrap interval of the
    attainment difference best - current, 0..1. results: full replays of current and best, for the before-and-after
    tables. sampler: name of the Optuna sampler. trials, simulated_steps: of the Optuna search.
    """

    verdict: Advice
    current: Evaluation
    best: Evaluation
    evaluations: tuple[Evaluation, ...]
    random_best: Evaluation
    noise: float
    current_result: RunResult
    best_result: RunResult
    sampler: str
    seed: int
    trials: int
    simulated_steps: int
    burst_attainment: float
    binding_target: MarginRow | None
