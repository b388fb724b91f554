"""Signals about gaps: a tail that the budget does not explain, with its cause; and gaps that follow the prompts."""

from collections.abc import Iterator

import numpy as np

from rooftune.policies.quantiles import quantile, weighted_quantile
from rooftune.tuner.control.outcome import SignalPart
from rooftune.tuner.control.signals.codes import Signal, finding
from rooftune.tuner.control.signals.view import MIN_REQUESTS, MIN_STEPS, View, rank_correlation
from rooftune.tuner.observe.rows import FloatArray

# Three times the longest step that the budget explains: models are wrong by tens of percent, not by two hundred.
TAIL_RATIO = 3.0
# Without chunks: steps with a prompt this many times as long as those without are what users feel as a stall.
WHOLE_PROMPT_RATIO = 4.0
# Single odd steps (compilation, a page fault) happen; three of them in a window are a habit.
MIN_ODD = 3
# A share of steps that leave a writing request out before it can be what makes the p99.
LEFT_OUT_SHARE = 0.02
# Time slices, each with some steps: enough for a rank correlation, wide enough to hold a prompt.
SLICES = 24
MIN_SLICES = 12
# By chance 24 slices of unrelated numbers reach 0.6 about twice in a thousand windows.
MIN_CORRELATION = 0.6
# And the slices with the longest prompts must have gaps three times those of the slices with the shortest.
FOLLOW_RATIO = 3.0


def chunking(view: View) -> Iterator[SignalPart]:
    """Prompts that run whole: bypassed, off, or switched off by the kind of model, judged by envelope and records."""
    steps = view.steps
    tail_s = _tail_s(view)
    if view.state.envelope.chunking:
        over = view.above_budget
        if int(over.sum()) >= MIN_ODD:
            most, allowed = np.max(steps.computed_tokens[over]), np.max(steps.budget_tokens[over])
            numbers = {"steps": over.sum(), "computed_tokens": most, "budget_tokens": allowed}
            yield finding(Signal.CHUNKING_BYPASSED, **numbers, gap_p99_s=tail_s)
        return
    with_prompt = (steps.prefill_tokens > 0) & (steps.decode_tokens > 0)
    plain = (steps.prefill_tokens == 0) & (steps.decode_tokens > 0)
    if int(with_prompt.sum()) < MIN_ODD or int(plain.sum()) < MIN_STEPS:
        return
    usual_s = float(np.median(steps.duration_s[plain]))
    longest_s = quantile(steps.duration_s[with_prompt], 0.99)
    if longest_s >= WHOLE_PROMPT_RATIO * usual_s:
        code = Signal.CHUNKING_OFF_BY_MODEL if _chunks_were_requested(view) else Signal.CHUNKING_OFF
        largest = np.max(steps.prefill_tokens)
        yield finding(code, step_s=longest_s, decode_step_s=usual_s, prompt_tokens=largest, gap_p99_s=tail_s)


def _chunks_were_requested(view: View) -> bool:
    """With chunking off on purpose an engine's budget holds its longest prompt and there is no cap; else it was not
    the operator who switched it off (vLLM: encoder-decoder models, no KV cache, attention that is not causal)."""
    envelope = view.state.envelope
    too_small = envelope.model_tokens is not None and envelope.ceiling_tokens < envelope.model_tokens
    return view.value("chunk_cap_tokens") > 0 or too_small or envelope.kv_blocks == 0


def _tail_s(view: View) -> float:
    """p99 of the longest gap of a request; NaN with too few of them."""
    rows = view.with_gaps
    return quantile(rows.longest_gap_s, 0.99) if len(rows) >= MIN_REQUESTS else float("nan")


def unexplained_tail(view: View) -> Iterator[SignalPart]:
    """Chunks are in order, and yet the tail is far above the longest step that the budget explains: why?"""
    tail_s, explained_s = _tail_s(view), view.explained_s
    steps, predicted_s = view.steps, view.predicted_s
    sound = view.state.envelope.chunking and int(view.above_budget.sum()) < MIN_ODD
    if explained_s is None or predicted_s is None or not sound or not view.enough_steps:
        return
    if not tail_s > TAIL_RATIO * explained_s:
        return
    far_s = TAIL_RATIO * explained_s
    numbers = {"gap_p99_s": tail_s, "explained_s": explained_s}
    slow = (steps.duration_s > far_s) & (steps.duration_s > TAIL_RATIO * predicted_s)
    busy = (steps.running[:-1] > steps.prefills[:-1]) | (steps.partial_prefills[:-1] > 0) | (steps.waiting[:-1] > 0)
    pauses_s = (steps.start_s[1:] - steps.end_s[:-1])[busy & (np.diff(steps.step) == 1)]
    left_out = steps.running - steps.sequences > steps.partial_prefills
    if int(slow.sum()) >= MIN_ODD:
        longest_s = np.max(steps.duration_s[slow])
        yield finding(Signal.GAP_TAIL_SLOW_STEPS, **numbers, steps=slow.sum(), step_s=longest_s)
    elif int((pauses_s > far_s).sum()) >= MIN_ODD:
        yield finding(Signal.GAP_TAIL_PAUSES, **numbers, pauses=(pauses_s > far_s).sum(), pause_s=pauses_s.max())
    elif np.mean(left_out) >= LEFT_OUT_SHARE:
        yield finding(Signal.GAP_TAIL_LEFT_OUT, **numbers, share=np.mean(left_out))


def gaps_follow_prompts(view: View) -> Iterator[SignalPart]:
    """p99 gap and the prompts admitted, in slices of time: do they rise together, and how far?"""
    if not view.enough_steps or len(view.served) < MIN_REQUESTS:
        return
    gaps_s, prompts = _slices(view)
    if len(gaps_s) < MIN_SLICES:
        return
    correlation = rank_correlation(gaps_s, prompts)
    order = np.argsort(prompts, kind="stable")
    third = len(order) // 3
    short_s, long_s = float(np.median(gaps_s[order[:third]])), float(np.median(gaps_s[order[-third:]]))
    if correlation >= MIN_CORRELATION and long_s >= FOLLOW_RATIO * short_s:
        yield finding(
            Signal.GAPS_FOLLOW_PROMPTS, correlation=correlation, gap_p99_short_prompts_s=short_s,
            gap_p99_long_prompts_s=long_s, long_prompt_tokens=np.median(prompts[order[-third:]]),
        )  # fmt: skip


def _slices(view: View) -> tuple[FloatArray, FloatArray]:
    """For each slice of time in which something was written: p99 gap (a step is the gap of every decode in it), and
    the longest prompt without its cached part that was first scheduled in the slice (0: none)."""
    steps, rows = view.steps, view.requests
    edges = np.linspace(float(steps.start_s[0]), float(steps.end_s[-1]), SLICES + 1)
    step_at = np.clip(np.searchsorted(edges, steps.start_s, side="right") - 1, 0, SLICES - 1)
    seen = np.isfinite(rows.scheduled_s)
    fresh = (rows.prompt_tokens - rows.cached_tokens)[seen].astype(np.float64)
    request_at = np.searchsorted(edges, rows.scheduled_s[seen], side="right") - 1
    gaps_s, prompts = [], []
    for at in range(SLICES):
        here = (step_at == at) & (steps.decode_tokens > 0)
        if here.any():
            gaps_s.append(weighted_quantile(steps.duration_s[here], steps.decode_tokens[here], 0.99))
            prompts.append(float(np.max(fresh[request_at == at], initial=0.0)))
    return np.array(gaps_s), np.array(prompts)
