"""Signals of an engine in trouble: KV, stalls, a pace that does not come back, a drifted model, nothing to judge."""

from collections.abc import Iterator

import numpy as np

from rooftune.tuner.control.outcome import LoadPart, SignalPart
from rooftune.tuner.control.signals.codes import Signal, finding
from rooftune.tuner.control.signals.view import MIN_STEPS, View, thirds

# A pool counts as full a few blocks before it is: the last ones hold a request's next token.
KV_FULL = 0.95
KV_FULL_SHARE = 0.1
# One preemption is an accident.
MIN_PREEMPTIONS = 3
# A stall is reported after as many steps as a prompt of ordinary length takes.
STALL_STEPS = 20
# No step for this long, and for many times the longest one, while requests are there.
HUNG_S = 10.0
HUNG_STEPS = 20.0
# Steps but no end: as long as this an answer of hundreds of tokens takes on a slow engine.
SILENT_S = 30.0
# Load fell by a third at least, and each running request is served at less than half the pace it was.
LOAD_FELL_TO = 0.67
PACE_FELL_TO = 0.5


def kv_bound(view: View) -> Iterator[SignalPart]:
    """KV full and preemptions that go on: moving the budget does not help, blocks do."""
    steps = view.steps
    if not view.enough_steps:
        return
    full = float(np.mean(steps.kv_used >= KV_FULL))
    half = len(steps) // 2
    before, after = int(steps.preemptions[:half].sum()), int(steps.preemptions[half:].sum())
    if full >= KV_FULL_SHARE and before + after >= MIN_PREEMPTIONS and after > before / 3:
        per_s = (before + after) / view.span_s if view.span_s > 0.0 else float("nan")
        yield finding(Signal.KV_BOUND, full_share=full, preemptions_per_s=per_s, kv_used=np.max(steps.kv_used))


def throughput_not_recovered(view: View) -> Iterator[SignalPart]:
    """KV was full, load has fallen since, and the pace of each request has not come back."""
    steps = view.steps
    if not view.enough_steps or not (steps.kv_used >= KV_FULL).any():
        return
    first_load, middle_load, last_load = thirds(steps.running + steps.waiting)
    busy = (steps.decode_tokens > 0) & (steps.running > 0)
    if int(busy.sum()) < MIN_STEPS:
        return
    pace = steps.decode_tokens[busy] / (steps.running[busy] * steps.duration_s[busy])
    at_first, _, at_last = thirds(pace)
    if last_load <= LOAD_FELL_TO * max(first_load, middle_load) and at_last < PACE_FELL_TO * at_first:
        yield finding(
            Signal.THROUGHPUT_NOT_RECOVERED, load_before=max(first_load, middle_load), load_after=last_load,
            tokens_per_s_before=at_first, tokens_per_s_after=at_last,
        )  # fmt: skip


def stalled(view: View) -> Iterator[SignalPart]:
    """A request waits all the time, preemptions climb, nothing finishes: it never fits."""
    steps = view.steps
    if len(steps) < STALL_STEPS:
        return
    ended = int(np.sum(view.requests.finish_s >= steps.start_s[0]))
    preempted = int(steps.preemptions.sum())
    if ended == 0 and preempted >= MIN_PREEMPTIONS and bool((steps.waiting > 0).all()):
        numbers = {"waiting": steps.waiting[-1], "preemptions": preempted, "steps": len(steps)}
        yield finding(Signal.STALLED, **numbers, span_s=view.span_s)


def hung(view: View) -> Iterator[SignalPart]:
    """Requests are there, and no step has ended for long."""
    steps = view.steps
    if not len(steps):
        return
    ended = int(np.sum(view.requests.finish_s >= steps.start_s[-1]))
    left = int(steps.waiting[-1]) + max(int(steps.running[-1]) - ended, 0)
    silent_s = view.now_s - float(steps.end_s[-1])
    if left > 0 and silent_s > max(HUNG_S, HUNG_STEPS * float(np.max(steps.duration_s))):
        yield finding(Signal.HUNG, silent_s=silent_s, requests=left)


def step_model_drifted(view: View) -> Iterator[SignalPart]:
    if view.drift is not None:
        drift = view.drift
        yield finding(Signal.STEP_MODEL_DRIFTED, ratio=drift.ratio, windows=drift.windows, slower=drift.slower)


def overload(load: LoadPart) -> Iterator[SignalPart]:
    """More arrives than is carried; by the search, so it comes with a cycle's load and not with its rows."""
    if load.overload and load.offered_rps is not None:
        parts = {"in_force": load.in_force, "boot": load.boot, "proposed": load.proposed}
        known = {f"{k}_rps": v.sustainable_rps for k, v in parts.items() if v.sustainable_rps is not None}
        yield finding(Signal.OVERLOAD, offered_rps=load.offered_rps, **known)


def no_request_ended(view: View) -> Iterator[SignalPart]:
    """Steps run, and nothing came to an end: there is nothing to judge a setting by."""
    if len(view.requests) == 0 and view.enough_steps and view.span_s >= SILENT_S:
        running = np.median(view.steps.running)
        yield finding(Signal.NO_REQUEST_ENDED, steps=len(view.steps), span_s=view.span_s, running=running)
