"""The loop's memory while it runs; the store gets it before a push leaves and at the end of a cycle."""

import math
from typing import Unpack

from rooftune.policies.proof.probation import Probation
from rooftune.policies.verify import Verdict
from rooftune.tuner.control.cycle.verify import Checked
from rooftune.tuner.control.memory import (
    MOST_TRIED,
    Kept,
    Memory,
    MemoryChanges,
    Moved,
    Trial,
    Tried,
    Trust,
    recall,
    remember,
)
from rooftune.tuner.control.ports import Store
from rooftune.tuner.observe.protocol import Reading
from rooftune.tuner.observe.window import Window


class Book:
    """memory: the current value, saved or not. day: in the operator's zone; its exploration budget pays for a trial
    that ends.

    A rollback takes two calls: ``take_back`` before the request and ``taken_back`` after the engine's answer. When the
    answer is lost, the next reading finds the trial ``gone`` and its verdict is still known.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._memory: Memory | None = None
        self._saved: Memory | None = None
        self._before: tuple[int, Window] | None = None
        self._moved_before: Moved | None = None
        self._going_back: tuple[Trial, Checked | None, Verdict | None] | None = None

    @property
    def memory(self) -> Memory:
        """Raises StoreError until the first read succeeds."""
        if self._memory is None:
            self._memory = self._saved = recall(self._store)
        return self._memory

    def change(self, **changes: Unpack[MemoryChanges]) -> None:
        self._memory = self.memory.but(**changes)

    def save(self) -> None:
        """Raises StoreError and leaves the last saved memory in place."""
        memory = self.memory
        if memory != self._saved:
            remember(self._store, memory)
            self._saved = memory

    def serve_model(self, model: str) -> None:
        """Starts over for another model: old trials and predictions say nothing about it."""
        if self.memory.model not in ("", model):
            self.change(tried=(), trust=Trust())
        if self.memory.model != model:
            self.change(model=model)

    def moved(self, boot_id: str, at_s: float) -> None:
        """Notes that we changed the setting; at_s: on the engine's clock."""
        self.change(moved=Moved(boot_id=boot_id, at_s=at_s))

    # --- trials ---

    def begin(self, trial: Trial, window: Window) -> None:
        """Call before sending the push. window: the rows before it, which a restart loses."""
        self._moved_before = self.memory.moved
        self.change(trial=trial)
        self.moved(trial.boot_id, trial.began_s)
        self._before = (trial.push_cycle, window)

    def never_left(self) -> None:
        """The push that ``begin`` noted was not sent or was refused: no cost, no change."""
        self.change(trial=None, moved=self._moved_before)

    def rows_before(self, trial: Trial, now: Window) -> Window:
        """The rows at the push; for a push by an earlier run those in the current window."""
        if self._before is None or self._before[0] != trial.push_cycle:
            self._before = (trial.push_cycle, now)
        return self._before[1]

    def keep(self, trial: Trial, checked: Checked, day: str, wall_s: float) -> None:
        """Ends a good trial; its setting stays."""
        self._end(trial, checked, checked.verdict, day, wall_s)
        self.change(kept=kept_after(trial, _share_of(trial, True), _share_of(trial, False), self.memory.kept))
        self.moved(trial.boot_id, trial.in_force_from_s)

    def take_back(
        self, trial: Trial | None, kept: Kept | None, checked: Checked | None, verdict: Verdict | None
    ) -> None:
        """Call before sending the request. verdict: None when the trial taught nothing. kept: a kept setting that
        crossed an operator's threshold and so counts as worse from now on."""
        self._going_back = None if trial is None else (trial, checked, verdict)
        if trial is None and kept is not None:
            worse = {"verdict": Verdict.WORSE.value}
            tried = self.memory.tried
            marked = (one.model_copy(update=worse) if one.setting == kept.setting else one for one in tried)
            self.change(tried=tuple(marked))

    def taken_back(self, reading: Reading, day: str, wall_s: float) -> None:
        """The engine confirmed what ``take_back`` announced."""
        if self._going_back is None:
            return self.stopped(reading, day)
        self._end(*self._going_back, day, wall_s)
        self.moved(reading.boot_id, reading.now_s)

    def stopped(self, reading: Reading, day: str) -> None:
        """Our setting left force without a lesson: an operator's revert, or a kept setting's rollback."""
        self._book_cost(day)
        self.change(kept=None)
        self.moved(reading.boot_id, reading.now_s)

    def gone(self, trial: Trial, reading: Reading, day: str, wall_s: float) -> Verdict | None:
        """Ends a trial that is no longer in force; returns its verdict if it had one."""
        if self._going_back is None or self._going_back[0].push_cycle != trial.push_cycle:
            self._book_cost(day)
            return None
        verdict = self._going_back[2]
        self.taken_back(reading, day, wall_s)  # our revert arrived; only its answer was lost
        return verdict

    def _book_cost(self, day: str) -> None:
        self._memory = self.memory.with_spent(day, self.memory.running_slo_s)
        self._before = self._going_back = None
        self.change(trial=None, running_slo_s=0.0)

    def _end(self, trial: Trial, checked: Checked | None, verdict: Verdict | None, day: str, wall_s: float) -> None:
        """Books the lessons about setting and twin; without a verdict there are none."""
        trust = self.memory.trust
        if verdict is Verdict.WORSE or checked is None or checked.harmful:
            trust = trust.after(False)
        elif verdict is not None and math.isfinite(checked.found.half_width):
            trust = trust.after(checked.part.prediction_held)
        self._book_cost(day)
        tried = () if verdict is None else _tried(trial, checked, verdict, wall_s)
        self.change(trust=trust, tried=(*self.memory.tried, *tried)[-MOST_TRIED:])


def kept_after(trial: Trial, new: float | None, old: float | None, before: Kept | None) -> Kept:
    """The setting of a good trial, with what its probation starts from. new, old: shares of good requests under
    ``after`` and ``before`` in the trial, None unknown. before: what was kept until the push; without it, the old share
    is the boot setting's."""
    known = before is not None and before.boot_id == trial.boot_id and before.setting == trial.before
    boot = before.probation.boot if before is not None and known else old
    new, boot = (value if value is not None and 0.0 <= value <= 1.0 else None for value in (new, boot))
    offered_rps = trial.traffic.rate_rps if trial.traffic is not None else None
    return Kept(
        boot_id=trial.boot_id,
        setting=trial.after,
        push_cycle=trial.push_cycle,
        share=new,
        traffic=trial.traffic,
        probation=Probation(expected=new, boot=boot, offered_rps=offered_rps),
    )


def _share_of(trial: Trial, new: bool) -> float | None:
    """Good share in the trial's blocks under the new or the old setting; None without requests."""
    good, judged = (sum(row[at] for row in trial.blocks if row[0] is new) for at in (1, 2))
    return good / judged if judged > 0.0 else None


def _tried(trial: Trial, checked: Checked | None, verdict: Verdict, wall_s: float) -> list[Tried]:
    """The trial for later searches; empty when its traffic is unknown."""
    if trial.traffic is None:
        return []
    part = checked.part if checked is not None else None
    share = _share_of(trial, True)
    return [
        Tried(
            before=trial.before,
            setting=trial.after,
            traffic=trial.traffic,
            verdict=verdict.value,
            predicted_gain=trial.predicted_gain,
            observed_gain=part.observed_gain if part is not None else None,
            half_width=part.half_width if part is not None else None,
            attainment=share,
            goodput_rps=None if share is None else share * trial.traffic.rate_rps,
            requests=int(sum(row[2] for row in trial.blocks if row[0])),
            predicted_attainment=trial.predicted_attainment,
            wall_s=wall_s,
        )
    ]
