"""The main job on a twin: from traffic, a step model and targets to one setting and what it was held against."""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from policies.errors import bad_value
from policies.request import Setting
from policies.slo import MarginRow, Slo, good
from policies.step_time import StepModel
from tuner.search import baselines
from tuner.search.evaluation import Evaluation, Recommendation, Role, Verdict
from tuner.search.objective import capped_margin, evaluate
from tuner.search.space import SearchSpace, search_space
from tuner.search.study import SettingStudy
from tuner.sim.engine import Engine
from tuner.sim.result import RunResult
from tuner.sim.workload import Traffic

Progress = Callable[[str, int, int], None]

# Settings this close in their objective are one setting; among them the one with most to spare wins.
SAME_SHARE = 0.002
BATCH_SHARE = 0.01
# Replays release the interpreter, so two run at a time; asked and told in fixed order, so the result is the same.
PARALLEL = 2
BOOTSTRAP_BLOCKS = 40
BOOTSTRAP_DRAWS = 400


def recommend(
    traffic: Traffic,
    engine: Engine,
    model: StepModel,
    slo: Slo,
    *,
    current: Setting,
    trials: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
) -> Recommendation:
    """Search budget and chunk cap for ``slo`` on the twin; random search gets the same number of simulated steps.

    Deterministic for equal arguments. progress(stage, done, total) is called as trials come in.
    Raises InputError when ``current`` is outside the boot envelope or the range is empty.
    """
    tell = progress or (lambda stage, done, total: None)
    space = search_space(engine, current)
    bench = _Bench(traffic, engine, model, slo)

    tell("current", 0, 1)
    now, now_result = evaluate(traffic, engine, current, model, slo, Role.CURRENT)
    tell("current", 1, 1)
    if now.refused == len(traffic):
        pool = engine.kv_blocks * engine.boot.block_tokens
        raise bad_value("KV pool", pool, "large enough for at least one request", "give the pool's size in tokens")

    warm: list[tuple[Setting, Role]] = []
    for setting, role in (
        (baselines.formula_setting(space, slo, model, now_result), Role.FORMULA),
        (baselines.knee_setting(space, model, now_result), Role.KNEE),
    ):
        if setting is not None:
            warm.append((setting, role))
    warm += [(setting, Role.SWEEP) for setting in baselines.sweep_settings(space)]
    fixed = bench.run(warm, lambda done: tell("baselines", done, len(warm)))

    study = SettingStudy(space, sampler="tpe", seed=seed)
    study.enqueue(current)
    for evaluation in sorted(fixed, key=lambda e: _rank(e, slo))[:3] + fixed[: len(warm) - len(fixed) + 2]:
        study.enqueue(evaluation.setting)
    found = _search(study, bench, slo, trials, lambda done: tell("search", done, trials))

    steps = sum(e.simulated_steps for e in found)
    random_found = _random(space, bench, seed, steps, trials, lambda done, total: tell("random search", done, total))

    tried = [now, *fixed, *found, *random_found]
    best = min((e for e in tried if e.role is not Role.RANDOM), key=lambda e: _rank(e, slo))
    best = _most_to_spare(best, tried, slo)
    best, best_result = evaluate(traffic, engine, best.setting, model, slo, best.role)
    noise = _noise(now_result, best_result, slo, seed)
    verdict = _verdict(now, best, noise, slo)
    if verdict is Verdict.KEEP:
        best, best_result = now, now_result
    return Recommendation(
        verdict=verdict,
        current=now,
        best=best,
        evaluations=tuple(tried),
        random_best=min(random_found, key=lambda e: _rank(e, slo)),
        noise=noise,
        current_result=now_result,
        best_result=best_result,
        sampler="tpe",
        seed=seed,
        trials=len(found),
        simulated_steps=steps,
        binding_target=binding(best.margins),
    )


class _Bench:
    """Evaluates settings on one traffic, a few at a time, each setting once."""

    def __init__(self, traffic: Traffic, engine: Engine, model: StepModel, slo: Slo) -> None:
        self._what = (traffic, engine, model, slo)
        self._known: dict[Setting, Evaluation] = {}

    def one(self, setting: Setting, role: Role) -> Evaluation:
        traffic, engine, model, slo = self._what
        known = self._known.get(setting)
        if known is None:
            known = evaluate(traffic, engine, setting, model, slo, role)[0]
            self._known[setting] = known
        return replace(known, role=role)

    def run(self, wanted: Sequence[tuple[Setting, Role]], tell: Callable[[int], None]) -> list[Evaluation]:
        done: list[Evaluation] = []
        with ThreadPoolExecutor(PARALLEL) as pool:
            for evaluation in pool.map(lambda pair: self.one(*pair), wanted):
                done.append(evaluation)
                tell(len(done))
        return done


def _search(study: SettingStudy, bench: _Bench, slo: Slo, trials: int, tell: Callable[[int], None]) -> list[Evaluation]:
    found: list[Evaluation] = []
    while len(found) < trials:
        tickets = [study.ask() for _ in range(min(PARALLEL, trials - len(found)))]
        batch = bench.run([(ticket.setting, Role.SEARCH) for ticket in tickets], lambda done: None)
        for ticket, evaluation in zip(tickets, batch, strict=True):
            study.tell(ticket, evaluation, value(evaluation, slo))
            found.append(evaluation)
        tell(len(found))
    return found


def _random(
    space: SearchSpace, bench: _Bench, seed: int, steps: int, trials: int, tell: Callable[[int, int], None]
) -> list[Evaluation]:
    """Random search until it has paid as many simulated steps as the search did."""
    found: list[Evaluation] = []
    paid = 0
    # Far more draws than the steps can pay for: the twin's steps hardly differ between settings.
    draws: Iterable[Setting] = iter(baselines.random_settings(space, seed + 1, 4 * trials + PARALLEL))
    while paid < steps or not found:
        batch = [setting for _, setting in zip(range(PARALLEL), draws, strict=False)]
        if not batch:
            break
        for evaluation in bench.run([(setting, Role.RANDOM) for setting in batch], lambda done: None):
            found.append(evaluation)
            paid += evaluation.simulated_steps
        tell(min(paid, steps), steps)
    return found


def value(evaluation: Evaluation, slo: Slo) -> float:
    """What a sampler maximises: the objective, and a last bit for calmer gaps."""
    if slo.objective == "tokens_per_s":
        return evaluation.tokens_per_s
    calm = evaluation.gap_p99_s if math.isfinite(evaluation.gap_p99_s) else 1e3
    return evaluation.attainment - 1e-3 * min(calm, 1.0)


def _rank(evaluation: Evaluation, slo: Slo) -> tuple[float, ...]:
    """Sort key, best first: feasible before infeasible; then the objective; then calm gaps; then a small budget."""
    if slo.objective == "tokens_per_s":
        return (0.0 if evaluation.feasible else 1.0, -evaluation.tokens_per_s, evaluation.setting.step_tokens)
    return (
        0.0 if evaluation.feasible else 1.0,
        -evaluation.attainment,
        evaluation.gap_p99_s,
        float(evaluation.setting.step_tokens),
    )


def _most_to_spare(best: Evaluation, tried: Sequence[Evaluation], slo: Slo) -> Evaluation:
    """Among settings as good as the best, the one to set: most to spare at its tightest target.

    For batch, which has no target, the smallest budget.
    """
    alike = [e for e in tried if e.feasible == best.feasible and e.role is not Role.RANDOM]
    if slo.objective == "tokens_per_s":
        alike = [e for e in alike if e.tokens_per_s >= (1.0 - BATCH_SHARE) * best.tokens_per_s]
        return min(alike, key=lambda e: (e.setting.step_tokens, e.setting.chunk_cap_tokens > 0, -e.tokens_per_s))
    alike = [e for e in alike if e.attainment >= best.attainment - SAME_SHARE]
    # A setting without a chunk cap has one thing less to explain: it wins when it is as good.
    plain = [e for e in alike if e.setting.chunk_cap_tokens == 0]
    return min(plain or alike, key=lambda e: (max(capped_margin(row) for row in e.margins), e.setting.step_tokens))


def _noise(current: RunResult, best: RunResult, slo: Slo, seed: int) -> float:
    """Half-width of the 90 % interval of the difference in good share, by a bootstrap over blocks of the traffic.

    The same requests run under both settings, so the difference is paired; neighbours share their fate, so whole
    stretches of the traffic are drawn.
    """
    gain = good(best.outcomes, slo).astype(np.float64) - good(current.outcomes, slo)
    blocks = np.array_split(gain, min(BOOTSTRAP_BLOCKS, len(gain)))
    sums = np.array([block.sum() for block in blocks])
    sizes = np.array([len(block) for block in blocks])
    picks = np.random.default_rng(seed).integers(0, len(blocks), (BOOTSTRAP_DRAWS, len(blocks)))
    drawn = sums[picks].sum(axis=1) / sizes[picks].sum(axis=1)
    low, high = np.quantile(drawn, [0.05, 0.95])
    return float(high - low) / 2.0


def _verdict(current: Evaluation, best: Evaluation, noise: float, slo: Slo) -> Verdict:
    if not best.feasible:
        return Verdict.INFEASIBLE
    if best.setting == current.setting:
        return Verdict.KEEP
    if slo.objective == "tokens_per_s":
        better = best.tokens_per_s > (1.0 + BATCH_SHARE) * current.tokens_per_s
        smaller = best.setting.step_tokens < current.setting.step_tokens
        return Verdict.CHANGE if better or smaller else Verdict.KEEP
    if not current.feasible:
        return Verdict.CHANGE
    return Verdict.CHANGE if best.attainment - current.attainment > max(noise, SAME_SHARE) else Verdict.KEEP


def binding(rows: Sequence[MarginRow]) -> MarginRow | None:
    """The target with the largest margin: the one that breaks first; None without a measured target."""
    known = [row for row in rows if not math.isnan(row.margin)]
    return max(known, key=lambda row: row.margin) if known else None
