"""What a controller's search is asked and what it answers. Values only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rooftune.policies.request import Setting
from rooftune.policies.slo import MarginRow, Slo
from rooftune.policies.step_time import StepCost, StepModel
from rooftune.tuner.search.evaluation import Advice, Evaluation
from rooftune.tuner.search.lessons import LiveResult
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.noise import QUIET, StepNoise
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.traffic.workload import Traffic

Model = StepModel | StepCost


@dataclass(frozen=True, kw_only=True)
class Question:
    """One window to search on.

    base: the setting in force, from which the search goes out. bounds: knob -> (least, greatest); a knob that is not
    named is not searched. draws: other step models that the measurements allow. noise: of single steps. live: settings
    that ran live, newest first. now_error: observed minus predicted share of the setting in force. warm: settings worth
    a try, such as what was best for earlier windows.
    """

    traffic: Traffic
    engine: Engine
    model: Model
    slo: Slo
    base: Setting
    bounds: Mapping[str, tuple[float, float]]
    trials: int
    seed: int = 0
    draws: Sequence[Model] = ()
    noise: StepNoise = QUIET
    live: Sequence[LiveResult] = ()
    now_error: float = 0.0
    warm: Sequence[Setting] = ()


@dataclass(frozen=True)
class LiveProposal:
    """What the search came to. Shares of ``now``, ``best`` and ``leaders`` are the twin's with live corrections.

    twin_now, twin_best: the twin's alone. noise: half-width of the 90 % interval of best - now. trials,
    simulated_steps: of the Optuna search alone, the replays of its leaders included; live_trials: those that stood
    beside them in its study. random_best, equal_best: the best that random search found for random_steps, and Optuna
    for as many, both where the trials ran. now_result, best_result: their replays. batch: no targets.
    """

    verdict: Advice
    now: Evaluation
    best: Evaluation
    twin_now: float
    twin_best: float
    noise: float
    binding: MarginRow | None
    trials: int
    simulated_steps: int
    random_trials: int
    random_steps: int
    random_best: Evaluation | None
    equal_best: Evaluation | None
    live_trials: int
    leaders: tuple[Evaluation, ...]
    now_result: RunResult
    best_result: RunResult

    batch: bool = False

    @property
    def gain(self) -> float:
        """Share of good requests, best minus now; without targets the relative gain in tokens per second."""
        if self.batch:
            return self.best.tokens_per_s / max(self.now.tokens_per_s, 1e-9) - 1.0
        return self.best.attainment - self.now.attainment
