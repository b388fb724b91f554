"""Probation: each cycle looks at what is kept; a block of verify_s / 2 at a time it is tested.

``rooftune.policies.proof.probation`` decides. Here a block is counted from the engine's rows, and a search's answer
joins in: what the twin expects under other traffic than the trial's, and what in-force and boot setting carry.
"""

import math
from dataclasses import replace

import numpy as np

from rooftune.policies.proof.probation import Block, Probation, Rates, Standing, watch
from rooftune.policies.slo import good
from rooftune.policies.step_time import StepModel
from rooftune.tuner.control.cycle.book import Book
from rooftune.tuner.control.cycle.draft import Draft
from rooftune.tuner.control.cycle.fit import Learner
from rooftune.tuner.control.cycle.observe import Seen, arrivals, overdue, wait_bound_s, waiting_at
from rooftune.tuner.control.cycle.observer import CycleView
from rooftune.tuner.control.cycle.verify import PACE_RATIO, pace
from rooftune.tuner.control.figures import judged
from rooftune.tuner.control.memory import Kept, alike
from rooftune.tuner.control.options import LoopOptions
from rooftune.tuner.control.outcome import ProbationPart
from rooftune.tuner.model.drift import Drift


class Watcher:
    """Watches the kept setting in force; the memory holds all that it learns."""

    def __init__(self, book: Book, learner: Learner, options: LoopOptions) -> None:
        self._book, self._learner, self._options = book, learner, options
        self._model: StepModel | None = None  # behind the pace that the memory holds

    def watch(self, view: CycleView, draft: Draft) -> CycleView:
        """The view with the standing of what is kept. A lost setting stays lost until the engine has gone back."""
        kept, seen, memory = view.standing.kept, view.seen, self._book.memory
        if memory.pause is not None and memory.pause.left_s(view.wall_s) > 0.0:
            draft.put(pause_left_s=memory.pause.left_s(view.wall_s))
        if kept is None:
            return view
        if memory.pause is not None and memory.pause.push_cycle == kept.push_cycle:
            return replace(view, kept_lost=True)
        state = self._refitted(kept.probation)
        from_s = seen.now_s if state.from_s is None else state.from_s
        if state.from_s is None or from_s < seen.since_s or seen.abort_storm:
            settled_s = max(from_s, seen.since_s + self._options.settle_s)
            if state.pace is None:  # of the trial's last minutes
                state = replace(
                    state, pace=self._measured(seen, max(seen.since_s, seen.now_s - self._options.verify_s))
                )
            return self._store(view, kept, state.restarted(seen.now_s if seen.abort_storm else settled_s))
        if seen.now_s - from_s < self._options.verify_s / 2.0:
            return self._store(view, kept, state)
        return self._judge(view, kept, state, from_s, draft)

    def _refitted(self, state: Probation) -> Probation:
        """Without the pace under an earlier model."""
        before, self._model = self._model, self._learner.model
        return state if before in (None, self._model) else replace(state, pace=None)

    def _judge(self, view: CycleView, kept: Kept, state: Probation, from_s: float, draft: Draft) -> CycleView:
        """The tests after the block from ``from_s`` to now."""
        seen = view.seen
        block = block_of(seen, from_s)
        like = self._like(kept, seen, block.offered_rps)
        if like and kept.share is not None:
            state = state.expecting(kept.share)
        expected, measured = state.expected, self._measured(seen, from_s)
        ratio = None if measured is None or state.pace is None else measured / state.pace
        state, standing = watch(state, block, seen.now_s - from_s, like)
        slower = ratio is not None and max(ratio, 1.0 / ratio) > PACE_RATIO
        if slower and ratio is not None and self._learner.drift is None:
            draft.note(f"decodes alone take {ratio:.2f} times as long as when this setting was kept: refits")
            since = seen.window.steps.select(seen.window.steps.start_s >= from_s).samples()
            self._learner.drifted(Drift(ratio, 1, ratio > 1.0), since)
        state = replace(state.restarted(seen.now_s), pace=measured if state.pace is None else state.pace)
        draft.put(
            probation=ProbationPart(
                push_cycle=kept.push_cycle,
                standing=standing.value,
                expected=expected,
                observed=block.share if block.judged else None,
                boot=state.boot if like else None,
                waiting=block.waiting,
                offered_rps=block.offered_rps,
                pace=ratio,
            )
        )
        if standing in (Standing.LOWER, Standing.OVERLOAD):
            kept = kept.model_copy(update={"share": state.expected, "traffic": seen.traffic or kept.traffic})
        view = self._store(view, kept, state)
        return self._lost(view, kept) if standing is Standing.LOST else view

    def hear(self, view: CycleView, draft: Draft) -> CycleView:
        """Takes from the search that answered in this cycle what it says of the kept setting."""
        kept, seen = view.standing.kept, view.seen
        load, twin, found = draft.parts.get("load"), draft.parts.get("twin"), draft.parts.get("proposal")
        if kept is None or twin is None:
            return view
        state = kept.probation
        offered_rps = load.offered_rps if load is not None else None
        if offered_rps is None:
            offered_rps = seen.traffic.rate_rps if seen.traffic is not None else 0.0
        now = found.attainment_now if found is not None else None
        known = kept.share is not None and self._like(kept, seen, offered_rps)
        # Under overload a window lacks those that still wait, and what its replay says is too good.
        if twin.verdict == "good" and now is not None and not known and not (load is not None and load.overload):
            state = state.expecting(now)
        rates = Rates()
        if load is not None and twin.verdict == "good":
            rates = Rates(load.in_force.sustainable_rps, load.boot.sustainable_rps)
        state = replace(state, rates=rates)
        view = self._store(view, kept, state)
        if state.rates.only_boot(offered_rps):
            draft.note(
                f"{offered_rps:.3g} requests/s are offered; this setting carries "
                f"{state.rates.in_force_rps:.3g}, the boot setting {state.rates.boot_rps:.3g}"
            )
            return self._lost(view, kept)
        return view

    def _lost(self, view: CycleView, kept: Kept) -> CycleView:
        least_s = max(self._options.limits.dwell_s, self._options.verify_s)
        self._book.change(pause=self._book.memory.paused_for(kept, view.wall_s, least_s).pause)
        return replace(view, kept_lost=True)

    def _store(self, view: CycleView, kept: Kept, state: Probation) -> CycleView:
        kept = kept.model_copy(update={"probation": state})
        self._book.change(kept=kept)
        return replace(view, standing=replace(view.standing, kept=kept))

    def _like(self, kept: Kept, seen: Seen, rate_rps: float) -> bool:
        """Whether the traffic is like that of the trial. rate_rps: of arrivals, for a queue hides those that wait."""
        if kept.traffic is None or seen.traffic is None:
            return False
        return alike(kept.traffic, seen.traffic.model_copy(update={"rate_rps": rate_rps}))

    def _measured(self, seen: Seen, from_s: float) -> float | None:
        """Measured over modelled time of decodes alone since ``from_s``; None: unknown."""
        model = self._learner.model
        if model is None:
            return None
        value = pace(seen.window, model, from_s, seen.now_s, decodes_alone=True)
        return value if math.isfinite(value) and value > 0.0 else None


def block_of(seen: Seen, from_s: float) -> Block:
    """The block from ``from_s`` to now: requests that ended in it, and those that came to wait beyond their target.

    Those that did so before it were counted then; however long a queue stands, only what joins it is a loss now.
    """
    window, now_s = seen.window, seen.now_s
    span_s = now_s - from_s
    ended = window.requests.finish_s
    inside = (ended > from_s) & (ended <= now_s)
    rate_rps = arrivals(window, from_s, now_s) / span_s
    earlier = window.requests.arrival_s < seen.since_s
    rows = judged(window.requests.select(inside & ~earlier))
    met = float(np.sum(good(rows.outcomes(), seen.slo))) if len(rows) else 0.0
    bound_s = wait_bound_s(seen.slo, seen.verify_s)
    if window.in_flight is None:
        late, was_late = (max(0.0, waiting_at(window, at_s) - rate_rps * bound_s) for at_s in (now_s, from_s))
        # Of the setting before: they left the queue and are judged nowhere.
        cleared = int((inside & earlier & (window.requests.scheduled_s > from_s)).sum())
        late = max(0.0, late - max(0.0, was_late - cleared))
    else:
        late = overdue(window, seen.slo, bound_s, rate_rps, max(seen.since_s, from_s - bound_s))
        counted = (rows.arrival_s < from_s - bound_s) & (rows.arrival_s + rows.ttft_s > from_s)
        rows = rows.select(~counted)
    steps = window.steps.select((window.steps.start_s >= from_s) & (window.steps.end_s <= now_s))
    took_s = float(steps.duration_s.sum())
    waiting = float((steps.waiting * steps.duration_s).sum()) / took_s if took_s > 0.0 else float(window.in_system)
    return Block(met, len(rows) + late, waiting, rate_rps)
