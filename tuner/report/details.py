"""The parts of a record that need more replays: the step curve, the worst minute, the rate that would be feasible."""

import numpy as np

from rooftune.policies.request import IntArray, Setting
from rooftune.policies.slo import Slo, good
from rooftune.policies.step_time import StepCost, StepModel, chunk_attention_work, knee_tokens, priced, step_cost
from rooftune.tuner.record import BARS, BarsPart, CurvePart, FeasiblePart, TimelinePart, digits, finite, plain
from rooftune.tuner.search.baselines import concurrency
from rooftune.tuner.search.evaluation import Advice, Case, Recommendation
from rooftune.tuner.search.feasible_rate import LOWEST_SCALE, feasible_rate
from rooftune.tuner.search.stretch import MINUTE_S, Steps, steps_between, worst_window
from rooftune.tuner.sim.result import RunResult

CURVE_POINTS = 64
CURVE_BEYOND = 1.25  # of the larger of both budgets
SHORT_S = 10.0


def _six(value: float) -> float:
    return digits(value, 6)


def curve_part(found: Recommendation, model: StepModel | StepCost) -> CurvePart:
    """Step time from one token to a quarter beyond the larger of both budgets."""
    cost = priced(model)
    running, context = concurrency(found.current_result)
    top = CURVE_BEYOND * max(found.current.setting.step_tokens, found.best.setting.step_tokens)
    knee = knee_tokens(cost.formula)
    marks = [knee] if 1 <= knee <= top else []
    tokens = sorted({max(round(value), 1) for value in (*np.linspace(1, top, CURVE_POINTS), *marks)})
    decodes = round(running)
    idle_s, live_s = [], []
    for count in tokens:
        idle_s.append(_six(step_cost(cost, count, 1, 0, 0.0, 0.0, chunk_attention_work(count, 0.0))))
        writing = min(decodes, count)
        chunk = count - writing
        share = context * writing / decodes if decodes else 0.0
        work = chunk_attention_work(float(chunk), 0.0)
        live_s.append(_six(step_cost(cost, count, writing + (chunk > 0), writing, share, 0.0, work)))
    return CurvePart(
        tokens=tuple(tokens),
        idle_s=tuple(idle_s),
        live_s=tuple(live_s),
        running_mean=_six(running),
        context_mean_tokens=_six(context),
        knee_live_tokens=plain(knee_tokens(cost.formula, context)),
    )


def _cuts(steps: Steps) -> IntArray:
    """First step of each bar, and the end. Steps that read prompts and steps that do not share a bar only when there
    are more runs of one kind than bars, so that a tall step is not drawn as several low ones.
    """
    total = len(steps)
    changes = np.flatnonzero(np.diff((steps.prefill_tokens > 0).astype(np.int64))) + 1
    ends = np.concatenate([changes, [total]])
    runs = np.diff(ends, prepend=0)
    if len(runs) > BARS:
        return np.linspace(0, total, BARS + 1).round().astype(np.int64)
    pieces = np.minimum(runs, 1 + runs * (BARS - len(runs)) // total)
    parts = [
        np.linspace(end - run, end, piece + 1)[:-1].round().astype(np.int64)
        for end, run, piece in zip(ends.tolist(), runs.tolist(), pieces.tolist(), strict=True)
    ]
    return np.concatenate([*parts, [total]])


def bars_of(steps: Steps) -> BarsPart:
    """At most BARS bars; a long run of steps of one kind gets bars of about equally many steps."""
    cuts = _cuts(steps)
    firsts, counts = cuts[:-1], np.diff(cuts)

    def each(values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[float, ...]:
        return tuple(_six(value) for value in (np.add.reduceat(values, firsts) / counts).tolist())

    return BarsPart(
        start_s=tuple(digits(value) for value in steps.start_s[firsts].tolist()),
        duration_s=tuple(_six(value) for value in np.add.reduceat(steps.duration_s, firsts).tolist()),
        steps=tuple(counts.tolist()),
        decode_tokens=each(steps.decode_tokens),
        prefill_tokens=each(steps.prefill_tokens),
        longest_s=tuple(_six(value) for value in np.maximum.reduceat(steps.duration_s, firsts).tolist()),
    )


def _worst_part(steps: Steps, slo: Slo, start_s: float) -> float:
    """Start of the SHORT_S in which most time went into steps over the tightest gap bound, or most was read."""
    bad = np.where(steps.duration_s > (slo.tightest_gap_s() or np.inf), steps.duration_s, 0.0)
    weight = bad if bad.any() else steps.prefill_tokens.astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(weight)])
    places = np.arange(start_s, start_s + MINUTE_S - SHORT_S + 1e-9, 1.0)
    low, high = (np.searchsorted(steps.start_s, places + shift, side="left") for shift in (0.0, SHORT_S))
    return float(places[int(np.argmax(sums[high] - sums[low]))])


def timeline_part(found: Recommendation, case: Case) -> TimelinePart | None:
    """The worst minute under the setting in force, or its worst ten seconds; None when no step ran in it."""
    now, best, slo = found.current_result, found.best_result, case.slo
    start_s, bad_current = worst_window(now, slo)
    if not bad_current:
        start_s, _ = worst_window(best, slo)
    arrival_s = case.traffic.arrival_s
    arrived = (arrival_s >= start_s) & (arrival_s < start_s + MINUTE_S)

    def listed(setting: Setting, result: RunResult) -> Steps:
        return steps_between(case, setting, result, start_s, MINUTE_S)

    before = listed(found.current.setting, now)
    later = before if found.best.setting == found.current.setting else listed(found.best.setting, best)
    shown_s, length_s = start_s, MINUTE_S
    if max(len(before), len(later)) > BARS:
        shown_s, length_s = _worst_part(before, slo, start_s), SHORT_S
        before, later = before.between(shown_s, length_s), later.between(shown_s, length_s)
    if not len(before) or not len(later):
        return None
    met = good if slo.all_targets() else (lambda outcomes, _: outcomes.finished)
    return TimelinePart(
        minute_start_s=_six(start_s),
        minute_s=MINUTE_S,
        requests=int(arrived.sum()),
        bad_current=int((~met(now.outcomes, slo))[arrived].sum()),
        bad_best=int((~met(best.outcomes, slo))[arrived].sum()),
        start_s=digits(shown_s),
        length_s=length_s,
        exact=before.exact and later.exact,
        current=bars_of(before),
        best=bars_of(later),
    )


def feasible_part(found: Recommendation, case: Case) -> FeasiblePart | None:
    """At which rate the nearest setting would meet every target; None when one does already, or there is no target."""
    if found.verdict is not Advice.INFEASIBLE or not case.slo.all_targets() or case.traffic.span_s <= 0.0:
        return None
    rate = feasible_rate(case, found.best.setting, start_scale=0.5)
    return FeasiblePart(
        scale=finite(rate.scale, 6),
        rate_rps=finite(rate.rate_rps, 6),
        width=finite(rate.width, 6),
        lowest_scale=LOWEST_SCALE,
        replays=rate.replays,
    )
