"""Which of two evaluations is better, and which of several equals to set. Pure."""

import math
from collections.abc import Sequence

import numpy as np

from rooftune.policies.envelope import SEARCHED
from rooftune.policies.request import Setting
from rooftune.policies.slo import MarginRow, Slo, good
from rooftune.tuner.search.evaluation import Advice, Evaluation
from rooftune.tuner.search.objective import capped_margin
from rooftune.tuner.sim.result import RunResult

# Settings this close in their objective are one setting; among them the one with most to spare wins.
SAME_SHARE = 0.002
BATCH_SHARE = 0.01
BOOTSTRAP_BLOCKS = 40
BOOTSTRAP_DRAWS = 400


def value(evaluation: Evaluation, slo: Slo) -> float:
    """What a sampler maximises: the objective, and a last bit for calmer gaps."""
    if slo.objective == "tokens_per_s":
        return evaluation.tokens_per_s
    calm = evaluation.gap_p99_s if math.isfinite(evaluation.gap_p99_s) else 1.0
    return evaluation.attainment - 1e-3 * min(calm, 1.0)


def known(evaluation: Evaluation) -> bool:
    """False when the replay gave no number: then nothing is known of the setting, good or bad."""
    return math.isfinite(evaluation.attainment) and math.isfinite(evaluation.tokens_per_s)


def rank(evaluation: Evaluation, slo: Slo) -> tuple[float, ...]:
    """Sort key, best first: what carries the load before what does not; feasible before infeasible; then the objective;
    then calm gaps; then a small budget.

    What gave no number comes after everything else.
    """
    if not known(evaluation):
        return (4.0, 0.0, 0.0, float(evaluation.setting.step_tokens))
    infeasible = (0.0 if evaluation.feasible else 1.0) + (0.0 if evaluation.carries else 2.0)
    if slo.objective == "tokens_per_s":
        return (infeasible, -evaluation.tokens_per_s, evaluation.setting.step_tokens)
    # Answers of one token have no gaps: nothing to be calm about.
    gap_s = 0.0 if math.isnan(evaluation.gap_p99_s) else evaluation.gap_p99_s
    return (infeasible, -evaluation.attainment, gap_s, float(evaluation.setting.step_tokens))


def alike(tried: Sequence[Evaluation], slo: Slo) -> list[Evaluation]:
    """The best and everything as good as the best, best first."""
    ordered = sorted(tried, key=lambda e: rank(e, slo))
    top = ordered[0]
    if not known(top):
        return [top]
    same = [e for e in ordered if (e.feasible, e.carries) == (top.feasible, top.carries)]
    if slo.objective == "tokens_per_s":
        return [e for e in same if e.tokens_per_s >= (1.0 - BATCH_SHARE) * top.tokens_per_s]
    return [e for e in same if e.attainment >= top.attainment - SAME_SHARE]


def complexity(evaluation: Evaluation, base: Setting) -> int:
    """How many things a setting asks to be explained beyond a budget: searched knobs that are not at their defaults,
    and a sequence cap other than that of ``base``, what is set today."""
    plain = Setting(evaluation.setting.step_tokens, max_running=base.max_running)
    return sum(1 for name in SEARCHED if getattr(evaluation.setting, name) != getattr(plain, name))


def to_set(equals: Sequence[Evaluation], slo: Slo, base: Setting) -> Evaluation:
    """Among equals: the plainest; then most to spare at the tightest target, for batch the smallest budget."""
    if slo.objective == "tokens_per_s":
        return min(equals, key=lambda e: (e.setting.step_tokens, complexity(e, base), -e.tokens_per_s))
    return min(equals, key=lambda e: (complexity(e, base), _tightest(e.margins), e.setting.step_tokens))


def _tightest(rows: Sequence[MarginRow]) -> float:
    return max((capped_margin(row) for row in rows), default=0.0)


def noise(current: RunResult, best: RunResult, slo: Slo, seed: int) -> float:
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


def verdict(current: Evaluation, best: Evaluation, uncertainty: float, slo: Slo) -> Advice:
    """CHANGE only for a gain beyond noise, or towards meeting every target or carrying the load."""
    if not best.feasible:
        return Advice.INFEASIBLE
    if best.setting == current.setting:
        return Advice.KEEP
    if best.carries and not current.carries:
        return Advice.CHANGE
    if slo.objective == "tokens_per_s":
        return Advice.CHANGE if best.tokens_per_s > (1.0 + BATCH_SHARE) * current.tokens_per_s else Advice.KEEP
    if not current.feasible:
        return Advice.CHANGE
    return Advice.CHANGE if best.attainment - current.attainment > max(uncertainty, SAME_SHARE) else Advice.KEEP


def stays(what: Advice, current: Evaluation, best: Evaluation, least_gain: float) -> bool:
    """Whether the setting in force stays: also where nothing meets every target and nothing is gained (in shares)."""
    return what is Advice.KEEP or (what is Advice.INFEASIBLE and best.attainment <= current.attainment + least_gain)


def binding(rows: Sequence[MarginRow]) -> MarginRow | None:
    """The target with the largest margin: the one that breaks first; None without a measured target."""
    known = [row for row in rows if not math.isnan(row.margin)]
    return max(known, key=lambda row: row.margin) if known else None
