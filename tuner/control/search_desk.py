"""The one search that may run and the one proposal that may stand: when to ask, and what an answer is worth now."""

import math

from rooftune.policies.errors import InputError
from rooftune.policies.guard import Reason
from rooftune.policies.request import Setting
from rooftune.tuner.control.effects import refuted
from rooftune.tuner.control.job import Answer, Job, WorkerError
from rooftune.tuner.control.memory import Traffic, Tried, setting_of
from rooftune.tuner.control.observe_stage import Seen
from rooftune.tuner.control.options import LoopOptions
from rooftune.tuner.control.outcome import CycleReason
from rooftune.tuner.control.parts import Searcher
from rooftune.tuner.control.propose_stage import Found, Proposal, Why, outside, proposal_of
from rooftune.tuner.control.push_stage import one_line
from rooftune.tuner.control.traffic import alike
from rooftune.tuner.control.trust import Bounds


def _differ(before: Traffic | None, now: Traffic | None) -> bool:
    return before is not None and now is not None and not alike(before, now)


class SearchDesk:
    """The one search that may run, and the one proposal that may stand. now_s: on the controller's clock."""

    def __init__(self, searcher: Searcher, options: LoopOptions) -> None:
        self._searcher, self._options = searcher, options
        self._asked_s = -math.inf
        self._asked_base: Setting | None = None
        self._told_base: Setting | None = None  # what the job named as in force: with the budget in effect
        self._asked_traffic: Traffic | None = None
        self._asked_bounds: Bounds = {}
        self._discard = False
        self.standing: Proposal | None = None
        self._why: Why = CycleReason.SEARCHING

    def forget(self) -> None:
        """The engine was started anew, or the setting moved: what was asked is about something else."""
        self._discard = self._searcher.busy
        self._asked_s = -math.inf
        self._asked_base = None
        self.standing = None

    def harvest(self, seen: Seen, tried: tuple[Tried, ...]) -> Found | None:
        """The answer, when one came; None: none did."""
        try:
            answer = self._searcher.answer()
        except WorkerError as error:
            self.standing, self._why = None, CycleReason.WORKER_FAILED
            return Found(None, self._why, detail=one_line(f"{error.fault.value}: {error}"))
        if answer is None:
            return None
        if self._discard or self._asked_base != seen.setting:
            self._discard, self._asked_s = False, -math.inf
            return None
        return self._judge(answer, seen, tried)

    def _judge(self, answer: Answer, seen: Seen, tried: tuple[Tried, ...]) -> Found:
        self.standing, detail = None, ""
        try:
            found = proposal_of(answer, seen.setting, self._asked_traffic, self._told_base)
        except InputError as error:
            self._why = CycleReason.WORKER_FAILED
            return Found(None, self._why, answer.twin, None, one_line(str(error)))
        if answer.proposal is None:
            self._why = Reason.TWIN_NOT_TRUSTED
        elif found is None:
            self._why = CycleReason.NULL_RESULT
        elif wrong := outside(found.setting, seen.setting, self._asked_bounds):
            self._why = CycleReason.WORKER_FAILED
            detail = f"the child proposes {', '.join(wrong)} outside of what it was asked; dropped"
        elif refuted(found.setting, tried, self._asked_traffic):
            self._why = CycleReason.NULL_RESULT
            detail = "the proposal was tried live under traffic like this and was not better"
        elif _differ(found.traffic, seen.traffic):
            self._why = CycleReason.SEARCHING
            detail = "the traffic has shifted while this was searched; dropped"
        else:
            self.standing = found
        return Found(self.standing, self._why, answer.twin, answer.proposal, detail)

    def current(self, seen: Seen) -> Found:
        """The proposal that stands, or why there is none; one that no longer fits is dropped."""
        standing = self.standing
        if standing is not None and (standing.base != seen.setting or _differ(standing.traffic, seen.traffic)):
            standing = self.standing = None
            self._why = CycleReason.SEARCHING
        return Found(standing, self._why)

    def due(self, seen: Seen, now_s: float) -> bool:
        """Whether a search would tell something new."""
        if self._searcher.busy:
            return False
        aged = now_s - self._asked_s >= self._options.search_every_s
        return aged or self._asked_base != seen.setting or _differ(self._asked_traffic, seen.traffic)

    def ask(self, job: Job, seen: Seen, now_s: float) -> str:
        """Start a search; returns why it could not be started, "" when it was."""
        if self._searcher.busy:
            return ""
        # Noted first: one that cannot be started is asked for again when it is due, not in every cycle.
        self._asked_s, self._asked_base, self._asked_traffic = now_s, seen.setting, seen.traffic
        self._told_base, self._asked_bounds, self._discard = setting_of(job.base), job.bounds, False
        try:
            self._searcher.ask(job)
        except WorkerError as error:
            self._why = CycleReason.WORKER_FAILED
            return one_line(f"{error.fault.value}: {error}")
        if self.standing is None:
            self._why = CycleReason.SEARCHING
        return ""

    @property
    def busy(self) -> bool:
        return self._searcher.busy
