"""Signals: what is wrong with a running engine or worth knowing of it, each with its cause named. Pure.

Each rule is a function of one ``View`` in a ``signals_*`` module beside this one, with its thresholds, why they are
what they are, and the least data below which it says nothing: what is missing is not zero.
"""

from collections.abc import Callable, Iterator

from rooftune.policies import wire
from rooftune.policies.guard import Reason
from rooftune.policies.step_time import StepModel
from rooftune.tuner.control.outcome import SignalPart
from rooftune.tuner.control.signals import budget as signals_budget
from rooftune.tuner.control.signals import gaps as signals_gaps
from rooftune.tuner.control.signals import pressure as signals_pressure
from rooftune.tuner.control.signals import requests as signals_requests
from rooftune.tuner.control.signals.codes import Signal
from rooftune.tuner.control.signals.view import View
from rooftune.tuner.model.drift import Drift
from rooftune.tuner.observe.rows import RequestRows, StepRows

Rule = Callable[[View], Iterator[SignalPart]]

# In the order in which to read them: what stops everything first.
RULES: tuple[Rule, ...] = (
    signals_pressure.hung,
    signals_pressure.stalled,
    signals_pressure.kv_bound,
    signals_pressure.throughput_not_recovered,
    signals_requests.two_tpot_levels,
    signals_pressure.step_model_drifted,
    signals_gaps.chunking,
    signals_gaps.unexplained_tail,
    signals_budget.budget_never_reached,
    signals_budget.decodes_crowd_budget,
    signals_budget.long_prefill_blocks,
    signals_budget.partial_prefills_growing,
    signals_budget.queue_growing,
    signals_gaps.gaps_follow_prompts,
    signals_requests.ttft_spread,
    signals_pressure.no_request_ended,
)

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
