"""The loop: observe, fit, calibrate, propose, decide, push, verify, keep or revert. ``Controller.cycle`` is the page.

The verdict on a push needs the rows of a later cycle, so a cycle begins with what became of the push before it. The
search runs in a process of its own: a cycle asks it when it is due and takes the answer when it is there.

Every stage is a module of its own and pure as far as it can be. What may go wrong is a typed error, and each has its
place here; a cycle always ends in a ``CycleRecord``. Nothing has to be undone after a failed cycle or a killed
controller: the engine goes back to its boot setting when the lease ends.
"""

from collections.abc import Callable

from pydantic import ValidationError

from rooftune.policies.errors import RooftuneError
from rooftune.policies.guard import Action, Decision, Reason
from rooftune.tuner.clock import Clock
from rooftune.tuner.control.cycle.act import Actor
from rooftune.tuner.control.cycle.book import Book
from rooftune.tuner.control.cycle.draft import AfterStage, Draft, nothing_after
from rooftune.tuner.control.cycle.fit import Learner
from rooftune.tuner.control.cycle.judge import Judge
from rooftune.tuner.control.cycle.observer import Observer, Reader
from rooftune.tuner.control.cycle.plan import Planner
from rooftune.tuner.control.cycle.push import fault_reason, one_line
from rooftune.tuner.control.cycle.trials import Trials
from rooftune.tuner.control.options import LoopOptions
from rooftune.tuner.control.outcome import CycleRecord, Stage
from rooftune.tuner.control.ports import Searcher, Store
from rooftune.tuner.control.state.file import StoreError
from rooftune.tuner.ports.base import Port, PortError


class Controller:
    """One controller of one engine. engine: its name for people; publish: hears of every record.

    after_stage: called at the end of each stage, so that tests can stop a controller anywhere.
    """

    def __init__(
        self,
        *,
        engine: str,
        port: Port,
        reader: Reader,
        searcher: Searcher,
        store: Store,
        clock: Clock,
        options: LoopOptions,
        deploying: Callable[[], bool] = lambda: False,
        publish: Callable[[CycleRecord], None] = lambda record: None,
        after_stage: AfterStage = nothing_after,
    ) -> None:
        self._engine, self._clock, self._store, self._options = engine, clock, store, options
        self._publish, self._after_stage = publish, after_stage
        self._number = 0
        book, learner = Book(store), Learner(options.seed)
        self._book, trials = book, Trials(book)
        self._observer = Observer(reader, store, book, trials, learner, options, clock, deploying)
        self._planner = Planner(searcher, book, learner, options, clock)
        self._judge = Judge(book, trials, learner, options)
        self._actor = Actor(port, store, book, trials, learner, options)

    def cycle(self) -> CycleRecord:
        """One cycle. Raises nothing that comes from the engine, the child, the disk or the traffic."""
        draft = self._begin()
        try:
            # Without a number nothing can be written down, so nothing is decided either.
            draft.number = self._number = self._store.next_number()
            draft.numbered = True
            end = self._run(draft)
        except PortError as error:
            end = self._failed(draft, fault_reason(error), error)
        except StoreError as error:
            end = self._failed(draft, Reason.STORE_FAILED, error)
        except (RooftuneError, ValidationError) as error:  # rows or a state without sense: nothing is made of them
            end = self._failed(draft, Reason.GARBAGE, error)
        return self._end(draft, end)

    def _run(self, draft: Draft) -> Decision:
        with draft.stage(Stage.OBSERVE):
            view = self._observer.look(draft)
        with draft.stage(Stage.VERIFY):
            view = self._judge.check(view, draft)
        with draft.stage(Stage.FIT):
            self._planner.fit(view, draft)
        with draft.stage(Stage.CALIBRATE):
            self._planner.harvest(view, draft)
        with draft.stage(Stage.PROPOSE):
            found = self._planner.propose(view, draft)
        with draft.stage(Stage.DECIDE):
            decision = self._judge.decide(view, found, draft)
        with draft.stage(Stage.PUSH):
            end = self._actor.act(view, found, decision, draft)
            if end.action is Action.PUSH:
                self._planner.acted()
            return end

    def _failed(self, draft: Draft, reason: Reason, error: Exception) -> Decision:
        """Nothing is made of such a cycle; what a person asked for is done all the same, if it can be."""
        draft.note(str(error))
        return self._actor.revert_asked(draft) or Decision(Action.HOLD, reason)

    def stop(self) -> str:
        """End of the controller's work: what is ours in force is taken back at once. Returns what was done."""
        return self._actor.let_go()

    def _begin(self) -> Draft:
        draft = Draft(
            self._clock, self._number + 1, "live" if self._options.live else "shadow", self._engine, self._after_stage
        )
        draft.started_at_s = self._clock.wall_s()
        return draft

    def _end(self, draft: Draft, end: Decision) -> CycleRecord:
        record = draft.record(end)
        try:
            self._book.save()
            if draft.numbered:
                self._store.put(record)
        except StoreError as error:
            draft.note(f"not written down: {one_line(str(error))}")
            record = draft.record(end)
        self._publish(record)
        return record
