"""Signals read from requests: two stable levels of TPOT at one arrival rate, and unequal TTFT of equal prompts."""

from collections.abc import Iterator

import numpy as np

from rooftune.tuner.control.outcome import SignalPart
from rooftune.tuner.control.signals.codes import Signal, finding
from rooftune.tuner.control.signals.view import View
from rooftune.tuner.observe.rows import FloatArray, RequestRows

# Each level needs as many requests as its median needs to stand still.
LEVEL_REQUESTS = 20
# The second state of the field report was four times as slow; half of that is no noise any more.
LEVEL_RATIO = 2.0
# A level is one when the middle half of its requests lies within this share of the median.
LEVEL_WIDTH = 0.3
# Arrivals and prompts of both parts may differ by as much as counting 20 requests does.
SAME_RATE_RATIO = 1.5
SAME_LENGTH_RATIO = 1.5
# "Together": within this share of the longest TTFT among them.
TOGETHER = 0.2
GROUP = 4
# A prompt is long when it takes this many whole budgets; shorter ones share a step and differ by one step.
LONG_BUDGETS = 4.0
# Four equal prompts one after the other: 1, 2, 3 and 4 times.
SPREAD_RATIO = 3.0
MAX_LONG = 200


def two_tpot_levels(view: View) -> Iterator[SignalPart]:
    """The engine settled at a slower level under the same arrivals, prompts and setting: tuning must not chase it."""
    rows = view.served.select(view.served.output_tokens > 1)
    if len(rows) < 2 * LEVEL_REQUESTS or len(np.unique(view.steps.revision)) > 1:
        return
    rows = rows.select(np.argsort(rows.arrival_s + rows.ttft_s, kind="stable"))
    tpot_s = (rows.finish_s - rows.arrival_s - rows.ttft_s) / (rows.output_tokens - 1)
    cut = _best_cut(np.log(np.maximum(tpot_s, 1e-9)))
    before, after = rows.select(np.arange(cut)), rows.select(np.arange(cut, len(rows)))
    low_s, high_s = float(np.median(tpot_s[:cut])), float(np.median(tpot_s[cut:]))
    if high_s < LEVEL_RATIO * low_s or not (_stable(tpot_s[:cut]) and _stable(tpot_s[cut:])):
        return
    rates = _rate_rps(before), _rate_rps(after)
    lengths = float(np.median(before.prompt_tokens)), float(np.median(after.prompt_tokens))
    if _alike(rates, SAME_RATE_RATIO) and _alike(lengths, SAME_LENGTH_RATIO):
        yield finding(
            Signal.TWO_TPOT_LEVELS, tpot_before_s=low_s, tpot_after_s=high_s, rate_before_rps=rates[0],
            rate_after_rps=rates[1], requests_after=len(after),
        )  # fmt: skip


def _best_cut(values: FloatArray) -> int:
    """Where two constants fit best, least squares, each with enough requests."""
    n = len(values)
    total, sums = float(values.sum()), np.cumsum(values)
    cuts = np.arange(LEVEL_REQUESTS, n - LEVEL_REQUESTS + 1)
    gained = sums[cuts - 1] ** 2 / cuts + (total - sums[cuts - 1]) ** 2 / (n - cuts)
    return int(cuts[int(np.argmax(gained))])


def _stable(values: FloatArray) -> bool:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return bool(high - low <= LEVEL_WIDTH * middle)


def _rate_rps(rows: RequestRows) -> float:
    """Arrivals per second; 0 when unknown."""
    distance_s = float(np.mean(np.diff(np.sort(rows.arrival_s))))
    return 1.0 / distance_s if distance_s > 0.0 else 0.0


def _alike(pair: tuple[float, float], ratio: float) -> bool:
    return min(pair) > 0.0 and max(pair) <= ratio * min(pair)


def ttft_spread(view: View) -> Iterator[SignalPart]:
    """Long prompts of one length that came together got their first tokens at very different times."""
    rows = view.served
    fresh = rows.prompt_tokens - rows.cached_tokens
    long = rows.select(fresh >= max(LONG_BUDGETS * view.value("step_tokens"), 1.0))
    if len(long) < GROUP:
        return
    long = long.select(np.argsort(long.arrival_s, kind="stable")[-MAX_LONG:])
    worst: dict[str, float] = {}
    for at in range(len(long)):
        apart_s = long.arrival_s - long.arrival_s[at]
        alike = np.abs(np.log(long.prompt_tokens / long.prompt_tokens[at])) <= np.log(SAME_LENGTH_RATIO)
        group = alike & (apart_s >= 0.0) & (apart_s <= TOGETHER * long.ttft_s)
        if int(group.sum()) < GROUP:
            continue
        least_s, most_s = float(long.ttft_s[group].min()), float(long.ttft_s[group].max())
        ratio = most_s / least_s if least_s > 0.0 else 0.0
        if ratio >= SPREAD_RATIO and ratio > worst.get("ratio", 0.0):
            worst = {"ratio": ratio, "ttft_min_s": least_s, "ttft_max_s": most_s, "requests": float(group.sum())}
            worst["prompt_tokens"] = float(long.prompt_tokens[at])
    if worst:
        yield finding(Signal.TTFT_SPREAD, **worst)
