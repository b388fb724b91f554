"""A running engine: intake, tuning desk and loop together, with the one thread that runs it."""

import time
from collections.abc import Callable
from threading import Thread

from rooftune.engine.intake import Intake
from rooftune.engine.interface import Deliver, FinishReason, GenerationRequest, Observer, Sink, Snapshot
from rooftune.engine.loop import EngineLoop
from rooftune.engine.options import EngineOptions
from rooftune.engine.protocol import TuningDesk
from rooftune.engine.step import ModelFacts, Runner


class RunningEngine:
    """``Engine`` of engine/interface.py over a runner. ``start`` runs it; tests may call ``step`` themselves instead.

    now_s: a monotonic clock (s). Raises InputError when the options do not fit together.
    """

    def __init__(self, runner: Runner, options: EngineOptions, now_s: Callable[[], float] = time.monotonic) -> None:
        facts = runner.facts
        self._facts, self._now_s = facts, now_s
        self._most_tokens = options.max_request_tokens(facts)
        self._desk = desk = TuningDesk(
            options.about(facts),
            options.envelope(),
            options.setting,
            now_s,
            gap_bounds_s=options.gap_bounds_s,
            ring_rows=options.ring_rows,
        )
        self._intake = Intake(facts, options, now_s)
        self._loop = EngineLoop(runner, options, self._intake, self._desk, now_s)
        # The tuning protocol is the desk's.
        self.tuning_state, self.push, self.revert, self.resume = desk.tuning_state, desk.push, desk.revert, desk.resume
        self.steps_after, self.requests_after = desk.steps_after, desk.requests_after
        self._thread: Thread | None = None
        self._stopping = self._broken = False

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def max_request_tokens(self) -> int:
        return self._most_tokens

    def now_s(self) -> float:
        return self._now_s()

    def submit(self, request: GenerationRequest, sink: Sink, arrived_s: float | None = None) -> int:
        return self._intake.submit(request, sink, arrived_s)

    def cancel(self, request_id: int, why: FinishReason = FinishReason.CANCELLED) -> None:
        self._intake.cancel(request_id, why)

    def observe_with(self, observer: Observer) -> None:
        self._loop.observer = self._intake.observer = self._desk.observer = observer

    def deliver_with(self, deliver: Deliver) -> None:
        self._loop.deliver = deliver

    def step(self) -> bool:
        """One step on the caller's thread, which must be the only one; see ``EngineLoop.step``."""
        return self._loop.step()

    def snapshot(self) -> Snapshot:
        left_s = self._desk.lease_left_s()
        book, latest, running = self._desk.book, self._loop.latest, self._loop.running
        return Snapshot(
            step=self._desk.steps,
            running=running,
            waiting=max(0, self._intake.live - running),
            partial_prefills=latest.partial_prefills if latest is not None and running > 0 else 0,
            kv_used=self._loop.kv_used,
            preemptions=self._loop.preemptions,
            budget_configured_tokens=book.setting.step_tokens,
            budget_in_force_tokens=latest.budget_tokens if latest is not None else book.setting.step_tokens,
            lease_left_s=left_s,
            revision=book.revision,
            blocked=book.blocked,
            healthy=not self._broken,
            accepting=self._intake.accepting,
        )

    # --- the thread ---

    def start(self) -> None:
        self._thread = Thread(target=self._serve, name="engine-loop", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        self._intake.close("it drains")
        return self._intake.wait_until_empty(timeout_s)

    def stop(self) -> None:
        self._intake.close("it has stopped")
        self._stopping = True
        self._intake.wake.set()
        if self._thread is None:
            self._loop.let_go(FinishReason.FAILED)
        else:
            self._thread.join()

    def _serve(self) -> None:
        turned = False
        try:
            self._turn()
            turned = True
        finally:
            # An error goes on to threading.excepthook; requests in flight must get their finishing event all the same.
            self._broken = not turned
            self._intake.close("it has stopped" if turned else "its loop broke")
            self._loop.let_go(FinishReason.FAILED)

    def _turn(self) -> None:
        wake = self._intake.wake
        while not self._stopping:
            wake.clear()
            if not self._loop.step():
                wake.wait(self._desk.lease_left_s() or None)  # nothing to do, but a lease must still end
