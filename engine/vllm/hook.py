"""The scheduler that vLLM chose, with ours around its decision. ``schedule`` is the page to read.

Nothing here may raise into vLLM: an exception inside ``schedule`` ends its engine. So values are checked where they
come in (``TuningDesk``), and whatever goes wrong all the same switches the hook off for good, boot values back.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from engine.protocol import About
from engine.vllm.arrange import Arranger
from engine.vllm.budgets import Budgets
from engine.vllm.desk import RowDesk
from engine.vllm.knobs import Knobs
from engine.vllm.probe import length_of, missing, pool_of, probe
from engine.vllm.records import Recorder
from policies.packing import effective_budget
from policies.request import FIXED_BUDGET, Boot

T = TypeVar("T")
LOG = logging.getLogger("vllm.rooftune")  # below vLLM's own, so that it stands in the server's log

# What the request records count gaps above: the targets people set.
GAP_BOUNDS_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)


class Hook:
    """What is ours about one scheduler: desk, records, arrangement. now_s: seconds on the monotonic clock."""

    def __init__(self, scheduler: Any, version: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self._scheduler = scheduler
        self.knobs = Knobs(scheduler)
        found = probe(scheduler, self.knobs, version)
        about = About("vllm", version, found.model, found.boot_envelope)
        pool, used = pool_of(scheduler.kv_cache_manager)
        self.desk = RowDesk(about, found.envelope, self.knobs.boot, now_s, gap_bounds_s=GAP_BOUNDS_S, used=used)
        for note in found.notes:
            self.desk.note(note)
            LOG.warning("rooftune: %s", note)
        self._length = length_of(scheduler.waiting)
        self.recorder = Recorder(
            scheduler, self.desk, GAP_BOUNDS_S, now_s, one_token=found.one_token, pool=pool, length=self._length
        )
        self.arranger = Arranger(scheduler, self.knobs, self.recorder)
        # Straight there: a call less in every step.
        self.updated, self.ended = self.recorder.updated, self.recorder.ended
        self.on = True
        self.moved = False  # something was ever pushed; until then vLLM is left exactly as it is
        self._boot = Boot(self.knobs.ceiling_tokens, 1, int(found.boot_envelope.chunking), 1, 0, 1)
        self._budgets = Budgets(self._boot)
        self._revision = 0
        self._defers = hasattr(scheduler, "deferred_waiting")

    def before(self, now_s: float) -> tuple[int, int, int]:
        """Arrange the step that is about to be planned; returns its number, its revision and its budget (tokens)."""
        desk, recorder, scheduler = self.desk, self.recorder, self._scheduler
        step = desk.begin(now_s)
        setting, model, revision = desk.force
        if revision != self._revision:
            self._revision = revision
            self.moved = True
        budget = setting.step_tokens
        if not self.moved:
            return step, revision, budget
        if recorder.decoders + len(recorder.partials) != len(scheduler.running):
            recorder.recount(scheduler.running)
        if setting.budget_policy != FIXED_BUDGET:
            first = next(iter(recorder.partials.values()), None)
            budget = self._budgets.ask(
                setting,
                model,
                recorder.decoders,
                recorder.context,
                len(recorder.partials) + self._length(scheduler.waiting),
                0 if first is None else first.num_computed_tokens,
            )
        budget = effective_budget(budget, self._boot.ceiling_tokens, recorder.decoders)
        self.arranger.before(setting, budget, now_s)
        return step, revision, budget

    def after(self, output: Any, held: tuple[int, int, int], now_s: float, ran: int) -> None:
        """Take back what was for one step, and write down what was planned."""
        if self.moved:
            self.arranger.after()
        if output.total_num_scheduled_tokens == 0:
            self.desk.skip()
            return
        gone = output.preempted_req_ids
        if gone or (self._defers and self._scheduler.deferred_waiting):
            self.arranger.order.changed()
        self.recorder.planned(output, *held, now_s, ran, len(gone) if gone else 0)

    def arrived(self, request: Any) -> None:
        """vLLM took a request; one that only brings more input for a session is known already."""
        if request.request_id in self._scheduler.requests and request.request_id not in self.recorder.tracks:
            self.recorder.arrived(request, self.now_s())
            self.arranger.order.changed()

    def safely(self, act: Callable[..., T], *arguments: Any) -> T | None:
        """What ``act`` returns; None after a fault, and from then on the hook is off."""
        try:
            return act(*arguments)
        except Exception as error:  # noqa: BLE001  # the one wide border: nothing may raise into vLLM
            self._fault(act.__name__, error)
            return None

    def _fault(self, where: str, error: Exception) -> None:
        """Off for good, boot values back, said in log and state."""
        self.on = False
        what = f"hook off after a fault in {where}: {type(error).__name__}: {error}"
        LOG.exception("rooftune: %s; vLLM goes on at its boot settings, please report this", what)
        self.desk.close("".join(character if character.isprintable() else " " for character in what))
        self.knobs.apply(self.knobs.boot)
        try:
            self.arranger.after()
        except Exception:  # the hook is off already, and still nothing may raise into vLLM
            LOG.exception("rooftune: what was arranged for this step could not be taken back")


def hooked(base: type, version: Callable[[], str], now_s: Callable[[], float] = time.monotonic) -> type:
    """A subclass of the scheduler class that vLLM chose."""

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
                LOG.exception("rooftune: not active, for its start failed; vLLM goes on without it")

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            hook = self.rooftune
            if hook is None or not hook.on:
                return super().schedule(*args, **kwargs)
            now_s, ran = hook.now_s(), len(self.running)
            held = hook.safely(hook.before, now_s)
            output = super().schedule(*args, **kwargs)
            if held is not None:
                hook.safely(hook.after, output, held, now_s, ran)
            return output

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            hook = self.rooftune
            if hook is None or not hook.on:
                return super().update_from_output(scheduler_output, *args, **kwargs)
            hook.recorder.booking = True
            answers = super().update_from_output(scheduler_output, *args, **kwargs)
            hook.safely(hook.updated, scheduler_output, answers)
            return answers

        def add_request(self, request: Any) -> None:
            super().add_request(request)
            if self.rooftune is not None and self.rooftune.on:
                self.rooftune.safely(self.rooftune.arrived, request)

        def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            if self.rooftune is not None and self.rooftune.on:
                self.rooftune.safely(self.rooftune.ended, request)
            return super()._free_request(request, *args, **kwargs)

    Rooftuned.__name__ = Rooftuned.__qualname__ = f"Rooftuned{base.__name__}"
    return Rooftuned
