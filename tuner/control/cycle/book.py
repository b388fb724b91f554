"""The loop's memory while it runs, and how it gets into the store: before a push leaves, and at the end of a cycle."""

from typing import Unpack

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
    Way,
    recall,
    remember,
)
from rooftune.tuner.control.ports import Store
from rooftune.tuner.observe.window import Window


class Book:
    """memory: as it is now; before: the rows as they stood at the push of that cycle, not kept over a restart."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._memory: Memory | None = None
        self._saved: Memory | None = None
        self.before: tuple[int, Window] | None = None
        self._sentence: tuple[int, Checked | None, Verdict] | None = None

    @property
    def memory(self) -> Memory:
        """Raises StoreError while it has never been read."""
        if self._memory is None:
            self._memory = self._saved = recall(self._store)
        return self._memory

    def change(self, **changes: Unpack[MemoryChanges]) -> None:
        self._memory = self.memory.but(**changes)

    def save(self) -> None:
        """Raises StoreError; then what was saved before still stands."""
        memory = self.memory
        if memory != self._saved:
            remember(self._store, memory)
            self._saved = memory

    def about(self, model: str) -> None:
        """What was tried with another model, and how its predictions held, says nothing of this one."""
        if self.memory.model not in ("", model):
            self.change(tried=(), trust=Trust())
        if self.memory.model != model:
            self.change(model=model)

    def spent_slo_s(self, day: str) -> float:
        """SLO-seconds of that day, the running trial's among them."""
        return self.memory.account.spent(day) + self.memory.running_slo_s

    def end_trial(self, day: str) -> None:
        """The trial is over, with or without a verdict: its cost is booked."""
        account = self.memory.account.with_spent(day, self.memory.running_slo_s)
        self.before = None
        self.change(trial=None, account=account, running_slo_s=0.0)

    def sentence(self, trial: Trial, checked: Checked | None, verdict: Verdict) -> None:
        """The verdict on a trial that is being taken back: should the engine's answer be lost, the verdict is not."""
        self._sentence = (trial.push_cycle, checked, verdict)

    def drop(self, trial: Trial, day: str, wall_s: float) -> Verdict | None:
        """A trial that is no longer in force; returns its verdict when it had one."""
        if self._sentence is None or self._sentence[0] != trial.push_cycle:
            self.end_trial(day)
            return None
        _, checked, verdict = self._sentence
        self.conclude(trial, checked, verdict, day, wall_s)
        return verdict

    def conclude(self, trial: Trial, checked: Checked | None, verdict: Verdict, day: str, wall_s: float) -> None:
        """A verdict: what was learnt of the setting and of the twin, and whether the setting stays."""
        trust = self.memory.trust
        judged = checked is not None and checked.matched is not None and checked.matched.matched
        if not trial.stride and judged and checked is not None:
            trust = trust.after(checked.judgement.prediction_held)
        elif verdict is Verdict.WORSE:
            trust = trust.after(False)
        self.end_trial(day)
        tried = _tried(trial, checked, verdict, wall_s)
        self.change(trust=trust, tried=(*self.memory.tried, *tried)[-MOST_TRIED:])
        if checked is not None and (verdict is Verdict.BETTER or (trial.stride and checked.passed)):
            way = self.way(trial, checked)
            kept = Kept(boot_id=trial.boot_id, setting=trial.after, push_cycle=trial.push_cycle)
            self.change(kept=kept.model_copy(update={"way": None if way.won else way}))
        elif checked is not None and checked.lost_way is not None:
            start, cycle = checked.lost_way.start, checked.lost_way.start_cycle
            kept_before = None if cycle is None else Kept(boot_id=trial.boot_id, setting=start, push_cycle=cycle)
            self.change(kept=kept_before)

    def way(self, trial: Trial, checked: Checked) -> Way:
        """The strides up to this trial, and with it as far as it was measured."""
        kept = self.memory.kept
        way = Way(start=trial.before)
        if kept is not None and kept.boot_id == trial.boot_id and kept.setting == trial.before:
            way = kept.way or Way(start=kept.setting, start_cycle=kept.push_cycle)
        found = checked.matched
        return way if found is None else way.onward(found.gain, found.half_width)

    def condemn(self, kept: Kept) -> None:
        """A setting that was found better crossed an operator's threshold since: it is proven no more."""
        worse = {"verdict": Verdict.WORSE.value}
        self.change(
            tried=tuple(
                one.model_copy(update=worse) if one.setting == kept.setting else one for one in self.memory.tried
            )
        )

    def moved(self, boot_id: str, at_s: float) -> None:
        """The setting changed by our doing, on the engine's clock."""
        self.change(moved=Moved(boot_id=boot_id, at_s=at_s))


def _tried(trial: Trial, checked: Checked | None, verdict: Verdict, wall_s: float) -> list[Tried]:
    """The trial as later searches are told of it; nothing when nobody knows under which traffic it ran."""
    if trial.traffic is None or (trial.stride and verdict is not Verdict.WORSE):
        return []
    found = checked.matched if checked is not None else None
    part = checked.part if checked is not None else None
    share = found.after if found is not None and 0.0 <= found.after <= 1.0 else None
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
            requests=checked.requests if checked is not None else 0,
            predicted_attainment=trial.predicted_attainment,
            wall_s=wall_s,
        )
    ]
