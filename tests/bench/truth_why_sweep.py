"""Why the CPU sweep is predicted as it is: what steps can tell, what a machine's drift does (decisions 010 and 012)."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from rooftune.policies.commands import Figure
from rooftune.policies.step_time import StepModel
from rooftune.tuner.model.fit import fit_steps, seen_before
from rooftune.tuner.model.reservoir import Reservoir
from rooftune.tuner.model.roofline import mape, predict
from rooftune.tuner.model.samples import StepSamples, join
from rooftune.tuner.sim.noise import QUIET
from tests.bench.step_table import StepTable, fit_table
from tests.bench.vllm_sweep import FITTED_RUN, RESERVOIR_STEPS, SEEDS, Twin, learn, predictions, speed_of
from tests.bench.vllm_sweep_data import Case, cases, outcomes_of, steps_of
from tests.bench.vllm_sweep_judge import Judged, Values, figures_of, judge

# A run on a faster machine, nearly always busy: what is out of bounds is mostly its own.
BUSY = Case("a", 64, 0)
DRIFT = 0.07
BETWEEN_TOKENS = (17, 511)
FEWEST_STEPS = 20
SMALL_RUN = "b_64_t0_r1"
SMALL_BUDGETS = (64, 128)


def why_sweep() -> Iterator[Figure]:
    """Errors of step forms on steps not fitted, first steps of a size, drift, and the same with other fitted runs."""
    runs = cases()
    yield from _forms(runs)
    yield from _first_steps([run for names in runs.values() for run in names])
    twin = learn(FITTED_RUN, SEEDS)
    yield from _drift(twin)
    yield from _at_own_speed(twin, runs)
    yield from _spread(runs)
    yield from _without_noise(twin, runs)
    yield from _other_fits(runs)


def fit_both(steps: StepSamples) -> tuple[StepModel, StepTable]:
    """The formula, fitted to a bounded reservoir, and the table that leans on it, fitted to all steps."""
    reservoir = Reservoir(RESERVOIR_STEPS)
    reservoir.add(steps)
    model = fit_steps(reservoir.samples).model
    return model, fit_table(steps, model)


def _forms(runs: dict[Case, list[str]]) -> Iterator[Figure]:
    mixed = join([steps_of(run) for case, names in runs.items() if case.traffic == "b" for run in names])
    chat_runs = {run: steps_of(run) for case, names in runs.items() if case.traffic == "a" for run in names}
    chat = join(list(chat_runs.values()))
    fitted = steps_of(FITTED_RUN)
    met = fitted.select(seen_before(fitted))
    for name, steps in (("b", mixed), ("b_512", fitted), ("b_512_sizes_met_before", met), ("itself", chat)):
        model, table = fit_both(steps)
        yield Figure(f"sweep_step_mape_a_from_{name}_formula", mape(model, chat), "fraction")
        yield Figure(f"sweep_step_mape_a_from_{name}_table", table.mape(chat), "fraction")
    model, table = fit_both(met)
    small = steps_of(SMALL_RUN)
    small = small.select(small.computed_tokens == SMALL_BUDGETS[0])
    yield Figure(
        "sweep_64_token_steps_from_b_512_formula",
        float((predict(model, small) / small.duration_s).mean()) - 1.0,
        "fraction, mean",
    )
    yield Figure(
        "sweep_64_token_steps_from_b_512_table",
        float((table.predict(small) / small.duration_s).mean()) - 1.0,
        "fraction, mean",
    )
    each = {}
    for run, steps in chat_runs.items():
        each[run] = fit_both(steps)[1].mape(steps)
    disturbed = max(each, key=lambda run: each[run])
    rest = [error for run, error in each.items() if run != disturbed]
    yield Figure(f"sweep_step_mape_own_table_{disturbed}", each[disturbed], "fraction, the largest")
    yield Figure("sweep_step_mape_own_table_others_least", min(rest), "fraction")
    yield Figure("sweep_step_mape_own_table_others_most", max(rest), "fraction")


def _first_steps(runs: Sequence[str]) -> Iterator[Figure]:
    extra_s = []
    for run in runs:
        steps = steps_of(run)
        again = seen_before(steps)
        _, table = fit_both(steps.select(again))
        first = steps.select(~again & _between(steps))
        if len(first) < FEWEST_STEPS:
            continue
        extra_s.append(float(np.median(first.duration_s - table.predict(first))))
    yield Figure("sweep_first_step_extra_least", min(extra_s), f"s, median of a run, {len(extra_s)} runs")
    yield Figure("sweep_first_step_extra_most", max(extra_s), "s, median of a run")
    steps = steps_of(FITTED_RUN)
    share = float((~seen_before(steps))[_between(steps)].mean())
    yield Figure("sweep_first_share_of_17_to_511_tokens", share, "share of such steps of the fitted run")


def _between(steps: StepSamples) -> npt.NDArray[np.bool_]:
    low, high = BETWEEN_TOKENS
    return (steps.computed_tokens >= low) & (steps.computed_tokens <= high)


def _rows(case: Case, twin: Twin, runs: dict[Case, list[str]], speed: float = 1.0) -> dict[str, Judged]:
    measured = [figures_of(outcomes_of(run)) for run in runs[case]]
    return {row.name: row for row in judge(case.traffic, case.name, predictions(twin, case, speed), measured)}


def _drift(twin: Twin) -> Iterator[Figure]:
    usual, faster, slower = (_means(predictions(twin, BUSY, speed)) for speed in (1.0, 1.0 - DRIFT, 1.0 + DRIFT))
    for name, other in (("faster", faster), ("slower", slower)):
        yield Figure(f"sweep_a_64_ttft_p50_7_percent_{name}", other["ttft_p50"] / usual["ttft_p50"] - 1.0, "fraction")
        yield Figure(f"sweep_a_64_good_s2_7_percent_{name}", other["good_s2"] - usual["good_s2"], "points")


def _means(each: Sequence[Values]) -> dict[str, float]:
    return {name: float(np.mean([values[name] for values in each])) for name in ("ttft_p50", "good_s2")}


def _at_own_speed(twin: Twin, runs: dict[Case, list[str]]) -> Iterator[Figure]:
    """The busy run's median TTFT at its own speed, and all that stays out of bounds there."""
    busy = runs[BUSY][0]
    outcomes = outcomes_of(busy)
    span_s = float(outcomes.finish_s.max() - outcomes.arrival_s.min())
    yield Figure("sweep_a_64_busy", float(steps_of(busy).duration_s.sum()) / span_s, "share of the time in steps")
    for case, names in runs.items():
        speed = float(np.mean([speed_of(twin, steps_of(run)) for run in names]))
        for name, row in _rows(case, twin, runs, speed).items():
            if row.out_of_bounds or (case, name) == (BUSY, "ttft_p50"):
                unit = ("points" if row.is_share else "fraction") + (", out of bounds" if row.out_of_bounds else "")
                yield Figure(f"sweep_{case.name}_{name}_error_at_own_speed", row.error, unit)


def _spread(runs: dict[Case, list[str]]) -> Iterator[Figure]:
    values = [figures_of(outcomes_of(run))["gap_p95"] for run in runs[Case("b", 2048, 0)]]
    yield Figure("sweep_b_2048_gap_p95_spread", (max(values) - min(values)) / float(np.mean(values)), "of the mean")


def _without_noise(twin: Twin, runs: dict[Case, list[str]]) -> Iterator[Figure]:
    quiet = Twin(twin.cost, (QUIET,), twin.outside, twin.level)
    small = [case for case in runs if case.budget in SMALL_BUDGETS and not case.chunk_cap]
    errors = [_rows(case, quiet, runs)["longest_gap_p99"].error for case in small]
    yield Figure("sweep_small_budgets_longest_gap_without_noise_least", min(errors), f"fraction, of {len(errors)}")
    yield Figure("sweep_small_budgets_longest_gap_without_noise_most", max(errors), f"fraction, of {len(errors)}")


def _other_fits(runs: dict[Case, list[str]]) -> Iterator[Figure]:
    fitted = next(case for case, names in runs.items() if FITTED_RUN in names)
    for run in runs[fitted]:
        if run == FITTED_RUN:
            continue
        twin = learn(run, SEEDS)
        rows = [row for case in runs if case != fitted for row in _rows(case, twin, runs).values()]
        latencies = [row for row in rows if not row.is_share]
        yield Figure(
            f"sweep_median_error_fitted_on_{run}", float(np.median([abs(r.error) for r in latencies])), "fraction"
        )
        yield Figure(
            f"sweep_out_of_bounds_fitted_on_{run}", sum(r.out_of_bounds for r in latencies), f"of {len(latencies)}"
        )
        worst = max(abs(row.error) for row in rows if row.is_share)
        yield Figure(f"sweep_goodput_error_fitted_on_{run}", worst, "points at worst")
