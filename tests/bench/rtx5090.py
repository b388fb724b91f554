"""Bench ``rtx5090``: which budget wins at which load on a real vLLM, from the quietest load of each model.

610 runs, of which only figures of whole runs exist (no steps). Per model seven coefficients are fitted on the lowest
load under at most three fixed budgets (512, 2,048, 16,384); every other load, budget, prompt and output length and the
pressure policy are predicted. Docs: decisions/013.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rooftune.policies.commands import Figure
from rooftune.policies.request import FloatArray
from rooftune.policies.step_time import chunk_attention_work
from rooftune.policies.step_time import step_cost as time_of
from tests.bench.rtx5090_data import ADAPTIVE, Load, Served, read_runs
from tests.bench.rtx5090_judge import Cell, cells_of, flip_rate, signs
from tests.bench.rtx5090_twin import CEILING, PRESSURE_TOKENS, Coefficients, fit, replay, step_cost
from tests.bench.shared_data import need_shared_data

FITTED_BUDGETS = (512, 2048, 16384)
LARGE, SMALL = CEILING, PRESSURE_TOKENS
FLIPPING = ("avg_tpot", "p95_tpot", "avg_latency", "p95_latency")
NEAR = 0.05
COMMON_LENGTHS = (25000, 32)
CHUNK = 512
# Rank correlations need more than two budgets.
FEWEST_RANKED = 3

Values = dict[tuple[Load, int], tuple[FloatArray, FloatArray]]


def bench(short: bool) -> Iterator[Figure]:
    """Winners, ranks, signs and errors outside the fit; baselines: rules that need no twin. Full: every cell."""
    need_shared_data()
    runs = read_runs()
    quiet = {model: quietest(runs, model) for model in models(runs)}
    learned = {model: fit(fitted_runs(runs, load)) for model, load in quiet.items()}
    cells = list(cells_of(predict(runs, learned)))
    unseen = [cell for cell in cells if cell.load not in quiet.values()]
    yield Figure("runs_read", len(runs), "runs, each with the traffic its seed makes")
    yield from _winners(unseen, [cell for cell in cells if cell.load in quiet.values()])
    yield from _ranks(unseen)
    yield from _signs(unseen)
    yield from _flips(cells)
    yield from _errors(unseen)
    yield from _adaptive(unseen)
    yield from _coefficients(learned)
    if not short:
        yield from _without_beside(runs, quiet)
        for cell in cells:
            for budget in sorted(cell.measured):
                name = f"{cell.load.name}_{budget or 'pressure'}_{cell.metric}"
                yield Figure(name, float(cell.predicted[budget].mean()), "s", float(cell.measured[budget].mean()))


def models(runs: Sequence[Served]) -> list[str]:
    """Names of the models in the runs."""
    return sorted({run.load.model for run in runs})


def quietest(runs: Sequence[Served], model: str) -> Load:
    """The load with the lowest rate that a model was run at."""
    return min((run.load for run in runs if run.load.model == model), key=lambda load: load.rate_rps)


def fitted_runs(runs: Sequence[Served], load: Load) -> list[Served]:
    """The runs a model is fitted on."""
    return [run for run in runs if run.load == load and run.budget in FITTED_BUDGETS]


def predict(runs: Sequence[Served], learned: dict[str, Coefficients]) -> Values:
    """(measured, predicted) by load and budget, a row for each seed."""
    found: dict[tuple[Load, int], list[Served]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        found.setdefault((run.load, run.budget), []).append(run)
    return {
        (load, budget): (
            np.array([run.values for run in group]),
            np.array([replay(learned[load.model], load, budget, run.seed) for run in group]),
        )
        for (load, budget), group in found.items()
    }


def _winners(unseen: Sequence[Cell], fitted: Sequence[Cell]) -> Iterator[Figure]:
    at_quiet = {(cell.load.model, cell.metric): cell.best(False) for cell in fitted}
    same = [cell.best(True) == cell.best(False) for cell in unseen]
    good = [cell.as_good(cell.best(True)) for cell in unseen]
    without = [cell.as_good(at_quiet[cell.load.model, cell.metric]) for cell in unseen]
    yield Figure("cells", len(unseen), "load and metric, none fitted")
    yield Figure("winner_same", float(np.mean(same)), "share of cells")
    yield Figure("winner_within_noise", float(np.mean(good)), "share of cells", baseline=float(np.mean(without)))
    near = [cell.regret(cell.best(True)) <= NEAR for cell in unseen]
    near_without = [cell.regret(at_quiet[cell.load.model, cell.metric]) <= NEAR for cell in unseen]
    yield Figure("winner_within_5_percent", float(np.mean(near)), "share of cells", float(np.mean(near_without)))
    regrets = [cell.regret(cell.best(True)) for cell in unseen]
    for name, budget in (("always_large", LARGE), ("always_small", SMALL)):
        yield Figure(f"regret_{name}", float(np.mean([cell.regret(budget) for cell in unseen])), "mean fraction")
    yield Figure("regret_of_predicted", float(np.mean(regrets)), "mean fraction")
    yield Figure("regret_of_predicted_worst", max(regrets), "fraction")
    for metric in sorted({cell.metric for cell in unseen}):
        mine = [cell.as_good(cell.best(True)) for cell in unseen if cell.metric == metric]
        yield Figure(f"winner_within_noise_{metric}", float(np.mean(mine)), f"share of {len(mine)}")


def _ranks(unseen: Sequence[Cell]) -> Iterator[Figure]:
    ranks = [cell.rank_correlation() for cell in unseen if len(cell.budgets) >= FEWEST_RANKED]
    yield Figure("rank_correlation_median", float(np.median(ranks)), f"of {len(ranks)} cells with six budgets")
    yield Figure("rank_correlation_p10", float(np.quantile(ranks, 0.1)), "correlation")
    yield Figure("rank_correlation_least", min(ranks), "correlation")


def _signs(unseen: Sequence[Cell]) -> Iterator[Figure]:
    for metric in FLIPPING:
        wrong, judged = signs([cell for cell in unseen if cell.metric == metric], LARGE, SMALL)
        yield Figure(f"sign_errors_{metric}", wrong, f"of {judged} loads beyond noise")


def _flips(cells: Sequence[Cell]) -> Iterator[Figure]:
    """Where the sign changes along one series of loads; only the first of them is fitted."""
    for model in sorted({cell.load.model for cell in cells}):
        for metric in FLIPPING:
            series = [cell for cell in cells if cell.metric == metric and _is_common(cell.load, model)]
            found = [flip_rate(series, LARGE, SMALL, predicted) for predicted in (True, False)]
            if all(0.0 < rate < np.inf for rate in found):
                yield Figure(f"{model}_{metric}_flips_at", found[0], "requests/s, against measured", found[1])
            elif found[0] != found[1]:
                yield Figure(f"{model}_{metric}_flip_missed", 1.0, "0 or 1")


def _is_common(load: Load, model: str) -> bool:
    """Of the lengths that every model was run with."""
    return (load.model, load.prompt_tokens, load.output_tokens) == (model, *COMMON_LENGTHS)


def _errors(unseen: Sequence[Cell]) -> Iterator[Figure]:
    every = [(cell, budget, abs(cell.error(budget))) for cell in unseen for budget in cell.budgets]
    yield Figure("error_median", float(np.median([error for _, _, error in every])), f"fraction, {len(every)} means")
    yield Figure("error_p90", float(np.quantile([error for _, _, error in every], 0.9)), "fraction")
    yield Figure("error_worst", max(error for _, _, error in every), "fraction")
    for model in sorted({cell.load.model for cell in unseen}):
        for budget in sorted({budget for cell, budget, _ in every if cell.load.model == model}):
            mine = [cell.error(budget) for cell in unseen if cell.load.model == model and budget in cell.budgets]
            yield Figure(f"error_{model}_{budget}", float(np.median(np.abs(mine))), f"median fraction of {len(mine)}")
            yield Figure(f"bias_{model}_{budget}", float(np.mean(mine)), "mean fraction, signed")
    for lengths in sorted({(cell.load.prompt_tokens, cell.load.output_tokens) for cell in unseen}):
        mine = [e for c, _, e in every if (c.load.prompt_tokens, c.load.output_tokens) == lengths]
        yield Figure(f"error_{lengths[0]}x{lengths[1]}", float(np.median(mine)), f"median fraction of {len(mine)}")


def _adaptive(unseen: Sequence[Cell]) -> Iterator[Figure]:
    errors = [abs(cell.error(ADAPTIVE)) for cell in unseen]
    fixed = [abs(cell.error(budget)) for cell in unseen for budget in (SMALL, LARGE)]
    yield Figure("pressure_error_median", float(np.median(errors)), "fraction", baseline=float(np.median(fixed)))
    yield Figure("pressure_error_p90", float(np.quantile(errors, 0.9)), "fraction", float(np.quantile(fixed, 0.9)))
    for name, budget in (("large", LARGE), ("small", SMALL)):
        wrong, judged = signs(unseen, ADAPTIVE, budget)
        yield Figure(f"pressure_against_{name}_sign_errors", wrong, f"of {judged} cells beyond noise")


def _without_beside(runs: Sequence[Served], quiet: dict[str, Load]) -> Iterator[Figure]:
    """The errors if a decode costs the same whether or not a chunk shares its step."""
    model = "qwen2.5-3b"
    one = fit(fitted_runs(runs, quiet[model]), beside=False)
    mine = [run for run in runs if run.load.model == model and run.load != quiet[model]]
    cells = list(cells_of(predict(mine, {model: one})))
    for budget in FITTED_BUDGETS:
        errors = [abs(cell.error(budget)) for cell in cells]
        yield Figure(f"error_{model}_{budget}_without_beside", float(np.median(errors)), f"median of {len(errors)}")
    good = [cell.regret(cell.best(True)) <= NEAR for cell in cells]
    yield Figure(f"winner_within_5_percent_{model}_without_beside", float(np.mean(good)), f"share of {len(good)}")


def _coefficients(learned: dict[str, Coefficients]) -> Iterator[Figure]:
    for model, one in learned.items():
        for name, value in one._asdict().items():
            yield Figure(f"{model}_{name}", value, "s")
        alone_s, beside_s = (chunk_time(model, one, decodes) for decodes in (0, 1))
        yield Figure(f"{model}_chunk_beside_a_decode_s", beside_s, "s, against the chunk alone", alone_s)


def chunk_time(model: str, one: Coefficients, decodes: int) -> float:
    """Seconds of a step with a chunk of CHUNK tokens half-way through a prompt, and decodes behind such a prompt."""
    prompt = COMMON_LENGTHS[0]
    work = chunk_attention_work(CHUNK, prompt / 2)
    cost = step_cost(model, one)
    return time_of(cost, CHUNK, 1 + decodes, decodes, float(decodes * prompt), prompt / 2, work)
