"""Bench ``vllm-sweep``: what a real vLLM did under other budgets, predicted from the steps of one run.

Fitted on one run of budget 512 on the mixed list (its steps, and its stamps for the constants outside the step);
predicted are every other setting on that list and, with the same fit, on the chat list. The machine's own speed
drifts between runs, which no model can know: a second reading corrects each run by its own speed alone and shows
what remains of the errors, the twin's share.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rooftune.policies.commands import Figure
from rooftune.policies.outcomes import Outcomes
from rooftune.policies.request import Boot
from rooftune.policies.step_time import StepCost, priced
from rooftune.tuner.model.fit import fit_steps, seen_before
from rooftune.tuner.model.reservoir import Reservoir
from rooftune.tuner.model.roofline import predict as predict_steps
from rooftune.tuner.model.samples import StepSamples, join
from rooftune.tuner.sim.calibrate import Fidelity, calibrate
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.noise import QUIET, StepNoise, noise_from_steps
from tests.bench.outside import Outside, learn_outside, predict
from tests.bench.shared_data import need_shared_data
from tests.bench.step_table import fit_table
from tests.bench.vllm_sweep_data import MAX_RUNNING, Case, cases, outcomes_of, stamps_of, steps_of, traffic_of
from tests.bench.vllm_sweep_judge import LATENCIES, SHARES, Judged, Values, figures_of, judge, ranking

FITTED_RUN = "b_512_t0_r1"
FITTED_CASE = Case("b", 512, 0)
# The pool was never full; the ceiling is what the server was started with.
ENGINE = Engine(
    Boot(4096, 16, chunking=1, reserve_whole_prompt=1, contents=0, keep_decodes_moving=0), 200_000, MAX_RUNNING
)
SEEDS = 16
SHORT_SEEDS = 4
RESERVOIR_STEPS = 2048
MAPE_AIM = 0.08


@dataclass(frozen=True, eq=False)
class Twin:
    """Learned from one run: prices of steps, their scatter (one noise per seed), the constants outside, and its level
    (all time measured to all time modelled)."""

    cost: StepCost
    noises: tuple[StepNoise, ...]
    outside: Outside
    level: float


def learn(run: str, seeds: int) -> Twin:
    """Fit on the steps and stamps of one run."""
    steps = steps_of(run)
    steps = steps.select(seen_before(steps))
    reservoir = Reservoir(RESERVOIR_STEPS)
    reservoir.add(steps)
    model = fit_steps(reservoir.samples).model
    modelled_s = predict_steps(model, steps)
    noises = tuple(noise_from_steps(modelled_s, steps.duration_s, seed=seed) for seed in range(seeds))
    level = float(steps.duration_s.sum() / modelled_s.sum())
    return Twin(priced(model), noises, learn_outside(*stamps_of(run)), level)


def predictions(twin: Twin, case: Case, speed: float = 1.0) -> list[Values]:
    """Figures of a setting, one for each seed. speed: factor on every step's time."""
    return [figures_of(outcomes) for outcomes in replays(twin, case, speed)]


def replays(twin: Twin, case: Case, speed: float = 1.0) -> list[Outcomes]:
    """What the twin expects of each request under a setting, one replay a seed."""
    traffic = traffic_of(case)
    noises = [noise._replace(factors=noise.factors * speed) for noise in twin.noises]
    return [predict(traffic, ENGINE, case.setting, twin.cost, twin.outside, noise) for noise in noises]


def speed_of(twin: Twin, steps: StepSamples) -> float:
    """Time of a run's steps against what the twin expects of the same steps (1.1 = 10 % slower)."""
    expected_s = twin.level * predict_steps(twin.cost.formula, steps)
    return float(steps.duration_s.sum() / expected_s.sum())


def bench(short: bool) -> Iterator[Figure]:
    """Errors over all settings but the fitted one; baselines: the aims. The full form adds every figure."""
    need_shared_data()
    runs = cases()
    others = {case: names for case, names in runs.items() if case != FITTED_CASE}
    measured = {case: [figures_of(outcomes_of(run)) for run in names] for case, names in runs.items()}
    twin = learn(FITTED_RUN, SHORT_SEEDS if short else SEEDS)
    rows = {case: _judge(case, predictions(twin, case), measured[case]) for case in runs}
    unknown = [row for case in others for row in rows[case]]
    yield from _summary(unknown, "")
    for figure, names in (("ranking_errors", SHARES), ("latency_ranking_errors", LATENCIES)):
        wrong, pairs = ranking([row for case in runs for row in rows[case]], names)
        yield Figure(figure, wrong, f"of {pairs} pairs")
    verdicts = [
        calibrate(expected, outcomes_of(run)).verdict
        for case, names in runs.items()
        for expected in [replays(twin, case)]
        for run in names
    ]
    yield Figure("runs_calibrated_good", verdicts.count(Fidelity.GOOD), f"of {len(verdicts)} runs")
    yield Figure("step_mape_a_from_b", _mape_a_from_b(runs), "fraction", baseline=MAPE_AIM)
    speeds = {case: [speed_of(twin, steps_of(run)) for run in names] for case, names in others.items()}
    yield Figure("least_speed_factor", min(min(each) for each in speeds.values()), "of the fitted run's")
    yield Figure("largest_speed_factor", max(max(each) for each in speeds.values()), "of the fitted run's")
    at_own = [row for case in others for row in _judge(case, _at(twin, case, speeds[case]), measured[case])]
    yield from _summary(at_own, "_at_own_speed")
    quiet = Twin(twin.cost, (QUIET,), twin.outside, twin.level)
    yield from _summary(
        [row for c in others for row in _judge(c, predictions(quiet, c), measured[c])], "_without_noise"
    )
    if not short:
        yield from _details(twin, [row for case in runs for row in rows[case]])


def _judge(case: Case, predicted: Sequence[Values], measured: Sequence[Values]) -> list[Judged]:
    return list(judge(case.traffic, case.name, predicted, measured))


def _at(twin: Twin, case: Case, speeds: Sequence[float]) -> list[Values]:
    return [values for speed in speeds for values in predictions(twin, case, speed)]


def _summary(rows: Sequence[Judged], suffix: str) -> Iterator[Figure]:
    latencies = [row for row in rows if not row.is_share]
    shares = [row for row in rows if row.is_share]
    out = sum(row.out_of_bounds for row in latencies)
    yield Figure(
        f"median_error{suffix}", float(np.median([abs(row.error) for row in latencies])), "fraction", baseline=0.1
    )
    yield Figure(f"figures_out_of_bounds{suffix}", out, f"of {len(latencies)}")
    worst = max(abs(row.error) for row in shares)
    yield Figure(f"goodput_error_points{suffix}", worst, "points at worst", baseline=6.0)
    yield Figure(f"goodput_out_of_bounds{suffix}", sum(row.out_of_bounds for row in shares), f"of {len(shares)}")


def _details(twin: Twin, rows: Sequence[Judged]) -> Iterator[Figure]:
    yield Figure("before_scheduler_s", twin.outside.before_s, f"s, {twin.outside.idle_requests} requests")
    yield Figure("host_s", twin.outside.host_s, "s a step")
    yield Figure("host_sequence_s", twin.outside.host_sequence_s, "s a request")
    for row in rows:
        mark = ", out of bounds" if row.out_of_bounds else ""
        yield Figure(f"{row.case}_{row.name}", row.predicted, ("points" if row.is_share else "s") + mark, row.measured)


def _mape_a_from_b(runs: dict[Case, list[str]]) -> float:
    """Error of step times of the chat list from a table of all steps of the mixed list (mean, relative)."""
    mixed, chat = (join(steps_of(run) for case in runs if case.traffic == t for run in runs[case]) for t in ("b", "a"))
    reservoir = Reservoir(RESERVOIR_STEPS)
    reservoir.add(mixed)
    return fit_table(mixed, fit_steps(reservoir.samples).model).mape(chat)
