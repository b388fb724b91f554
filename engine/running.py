"""A running engine: intake, tuning desk and loop together, with the one thread that runs it."""

import time
from collections.abc import Callable
from threading import Thread

from rooftune.engine.intake import Intake
from rooftune.engine.interface import Deliver, FinishReason, Flights, Observer, Snapshot
from rooftune.engine.loop import EngineLoop
from rooftune.engine.options import EngineOptions
from rooftune.engine.protocol import TuningDesk
from rooftune.engine.step import Runner
from rooftune.policies.errors import UnreachableError

_MOST_STEP_S = 2.0  # that a reader waits for the end of a step


class RunningEngine:
    """An engine over a runner. ``start`` runs it; tests may call ``step`` themselves instead, on one thread.

    Any thread may call every other method. max_request_tokens: most prompt and output tokens of one request together,
    what model and KV pool hold. now_s: a monotonic clock (s). Raises InputError when the options do not fit together.
    """

    def __init__(self, runner: Runner, options: EngineOptions, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self.facts = facts = runner.facts
        self.max_request_tokens = options.max_request_tokens(facts)
        self.desk = desk = TuningDesk(
            options.about(facts),
            options.envelope(),
            options.setting,
            now_s,
            gap_bounds_s=options.gap_bounds_s,
            ring_rows=options.ring_rows,
        )
        self._intake = Intake(facts, options, now_s)
        self._loop = EngineLoop(runner, options, self._intake, self.desk, now_s)
        self.submit, self.cancel, self.step = self._intake.submit, self._intake.cancel, self._loop.step
        # The tuning protocol is the desk's; here for callers in this process.
        self.tuning_state, self.push, self.revert, self.resume = desk.tuning_state, desk.push, desk.revert, desk.resume
        self.steps_after, self.requests_after = desk.steps_after, desk.requests_after
        self.in_flight, desk.flights = desk.in_flight, self._flights
        self._thread: Thread | None = None
        self._stopping = self._broken = False

    def observe_with(self, observer: Observer) -> None:
        """One observer, set before ``start``."""
        self._loop.observer = self._intake.observer = self.desk.observer = observer

    def deliver_with(self, deliver: Deliver) -> None:
        """How events reach their sinks, set before ``start``; by default the loop's thread calls each sink."""
        self._loop.deliver = deliver

    def snapshot(self) -> Snapshot:
        left_s = self.desk.lease_left_s()
        book, latest, running = self.desk.book, self._loop.latest, self._loop.running
        return Snapshot(
            step=self.desk.steps,
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

    def _flights(self) -> Flights:
        """What is in flight between two steps. Raises UnreachableError when the step that runs takes too long."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return self._loop.in_flight()
        try:
            return self._intake.ask().result(_MOST_STEP_S)
        except TimeoutError:
            raise UnreachableError(f"the engine's step takes more than {_MOST_STEP_S:g} s; ask again later") from None

    # --- the thread ---

    def start(self) -> None:
        self._thread = Thread(target=self._serve, name="engine-loop", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for those in flight; False when some were left at the timeout."""
        self._intake.close("it drains")
        return self._intake.wait_until_empty(timeout_s)

    def stop(self) -> None:
        """Ends the loop's thread after its step; requests still in flight end with FAILED."""
        self._intake.close("it has stopped")
        self._stopping = True
        self._intake.wake.set()
        if self._thread is None:
            self._loop.let_go(FinishReason.FAILED)
        else:
            self._thread.join()

    def _serve(self) -> None:
        wake, turned = self._intake.wake, False
        try:
            while not self._stopping:
                wake.clear()
                if not self._loop.step():
                    wake.wait(self.desk.lease_left_s() or None)  # nothing to do, but a lease must still end
            turned = True
        finally:
            # An error goes on to threading.excepthook; requests in flight must get their finishing event all the same.
            self._broken = not turned
            self._intake.close("it has stopped" if turned else "its loop broke")
            self._loop.let_go(FinishReason.FAILED)
