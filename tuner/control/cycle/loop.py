"""The loop: observe, verify, fit, calibrate, propose, decide, push. Start reading at ``Controller.cycle``.

The verdict on a push needs the rows of a later cycle, so each cycle first verifies the push before it. The search runs
in a child process: a cycle starts it when due and takes the answer when there is one.

Failures are typed errors, all handled here; a cycle always ends in a ``CycleRecord``. A failed cycle or a killed
controller leaves nothing to undo: the engine goes back to its boot setting when the lease expires.
"""

from collections.abc import Callable

from pydantic import ValidationError

from rooftune.policies.errors import RooftuneError
from rooftune.policies.guard import Action, Decision, Reason
from rooftune.tuner.clock import Clock
from rooftune.tuner.control.cycle.act import Actor
from rooftune.tuner.control.cycle.book import Book
from rooftune.tuner.control.cycle.draft import AfterStage, Draft
from rooftune.tuner.control.cycle.fit import Learner
from rooftune.tuner.control.cycle.judge import Judge
from rooftune.tuner.control.cycle.observer import Observer
from rooftune.tuner.control.cycle.plan import Planner
from rooftune.tuner.control.cycle.probation import Watcher
from rooftune.tuner.control.cycle.push import fault_reason, one_line
from rooftune.tuner.control.options import LoopOptions
from rooftune.tuner.control.outcome import CycleRecord, Stage
from rooftune.tuner.control.ports import Searcher, Store
from rooftune.tuner.control.state.file import StoreError
from rooftune.tuner.observe.protocol import ProtocolReader
from rooftune.tuner.ports.base import Port, PortError


class Controller:
    """Tunes one engine. engine: its name for people; publish: called with every record.

    after_stage: called at the end of each stage, so that tests can stop a controller anywhere.
    """

    def __init__(
        self,
        *,
        engine: str,
        port: Port,
        reader: ProtocolReader,
        searcher: Searcher,
        store: Store,
        clock: Clock,
        options: LoopOptions,
        deploying: Callable[[], bool] = lambda: False,
        publish: Callable[[CycleRecord], None] = lambda record: None,
        after_stage: AfterStage = lambda stage: None,
    ) -> None:
        self._engine, self._clock, self._store, self._options = engine, clock, store, options
        self._publish, self._after_stage = publish, after_stage
        self._number = 0
        book, learner = Book(store), Learner(options.seed)
        self._book = book
        self._observer = Observer(reader, store, book, learner, options, clock, deploying)
        self._planner = Planner(searcher, book, learner, options, clock)
        self._judge = Judge(book, learner, options)
        self._watcher = Watcher(book, learner, options)
        self._actor = Actor(port, store, book, learner, options)

    def cycle(self) -> CycleRecord:
        """Runs one cycle. Failures of engine, child, disk or traffic end in the record, not in an exception."""
        mode = "live" if self._options.live else "shadow"
        draft = Draft(self._clock, self._number + 1, mode, self._engine, self._after_stage, self._clock.wall_s())
        try:
            # Without a number nothing can be recorded, so nothing is decided.
            draft.number = self._number = self._store.next_number()
            draft.numbered = True
            end = self._run(draft)
        except PortError as error:
            end = self._failed(draft, fault_reason(error), error)
        except StoreError as error:
            end = self._failed(draft, Reason.STORE_FAILED, error)
        except (RooftuneError, ValidationError) as error:  # invalid rows or state
            end = self._failed(draft, Reason.GARBAGE, error)
        return self._end(draft, end)

    def _run(self, draft: Draft) -> Decision:
        with draft.stage(Stage.OBSERVE):
            view = self._observer.look(draft)
        with draft.stage(Stage.VERIFY):
            view = self._planner.foretold(view, draft)
            view = self._watcher.watch(self._judge.check(view, draft), draft)
        with draft.stage(Stage.FIT):
            self._planner.fit(view, draft)
        with draft.stage(Stage.CALIBRATE):
            self._planner.harvest(view, draft)
            view = self._watcher.hear(view, draft)
        with draft.stage(Stage.PROPOSE):
            found = self._planner.propose(view, draft)
        with draft.stage(Stage.DECIDE):
            decision = self._judge.decide(view, found, draft)
        with draft.stage(Stage.PUSH):
            end = self._actor.act(view, found, decision, draft)
            if end.action is Action.PUSH:
                self._planner.pushed()
            return end

    def _failed(self, draft: Draft, reason: Reason, error: Exception) -> Decision:
        """Holds, but still tries a requested revert."""
        draft.note(str(error))
        return self._actor.revert_requested(draft) or Decision(Action.HOLD, reason)

    def stop(self) -> str:
        """Takes our setting back at once; returns the result in words."""
        return self._actor.let_go()

    def _end(self, draft: Draft, end: Decision) -> CycleRecord:
        record = draft.record(end)
        try:
            self._book.save()
            if draft.numbered:
                self._store.put(record)
        except StoreError as error:
            draft.note(f"not recorded: {one_line(str(error))}")
            record = draft.record(end)
        self._publish(record)
        return record
