"""What bench ``vllm-prediction`` makes of the protocol's rows: stamps, figures, the twin learned from one round. Pure.

The protocol tells no single gap, but the steps do: while no decode is passed over, every decode of a step waited from
the end of the step before to the end of this one. So the gaps of a round are the times between the ends of its steps,
each as often as the step decoded; ``outcomes`` refuses rows in which that does not add up.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rooftune.policies.errors import RefusedError
from rooftune.policies.outcomes import Outcomes
from rooftune.policies.quantiles import quantile, weighted_quantile
from rooftune.policies.request import Setting
from rooftune.policies.step_time import StepModel, priced
from rooftune.tuner.control.cycle.fit import Learner, noise_pairs
from rooftune.tuner.model.roofline import predict as predict_steps
from rooftune.tuner.model.samples import StepSamples
from rooftune.tuner.observe.rows import FINISHED, BoolArray, RequestRows, StepRows
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.noise import noise_from_steps
from rooftune.tuner.traffic.workload import Traffic
from tests.bench.outside import RequestStamps, StepStamps, learn_outside, predict
from tests.bench.vllm_sweep import Twin
from tests.bench.vllm_sweep_judge import Judged

FIGURES = ("gap_p99", "longest_gap_p99", "ttft_p50", "ttft_p95", "tpot_p95")
# An instant that is a start plus a duration is off by the last bits.
ROUNDING_S = 1e-6

Values = Mapping[str, float]


def follows(steps: StepRows, requests: RequestRows) -> BoolArray:
    """Steps that the engine began with work left from the step before: a request of that one had not ended. (n,)"""
    found = np.zeros(len(steps), dtype=np.bool_)
    started_s, finished_s = np.sort(requests.scheduled_s), np.sort(requests.finish_s)
    begun = np.searchsorted(started_s, steps.start_s[:-1] + ROUNDING_S)
    ended = np.searchsorted(finished_s, steps.end_s[:-1] + ROUNDING_S)
    found[1:] = begun > ended
    return found


def stamps(steps: StepRows, requests: RequestRows) -> tuple[RequestStamps, StepStamps]:
    """For the constants outside the step. The first schedule stands for the hand-over, which no row tells: for
    requests that found the engine idle, by which the constant goes, they are one."""
    nothing = np.zeros(0)
    of_requests = RequestStamps(requests.arrival_s, requests.scheduled_s, nothing, nothing, nothing, nothing)
    # An end that is a rounding above the next start is no time that ran backwards.
    end_s = np.concatenate([np.minimum(steps.end_s[:-1], steps.start_s[1:]), steps.end_s[-1:]])
    return of_requests, StepStamps(steps.start_s, end_s, steps.sequences, follows(steps, requests))


def outcomes(steps: StepRows, requests: RequestRows) -> Outcomes:
    """A round as it was measured, requests in the order of their arrival.

    Raises RefusedError when a request did not finish or when the steps do not hold exactly the gaps of the requests.
    """
    if len(requests) == 0 or (requests.ended != FINISHED).any():
        raise RefusedError("a request of the round did not finish; see the server's log")
    rows = requests.select(np.lexsort((requests.sequence, requests.arrival_s)))
    decodes, gaps = int(steps.decode_tokens.sum()), int(rows.gap_count.sum())
    if decodes != gaps or steps.preemptions.any():
        raise RefusedError(f"the steps decoded {decodes} tokens and the requests have {gaps} gaps; rows are missing")
    kept = steps.decode_tokens[1:] > 0
    return Outcomes(
        arrival_s=rows.arrival_s,
        first_token_s=rows.arrival_s + rows.ttft_s,
        finish_s=rows.finish_s,
        prompt_tokens=rows.prompt_tokens,
        output_tokens=rows.output_tokens,
        scheduled_s=rows.scheduled_s,
        longest_gap_s=np.nan_to_num(rows.longest_gap_s),
        gap_count=rows.gap_count,
        gap_values_s=np.diff(steps.end_s)[kept],
        gap_weights=steps.decode_tokens[1:][kept].astype(np.float64),
    )


def traffic_of(measured: Outcomes) -> Traffic:
    """The round's requests as they reached the engine, from the first arrival on."""
    nothing = np.zeros(len(measured), dtype=np.int64)
    return Traffic(
        arrival_s=measured.arrival_s - measured.arrival_s[0],
        prompt_tokens=measured.prompt_tokens,
        output_tokens=measured.output_tokens,
        cached_tokens=nothing,
        tenant=nothing,
        name="live round",
    )


def figures_of(found: Outcomes) -> dict[str, float]:
    """``FIGURES`` of a round, measured or replayed, in seconds."""
    ttft_s = found.first_token_s - found.arrival_s
    several = found.output_tokens > 1
    tpot_s = (found.finish_s - found.first_token_s)[several] / (found.output_tokens[several] - 1)
    return {
        "gap_p99": weighted_quantile(found.gap_values_s, found.gap_weights, 0.99),
        "longest_gap_p99": quantile(found.longest_gap_s[several], 0.99),
        "ttft_p50": quantile(ttft_s, 0.5),
        "ttft_p95": quantile(ttft_s, 0.95),
        "tpot_p95": quantile(tpot_s, 0.95),
    }


def learn(steps: StepRows, requests: RequestRows, seeds: int) -> Twin:
    """The controller's own fit on these rows, with the steps' scatter and the constants outside the step."""
    learner = Learner()
    learner.take(steps)
    model = StepModel(**learner.fit().coefficients)
    modelled_s, measured_s = (np.array(column) for column in noise_pairs(model, steps, len(steps)))
    noises = tuple(noise_from_steps(modelled_s, measured_s, seed=seed) for seed in range(seeds))
    outside = learn_outside(*stamps(steps, requests))
    return Twin(priced(model), noises, outside, float(measured_s.sum() / modelled_s.sum()))


def predictions(twin: Twin, traffic: Traffic, engine: Engine, setting: Setting, speed: float = 1.0) -> list[Values]:
    """Figures of a setting, one for each seed. speed: factor on every step's time."""
    noises = [noise._replace(factors=noise.factors * speed) for noise in twin.noises]
    return [figures_of(predict(traffic, engine, setting, twin.cost, twin.outside, noise)) for noise in noises]


def judged(case: str, predicted: Sequence[Values], measured: Sequence[Values]) -> Iterator[Judged]:
    """All figures of a setting; predictions (one a seed) and repeats count as their means."""
    for name in FIGURES:
        repeats = [values[name] for values in measured]
        expected = float(np.mean([values[name] for values in predicted]))
        yield Judged("live", case, name, expected, float(np.mean(repeats)), max(repeats) - min(repeats))


def step_mape(twin: Twin, steps: StepSamples) -> float:
    """Mean relative error of the model, brought to its level, on single steps."""
    expected_s = twin.level * predict_steps(twin.cost.formula, steps)
    return float(np.mean(np.abs(expected_s / steps.duration_s - 1.0)))
