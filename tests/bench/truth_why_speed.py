"""How much of the CPU sweep's errors is the machine's speed, and how often a perfect model would meet the bounds.

A perfect model is the twin itself: it plays the measured runs at speeds that differ from run to run as those of
repeats do, and it predicts them from one run whose speed differs as well. What is out of bounds then, no predictor
that knows only one run can avoid.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rooftune.policies.commands import Figure
from rooftune.policies.errors import InputError
from rooftune.policies.request import FloatArray
from rooftune.tuner.model.samples import StepSamples
from tests.bench.vllm_sweep import FITTED_CASE, FITTED_RUN, SEEDS, Twin, learn, predictions, speed_of
from tests.bench.vllm_sweep_data import Case, cases, outcomes_of, steps_of
from tests.bench.vllm_sweep_judge import LATENCIES, SHARES, Values, figures_of, judge

BUSY_RUN, LIKE_RUN = "a_64_t0_r1", "b_64_t0_r1"
# Steps are alike: as many tokens and requests, contexts within these factors (below the least they do not matter).
ALIKE_DECODE, ALIKE_PREFIX, LEAST_CONTEXT = 1.2, 1.4, 64.0
NARROW = (Case("a", 64, 0), Case("b", 64, 0), Case("a", 512, 0), Case("b", 4096, 0))
SPEEDS = np.arange(0.84, 1.161, 0.02)
OWN_SPEEDS = np.arange(0.93, 1.071, 0.01)
TRIALS = 400
NAMES = (*LATENCIES, *SHARES)


def why_speed() -> Iterator[Figure]:
    """The busy run beside steps of like content, the fitted run's own part, and a perfect model's chance."""
    runs = cases()
    ratio, groups = like_steps(steps_of(BUSY_RUN), steps_of(LIKE_RUN))
    yield Figure("sweep_a_64_to_b_64_like_mixed_steps", ratio, f"of their time, {groups} kinds of step")
    first = learn(FITTED_RUN, 1)
    for run in runs[FITTED_CASE]:
        twin = learn(run, 1)
        yield Figure(f"sweep_sequence_price_{run}", twin.cost.formula.sequence_s, "s a request")
        own = speed_of(twin, steps_of(run))
        yield Figure(f"sweep_a_64_speed_by_{run}", speed_of(twin, steps_of(BUSY_RUN)) / own, "of that run's")
        if run != FITTED_RUN:
            level = speed_of(first, steps_of(FITTED_RUN))
            yield Figure(f"sweep_speed_{run}", speed_of(first, steps_of(run)) / level, "of the fitted run's")
    for case in NARROW:
        speeds = allowed_speeds(case, runs[case])
        yield Figure(f"sweep_{case.name}_own_model_speeds_allowed", len(speeds), f"of {len(OWN_SPEEDS)}, 1 % apart")
    logs = [[math.log(speed_of(first, steps_of(run))) for run in names] for names in runs.values()]
    repeats = [each for each in logs if len(each) > 1]
    free = sum(len(each) - 1 for each in repeats)
    between = math.sqrt(sum((len(each) - 1) * float(np.var(each, ddof=1)) for each in repeats) / free)
    yield Figure("sweep_speed_sd_of_repeats", between, f"fraction, {free} degrees of freedom")
    every = float(np.std([value for each in logs for value in each], ddof=1))
    yield Figure("sweep_speed_sd_of_all_runs", every, "fraction")
    grid = Grid.of(learn(FITTED_RUN, SEEDS), [case for case in runs if case != FITTED_CASE])
    for name, sd in (("repeats", between), ("all_runs", every)):
        latencies, shares = grid.trials(sd, runs)
        yield Figure(f"sweep_perfect_model_latencies_out_{name}", float(latencies.mean()), "of 55, mean of trials")
        yield Figure(f"sweep_perfect_model_latencies_all_in_{name}", float((latencies == 0).mean()), "share of trials")
        met = (latencies == 0) & (shares == 0)
        yield Figure(f"sweep_perfect_model_all_in_{name}", float(met.mean()), "share of trials")


def like_steps(one: StepSamples, other: StepSamples) -> tuple[float, int]:
    """Time of one run's mixed steps against the other's of like content, and the kinds of step both have twice.

    Raises InputError when there are none.
    """
    mine, theirs = _kinds(one), _kinds(other)
    both = [kind for kind in mine if min(len(mine[kind]), len(theirs.get(kind, []))) >= 2]
    if not both:
        raise InputError("the two runs have no mixed steps of like content; give runs under one budget")
    logs = [math.log(float(np.mean(mine[kind])) / float(np.mean(theirs[kind]))) for kind in both]
    weights = [1.0 / (1.0 / len(mine[kind]) + 1.0 / len(theirs[kind])) for kind in both]
    return math.exp(float(np.average(logs, weights=weights))), len(both)


def _kinds(steps: StepSamples) -> dict[tuple[int, ...], list[float]]:
    decode = _bins(steps.decode_context_tokens, ALIKE_DECODE)
    prefix = _bins(steps.prefill_context_tokens, ALIKE_PREFIX)
    found: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for row in np.flatnonzero(steps.prefill_tokens > 0):
        content = (steps.computed_tokens[row], steps.sequences[row], decode[row], prefix[row])
        found[tuple(map(int, content))].append(float(steps.duration_s[row]))
    return found


def _bins(context: FloatArray, factor: float) -> FloatArray:
    return np.asarray(np.floor(np.log(np.maximum(context, LEAST_CONTEXT)) / math.log(factor)))


def allowed_speeds(case: Case, names: Sequence[str]) -> list[float]:
    """Speeds at which a fit of the runs themselves, with their own scatter, meets every bound of their setting."""
    measured = [figures_of(outcomes_of(run)) for run in names]
    twins = [learn(run, SEEDS // 2) for run in names]
    return [
        float(speed)
        for speed in OWN_SPEEDS
        for predicted in [[values for twin in twins for values in predictions(twin, case, float(speed))]]
        if not any(row.out_of_bounds for row in judge(case.traffic, case.name, predicted, measured))
    ]


@dataclass(frozen=True, eq=False)
class Grid:
    """Figures of each setting at each of SPEEDS, shape (speeds, seeds, figures)."""

    figures: dict[Case, FloatArray]

    @classmethod
    def of(cls, twin: Twin, settings: Sequence[Case]) -> "Grid":
        found = {}
        for case in settings:
            rows = [[[v[n] for n in NAMES] for v in predictions(twin, case, float(speed))] for speed in SPEEDS]
            found[case] = np.array(rows)
        return cls(found)

    def at(self, case: Case, speed: float) -> list[Values]:
        """The figures at a speed between two of the grid's, one a seed."""
        place = float(np.clip(np.interp(speed, SPEEDS, np.arange(len(SPEEDS))), 0.0, len(SPEEDS) - 1.001))
        low, share = int(place), place - int(place)
        values = (1.0 - share) * self.figures[case][low] + share * self.figures[case][low + 1]
        return [dict(zip(NAMES, map(float, row), strict=True)) for row in values]

    def trials(self, sd: float, runs: dict[Case, list[str]]) -> tuple[FloatArray, FloatArray]:
        """Latencies and shares out of bounds in each trial. sd: of the log of a run's speed; one seed is one run."""
        rng = np.random.default_rng(0)
        out = np.zeros((2, TRIALS))
        for trial in range(TRIALS):
            fitted = math.exp(float(rng.normal(0.0, sd)))
            for case in self.figures:
                seen = [
                    self.at(case, math.exp(float(rng.normal(0.0, sd))))[int(rng.integers(SEEDS))] for _ in runs[case]
                ]
                for row in judge(case.traffic, case.name, self.at(case, fitted), seen):
                    out[int(row.is_share), trial] += row.out_of_bounds
        return out[0], out[1]
