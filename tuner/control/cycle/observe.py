"""Observe: one reading and the window it joins, as everything that the rest of a cycle looks at. Pure."""

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
from rooftune.tuner.control.cycle.matched import overdue
from rooftune.tuner.control.memory import Kept, Memory, Traffic, Trial, setting_of, traffic_of
from rooftune.tuner.control.outcome import SignalPart
from rooftune.tuner.control.signals.budget import observed_ceiling_tokens
from rooftune.tuner.observe.protocol import Reading
from rooftune.tuner.observe.rows import ABORTED, RequestRows
from rooftune.tuner.observe.window import Window

# Beyond this share of aborted requests (and so many of them) a window says more of its callers than of the engine.
STORM_SHARE, STORM_LEAST = 0.25, 10
# From here on a pool of a size that nobody knows may hold requests back: a twin without its size would not.
POOL_TIGHT = 0.9
# How the hook names its engine, and how a note of its begins when it has switched itself off.
VLLM, HOOK_OFF = "vllm", "hook off"


@dataclass(frozen=True, eq=False)
class Seen:
    """What one cycle looks at. window: with this reading's rows. since_s: since when the setting has been in force,
    on the engine's clock, as far as known. slo: targets as this engine's records can show them."""

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
        """On the engine's clock."""
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
        """Start of the stretch in which this setting can be judged: no longer than a window."""
        return max(self.since_s, self.window.complete_from_s, self.now_s - self.window_s)

    @cached_property
    def requests(self) -> RequestRows:
        """Requests, however they ended, that arrived and ended while this setting was in force, by arrival."""
        return self.window.requests_since(self.from_s)

    @cached_property
    def span_s(self) -> float:
        """Seconds that ``requests`` cover; before the first row that was ever read nothing is known."""
        from_s = self.from_s
        if math.isinf(self.window.complete_from_s) and math.isinf(self.since_s) and len(self.requests):
            from_s = max(from_s, float(self.requests.arrival_s[0]))
        return max(0.0, self.now_s - from_s) if math.isfinite(from_s) else 0.0

    @cached_property
    def demand(self) -> RequestRows:
        """Finished requests of the same stretch, complete as far as can be known: what a twin may replay."""
        return self.window.demand(self.from_s)

    @cached_property
    def traffic(self) -> Traffic | None:
        """What the requests are like; None when there are too few to say."""
        return traffic_of(self.requests, self.span_s)

    @cached_property
    def overdue(self) -> float:
        """Requests that wait now and must have waited longer than ``wait_bound_s``: missed, though not ended."""
        rate_rps = len(self.requests) / self.span_s if self.span_s > 0.0 else math.nan
        return overdue(waiting_at(self.window, self.now_s), rate_rps, wait_bound_s(self.slo, self.verify_s))

    @cached_property
    def ceiling_tokens(self) -> int | None:
        """The budget that the steps under this setting show to be in force, when it is not the one that is set."""
        steps = self.window.steps.select(self.window.steps.start_s >= self.from_s)
        return observed_ceiling_tokens(steps, self.state)

    @cached_property
    def hidden_pool_fills(self) -> bool:
        """Whether the engine keeps its KV pool's size to itself while its steps show that the pool limits them."""
        if self.state.envelope.kv_blocks:
            return False
        steps = self.window.steps.select(self.window.steps.start_s >= self.from_s)
        return bool((steps.kv_used >= POOL_TIGHT).any() or steps.preemptions.any())

    @property
    def abort_storm(self) -> bool:
        return storming(self.window, max(self.from_s, self.now_s - self.verify_s))

    @cached_property
    def observed(self) -> Observed:
        """What operator's thresholds are held against: since the setting came, at most ``verify_s`` back."""
        return observed(self.window, max(self.since_s, self.now_s - self.verify_s), self.now_s)

    @cached_property
    def errors_rising(self) -> bool:
        """Failed requests in the latest ``verify_s`` against those before."""
        ended = self.window.requests.select(self.window.requests.ended != ABORTED)
        late = ended.finish_s > self.now_s - self.verify_s
        return rising(ended.ended[late], ended.ended[~late])

    @property
    def kv_used(self) -> float:
        """Of the latest step; NaN without one."""
        return float(self.reading.steps.kv_used[-1]) if len(self.reading.steps) else math.nan

    @property
    def preempting(self) -> bool:
        return bool(self.reading.steps.preemptions.sum() > 0)


def ttft_bound_s(slo: Slo) -> float:
    """The mildest bound on a wait for a first token that holds for everybody; +inf without one."""
    bounds = [target.bound_s for target, _ in slo.all_targets() if target.metric in ("ttft", "queue")]
    base = [target for target in slo.targets if target.metric in ("ttft", "queue")]
    return max(bounds) if base else math.inf


def wait_bound_s(slo: Slo, verify_s: float) -> float:
    """How long a request may wait for its first token before it counts as missed though it has not ended. Where no
    target says so, half of the time in which a push is judged: gaps alone look well where nobody is let in."""
    bound_s = ttft_bound_s(slo)
    return bound_s if math.isfinite(bound_s) else verify_s / 2.0


def storming(window: Window, start_s: float) -> bool:
    """Whether so many of those that arrived from then on hung up that the others say little of the engine."""
    rows = window.requests_since(start_s)
    aborted = int((rows.ended == ABORTED).sum())
    return aborted >= STORM_LEAST and aborted > STORM_SHARE * len(rows)


def setting_in_force(state: wire.State) -> Setting:
    """What the engine runs under, see ``canonical``. Raises InputError without a token budget, or below 0."""
    setting = state.setting()
    if min(setting) < 0:
        name, value = min(setting._asdict().items(), key=lambda pair: pair[1])
        raise bad_value(f"{name} in force", value, "at least 0", "see the engine's hook and its release")
    return canonical(setting)


def boot_of(state: wire.State) -> Setting:
    """The setting of the engine's start; knobs that are absent keep their defaults."""
    values: dict[str, int | float] = {knob.name: knob.boot for knob in state.knobs if knob.boot is not None}
    return canonical(state.setting()._replace(**values))  # type: ignore[arg-type]  # as in wire.State.setting


def envelope_of(state: wire.State) -> Envelope:
    """The bounds that the engine states."""
    return Envelope(
        tuple(
            KnobBound(knob.name, knob.min, knob.max, Mode(knob.mode))
            for knob in state.knobs
            if knob.min is not None and knob.max is not None
        )
    )


def keeps_decodes_moving(state: wire.State) -> bool:
    """Whether the engine's steps follow the rule that no prefill starves the decodes behind it.

    The hook leaves vLLM exactly as it is until something is pushed, and again after a fault of its own. So before the
    first push, a renewal or claim of the lease among them, a twin predicts a change without what the rule adds to it.
    """
    off = any(note.startswith(HOOK_OFF) for note in state.notes)
    return state.engine != VLLM or (state.revision > 0 and not off)


def in_flight(window: Window, at_s: float) -> int:
    """Requests running and waiting at an instant, from the step that covers it; 0 between steps that do not join."""
    if at_s >= window.now_s:
        return window.in_system
    index = int(np.searchsorted(window.steps.start_s, at_s, side="right")) - 1
    if index < 0 or window.steps.end_s[index] < at_s:
        return 0
    return int(window.steps.running[index] + window.steps.waiting[index])


def waiting_at(window: Window, at_s: float) -> int:
    """Requests waiting at an instant, as ``in_flight``; at the end of the rows what the newest step left."""
    if not len(window.steps) or (window.in_system == 0 and at_s >= window.now_s):
        return 0
    index = int(np.searchsorted(window.steps.start_s, at_s, side="right")) - 1
    if index < 0 or (at_s < window.now_s and window.steps.end_s[index] < at_s):
        return 0
    return int(window.steps.waiting[index])


class Holder(StrEnum):
    NONE = "nobody"
    OURS = "ours"
    OTHER = "other"


@dataclass(frozen=True)
class Standing:
    """trial: the push whose verdict is due and whose setting is in force; kept: ours, found good, in force.

    foreign: our lease holds a setting that the memory does not know. dropped: a trial that is over without a verdict.
    """

    holder: Holder
    trial: Trial | None
    kept: Kept | None
    foreign: bool
    dropped: Trial | None

    @property
    def ours_in_force(self) -> bool:
        """Whether what is in force was pushed by us and is not the boot setting."""
        return self.trial is not None or self.kept is not None or self.foreign


def stand(state: wire.State, actor: str, memory: Memory) -> Standing:
    """What the engine says of what the memory holds."""
    setting, trial = setting_in_force(state), memory.trial
    if state.lease is None or state.lease.actor != actor:
        holder = Holder.NONE if state.lease is None else Holder.OTHER
        return Standing(holder, None, None, False, trial)
    if trial is not None and trial.boot_id == state.boot_id and _is(setting, trial.after):
        return Standing(Holder.OURS, trial, None, False, None)
    kept = memory.kept
    if kept is not None and kept.boot_id == state.boot_id and _is(setting, kept.setting):
        return Standing(Holder.OURS, None, kept, False, trial)
    return Standing(Holder.OURS, None, None, setting != boot_of(state), trial)


def beyond(setting: Setting, boot: Setting, bounds: Mapping[str, tuple[float, float]]) -> list[str]:
    """Knobs that were moved although the operator does not let them be, or further than his bounds.

    What lies between the boot setting and the bounds is on the way to them. A chunk cap of 0 is none.
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


def _is(setting: Setting, knobs: dict[str, int | float]) -> bool:
    return setting == setting_of(knobs)
