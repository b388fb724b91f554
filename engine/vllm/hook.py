"""Wraps the scheduler that vLLM chose with our policies. ``schedule`` is the page to read.

Nothing here may raise into vLLM: an exception inside ``schedule`` ends its engine. So values are checked where they
come in (``TuningDesk``), and any other fault switches the hook off for good and restores the boot values.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from rooftune.engine.interface import Flights
from rooftune.engine.options import GAP_TARGETS_S
from rooftune.engine.protocol import About
from rooftune.engine.vllm.arrange import Arranger
from rooftune.engine.vllm.desk import RowDesk
from rooftune.engine.vllm.knobs import Budgets, Knobs
from rooftune.engine.vllm.lists import WaitingOrder
from rooftune.engine.vllm.probe import length_of, missing, pool_of, probe
from rooftune.engine.vllm.records import ARRIVED, ENDED, FOLDED, PLANNED, UPDATED, Recorder
from rooftune.policies.errors import printable
from rooftune.policies.packing import effective_budget
from rooftune.policies.request import FIXED_BUDGET, Boot

LOG = logging.getLogger("vllm.rooftune")  # below vLLM's own, so that it stands in the server's log

WRAPPED = ("schedule", "update_from_output", "get_grammar_bitmask", "add_request", "_free_request")


class Hook:
    """The hook's state for one scheduler: desk, records, arrangement. now_s: seconds on the monotonic clock."""

    __slots__ = (
        "_boot", "_budgets", "_defers", "_moved", "_scheduler", "arranger", "booking", "desk", "held", "knobs",
        "length", "note", "on", "pool", "recorder", "stirred",
    )  # fmt: skip

    def __init__(self, scheduler: Any, version: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self.knobs = Knobs(scheduler)
        found = probe(scheduler, self.knobs, version)
        about = About("vllm", version, found.model, found.boot_envelope)
        self.pool, used = pool_of(scheduler.kv_cache_manager)
        self.stirred = self._moved = False  # nothing was pushed yet, and until then vLLM is left exactly as it is
        self.desk = RowDesk(
            about, found.envelope, self.knobs.boot, now_s, gap_bounds_s=GAP_TARGETS_S, used=used, stirred=self._stir
        )
        for note in found.notes:
            self.desk.note(note)
            LOG.warning("rooftune: %s", note)
        self.length = length_of(scheduler.waiting)
        order = WaitingOrder()
        self.recorder = Recorder(scheduler, self.desk, GAP_TARGETS_S, order.changed)
        self.note = self.recorder.notes.append
        self.booking = False  # requests that end now got their last token just now
        self.arranger = Arranger(scheduler, self.knobs, self.recorder, order)
        self.on = True
        self._boot = Boot(self.knobs.ceiling_tokens, 1, int(found.boot_envelope.chunking), 1, 0, 1)
        self._budgets = Budgets(self._boot)
        self.held = (self.knobs.boot.step_tokens, self.desk.force.revision)  # budget and revision that steps run under
        self._defers = hasattr(scheduler, "deferred_waiting")

    def _stir(self) -> None:
        self.stirred = True

    def before(self, now_s: float) -> None:
        """Arrange the step that is about to be planned."""
        desk, recorder, scheduler = self.desk, self.recorder, self._scheduler
        desk.renew(now_s)
        setting, model, revision = desk.force
        if not self._moved:
            if revision == self.held[1]:
                return
            self._moved = recorder.stale = True
        recorder.settle()
        budget = setting.step_tokens
        if setting.budget_policy != FIXED_BUDGET:
            first = next(iter(recorder.partials.values()), None)
            budget = self._budgets.ask(
                setting,
                model,
                recorder.decoders,
                recorder.context,
                len(recorder.partials) + self.length(scheduler.waiting),
                0 if first is None else first.num_computed_tokens,
            )
        budget = effective_budget(budget, self._boot.ceiling_tokens, recorder.decoders)
        self.held = (budget, revision)
        self.arranger.before(setting, budget, now_s)

    def after(self) -> None:
        """Undo what was for one step."""
        if self._moved:
            self.arranger.after()
            self.recorder.lacking = True
            if self._defers and self._scheduler.deferred_waiting:
                self.arranger.order.changed()

    def fold(self) -> None:
        """Turn all notes into records before a read."""
        if self.on:
            try:
                self.recorder.fold()
            except Exception as error:  # noqa: BLE001  # nothing may raise into vLLM
                self.fault("fold", error)

    def in_flight(self) -> Flights | None:
        """What has not ended, after ``fold``; None when that cannot be told: a read switches nothing off."""
        if not self.on:
            return None
        try:
            return self.recorder.in_flight()
        except Exception:  # nothing may raise into vLLM
            LOG.exception("rooftune: the requests in flight cannot be told")
            return None

    def fault(self, where: str, error: Exception) -> None:
        """Switch the hook off for good, restore the boot values, and report it in log and state."""
        self.on = False
        what = f"hook off after a fault in {where}: {type(error).__name__}: {error}"
        LOG.exception("rooftune: %s; vLLM goes on at its boot settings, please report this", what)
        self.desk.close(printable(what))
        self.knobs.apply(self.knobs.boot)
        try:
            self.arranger.after()
        except Exception:  # the hook is off already, and still nothing may raise into vLLM
            LOG.exception("rooftune: what was arranged for this step could not be undone")


def hooked(base: Any, version: Callable[[], str], now_s: Callable[[], float] = time.monotonic) -> type:
    """A subclass of the scheduler class that vLLM chose.

    What is inherited is called as a plain function: ``super()`` is a microsecond after a forward pass.
    """
    lacks = missing(base, WRAPPED)
    if lacks is not None:
        LOG.warning("rooftune: %s; nothing is recorded and nothing can be moved", lacks)
        untouched: type = base
        return untouched
    plan, book, mask, take, free = (getattr(base, name) for name in WRAPPED)

    class Rooftuned(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.rooftune: Hook | None = None
            lacks = missing(self)
            if lacks is not None:
                LOG.warning("rooftune: %s; nothing is recorded and nothing can be moved", lacks)
                return
            try:
                self.rooftune = Hook(self, version(), now_s)
            except Exception:  # a server must start without us
                LOG.exception("rooftune: not active because its start failed; vLLM runs without it")

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            hook = self.rooftune
            if hook is None or not hook.on:
                return plan(self, *args, **kwargs)
            started_s = now_s()
            if hook.stirred:
                try:
                    hook.before(started_s)
                except Exception as error:  # noqa: BLE001  # the wide border: nothing may raise into vLLM
                    hook.fault("before", error)
            output = plan(self, *args, **kwargs)
            try:
                if hook.stirred:
                    hook.after()
                running, waiting = len(self.running), hook.length(self.waiting)
                hook.note((PLANNED, started_s, hook.held, output, running, waiting, hook.pool.num_free_blocks))
                recorder, gone = hook.recorder, output.preempted_req_ids
                if gone or len(recorder.notes) > recorder.limit:
                    recorder.catch_up(whole=bool(gone))
            except Exception as error:  # noqa: BLE001  # as above
                hook.fault("schedule", error)
            return output

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            hook = self.rooftune
            if hook is None or not hook.on:
                return book(self, scheduler_output, *args, **kwargs)
            hook.booking = True
            answers = book(self, scheduler_output, *args, **kwargs)
            hook.booking = False
            hook.note((UPDATED, now_s(), scheduler_output, answers))
            return answers

        def get_grammar_bitmask(self, *args: Any, **kwargs: Any) -> Any:
            """vLLM calls this once the model has its work, so our own work here does not delay it."""
            hook = self.rooftune
            if hook is not None and hook.on and len(hook.recorder.notes) >= FOLDED:
                try:
                    hook.recorder.catch_up()
                except Exception as error:  # noqa: BLE001  # as above
                    hook.fault("fold", error)
            return mask(self, *args, **kwargs)

        def add_request(self, request: Any) -> None:
            take(self, request)
            hook = self.rooftune
            # A request that only brings more input for a session is known already.
            if hook is not None and hook.on and self.requests.get(request.request_id) is request:
                hook.note((ARRIVED, request, now_s(), time.time()))
                hook.recorder.stale = True

        def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            hook = self.rooftune
            if hook is not None and hook.on:
                hook.note((ENDED, request, None if hook.booking else now_s()))
                hook.recorder.stale = True
            return free(self, request, *args, **kwargs)

    Rooftuned.__name__ = Rooftuned.__qualname__ = f"Rooftuned{base.__name__}"
    return Rooftuned
