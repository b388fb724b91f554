"""From what was seen to a proposal: refit when it is worth it, search when it is due, and otherwise say why not."""

from rooftune.policies.guard import Reason
from rooftune.tuner.clock import Clock
from rooftune.tuner.control.cycle.book import Book
from rooftune.tuner.control.cycle.draft import Draft
from rooftune.tuner.control.cycle.fit import Learner
from rooftune.tuner.control.cycle.learned import still_told, without_effect
from rooftune.tuner.control.cycle.observe import Holder
from rooftune.tuner.control.cycle.observer import CycleView
from rooftune.tuner.control.cycle.propose import Found, SearchDesk, make_job, remembered, searched
from rooftune.tuner.control.cycle.push import one_line
from rooftune.tuner.control.memory import Bounds, Trust
from rooftune.tuner.control.options import LoopOptions
from rooftune.tuner.control.ports import Searcher
from rooftune.tuner.control.signals.codes import Signal
from rooftune.tuner.model.roofline import FitRefused

# What has ended may look well while others never get that far.
UNHEALTHY = frozenset(
    {
        Signal.LONG_PREFILL_BLOCKS.value, Signal.QUEUE_GROWING.value, Signal.PARTIAL_PREFILLS_GROWING.value,
        Signal.DECODES_CROWD_BUDGET.value,
    }
)  # fmt: skip


class Planner:
    """Keeps the search and what stands between cycles."""

    def __init__(self, searcher: Searcher, book: Book, learner: Learner, options: LoopOptions, clock: Clock) -> None:
        self._desk = SearchDesk(searcher, options)
        self._book, self._learner, self._options, self._clock = book, learner, options, clock
        self._refused = self._boot_id = ""
        self._came: Found | None = None

    def fit(self, view: CycleView, draft: Draft) -> None:
        """A refit, when there is no model, when it drifted, or when there are that many more steps than at the last."""
        # By name and not by ``restarted``, which a cycle that ended before this stage would have used up.
        boot_id = view.seen.state.boot_id
        if boot_id != self._boot_id and self._boot_id:
            self._desk.forget()
        self._boot_id = boot_id
        if view.standing.trial is not None:
            self.acted()  # in an earlier cycle, whose answer may have been lost
        learner = self._learner
        if not learner.enough or not learner.due:
            return
        drifted = learner.drift is not None
        try:
            learner.fit()
            self._refused = ""
            if drifted:  # what failed, and what stands or is searched, is by the model that has just been replaced
                self._book.change(trust=Trust())
                self._desk.forget()
        except FitRefused as error:
            self._refused = one_line(f"{error.code.value}: {error}")
        draft.put(fit=learner.part())

    def acted(self) -> None:
        """The proposal was pushed: whatever ends that push, it takes another answer to push again."""
        self._desk.standing = None

    def harvest(self, view: CycleView, draft: Draft) -> None:
        """The child's answer, when it is there: how good the twin is, and what it proposes."""
        self._came = self._desk.harvest(view.seen, still_told(self._book.memory.tried, view.wall_s))
        if self._came is not None:
            draft.put(twin=self._came.twin, proposal=self._came.part)
            draft.note(self._came.detail)

    def propose(self, view: CycleView, draft: Draft) -> Found:
        """The proposal that stands, or why there is none; asks the child for the next one."""
        why = self._no_search(view)
        if why is not None:
            if why is Reason.TOO_LITTLE_DATA and not self._judgeable(view):
                options = self._options
                draft.note(
                    f"a window of {options.verify_s:g} s sees fewer than {options.min_requests} requests, so no push "
                    "could be judged: lengthen cadence.verify_s"
                )
            return Found(None, why)
        if self._learner.model is None or self._learner.drift is not None:
            draft.note(self._refused)
            return Found(None, Reason.FIT_REFUSED if self._refused else Reason.TOO_LITTLE_DATA)
        if self._desk.due(view.seen, self._clock.now_s()):
            draft.note(self._ask(view, draft.number))
        found = self._came or self._desk.current(view.seen)
        if found.proposal is None and found.why is Reason.SEARCHING:
            known = remembered(view.seen, self._book.memory.tried, self._bounds(view)[0])
            if known is not None:
                draft.note("this setting was found better under traffic like this before")
                return Found(known, found.why)
        return found

    def _bounds(self, view: CycleView) -> tuple[Bounds, frozenset[str]]:
        """Where to search, and the knobs left out because they showed no effect."""
        seen, memory = view.seen, self._book.memory
        silent = without_effect(memory.tried, seen.traffic) & frozenset(self._options.bounds)
        return searched(seen, self._options.bounds, memory.trust, silent), silent

    def _ask(self, view: CycleView, number: int) -> str:
        seen, fit, memory = view.seen, self._learner.accepted, self._book.memory
        assert fit is not None
        bounds, silent = self._bounds(view)
        if not bounds:
            return "no knob of this engine may be moved: see its envelope and the bounds"
        job = make_job(seen, self._options, fit, bounds, memory.tried, number)
        said = [self._desk.ask(job, seen, self._clock.now_s())]
        if silent:
            said.append(f"no effect seen of {', '.join(sorted(silent))}: not searched")
        if seen.ceiling_tokens is not None:
            said.append(f"the set budget is not in force, steps show {seen.ceiling_tokens} tokens")
        return "; ".join(text for text in said if text)

    def _no_search(self, view: CycleView) -> Reason | None:
        """Why no proposal is looked for in this cycle; None: one may be."""
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
        if len(seen.demand) < self._options.search_requests or not self._judgeable(view):
            return Reason.TOO_LITTLE_DATA
        return Reason.NO_TARGETS_MISSED if self._healthy(view) else None

    def _judgeable(self, view: CycleView) -> bool:
        """Whether the window after a push would see enough requests for a verdict; a proposal alone needs none."""
        traffic, options = view.seen.traffic, self._options
        return not options.live or traffic is None or traffic.rate_rps * options.verify_s >= options.min_requests

    def _healthy(self, view: CycleView) -> bool:
        """Whether everybody is served within the targets, those who still wait among them."""
        share, ended = view.figures.attainment, view.figures.requests
        if share is None or any(part.code in UNHEALTHY for part in view.seen.signals):
            return False
        served = share * ended / (ended + view.seen.overdue)
        return 1.0 - served <= self._options.limits.min_gain
