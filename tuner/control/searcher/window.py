"""A job's values as the twin's: traffic, what was observed, and the noise of steps."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rooftune.policies.errors import InputError
from rooftune.policies.outcomes import BoolArray, FloatArray, IntArray, Outcomes
from rooftune.policies.slo import Slo
from rooftune.tuner.control.figures import judgeable
from rooftune.tuner.control.job import Job, WindowPart
from rooftune.tuner.observe.rows import FINISHED, FlightRows, RequestRows
from rooftune.tuner.sim.noise import QUIET, StepNoise, noise_from_steps
from rooftune.tuner.sim.progress import Progress
from rooftune.tuner.traffic.workload import Traffic

LEAST_NOISE_STEPS = 20
# The end of a window is not compared where it is cut: at most this share of its span.
MOST_CUT = 0.25
CUT_QUANTILE = 0.9


def slo_of(job: Job) -> Slo:
    """The targets as this window can show them."""
    return judgeable(job.slo, job.window.gap_bounds_s)


def noise_of(job: Job, seed: int) -> StepNoise:
    """Noise of single steps; none when the job brings too few of them."""
    modelled, measured = np.array(job.noise_modelled_s), np.array(job.noise_measured_s)
    if len(modelled) != len(measured):
        raise InputError(f"noise has {len(modelled)} modelled and {len(measured)} measured steps; give the same twice")
    kept = (modelled > 0.0) & (measured > 0.0)
    if int(kept.sum()) < LEAST_NOISE_STEPS:
        return QUIET
    return noise_from_steps(modelled[kept], measured[kept], seed=seed)


def traffic_of(window: WindowPart, from_s: float = -math.inf) -> Traffic:
    """The window's requests from the first arrival on (0 s), which may lie before the window. from_s: without those
    that arrived earlier, on the window's clock."""
    rows = np.array(window.arrival_s) >= from_s
    arrival_s = np.array(window.arrival_s)[rows]
    if not len(arrival_s):
        raise InputError("the window holds no finished request; wait for some")
    prompt = np.array(window.prompt_tokens, dtype=np.int64)[rows]
    return Traffic(
        arrival_s=arrival_s - arrival_s[0],
        prompt_tokens=prompt,
        output_tokens=np.array(window.output_tokens, dtype=np.int64)[rows],
        cached_tokens=np.minimum(np.array(window.cached_tokens, dtype=np.int64)[rows], prompt - 1),
        tenant=np.zeros(len(arrival_s), dtype=np.int64),
        name="live window",
    )


def block_of(window: WindowPart, start_s: float, until_s: float) -> WindowPart:
    """The part of a window from start_s on, its new zero: arrivals before until_s, and what was in the engine then."""
    arrival_s, finish_s = np.array(window.arrival_s), _instants(window.finish_s)
    rows = np.flatnonzero((arrival_s < until_s) & ((arrival_s >= start_s) | ~(finish_s <= start_s))).tolist()
    columns: dict[str, Any] = {name: getattr(window, name) for name in WindowPart.model_fields}
    for name, column in columns.items():
        if name == "gap_over":
            columns[name] = tuple(tuple(counts[row] for row in rows) for counts in column)
        elif name in ("arrival_s", "scheduled_s", "finish_s"):
            columns[name] = tuple(None if column[row] is None else column[row] - start_s for row in rows)
        elif name != "gap_bounds_s" and column:
            columns[name] = tuple(column[row] for row in rows)
    return WindowPart(**columns)


def progress_of(window: WindowPart) -> Progress | None:
    """What was in the engine when the window began, on the traffic's clock; None: nothing.

    A prompt is taken to be read, and an answer to be written, evenly between the instants that are known.
    """
    count = sum(at_s < 0.0 for at_s in window.arrival_s)
    if not count:
        return None
    columns = (window.arrival_s, window.scheduled_s, window.ttft_s, window.finish_s)
    arrival_s, scheduled_s, ttft_s, finish_s = (_instants(column)[:count] for column in columns)
    prompt, cached = np.array(window.prompt_tokens)[:count], np.array(window.cached_tokens)[:count]
    ended, output = _ended(window)[:count], np.array(window.produced_tokens or window.output_tokens)[:count]
    first_s = arrival_s + ttft_s
    runs, decodes = scheduled_s <= 0.0, first_s <= 0.0
    read = cached + (prompt - cached) * _share(scheduled_s, first_s)
    gap_s = (finish_s - first_s) / np.maximum(output - 1, 1)
    most = output - ended
    produced = np.where(decodes, np.minimum(1 + np.floor((output - 1) * _share(first_s, finish_s)), most), 0.0)
    produced = np.where(most > 0, np.maximum(produced, decodes), 0.0)
    decodes = produced > 0.0
    computed = np.where(decodes, prompt + produced - 1, np.where(runs, np.minimum(np.floor(read), prompt - 1), 0.0))
    order = np.lexsort((arrival_s, np.where(runs, scheduled_s, 0.0), ~runs))
    zero_s = arrival_s[0]
    return Progress(
        at_s=-zero_s,
        request=order.astype(np.int64),
        running=int(runs.sum()),
        computed_tokens=computed[order].astype(np.int64),
        produced_tokens=produced[order].astype(np.int64),
        scheduled_s=np.where(runs, scheduled_s - zero_s, np.nan)[order],
        first_token_s=np.where(decodes, first_s - zero_s, np.nan)[order],
        last_token_s=np.where(decodes, first_s + (produced - 1) * gap_s - zero_s, np.nan)[order],
        longest_gap_s=np.where(decodes, 0.0, np.nan)[order],
    )


def _share(from_s: FloatArray, until_s: FloatArray) -> FloatArray:
    """How much of the time between two instants had passed at 0 s, 0..1; 0 where one of them is not reached."""
    share: FloatArray = np.nan_to_num(np.clip(-from_s / np.maximum(until_s - from_s, 1e-9), 0.0, 1.0))
    return share


def _instants(column: Sequence[float | None]) -> FloatArray:
    return np.array(column, dtype=np.float64)  # None becomes NaN


def _ended(window: WindowPart) -> BoolArray:
    produced = window.produced_tokens or window.output_tokens
    ended: BoolArray = np.array(produced) >= np.array(window.output_tokens)
    return ended


def observed_of(window: WindowPart) -> Outcomes:
    """What became of them, on the traffic's clock."""
    arrival_s = np.array(window.arrival_s)
    over = np.array(window.gap_over, dtype=np.int64).reshape(len(window.gap_bounds_s), len(arrival_s))
    zero_s = arrival_s[0]
    return Outcomes(
        arrival_s=arrival_s - zero_s,
        scheduled_s=_instants(window.scheduled_s) - zero_s,
        first_token_s=arrival_s - zero_s + _instants(window.ttft_s),
        finish_s=np.where(_ended(window), _instants(window.finish_s) - zero_s, np.nan),
        prompt_tokens=np.array(window.prompt_tokens, dtype=np.int64),
        output_tokens=np.array(window.output_tokens, dtype=np.int64),
        longest_gap_s=np.array(window.longest_gap_s),
        gap_count=np.array(window.gap_count, dtype=np.int64),
        cached_tokens=np.array(window.cached_tokens, dtype=np.int64),
        gap_bounds_s=np.array(window.gap_bounds_s),
        gap_over=over.T,
    )


def compared(observed: Outcomes, from_s: float) -> BoolArray:
    """Which requests the twin is judged on: those that have ended and arrived from ``from_s`` on, but for the end of
    the window.

    There the requests that have finished are the short ones. It lasts as long as nine requests in ten take, at most a
    quarter of the window.
    """
    arrival_s, ended = np.asarray(observed.arrival_s), observed.finished
    took_s = (observed.finish_s - arrival_s)[ended]
    end_s = float(np.max(observed.finish_s[ended], initial=-math.inf))
    cut_s = min(float(np.quantile(took_s, CUT_QUANTILE)), MOST_CUT * (end_s - from_s)) if len(took_s) else math.nan
    kept: BoolArray = ended & (arrival_s >= from_s) & (arrival_s <= end_s - cut_s)
    return kept if kept.any() and math.isfinite(cut_s) else ended


def assumed_output(produced: IntArray, finished: IntArray) -> IntArray:
    """How long answers that have not ended will be: as long as they are, and as much more as the mean of the finished
    ones that became longer went on; at least one token more."""
    lengths = np.sort(finished)
    longer = np.searchsorted(lengths, produced, side="right")
    sums = np.concatenate([np.cumsum(lengths[::-1])[::-1], [0]])
    more = sums[longer] / np.maximum(len(lengths) - longer, 1) - produced
    assumed: IntArray = produced + np.maximum(np.rint(more), 1.0).astype(np.int64)
    return assumed


def with_unended(part: WindowPart, rows: FlightRows, start_s: float) -> WindowPart:
    """The window with the requests that have not ended. What of a waiting prompt the cache will spare is not known: the
    same share as of the finished ones."""
    rows = rows.select(rows.prompt_tokens > 0)
    finished = np.array(part.output_tokens, dtype=np.int64)
    spared = sum(part.cached_tokens) / max(sum(part.prompt_tokens), 1)
    waits = np.isnan(rows.scheduled_s)
    none = (0,) * len(rows)
    columns: dict[str, Sequence[Any]] = {
        "arrival_s": (rows.arrival_s - start_s).tolist(),
        "scheduled_s": _reached(rows.scheduled_s - start_s),
        "ttft_s": _reached(rows.first_token_s - rows.arrival_s),
        "finish_s": _reached(rows.last_token_s - start_s),
        "longest_gap_s": (0.0,) * len(rows),
        "prompt_tokens": rows.prompt_tokens.tolist(),
        "cached_tokens": np.where(waits, spared * rows.prompt_tokens, rows.cached_tokens).astype(np.int64).tolist(),
        "output_tokens": assumed_output(rows.output_tokens, finished).tolist(),
        "gap_count": none,
        "produced_tokens": rows.output_tokens.tolist(),
    }
    before = part.model_copy(update={"produced_tokens": part.output_tokens})
    order = np.argsort([*part.arrival_s, *columns["arrival_s"]], kind="stable").tolist()

    def merged(old: Sequence[Any], new: Sequence[Any]) -> tuple[Any, ...]:
        both = [*old, *new]
        return tuple(both[row] for row in order)

    values = {name: merged(getattr(before, name), column) for name, column in columns.items()}
    return part.model_copy(update=values | {"gap_over": tuple(merged(row, none) for row in part.gap_over)})


def _reached(instants_s: FloatArray) -> list[float | None]:
    return [None if math.isnan(at_s) else at_s for at_s in instants_s.tolist()]


def window_part(rows: RequestRows, start_s: float) -> WindowPart:
    """Finished requests by arrival, times counted from start_s (engine's clock); rows of another end are left out.

    So are requests without a token of prompt or output, which no twin can replay.
    """
    kept = (rows.ended == FINISHED) & np.isfinite(rows.ttft_s) & np.isfinite(rows.finish_s)
    kept &= (rows.prompt_tokens > 0) & (rows.output_tokens > 0)
    picked = rows.select(kept)
    picked = picked.select(np.lexsort((picked.sequence, picked.arrival_s)))
    return WindowPart(
        arrival_s=tuple((picked.arrival_s - start_s).tolist()),
        scheduled_s=tuple((np.fmax(picked.scheduled_s, picked.arrival_s) - start_s).tolist()),
        ttft_s=tuple(picked.ttft_s.tolist()),
        finish_s=tuple((picked.finish_s - start_s).tolist()),
        longest_gap_s=tuple(np.nan_to_num(picked.longest_gap_s).tolist()),
        prompt_tokens=tuple(picked.prompt_tokens.tolist()),
        cached_tokens=tuple(picked.cached_tokens.tolist()),
        output_tokens=tuple(picked.output_tokens.tolist()),
        gap_count=tuple(picked.gap_count.tolist()),
        gap_bounds_s=picked.gap_bounds_s,
        gap_over=tuple(tuple(row) for row in picked.gap_over.T.tolist()),
    )
