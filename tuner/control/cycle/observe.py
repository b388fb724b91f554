"""Observe: one reading and its window, as the rest of the cycle sees them. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from rooftune.policies import wire
from rooftune.policies.envelope import FOLLOWERS, Envelope, KnobBound, Mode, canonical
from rooftune.policies.errors import bad_value
from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo
from rooftune.policies.verify import Observed
from rooftune.tuner.control.cycle.degradation import observed, rising
from rooftune.tuner.control.memory import Kept, Memory, Traffic, Trial, setting_of, traffic_of
from rooftune.tuner.control.outcome import SignalPart
from rooftune.tuner.control.signals.budget import observed_ceiling_tokens
from rooftune.tuner.observe.protocol import Reading
from rooftune.tuner.observe.rows import ABORTED, FloatArray, RequestRows
from rooftune.tuner.observe.window import Window

# An abort storm: beyond this share and number of aborts a window says more about its clients than about the engine.
STORM_SHARE, STORM_LEAST = 0.25, 10
# From here on a KV pool of unknown size may hold requests back, which the twin would not show.
POOL_TIGHT = 0.9
# The hook's engine name, and the start of its note after it has switched itself off.
VLLM, HOOK_OFF = "vllm", "hook off"


@dataclass(frozen=True, eq=False)
class Seen:
    """The facts of one cycle. window: with this reading's rows. since_s: when the setting came into force, on the
    engine's clock, -inf if unknown. slo: targets as this engine's records can show them."""

    reading: Reading
    window: Window
    signals: tuple[SignalPart, ...]
    slo: Slo
    since_s: float
    window_s: float
    verify_s: float

    @property
    def state(self) -> wire.State:
        return self.reading.state

    @property
    def now_s(self) -> float:
        return self.reading.now_s

    @cached_property
    def setting(self) -> Setting:
        return setting_in_force(self.state)

    @cached_property
    def boot(self) -> Setting:
        return boot_of(self.state)

    @cached_property
    def envelope(self) -> Envelope:
        return envelope_of(self.state)

    @property
    def from_s(self) -> float:
        """Start of the time in which this setting can be judged, at most a window ago."""
        return max(self.since_s, self.window.complete_from_s, self.now_s - self.window_s)

    @cached_property
    def requests(self) -> RequestRows:
        """Requests that arrived and ended under this setting, aborted and failed ones included, by arrival."""
        return self.window.requests_since(self.from_s)

    @cached_property
    def span_s(self) -> float:
        """Seconds that ``requests`` cover, from the first row on."""
        from_s = self.from_s
        if math.isinf(self.window.complete_from_s) and math.isinf(self.since_s) and len(self.requests):
            from_s = max(from_s, float(self.requests.arrival_s[0]))
        return max(0.0, self.now_s - from_s) if math.isfinite(from_s) else 0.0

    @cached_property
    def demand(self) -> RequestRows:
        """Finished requests of the same time that a twin may replay; see ``Window.demand``."""
        return self.window.demand(self.from_s)

    @cached_property
    def arrivals_s(self) -> FloatArray:
        """Of ``demand`` and of what arrived in that time and has not ended, where that is known; ascending."""
        flights = self.window.in_flight
        if flights is None or not len(self.demand):  # without one that has ended, nothing could be compared
            return self.demand.arrival_s
        later_s = flights.arrival_s[flights.arrival_s >= self.from_s]
        return np.sort(np.concatenate([self.demand.arrival_s, later_s]))

    @cached_property
    def traffic(self) -> Traffic | None:
        """Lengths of ``requests``, at the rate at which they arrive: where a queue grows, fewer end."""
        found = traffic_of(self.requests, self.span_s)
        steps = self.window.steps
        if found is None or not len(steps):
            return found
        from_s = max(self.now_s - self.span_s, float(steps.start_s[0]))
        if not from_s < self.now_s:
            return found
        rate_rps = arrivals(self.window, from_s, self.now_s) / (self.now_s - from_s)
        return found.model_copy(update={"rate_rps": rate_rps})

    @cached_property
    def arrived(self) -> tuple[float, float]:
        """Requests that arrived in the latest ``2 * verify_s``, under whatever setting, ended or not; and the seconds
        that were seen of them, 0 without steps."""
        window = self.window
        steps = window.steps.select(window.steps.start_s >= self.now_s - 2.0 * self.verify_s)
        if not len(steps):
            return 0.0, 0.0
        since_s = float(steps.start_s[0])
        return float(arrivals(window, since_s, self.now_s)), self.now_s - since_s

    @cached_property
    def overdue(self) -> float:
        """Waiting requests that must have waited longer than ``wait_bound_s``: missed, though not ended."""
        rate_rps = len(self.requests) / self.span_s if self.span_s > 0.0 else math.nan
        return overdue(self.window, self.slo, wait_bound_s(self.slo, self.verify_s), rate_rps, self.from_s)

    @cached_property
    def ceiling_tokens(self) -> int | None:
        """The budget that the steps show, when it differs from the set one."""
        steps = self.window.steps.select(self.window.steps.start_s >= self.from_s)
        return observed_ceiling_tokens(steps, self.state)

    @cached_property
    def hidden_pool_fills(self) -> bool:
        """Whether the KV pool limits the steps while the engine hides its size."""
        if self.state.envelope.kv_blocks:
            return False
        steps = self.window.steps.select(self.window.steps.start_s >= self.from_s)
        return bool((steps.kv_used >= POOL_TIGHT).any() or steps.preemptions.any())

    @property
    def abort_storm(self) -> bool:
        return storming(self.window, max(self.from_s, self.now_s - self.verify_s))

    @cached_property
    def observed(self) -> Observed:
        """Quantities for operator thresholds, under this setting and at most ``verify_s`` back.

        What queued behind requests from before the setting says little about it.
        """
        since_s = self.since_s
        if math.isfinite(since_s):
            since_s = carried_until(self.window, since_s, since_s + self.verify_s / 2.0)
        return observed(self.window, max(since_s, self.now_s - self.verify_s), self.now_s)

    @cached_property
    def errors_rising(self) -> bool:
        """Compares failed requests in the latest ``verify_s`` with those before."""
        ended = self.window.requests.select(self.window.requests.ended != ABORTED)
        late = ended.finish_s > self.now_s - self.verify_s
        return rising(ended.ended[late], ended.ended[~late])

    @property
    def kv_used(self) -> float:
        """KV use of the latest step, 0..1; NaN without one."""
        return float(self.reading.steps.kv_used[-1]) if len(self.reading.steps) else math.nan

    @property
    def preempting(self) -> bool:
        return bool(self.reading.steps.preemptions.sum() > 0)


def overdue(window: Window, slo: Slo, wait_s: float, rate_rps: float, start_s: float, end_s: float = math.inf) -> float:
    """Requests that have not ended and waited longer than ``wait_s``, whatever comes: of those that arrived within
    start_s <= arrival < end_s where the engine tells; else, of all that wait, those beyond what arrives at ``rate_rps``
    within the bound. 0 without a finite bound."""
    if not math.isfinite(wait_s):
        return 0.0
    flights = window.in_flight
    if flights is None:
        return max(0.0, waiting_at(window, window.now_s) - rate_rps * wait_s) if math.isfinite(rate_rps) else 0.0
    metrics = {target.metric for target in slo.targets}
    reached_s = flights.scheduled_s if "queue" in metrics and "ttft" not in metrics else flights.first_token_s
    late = np.where(np.isnan(reached_s), flights.now_s, reached_s) - flights.arrival_s > wait_s
    if not metrics & {"ttft", "queue"}:
        late &= np.isnan(reached_s)  # without a target on it, a first token that came late is no miss
    return float(np.sum(late & (flights.arrival_s >= start_s) & (flights.arrival_s < end_s)))


def wait_bound_s(slo: Slo, verify_s: float) -> float:
    """Longest wait for a first token before a waiting request counts as missed: the mildest target that holds for all.
    Without one half of ``verify_s``: gaps alone look good while no request is admitted."""
    bounds = [target.bound_s for target, _ in slo.all_targets() if target.metric in ("ttft", "queue")]
    return max(bounds) if any(target.metric in ("ttft", "queue") for target in slo.targets) else verify_s / 2.0


def storming(window: Window, start_s: float) -> bool:
    """Whether an abort storm runs among the requests that arrived from ``start_s`` on."""
    rows = window.requests_since(start_s)
    aborted = int((rows.ended == ABORTED).sum())
    return aborted >= STORM_LEAST and aborted > STORM_SHARE * len(rows)


def setting_in_force(state: wire.State) -> Setting:
    """The engine's setting, made ``canonical``. Raises InputError without a token budget or for a negative value."""
    setting = state.setting()
    if min(setting) < 0:
        name, value = min(setting._asdict().items(), key=lambda pair: pair[1])
        raise bad_value(f"{name} in force", value, "at least 0", "see the engine's hook and its release")
    return canonical(setting)


def boot_of(state: wire.State) -> Setting:
    """The engine's boot setting; absent knobs keep their defaults."""
    values: dict[str, int | float] = {knob.name: knob.boot for knob in state.knobs if knob.boot is not None}
    return canonical(state.setting()._replace(**values))  # type: ignore[arg-type]  # as in wire.State.setting


def envelope_of(state: wire.State) -> Envelope:
    return Envelope(
        tuple(
            KnobBound(knob.name, knob.min, knob.max, Mode(knob.mode))
            for knob in state.knobs
            if knob.min is not None and knob.max is not None
        )
    )


def keeps_decodes_moving(state: wire.State) -> bool:
    """Whether the engine follows the rule that no prefill starves the decodes behind it.

    The hook leaves vLLM unchanged until the first push (a claim of the lease counts), and again after a fault of its
    own. Until then the twin predicts without the rule.
    """
    off = any(note.startswith(HOOK_OFF) for note in state.notes)
    return state.engine != VLLM or (state.revision > 0 and not off)


def in_flight(window: Window, at_s: float) -> int:
    """Requests running and waiting at an instant, from the step that covers it; 0 when no step does."""
    if at_s >= window.now_s:
        return window.in_system
    index = int(np.searchsorted(window.steps.start_s, at_s, side="right")) - 1
    if index < 0 or window.steps.end_s[index] < at_s:
        return 0
    return int(window.steps.running[index] + window.steps.waiting[index])


def arrivals(window: Window, from_s: float, until_s: float) -> int:
    """Requests that arrived between two instants, ended or not: from what ended and what was there at both."""
    ended = window.requests.finish_s
    known = int(((ended > from_s) & (ended <= until_s)).sum())
    return max(0, known + in_flight(window, until_s) - in_flight(window, from_s))


def waiting_at(window: Window, at_s: float) -> int:
    """Requests waiting at an instant, as ``in_flight``; at the end of the rows those after the newest step."""
    if not len(window.steps) or (window.in_system == 0 and at_s >= window.now_s):
        return 0
    index = int(np.searchsorted(window.steps.start_s, at_s, side="right")) - 1
    if index < 0 or (at_s < window.now_s and window.steps.end_s[index] < at_s):
        return 0
    return int(window.steps.waiting[index])


def carried_until(window: Window, start_s: float, end_s: float) -> float:
    """When the last request that waited at ``start_s`` was scheduled, as far as it has ended; at most half the way."""
    rows = window.requests
    carried = rows.scheduled_s[(rows.arrival_s < start_s) & (rows.scheduled_s > start_s)]
    return min(float(carried.max(initial=start_s)), (start_s + end_s) / 2.0)


class Holder(StrEnum):
    NONE = "none"
    OURS = "ours"
    OTHER = "other"


@dataclass(frozen=True)
class Standing:
    """Who holds the lease, and for what. trial: in force, its verdict due, with the turn that the engine confirms;
    kept: our good setting in force.

    foreign: our lease holds a setting that the memory does not know. dropped: a trial that ended without a verdict.
    """

    holder: Holder
    trial: Trial | None
    kept: Kept | None
    foreign: bool
    dropped: Trial | None

    @property
    def ours_in_force(self) -> bool:
        """Whether we pushed the setting in force and it is not the boot setting."""
        return self.trial is not None or self.kept is not None or self.foreign


def standing_of(state: wire.State, actor: str, memory: Memory) -> Standing:
    """Compares the engine's state with the memory."""
    setting, trial = setting_in_force(state), memory.trial
    if state.lease is None or state.lease.actor != actor:
        holder = Holder.NONE if state.lease is None else Holder.OTHER
        return Standing(holder, None, None, False, trial)
    if trial is not None and trial.boot_id == state.boot_id:
        if setting == setting_of(trial.turn.setting):
            return Standing(Holder.OURS, trial, None, False, None)
        if len(trial.turns) > 1 and setting == setting_of(trial.turns[-2].setting):
            # The switch never arrived: its turn is due again.
            return Standing(Holder.OURS, trial.but(turns=trial.turns[:-1]), None, False, None)
    kept = memory.kept
    if kept is not None and kept.boot_id == state.boot_id and setting == setting_of(kept.setting):
        return Standing(Holder.OURS, None, kept, False, trial)
    return Standing(Holder.OURS, None, None, setting != boot_of(state), trial)


def beyond(setting: Setting, boot: Setting, bounds: Mapping[str, tuple[float, float]]) -> list[str]:
    """Knobs moved without the operator's permission or beyond the operator's bounds.

    Values between the boot setting and the bounds are allowed. A chunk cap of 0 is none.
    """
    wrong = []
    for name, old, new in zip(Setting._fields, boot, setting, strict=True):
        if old == new or name in FOLLOWERS:
            continue
        low, high = bounds.get(name, (math.inf, -math.inf))
        start, end = (math.inf if name == "chunk_cap_tokens" and value == 0 else value for value in (old, new))
        if name not in bounds or not min(low, start) <= end <= max(high, start):
            wrong.append(name)
    return wrong
