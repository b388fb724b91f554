"""What is outside the step, learned from stamps: before the scheduler, between two steps, and on the way to the client.

An engine hands a request to its scheduler only between two steps. The twin waits for that by itself, so the constant
``before_s`` is what a request needs when no step is in its way.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.outcomes import Outcomes
from rooftune.policies.request import FloatArray, IntArray, Setting
from rooftune.policies.step_time import StepCost, StepModel, priced
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.noise import QUIET, StepNoise
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.traffic.workload import Traffic

BoolArray = npt.NDArray[np.bool_]

MIN_STEPS = 40
# With fewer requests that found the engine idle, the quickest of all stand for them.
MIN_IDLE_REQUESTS = 5
_QUICKEST = 0.05
# Host times above this quantile are cut: a pause of the process says nothing about the next step.
_CUT = 0.995


@dataclass(frozen=True, kw_only=True)
class Outside:
    """Constants outside the step, in seconds, at least 0; None: the stamps that would show it were not given.

    before_s: from arrival until the scheduler could see the request. host_s + host_sequence_s * requests in the
    step: between two steps. after_first_s, after_last_s: from the engine's first and last token to the client.
    idle_requests: requests behind before_s that found the engine idle (0: taken from the quickest of all).
    """

    before_s: float = 0.0
    host_s: float = 0.0
    host_sequence_s: float = 0.0
    after_first_s: float | None = None
    after_last_s: float | None = None
    idle_requests: int = 0

    def __post_init__(self) -> None:
        for name in ("before_s", "host_s", "host_sequence_s", "after_first_s", "after_last_s"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < 3600.0:
                raise bad_value(name, value, "within 0..3600 s", "check the stamps' unit and clock")


@dataclass(frozen=True, eq=False)
class RequestStamps:
    """Instants of requests on the engine's clock (s), shape (n,) each; arrived at the API, handed to the scheduler.

    first_token_s, last_token_s, client_first_s, client_last_s: empty when not recorded.
    """

    arrival_s: FloatArray
    handed_s: FloatArray
    first_token_s: FloatArray
    last_token_s: FloatArray
    client_first_s: FloatArray
    client_last_s: FloatArray


@dataclass(frozen=True, eq=False)
class StepStamps:
    """Steps in order: start and end (s, engine's clock), requests in each, and whether it found work left waiting.

    follows: True when the engine had work since the step before, so that the time between both is the host's.
    """

    start_s: FloatArray
    end_s: FloatArray
    sequences: IntArray
    follows: BoolArray


def learn_outside(requests: RequestStamps, steps: StepStamps) -> Outside:
    """The constants of one window. Raises InputError for too few steps or requests, or stamps that go backwards."""
    host_s, host_sequence_s = _host_time(steps)
    before_s, idle = _before(requests, steps)
    return Outside(
        before_s=before_s,
        host_s=host_s,
        host_sequence_s=host_sequence_s,
        after_first_s=_median_after(requests.first_token_s, requests.client_first_s, "first token"),
        after_last_s=_median_after(requests.last_token_s, requests.client_last_s, "last token"),
        idle_requests=idle,
    )


def with_host_time(model: StepModel | StepCost, outside: Outside) -> StepCost:
    """The model with the host's time in every step. A formula takes it as overhead, also for budget policies."""
    cost = priced(model)
    if len(cost.base_s) == 0:
        formula = cost.formula
        return cost._replace(
            formula=formula._replace(
                overhead_s=formula.overhead_s + outside.host_s, sequence_s=formula.sequence_s + outside.host_sequence_s
            )
        )
    each_s = outside.host_sequence_s * np.arange(len(cost.sequences_s))
    return cost._replace(
        base_s=cost.base_s + outside.host_s,
        sequences_s=cost.sequences_s + each_s,
        sequence_s=cost.sequence_s + outside.host_sequence_s,
    )


def predict(
    traffic: Traffic,
    engine: Engine,
    setting: Setting,
    model: StepModel | StepCost,
    outside: Outside,
    noise: StepNoise = QUIET,
) -> Outcomes:
    """What the twin expects of the traffic, times outside the step included; latencies count from the arrival."""
    handed = replace(traffic, arrival_s=traffic.arrival_s + outside.before_s)
    run = simulate(handed, engine, setting, with_host_time(model, outside), noise=noise)
    return replace(run.outcomes, arrival_s=traffic.arrival_s)


def _host_time(steps: StepStamps) -> tuple[float, float]:
    """Line through the times between steps over the requests in the step, both parts at least 0."""
    pause_s = steps.start_s[1:] - steps.end_s[:-1]
    kept = steps.follows[1:]
    if int(kept.sum()) < MIN_STEPS:
        raise InputError(
            f"{int(kept.sum())} steps follow another, at least {MIN_STEPS} are needed; give a longer window"
        )
    pause_s, sequences = pause_s[kept], steps.sequences[1:][kept].astype(np.float64)
    if pause_s.min() < -1e-3:
        raise bad_value(
            "time between two steps", float(pause_s.min()), "at least 0 s", "sort the steps, check the clock"
        )
    pause_s = np.clip(pause_s, 0.0, float(np.quantile(pause_s, _CUT)))
    centred = sequences - sequences.mean()
    varies = float(centred @ centred)
    each = max(float(centred @ pause_s) / varies, 0.0) if varies > 0.0 else 0.0
    base = float(pause_s.mean()) - each * float(sequences.mean())
    if base < 0.0:  # through the origin instead
        return 0.0, float(sequences @ pause_s) / float(sequences @ sequences)
    return base, each


def _before(requests: RequestStamps, steps: StepStamps) -> tuple[float, int]:
    """Median time to the scheduler of requests that arrived while the engine had nothing to do."""
    if len(requests.arrival_s) == 0:
        raise InputError("no request stamps in the window; give a window with requests")
    taken_s = requests.handed_s - requests.arrival_s
    if taken_s.min() < 0.0:
        raise bad_value(
            "time to the scheduler", float(taken_s.min()), "at least 0 s", "take both stamps from one clock"
        )
    upcoming = np.searchsorted(steps.start_s, requests.arrival_s, side="right")
    inside = np.clip(upcoming, 1, len(steps.start_s) - 1)
    idle = (upcoming == inside) & ~steps.follows[inside]
    idle &= (requests.arrival_s >= steps.end_s[inside - 1]) & (requests.handed_s <= steps.start_s[inside])
    if int(idle.sum()) >= MIN_IDLE_REQUESTS:
        return float(np.median(taken_s[idle])), int(idle.sum())
    return float(np.quantile(taken_s, _QUICKEST)), 0


def _median_after(engine_s: FloatArray, client_s: FloatArray, what: str) -> float | None:
    if len(engine_s) == 0 or len(client_s) == 0:
        return None
    after_s = float(np.median(client_s - engine_s))
    if after_s < 0.0:
        raise bad_value(f"time of the {what} to the client", after_s, "at least 0 s", "use one clock")
    return after_s
