"""The start of a cycle: the engine's reading, our standing, operator requests, and reasons not to judge."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rooftune.policies import wire
from rooftune.policies.errors import InputError
from rooftune.policies.guard import Reason
from rooftune.tuner.clock import Clock
from rooftune.tuner.control import options as schedule
from rooftune.tuner.control.cycle.book import Book
from rooftune.tuner.control.cycle.draft import Draft
from rooftune.tuner.control.cycle.fit import Learner
from rooftune.tuner.control.cycle.observe import Holder, Seen, Standing, beyond, boot_of, setting_in_force, standing_of
from rooftune.tuner.control.cycle.verify import MOST_BEFORE, Checked
from rooftune.tuner.control.figures import figures, judgeable
from rooftune.tuner.control.memory import knobs_of
from rooftune.tuner.control.options import LoopOptions
from rooftune.tuner.control.outcome import Figures
from rooftune.tuner.control.ports import Store
from rooftune.tuner.control.signals.find import find_signals, freeze_of
from rooftune.tuner.control.state import operator
from rooftune.tuner.observe.protocol import ProtocolReader, Reading
from rooftune.tuner.observe.rows import StepRows
from rooftune.tuner.observe.window import Window

# Shadow time counts only while the controller observes: at most this many cycles between two readings.
LOOKING_CYCLES = 3.0
LATEST_WALL_S = 9e10


@dataclass(frozen=True, eq=False)
class CycleView:
    """One cycle's view. day: the date in the operator's zone. since_push_s: +inf when we never moved this engine.

    freeze: why no setting can be judged now. checked: the verdict on the trial in force, if there is one.
    kept_lost: the kept setting in force failed its probation.
    """

    seen: Seen
    standing: Standing
    figures: Figures
    paused: bool
    blocked: bool
    revert: operator.OperatorRequest | None
    resume: operator.OperatorRequest | None
    deploying: bool
    freeze: Reason | None
    since_push_s: float
    day: str
    minute_of_week: int
    wall_s: float
    checked: Checked | None = None
    kept_lost: bool = False


class Observer:
    """Reads the engine; keeps the window and when its setting came into force."""

    def __init__(
        self,
        reader: ProtocolReader,
        store: Store,
        book: Book,
        learner: Learner,
        options: LoopOptions,
        clock: Clock,
        deploying: Callable[[], bool],
    ) -> None:
        self._reader, self._store, self._book, self._learner = reader, store, book, learner
        self._options, self._clock, self._deploying = options, clock, deploying
        self._actor = actor_of(store)
        self._window = Window(max(options.window_s, MOST_BEFORE * options.verify_s))
        self._before: Seen | None = None
        self._since_s = -math.inf
        self._changed_s: tuple[float, ...] = ()  # when each setting came into force, as far as steps are known
        self._looked_s: float | None = None
        self._learnt_from = ""
        self._alarm: tuple[str, float] = ("", -math.inf)

    def look(self, draft: Draft) -> CycleView:
        """Reads and judges the state. Raises PortError, StoreError, and InputError for invalid rows, which it drops."""
        waited = bool(self._window.steps.waiting[-1:].any())
        reading = self._reader.read(flights=self._options.live or waited)
        self._window = self._window.add(reading)
        try:
            return self._look(reading, draft)
        except InputError:
            # Start a new window: requests that arrived before have lost their neighbours.
            now_s = reading.now_s
            self._window = replace(
                self._window.fresh(), boot_id=reading.boot_id, now_s=now_s, complete_from_s=now_s, steps_from_s=now_s
            )
            raise

    def _look(self, reading: Reading, draft: Draft) -> CycleView:
        state = reading.state
        # A wrong wall clock gives a wrong day, but does not end the cycle.
        now_s, wall_s = self._clock.now_s(), min(max(self._clock.wall_s(), 0.0), LATEST_WALL_S)
        day = schedule.day(wall_s, self._options.zone)
        standing = self._standing(reading, day, wall_s, draft)
        self._book.serve_model(state.model)
        since_s = self._since(reading, standing)
        if since_s != self._since_s:
            known = (at_s for at_s in self._changed_s if self._window.steps_from_s < at_s < since_s)
            self._since_s, self._changed_s = since_s, (*known, since_s)
        self._learn(reading)
        seen = self._seen(reading)
        self._before = seen
        self._count_shadow(now_s)
        if state.blocked:
            operator.note_block(self._store, state.boot_id, state.revision)
        requested = operator.read(self._store)
        revert, resume = operator.pending(self._store)
        measured = figures(seen.requests, seen.slo, seen.span_s)
        lease = state.lease
        draft.put(
            boot_id=state.boot_id,
            revision=state.revision,
            in_force=knobs_of(seen.setting),
            lease_left_s=lease.left_s if lease is not None and lease.actor == self._actor else None,
            lost_steps=reading.lost_steps,
            lost_requests=reading.lost_requests,
            metrics_age_s=reading.metrics_age_s if math.isfinite(reading.metrics_age_s) else None,
            observed=measured if measured.requests else None,
            signals=seen.signals,
            fit=self._learner.part(),
        )
        idle = not reading.busy and not len(reading.steps)
        return CycleView(
            seen=seen,
            standing=standing,
            figures=measured,
            paused=requested.paused is not None,
            blocked=requested.blocked is not None or state.blocked,
            revert=revert,
            resume=resume,
            deploying=self._deploying(),
            freeze=self._freeze(seen, idle),
            since_push_s=self._since_push(reading),
            day=day,
            minute_of_week=schedule.minute_of_week(wall_s, self._options.zone),
            wall_s=wall_s,
        )

    def _standing(self, reading: Reading, day: str, wall_s: float, draft: Draft) -> Standing:
        standing = standing_of(reading.state, self._actor, self._book.memory)
        wrong = beyond(setting_in_force(reading.state), boot_of(reading.state), self._options.bounds)
        if wrong and standing.ours_in_force:  # pushed by an earlier run under another configuration
            draft.note(f"outside the configured bounds: {', '.join(wrong)}")
            standing = replace(standing, trial=None, kept=None, foreign=True, dropped=standing.trial)
        if not self._options.live:
            # Shadow mode owns nothing: a lease that an earlier run left expires.
            standing = replace(standing, trial=None, kept=None, foreign=False, dropped=self._book.memory.trial)
        if standing.dropped is not None:
            verdict = self._book.gone(standing.dropped, reading, day, wall_s)
            words = "no verdict" if verdict is None else f"it was {verdict.value}"
            draft.note(f"the push of cycle {standing.dropped.push_cycle} is no longer in force; {words}")
        if standing.trial is not None:
            self._book.change(trial=standing.trial)  # without a switch that never arrived
        if standing.kept is None and standing.trial is None and self._book.memory.kept is not None:
            self._book.change(kept=None)
        return standing

    def _since(self, reading: Reading, standing: Standing) -> float:
        """When the current setting came into force, on the engine's clock."""
        if standing.trial is not None:
            return standing.trial.in_force_from_s
        state, before = reading.state, self._before
        setting = setting_in_force(state)
        same = before is not None and before.state.boot_id == state.boot_id and before.setting == setting
        if before is not None and same and not self._left(before.state, state, standing):
            return self._since_s
        moved = self._book.memory.moved
        if before is None and standing.holder is Holder.OURS and moved is not None and moved.boot_id == state.boot_id:
            return moved.at_s
        # Revision 0: nothing was ever pushed.
        return self._window.in_force_from(state.revision) if state.revision > 0 else -math.inf

    def _left(self, before: wire.State, state: wire.State, standing: Standing) -> bool:
        """Whether another setting, ours or not, may have been in force between two readings that show the same one.

        Every change of setting or lease makes a revision. A push and its end make two; without a push, a renewal and
        the end of its lease make two that leave the setting alone. Another actor that holds the lease in both readings
        is taken to have renewed it.
        """
        held, holds = before.lease, state.lease
        if held is not None and holds is not None and held.actor == holds.actor != self._actor:
            return False
        return state.revision - before.revision > (2 if standing.dropped is None else 1)

    def _learn(self, reading: Reading) -> None:
        # Compares boot ids: an invalid reading may have used up ``restarted``.
        if self._learnt_from not in ("", reading.boot_id):
            self._learner.restart()
        self._learnt_from = reading.boot_id
        self._learner.recall(self._store, reading.state.model)
        self._learner.take(reading.steps)

    def _seen(self, reading: Reading) -> Seen:
        options, window = self._options, self._window
        from_s = reading.now_s - options.window_s
        steps = _by_setting(window.steps.select(window.steps.start_s >= from_s), self._changed_s)
        requests = window.requests.select(window.requests.finish_s >= from_s)
        model, drift = self._learner.model, self._learner.drift
        return Seen(
            reading=reading,
            window=window,
            signals=find_signals(steps, requests, reading.state, model, drift),
            slo=judgeable(options.slo, window.requests.gap_bounds_s),
            since_s=self._since_s,
            window_s=options.window_s,
            verify_s=options.verify_s,
        )

    def _freeze(self, seen: Seen, idle: bool) -> Reason | None:
        """Why nothing can be judged. An alarm lasts a window: its rows come and go by chance, its cause does not."""
        found = freeze_of(seen.signals, seen.abort_storm, idle)
        if found is Reason.FROZEN_BY_SIGNAL:
            self._alarm = (seen.state.boot_id, seen.now_s + self._options.window_s)
        boot_id, until_s = self._alarm
        alarmed = boot_id == seen.state.boot_id and seen.now_s < until_s
        return Reason.FROZEN_BY_SIGNAL if found is None and alarmed else found

    def _since_push(self, reading: Reading) -> float:
        moved = self._book.memory.moved
        return reading.now_s - moved.at_s if moved is not None and moved.boot_id == reading.boot_id else math.inf

    def _count_shadow(self, now_s: float) -> None:
        least_s, had_s = self._options.limits.min_shadow_s, self._book.memory.shadow_s
        if self._looked_s is not None and (had_s < least_s or not self._options.live):
            passed_s = min(max(0.0, now_s - self._looked_s), LOOKING_CYCLES * self._options.cycle_s)
            self._book.change(shadow_s=min(had_s + passed_s, max(least_s, had_s)))
        self._looked_s = now_s


def _by_setting(steps: StepRows, changed_s: tuple[float, ...]) -> StepRows:
    """The steps with one revision for each setting in a row: renewals of a lease change the engine's."""
    return replace(steps, revision=np.searchsorted(np.array(changed_s), steps.start_s, side="right"))


def actor_of(store: Store) -> str:
    """The actor in every lease of this controller."""
    return f"rooftune/{store.instance}"
