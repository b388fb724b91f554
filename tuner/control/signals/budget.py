"""Signals about the budget: demand above it, decodes that fill it, a budget that is not what is in force."""

from collections.abc import Iterator

import numpy as np

from rooftune.policies import wire
from rooftune.tuner.control.outcome import SignalPart
from rooftune.tuner.control.signals.codes import Signal, finding
from rooftune.tuner.control.signals.view import MIN_STEPS, View, thirds
from rooftune.tuner.observe.rows import StepRows

# Twice as many, and at least this many more: a queue that breathes does less over three thirds of a window.
GROWTH_RATIO = 2.0
GROWTH_LEAST = 3.0
# A step counts as full from here on; block sizes and caps keep a full one a little below its budget.
FULL_SHARE = 0.95
# Most steps of the last third must be full: then it is demand and not one long prompt that makes them wait.
MOSTLY = 0.5
# With four fifths of the budget gone to decodes a prompt gets a fifth of what the budget was chosen for.
CROWDED_SHARE = 0.8
# Never more than nine tenths of the budget, with a request waiting ...
REACHED_SHARE = 0.9
# ... and again and again the same ceiling (within 2 %, in a tenth of these steps): a clamp, not a lack of work.
CEILING_WIDTH = 0.02
CEILING_SHARE = 0.1
# Below this share of KV no request waits for blocks; above it a step may stay small for their sake.
KV_EASY = 0.8
# A prompt that fills a third fewer requests while others queue up behind it.
FELL_TO = 0.7
LONG_STRETCH_STEPS = 20


def demand_growing(view: View) -> Iterator[SignalPart]:
    """More and more prompts half read, or requests waiting, with full steps: demand above the budget."""
    if not view.enough_steps:
        return
    steps = view.steps
    tail = slice(-(len(steps) // 3), None)
    full = float(np.mean(steps.computed_tokens[tail] >= FULL_SHARE * steps.budget_tokens[tail]))
    for code, counts in (
        (Signal.PARTIAL_PREFILLS_GROWING, steps.partial_prefills),
        (Signal.QUEUE_GROWING, steps.waiting),
    ):
        first, middle, last = thirds(counts)
        grew = first <= middle <= last and last >= GROWTH_RATIO * first and last - first >= GROWTH_LEAST
        if grew and full >= MOSTLY:
            yield finding(code, first=first, last=last, full_share=full, span_s=view.span_s)


def decodes_crowd_budget(view: View) -> Iterator[SignalPart]:
    """Steps almost all decodes while prompts wait: the budget is too small for as many running requests."""
    steps = view.steps
    wanting = (steps.waiting > 0) | (steps.partial_prefills > 0)
    if int(wanting.sum()) < MIN_STEPS:
        return
    crowded = steps.decode_tokens >= CROWDED_SHARE * steps.budget_tokens
    share = np.mean(crowded[wanting])
    if share >= MOSTLY:
        decodes, budget = np.median(steps.decode_tokens[wanting]), np.median(steps.budget_tokens[wanting])
        yield finding(Signal.DECODES_CROWD_BUDGET, share=share, decode_tokens=decodes, budget_tokens=budget)


def observed_ceiling_tokens(steps: StepRows, state: wire.State) -> int | None:
    """The budget that is really in force when steps never reach the configured one although requests wait and nothing
    else holds them back; None when they do reach it, or when the steps do not show which (from metrics alone: never).
    """
    caps = {knob.name: knob.value or 0 for knob in state.knobs}
    free = (steps.waiting > 0) & (steps.prefill_tokens > 0)  # a step without a prompt may wait for blocks
    free &= steps.kv_used < KV_EASY
    if caps.get("max_running"):
        free &= steps.running < caps["max_running"]
    if caps.get("max_partial_prefills") or caps.get("max_long_partial_prefills"):
        free &= steps.partial_prefills == 0
    if int(free.sum()) < MIN_STEPS:
        return None
    computed, budget = steps.computed_tokens[free], steps.budget_tokens[free]
    if np.any(computed > REACHED_SHARE * budget):
        return None
    ceiling = int(computed.max())
    at_ceiling = float(np.mean(computed >= (1.0 - CEILING_WIDTH) * ceiling))
    return ceiling if at_ceiling >= CEILING_SHARE else None


def budget_never_reached(view: View) -> Iterator[SignalPart]:
    """The configured budget is not in force: something below it clamps every step."""
    ceiling = observed_ceiling_tokens(view.steps, view.state)
    if ceiling is not None:
        budget = np.max(view.steps.budget_tokens)
        yield finding(Signal.BUDGET_NEVER_REACHED, observed_ceiling_tokens=ceiling, budget_tokens=budget)


def long_prefill_blocks(view: View) -> Iterator[SignalPart]:
    """One long prompt is read step after step while running requests finish and none replaces them.

    Gaps are short meanwhile, which must not read as health: raise the budget, or cap the long prompt.
    """
    steps = view.steps
    if len(steps) < LONG_STRETCH_STEPS:
        return
    grows = np.diff(steps.prefill_context_tokens) > 0
    same = grows & (steps.partial_prefills[:-1] > 0) & (steps.prefills[1:] > 0)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    for begin, end in edges.reshape(-1, 2).tolist():  # steps begin..end inclusive read one prompt
        fell = steps.running[end] <= FELL_TO * steps.running[begin]
        rose = steps.waiting[end] - steps.waiting[begin] >= GROWTH_LEAST
        if end - begin >= LONG_STRETCH_STEPS and fell and rose:
            yield finding(
                Signal.LONG_PREFILL_BLOCKS,
                steps=end - begin + 1, span_s=steps.end_s[end] - steps.start_s[begin],
                running_before=steps.running[begin], running_after=steps.running[end],
                waiting_before=steps.waiting[begin], waiting_after=steps.waiting[end],
                budget_tokens=np.median(steps.budget_tokens[begin : end + 1]),
            )  # fmt: skip
            return
