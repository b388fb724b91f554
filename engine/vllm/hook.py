"""The scheduler that vLLM chose, with ours around its decision. ``schedule`` is the page to read.

Nothing here may raise into vLLM: an exception inside ``schedule`` ends its engine. So values are checked where they
come in (``TuningDesk``), and whatever goes wrong all the same switches the hook off for good, boot values back.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from engine.interface import FinishReason
from engine.protocol import About, InForce, TuningDesk
from engine.vllm.arrange import Arranger
from engine.vllm.knobs import Knobs
from engine.vllm.probe import missing, probe
from engine.vllm.records import Recorder
from policies.budget import step_budget
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
        self.desk = TuningDesk(about, found.envelope, self.knobs.boot, now_s, gap_bounds_s=GAP_BOUNDS_S)
        for note in found.notes:
            self.desk.note(note)
            LOG.warning("rooftune: %s", note)
        self.recorder = Recorder(self.desk, GAP_BOUNDS_S, one_token=found.one_token)
        self.arranger = Arranger(scheduler, self.knobs, self.recorder)
        self.on = True
        self.moved = False  # something was ever pushed; until then vLLM is left exactly as it is
        self._boot = Boot(self.knobs.ceiling_tokens, 1, int(found.boot_envelope.chunking), 1, 0, 1)
        self._revision = 0

    def before(self, now_s: float) -> tuple[InForce, int]:
        """Arrange the step that is about to be planned; returns what it runs under and its budget (tokens)."""
        force = self.desk.begin_step(now_s)
        setting, recorder, scheduler = force.setting, self.recorder, self._scheduler
        if force.revision != self._revision:
            self._revision = force.revision
            self.moved = True
        if not self.moved:
            return force, setting.step_tokens
        if recorder.decoders + len(recorder.partials) != len(scheduler.running):
            recorder.recount(scheduler.running)
        budget = setting.step_tokens
        if setting.budget_policy != FIXED_BUDGET:
            first = next(iter(recorder.partials.values()), None)
            budget = step_budget(
                setting,
                self._boot,
                force.step_model,
                recorder.decoders,
                recorder.context,
                len(recorder.partials) + len(scheduler.waiting),
                0 if first is None else first.num_computed_tokens,
            )
        budget = effective_budget(budget, self._boot.ceiling_tokens, recorder.decoders)
        self.arranger.before(setting, budget, now_s)
        return force, budget

    def after(self, output: Any, held: tuple[InForce, int], now_s: float, ran: int) -> None:
        """Take back what was for one step, and write down what was planned."""
        if self.moved:
            self.arranger.after()
        if output.total_num_scheduled_tokens == 0:
            self.desk.skip_step()
            return
        preempted = len(output.preempted_req_ids or ())
        if preempted or getattr(self._scheduler, "deferred_waiting", None):
            self.arranger.order.changed()
        self.recorder.planned(self._scheduler, output, held[0], held[1], now_s, ran, preempted)

    def arrived(self, request: Any) -> None:
        """vLLM took a request; one that only brings more input for a session is known already."""
        if request.request_id in self._scheduler.requests and request.request_id not in self.recorder.tracks:
            self.recorder.arrived(request, self.now_s())
            self.arranger.order.changed()

    def updated(self, output: Any, answers: Any) -> None:
        """The tokens of a step are there."""
        self.recorder.updated(output, answers, self.now_s())

    def ended(self, request: Any) -> None:
        """vLLM lets go of a request."""
        self.recorder.ended(request, _why(request), self.now_s())

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
            hook.recorder.updating()
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


def _why(request: Any) -> FinishReason:
    name = request.status.name
    if name in ("FINISHED_STOPPED", "FINISHED_REPETITION"):
        return FinishReason.STOP
    if name in ("FINISHED_LENGTH_CAPPED", "FINISHED_IGNORED"):
        return FinishReason.LENGTH
    if name == "FINISHED_ABORTED":
        # The frontend finds stop strings and then aborts: with one given, and output, that is how an answer ends.
        stops = getattr(request.sampling_params, "stop", None)
        return FinishReason.STOP if stops and request.num_output_tokens > 0 else FinishReason.CANCELLED
    return FinishReason.FAILED
