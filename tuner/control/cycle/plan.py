"""Plan: refits and searches when due, and gives the proposal or the reason why there is none."""

import math
from dataclasses import replace

from rooftune.policies.errors import InputError
from rooftune.policies.guard import Reason
from rooftune.policies.proof.switchback import PAIRS
from rooftune.policies.request import Setting
from rooftune.tuner.clock import Clock
from rooftune.tuner.control.cycle.book import Book
from rooftune.tuner.control.cycle.draft import Draft
from rooftune.tuner.control.cycle.fit import Learner
from rooftune.tuner.control.cycle.learned import refuted, still_valid, without_effect
from rooftune.tuner.control.cycle.observe import Holder, Seen
from rooftune.tuner.control.cycle.observer import CycleView
from rooftune.tuner.control.cycle.propose import (
    Found,
    carried_by,
    differ,
    foretell_job,
    load_part,
    make_job,
    outside,
    proposal_of,
    remembered,
    searched,
)
from rooftune.tuner.control.cycle.push import one_line
from rooftune.tuner.control.cycle.verify import heard, to_foretell
from rooftune.tuner.control.job import Expected, SearchAnswer, WorkerError, WorkerFault
from rooftune.tuner.control.memory import Bounds, Traffic, Trial, Trust
from rooftune.tuner.control.options import LoopOptions
from rooftune.tuner.control.outcome import Carries, LoadPart
from rooftune.tuner.control.ports import Searcher
from rooftune.tuner.control.signals.codes import Signal
from rooftune.tuner.control.signals.pressure import overload
from rooftune.tuner.model.roofline import FitRefused

# With one of these signals ended requests may look good while others starve.
UNHEALTHY = frozenset(
    {
        Signal.LONG_PREFILL_BLOCKS.value, Signal.QUEUE_GROWING.value, Signal.PARTIAL_PREFILLS_GROWING.value,
        Signal.DECODES_CROWD_BUDGET.value,
    }
)  # fmt: skip


class Planner:
    """Keeps at most one running search and one proposal between cycles."""

    def __init__(self, searcher: Searcher, book: Book, learner: Learner, options: LoopOptions, clock: Clock) -> None:
        self._searcher, self._book, self._learner = searcher, book, learner
        self._options, self._clock = options, clock
        self._refused = self._boot_id = ""
        self._job_s = -math.inf  # on the controller's clock
        self._job_base: Setting | None = None
        self._ran_base: Setting | None = None  # see ``effective``
        self._job_traffic: Traffic | None = None
        self._job_bounds: Bounds = {}
        self._discard = False
        self._job_requests = 0
        self._enough_requests = math.inf  # in the window, from which a twin with too few of them is asked again
        self._load: LoadPart | None = None  # of the latest answer
        self._carried: dict[Setting, Carries] = {}
        self._check_kept = False  # a kept setting under a new model: search even if all is well
        self._found = Found(None, Reason.SEARCHING)
        self._answered: Found | None = None  # what this cycle's answer gave
        # Of the blocks that the child is asked about: the push's cycle, how many are foretold, how many are asked.
        self._asked: tuple[int, int, int] | None = None

    def fit(self, view: CycleView, draft: Draft) -> None:
        """Refits without a model, after drift, or with enough new steps."""
        # Compares boot ids: a cycle that failed before this stage would have used up ``restarted``.
        boot_id = view.seen.state.boot_id
        if boot_id != self._boot_id and self._boot_id:
            self._forget()
        self._boot_id = boot_id
        if view.standing.trial is not None:
            self.pushed()  # an earlier cycle pushed it; its answer may have been lost
        learner = self._learner
        if not learner.enough or not learner.due:
            return
        drifted = learner.drift is not None
        try:
            learner.fit()
            self._refused = ""
            if drifted:  # failed predictions, proposal and search came from the replaced model
                self._book.change(trust=Trust())
                self._forget()
                self._check_kept = view.standing.kept is not None
        except FitRefused as error:
            self._refused = one_line(f"{error.code.value}: {error}")
        draft.put(fit=learner.part())

    def pushed(self) -> None:
        """The proposal was pushed: the next push needs a new answer."""
        self._found = Found(None, self._found.why)

    def _forget(self) -> None:
        """Drops search and proposal: the engine restarted or its model changed."""
        self._discard = self._searcher.busy
        self._job_s = -math.inf
        self._job_base = self._load = None
        self._carried = {}
        self._found = Found(None, self._found.why)

    def harvest(self, view: CycleView, draft: Draft) -> None:
        """Takes the child's answer, if there is one, and says what arrives beside what is carried."""
        self._take(view, draft)
        part = load_part(view.seen, self._load, self._carried)
        draft.put(load=part, signals=(*view.seen.signals, *overload(part)))

    def _take(self, view: CycleView, draft: Draft) -> None:
        self._answered = None
        if self._asked is not None:
            return
        try:
            answer = self._searcher.answer()
        except WorkerError as error:
            draft.note(one_line(f"{error.fault.value}: {error}"))
            self._found = self._answered = Found(None, Reason.WORKER_FAILED)
            return
        if answer is None:
            return
        if self._discard or self._job_base != view.seen.setting or isinstance(answer, Expected):
            self._discard, self._job_s = False, -math.inf
            return
        self._found = self._answered = self._judge(answer, view, draft)

    def _judge(self, answer: SearchAnswer, view: CycleView, draft: Draft) -> Found:
        seen = view.seen
        draft.put(twin=answer.twin, load=answer.load)
        try:
            proposal = proposal_of(answer, seen.setting, self._job_traffic, self._ran_base)
        except InputError as error:
            draft.note(one_line(str(error)))
            return Found(None, Reason.WORKER_FAILED)
        draft.put(proposal=answer.proposal)
        if answer.load is not None:
            self._load, self._carried = answer.load, carried_by(answer, answer.load, seen)
        if answer.twin.verdict == "too_few":
            missing = max(answer.twin.missing_requests or 1, 1)
            self._enough_requests = self._job_requests + missing
            draft.note(self._too_few(missing, seen))
            return Found(None, Reason.TWIN_TOO_FEW)
        if proposal is None:
            return Found(None, Reason.TWIN_NOT_TRUSTED if answer.proposal is None else Reason.NULL_RESULT)
        if wrong := outside(proposal.setting, seen.setting, self._job_bounds):
            draft.note(f"the child's {', '.join(wrong)} lies outside the searched bounds; dropped")
            return Found(None, Reason.WORKER_FAILED)
        if refuted(proposal.setting, still_valid(self._book.memory.tried, view.wall_s), self._job_traffic):
            draft.note("a live trial of this proposal under like traffic was not better")
            return Found(None, Reason.NULL_RESULT)
        if differ(proposal.traffic, seen.traffic):
            draft.note("the traffic shifted during the search; dropped")
            return Found(None, Reason.SEARCHING)
        return Found(proposal, self._found.why)

    def _too_few(self, missing: int, seen: Seen) -> str:
        """What is missing, and whether this window can ever hold it."""
        text = f"needs about {missing} more requests than the {self._job_requests} of this search"
        rate_rps = math.nan if seen.traffic is None else seen.traffic.rate_rps
        if rate_rps * self._options.window_s < self._enough_requests:
            text += f"; {self._options.window_s:g} s hold fewer at this rate: lengthen cadence.window_s"
        return text

    def propose(self, view: CycleView, draft: Draft) -> Found:
        """The current proposal, or why there is none; starts a search when due."""
        why = self._no_search(view)
        if why is not None:
            if why is Reason.TOO_LITTLE_DATA and not self._judgeable(view):
                options = self._options
                draft.note(
                    f"{PAIRS[0]} x {options.verify_s:g} s see fewer than {options.min_requests} requests, so no push "
                    "could be judged: lengthen cadence.verify_s"
                )
            elif why is Reason.TOO_LITTLE_DATA:
                seen, needed = len(view.seen.arrivals_s), self._options.search_requests
                draft.note(f"too few requests for a search: {seen} of {needed}")
            return Found(None, why)
        if self._learner.model is None or self._learner.drift is not None:
            draft.note(self._refused or "no step model yet: it needs more steps of different sizes")
            return Found(None, Reason.FIT_REFUSED if self._refused else Reason.TOO_LITTLE_DATA)
        if self._due(view.seen):
            draft.note(self._search(view, draft.number))
        found = self._answered or self._current(view.seen)
        if found.proposal is None and found.why is Reason.SEARCHING:
            known = remembered(view.seen, self._book.memory.tried, self._bounds(view)[0])
            if known is not None:
                draft.note("an earlier trial found this setting better under like traffic")
                return Found(known, found.why)
        return found

    def _current(self, seen: Seen) -> Found:
        """The proposal, or why there is none; drops one that no longer fits."""
        proposal = self._found.proposal
        if proposal is not None and (proposal.base != seen.setting or differ(proposal.traffic, seen.traffic)):
            self._found = Found(None, Reason.SEARCHING)
        return self._found

    def _due(self, seen: Seen) -> bool:
        """Whether a search could bring news."""
        if self._searcher.busy:
            return False
        aged = self._clock.now_s() - self._job_s >= self._options.search_every_s
        grown = len(seen.demand) >= self._enough_requests
        return aged or grown or self._job_base != seen.setting or differ(self._job_traffic, seen.traffic)

    def _bounds(self, view: CycleView) -> tuple[Bounds, frozenset[str]]:
        """Bounds of the search, and the knobs left out for lack of effect."""
        seen, memory = view.seen, self._book.memory
        silent = without_effect(memory.tried, seen.traffic) & frozenset(self._options.bounds)
        return searched(seen, self._options.bounds, memory.trust, silent), silent

    def _search(self, view: CycleView, number: int) -> str:
        """Starts a search; returns what to note about it."""
        seen, fit, memory = view.seen, self._learner.accepted, self._book.memory
        assert fit is not None
        bounds, silent = self._bounds(view)
        if not bounds:
            return "no knob of this engine may move: check its envelope and the configured bounds"
        job = make_job(seen, self._options, fit, bounds, memory.tried, number)
        # Noted first, so that a failed start is retried when due and not in every cycle.
        self._job_s, self._job_base, self._job_traffic = self._clock.now_s(), seen.setting, seen.traffic
        self._ran_base, self._job_bounds, self._discard = job.base, job.bounds, False
        self._job_requests, self._enough_requests = len(seen.demand), math.inf
        self._check_kept = False
        notes = []
        try:
            self._searcher.ask(job)
            if self._found.proposal is None:
                self._found = Found(None, Reason.SEARCHING)
        except WorkerError as error:
            self._found = Found(self._found.proposal, Reason.WORKER_FAILED)
            notes.append(one_line(f"{error.fault.value}: {error}"))
        if silent:
            notes.append(f"no effect seen of {', '.join(sorted(silent))}: not searched")
        if seen.ceiling_tokens is not None:
            notes.append(f"the set budget is not in force, steps show {seen.ceiling_tokens} tokens")
        return "; ".join(notes)

    def foretold(self, view: CycleView, draft: Draft) -> CycleView:
        """The view with what the twin says of the trial's blocks; asks for those that are missing. A child that fails
        is not asked again in this trial."""
        trial = view.standing.trial
        try:
            if self._asked is not None:
                trial = self._heard(trial)
            if trial is not None and self._asked is None:
                trial = self._ask_about(trial, view.seen)
        except WorkerError as error:
            self._asked = None
            if trial is not None:
                draft.note(one_line(f"the trial goes on without the twin, {error.fault.value}: {error}"))
                trial = trial.but(aided=False)
        if trial is view.standing.trial:
            return view
        self._book.change(trial=trial)
        return replace(view, standing=replace(view.standing, trial=trial))

    def _heard(self, trial: Trial | None) -> Trial | None:
        """The trial with the child's answer about its blocks, when there is one. Raises WorkerError."""
        assert self._asked is not None
        answer = self._searcher.answer()
        if answer is None and self._searcher.busy:
            return trial
        (push_cycle, known, count), self._asked = self._asked, None
        if not isinstance(answer, Expected) or len(answer.shares) != count:
            raise WorkerError(WorkerFault.NONSENSE, f"the child was asked about {count} blocks and told something else")
        if trial is None or not trial.aided or (trial.push_cycle, len(trial.foretold)) != (push_cycle, known):
            return trial
        return heard(trial, answer.shares)

    def _ask_about(self, trial: Trial, seen: Seen) -> Trial:
        """Asks the child about blocks that it has not foretold yet. Raises WorkerError."""
        fit, before = self._learner.accepted, self._book.rows_before(trial, seen.window)
        if not trial.aided or trial.won or fit is None or self._searcher.busy:
            return trial
        if trial.foretold_blocks < 0 and before.now_s > trial.began_s:
            return trial.but(aided=False)  # an earlier run pushed it, and its rows went with that run
        window, spans = to_foretell(trial, before, seen, self._options)
        if spans and self._searcher.ask(foretell_job(window, spans, trial, seen, fit)):
            self._asked = (trial.push_cycle, len(trial.foretold), len(spans))
        return trial

    def _no_search(self, view: CycleView) -> Reason | None:
        """Why this cycle looks for no proposal; None: it may."""
        seen, standing = view.seen, view.standing
        if seen.reading.restarted:
            return Reason.ENGINE_RESTARTED
        if self._options.live and standing.holder is Holder.OTHER:
            return Reason.HELD_BY_OTHER
        if standing.trial is not None:
            return Reason.VERIFYING
        if view.freeze is not None:
            return view.freeze
        if seen.hidden_pool_fills:
            return Reason.KV_BOUND
        if len(seen.arrivals_s) < self._options.search_requests or not self._judgeable(view):
            return Reason.TOO_LITTLE_DATA
        return Reason.NO_TARGETS_MISSED if self._healthy(view) and not self._check_kept else None

    def _judgeable(self, view: CycleView) -> bool:
        """Whether a trial would see enough requests by its first look; shadow mode needs none."""
        traffic, options = view.seen.traffic, self._options
        first_s = PAIRS[0] * options.verify_s
        return not options.live or traffic is None or traffic.rate_rps * first_s >= options.min_requests

    def _healthy(self, view: CycleView) -> bool:
        """Whether nearly all requests, the waiting ones included, meet the targets."""
        share, ended = view.figures.attainment, view.figures.requests
        if share is None or any(part.code in UNHEALTHY for part in view.seen.signals):
            return False
        served = share * ended / (ended + view.seen.overdue)
        return 1.0 - served <= self._options.limits.min_gain
