"""Signals: what is wrong with a running engine, or worth knowing about it, each with its cause. Pure.

Each rule is a function of one ``View`` in a module beside this one, with its thresholds, the reasons for them, and the
least data below which it says nothing: what is missing is not zero.
"""

from collections.abc import Callable, Iterator

from rooftune.policies import wire
from rooftune.policies.guard import Reason
from rooftune.policies.step_time import StepModel
from rooftune.tuner.control.outcome import SignalPart
from rooftune.tuner.control.signals import budget, gaps, pressure
from rooftune.tuner.control.signals import requests as of_requests
from rooftune.tuner.control.signals.codes import Signal
from rooftune.tuner.control.signals.view import View
from rooftune.tuner.model.drift import Drift
from rooftune.tuner.observe.rows import RequestRows, StepRows

Rule = Callable[[View], Iterator[SignalPart]]

# In the order in which to read them: what stops everything first.
RULES: tuple[Rule, ...] = (
    pressure.hung, pressure.stalled, pressure.kv_bound, pressure.throughput_not_recovered, of_requests.two_tpot_levels,
    pressure.step_model_drifted, gaps.chunking, gaps.unexplained_tail, budget.budget_never_reached,
    budget.decodes_crowd_budget, budget.long_prefill_blocks, budget.demand_growing, gaps.gaps_follow_prompts,
    of_requests.ttft_spread, pressure.no_request_ended,
)  # fmt: skip

# While one of these stands no setting can be judged, so none should be moved.
FREEZING = frozenset(
    {
        Signal.HUNG, Signal.STALLED, Signal.KV_BOUND, Signal.THROUGHPUT_NOT_RECOVERED, Signal.TWO_TPOT_LEVELS,
        Signal.NO_REQUEST_ENDED,
    }
)  # fmt: skip


def find_signals(
    steps: StepRows,
    requests: RequestRows,
    state: wire.State,
    model: StepModel | None = None,
    drift: Drift | None = None,
    now_s: float | None = None,
) -> tuple[SignalPart, ...]:
    """The signals of one window, in the order of ``RULES``.

    steps, requests: the rows of the window, in order, of the boot that ``state`` is of; requests: those that ended in
    it. now_s: on the engine's clock (default: when the state was read).
    """
    view = View(steps, requests, state, model, drift, state.now_s if now_s is None else now_s)
    return tuple(part for rule in RULES for part in rule(view))


def freeze_of(signals: tuple[SignalPart, ...], abort_storm: bool, idle: bool) -> Reason | None:
    """Why no setting can be judged now; None: one can."""
    codes = {Signal(part.code) for part in signals} & FREEZING
    if codes & {Signal.HUNG, Signal.STALLED}:
        return Reason.STALLED
    if codes & {Signal.THROUGHPUT_NOT_RECOVERED, Signal.TWO_TPOT_LEVELS}:
        return Reason.FROZEN_BY_SIGNAL
    if abort_storm:
        return Reason.ABORT_STORM
    if Signal.NO_REQUEST_ENDED in codes:
        return Reason.NO_SIGNAL
    return Reason.IDLE if idle else None
