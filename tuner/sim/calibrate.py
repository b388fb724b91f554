"""Judges the twin: compares what it foretold of a window with what was observed, with a verdict for each figure.

With targets, what decides is judged: the share of good requests under the setting in force, and each target's own
metric at its own quantile; where the window is too small for that quantile, the share of requests within the target's
bound. Other quantiles are shown, and neither open nor close anything. Without targets every metric
needs one good quantile and none that is not good.

A figure is ``good`` within a bound (relative for latencies, absolute for shares), ``not_good`` when neither the bound
nor the sampling error explains the difference, else ``too_few``, with the requests that are missing. The sampling error
is twice the standard error from blocks of neighbouring requests, which share their fate; for shares that of the
differences request by request, since the twin replays the same requests. Figures that do not decide for targets have
that of independent requests. Missing is not zero.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from rooftune.policies.errors import InputError
from rooftune.policies.outcomes import BoolArray, FloatArray, Outcomes
from rooftune.policies.quantiles import quantile
from rooftune.policies.slo import Metric, Slo, applies, good, meets, samples


class Fidelity(StrEnum):
    """May the prediction be acted on?"""

    GOOD = "good"
    NOT_GOOD = "not_good"
    TOO_FEW = "too_few"


# Not the gaps of all requests together: a window holds only counts of those above bounds.
SHOWN: tuple[Metric, ...] = ("ttft", "tpot", "longest_gap")
BLOCKS = 10  # of neighbouring requests
SHARE = "good share"


@dataclass(frozen=True)
class Quality:
    """The bounds of a good prediction.

    bound: largest relative error, above 0. share_bound: largest error of a share, 0..1. floor_s: differences up to this
    never count (clock and host jitter). quantiles: those compared of every metric, each above 0 and below 1.
    min_requests: finished requests that a window needs; min_beyond: samples beyond a quantile that a judgement needs
    (with five, two standard errors of the p99 of an exponential tail are 19 %).
    """

    bound: float = 0.25
    share_bound: float = 0.1
    floor_s: float = 0.001
    quantiles: tuple[float, ...] = (0.5, 0.95, 0.99)
    min_requests: int = 30
    min_beyond: int = 5


QUALITY = Quality()


@dataclass(frozen=True)
class FigureError:
    """One figure. metric, quantile: "" and NaN for a share. foretold, observed: seconds, or a share 0..1; NaN unknown.

    half_width: sampling error of their difference, in the same unit. missing: requests that a verdict still needs,
    roughly; 0 where it does not depend on them. decides: whether the overall verdict rests on it.
    """

    name: str
    metric: Metric | str
    quantile: float
    foretold: float
    observed: float
    half_width: float
    samples: int
    verdict: Fidelity
    missing: int = 0
    decides: bool = False

    @property
    def error(self) -> float:
        """Of a latency foretold / observed - 1, of a share the difference. NaN without samples."""
        if not self.metric:
            return self.foretold - self.observed
        return self.foretold / self.observed - 1.0 if self.observed > 0.0 else math.nan


@dataclass(frozen=True)
class Calibration:
    """All figures of a window, and the overall verdict. missing: requests that a too small window lacks, roughly."""

    rows: tuple[FigureError, ...]
    verdict: Fidelity
    missing: int = 0


def calibrate(
    predicted: Sequence[Outcomes], observed: Outcomes, quality: Quality = QUALITY, slo: Slo | None = None
) -> Calibration:
    """Judge the twin on a window.

    predicted: one replay of the same requests (same rows) for each seed of the noise; their figures are averaged. Only
    requests that finished in the window are compared, on both sides. Raises InputError when the rows are not the same
    requests.
    """
    if not predicted:
        raise InputError("no prediction to compare with; replay the window at least once")
    for replay in predicted:
        same = len(replay) == len(observed) and np.array_equal(replay.prompt_tokens, observed.prompt_tokens)
        if not same:
            raise InputError(
                f"the replay holds {len(replay)} requests, the window {len(observed)}, or different ones; "
                "replay the window's own requests in their order"
            )
    window = _Window(predicted, observed, observed.finished, quality)
    named = () if slo is None else slo.all_targets()
    deciding = _deciding(window, slo) if slo is not None and named else []
    base = {(row.metric, row.quantile) for row in deciding}
    shown = [window.latency(m, q, window.kept) for m in SHOWN for q in quality.quantiles if (m, q) not in base]
    rows = (*deciding, *shown)
    if deciding:
        return Calibration(rows, *_overall(deciding))
    several = bool((window.kept & (observed.output_tokens > 1)).any())
    return Calibration(rows, *_any_quantile(shown, SHOWN if several else SHOWN[:1]))


def _deciding(window: "_Window", slo: Slo) -> list[FigureError]:
    foretold = np.mean([good(replay, slo) for replay in window.predicted], axis=0)
    rows = [window.share(SHARE, foretold, good(window.observed, slo), window.kept)]
    for target, index in slo.all_targets():
        group = window.kept & applies(window.observed, slo, target, index)
        suffix = "" if index is None else f" (override {index + 1})"
        if target.metric != "gap" and target.quantile < 1.0:
            row = window.latency(target.metric, target.quantile, group, suffix, decides=True)
            if row.verdict is not Fidelity.TOO_FEW:
                rows.append(row)
                continue
        met = np.mean([meets(replay, target) for replay in window.predicted], axis=0)
        name = f"{_words(target.metric)} within {target.bound_s:g} s{suffix}"
        rows.append(window.share(name, met, meets(window.observed, target), group))
    # A target that no request of this window falls under is no reason to wait.
    return [row for row in rows if row.samples or row.name == SHARE]


def _overall(rows: Sequence[FigureError]) -> tuple[Fidelity, int]:
    verdicts = {row.verdict for row in rows}
    if Fidelity.NOT_GOOD in verdicts:
        return Fidelity.NOT_GOOD, 0
    few = max((row.missing for row in rows if row.verdict is Fidelity.TOO_FEW), default=0)
    return (Fidelity.TOO_FEW, few) if Fidelity.TOO_FEW in verdicts else (Fidelity.GOOD, 0)


def _any_quantile(rows: Sequence[FigureError], due: Sequence[Metric]) -> tuple[Fidelity, int]:
    """Without targets. due: metrics that must be judged (requests of one token have no gaps)."""
    if any(row.verdict is Fidelity.NOT_GOOD for row in rows):
        return Fidelity.NOT_GOOD, 0
    proven = {row.metric for row in rows if row.verdict is Fidelity.GOOD}
    few = [min(row.missing for row in rows if row.metric == metric) for metric in due if metric not in proven]
    return (Fidelity.TOO_FEW, max(few)) if few else (Fidelity.GOOD, 0)


@dataclass(frozen=True)
class _Window:
    predicted: Sequence[Outcomes]
    observed: Outcomes
    kept: BoolArray
    quality: Quality

    def share(self, name: str, foretold: FloatArray, observed: BoolArray, group: BoolArray) -> FigureError:
        """A share of the requests of ``group``."""
        count, bound = int(group.sum()), self.quality.share_bound
        if not count:
            return FigureError(
                name, "", math.nan, math.nan, math.nan, math.nan, 0, Fidelity.TOO_FEW, self.quality.min_requests, True
            )
        expected, seen = float(foretold[group].mean()), float(observed[group].mean())
        half = 2.0 * blocked_error((foretold - observed)[group])
        off = abs(expected - seen)
        verdict = Fidelity.GOOD if max(off, half) <= bound else Fidelity.TOO_FEW
        if off > bound + half:
            verdict = Fidelity.NOT_GOOD
        short = self.quality.min_requests - count
        if short > 0:
            verdict = Fidelity.TOO_FEW
        missing = max(short, _more(count, half, bound)) if verdict is Fidelity.TOO_FEW else 0
        return FigureError(name, "", math.nan, expected, seen, half, count, verdict, missing, True)

    def latency(
        self, metric: Metric, q: float, group: BoolArray, suffix: str = "", decides: bool = False
    ) -> FigureError:
        """A quantile over the requests of ``group``."""
        name, quality = f"{_words(metric)} p{q * 100:g}{suffix}", self.quality
        recorded = metric != "longest_gap" or len(self.observed.longest_gap_s)
        values = samples(self.observed, metric, group) if recorded else np.zeros(0)
        count, requests = len(values), int(group.sum())
        needed = max(quality.min_requests, math.ceil(quality.min_beyond / (1.0 - q) - 1e-9))
        if count == 0:
            few = Fidelity.TOO_FEW
            return FigureError(name, metric, q, math.nan, math.nan, math.nan, 0, few, needed, decides)
        observed_s = quantile(values, q)
        expected_s = float(np.mean([quantile(samples(replay, metric, group), q) for replay in self.predicted]))
        # The sampling interval of the observed quantile: two standard errors of its rank.
        blocked = blocked_error((values <= observed_s).astype(float)) if decides else 0.0
        half = 2.0 * max(blocked, math.sqrt(q * (1.0 - q) / count))
        low_s, high_s = quantile(values, max(q - half, 1e-9)), quantile(values, min(q + half, 1.0))
        half_s = max(high_s - observed_s, observed_s - low_s)
        verdict = _verdict(expected_s, observed_s, (low_s, high_s), quality)
        short = needed - count
        if short > 0 or math.isnan(expected_s):
            verdict = Fidelity.TOO_FEW
        missing = 0
        if verdict is Fidelity.TOO_FEW:
            more = _more(count, half_s, max(quality.bound * observed_s, quality.floor_s))
            missing = math.ceil((short if short > 0 else more) * max(requests / count, 1.0))
        return FigureError(name, metric, q, expected_s, observed_s, half_s, count, verdict, missing, decides)


def _words(metric: Metric) -> str:
    return metric.replace("_", " ")


def blocked_error(values: FloatArray) -> float:
    """Standard error of the mean, from blocks of neighbours; never below that of independent values. NaN when empty."""
    count = len(values)
    if count < 2:
        return math.nan
    single = float(np.std(values, ddof=1)) / math.sqrt(count)
    if count < 2 * BLOCKS:
        return single
    means = [float(block.mean()) for block in np.array_split(values, BLOCKS)]
    return max(single, float(np.std(means, ddof=1)) / math.sqrt(BLOCKS))


def _more(count: int, half: float, bound: float) -> int:
    """Requests beyond ``count`` until a sampling error of ``half`` falls to ``bound``: it falls with the root."""
    if not (math.isfinite(half) and bound > 0.0):
        return count
    return max(math.ceil(count * ((half / bound) ** 2 - 1.0)), max(count // 4, 1))


def _verdict(expected_s: float, observed_s: float, range_s: tuple[float, float], quality: Quality) -> Fidelity:
    if abs(expected_s - observed_s) <= max(quality.bound * observed_s, quality.floor_s):
        return Fidelity.GOOD
    low_s, high_s = range_s
    explained = low_s - quality.floor_s <= expected_s <= high_s + quality.floor_s
    return Fidelity.TOO_FEW if explained else Fidelity.NOT_GOOD
