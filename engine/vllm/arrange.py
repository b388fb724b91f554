"""Arranges, before vLLM plans a step, which requests get its tokens.

vLLM serves running requests in list order, then waiting ones in list order, under one chunk cap for all. Where our
policies differ, we change its input for one step: reorder the two lists, hide a request, lower the cap, make vLLM pass
over a prefill. ``Arranger.after`` undoes all of it.
"""

from typing import Any

from rooftune.engine.vllm.knobs import Knobs
from rooftune.engine.vllm.lists import WaitingOrder, by_admission, decodes_first, hide, unhide
from rooftune.engine.vllm.outlook import Lookout, Outlook, blocked, wanted_tokens
from rooftune.engine.vllm.probe import length_of
from rooftune.engine.vllm.records import Recorder
from rooftune.policies.order import aged_turn
from rooftune.policies.packing import NO_CAP, chunk_cap, effective_chunk_cap
from rooftune.policies.request import FCFS, Setting


class Arranger:
    """The arrangement of one scheduler, for the engine's thread only."""

    def __init__(self, scheduler: Any, knobs: Knobs, recorder: Recorder, order: WaitingOrder) -> None:
        self._scheduler, self._knobs, self._recorder = scheduler, knobs, recorder
        self._length = length_of(scheduler.waiting)
        self._stands: tuple[Setting, int, int] | None = None  # setting, budget, joins under which nothing moved
        self._can_skip = hasattr(scheduler, "current_step")
        self._before: list[Any] = []
        self._held: list[Any] = []
        self._skipped: list[tuple[Any, int]] = []
        self._places: dict[int, int] | None = None  # of running requests before a reorder for one step
        self._reordered = False
        self._joins = -1
        self._expected = -1  # requests that should run after this step
        self._disappointed = False
        self._ordered_steps = 0  # that gave prefills tokens by an order policy
        self._aged_first = True  # the latest of these was a turn of the aged
        self.order = order

    def before(self, setting: Setting, budget: int, now_s: float) -> None:
        """Set the budget and caps of this step and arrange the lists as the setting requires."""
        knobs, recorder, scheduler = self._knobs, self._recorder, self._scheduler
        running, waits = len(scheduler.running), self._length(scheduler.waiting)
        # No request is in prefill and none can be admitted: settings stay, and the queue's order does not matter yet.
        quiet = not recorder.partials and not (waits > 0 and running < setting.max_running)
        ordered = setting.order_policy != FCFS
        if quiet and waits > 0 and ordered and not self._disappointed:
            self._expected = running
        if quiet and self._stands == (setting, budget, recorder.joins):
            return
        self._stands = (setting, budget, recorder.joins) if quiet else None
        knobs.set_budget(budget)
        knobs.set_active(setting.max_running)
        if ordered and not quiet and budget > recorder.decoders:
            self._ordered_steps += 1
            self._aged_first = aged_turn(self._ordered_steps, setting.aged_share)
        if ordered or self._reordered:
            self._follow(setting, now_s)
        if quiet:
            knobs.set_cap(setting.chunk_cap_tokens, setting.adaptive_chunk_cap != 0)
            return
        capped = setting.max_partial_prefills > 0 or setting.max_long_partial_prefills > 0
        cap = chunk_cap(setting, knobs.ceiling_tokens, running + waits)
        if ordered:
            lookout = Lookout(scheduler, recorder, setting, budget, cap, now_s, aged_first=self._aged_first)
            outlook = lookout.by_policy(admitting=not self._disappointed)
            self._by_policy(setting, outlook, budget - recorder.decoders, cap)
        else:
            if capped and waits > 0:
                self._hold_back(Lookout(scheduler, recorder, setting, budget, cap, now_s).first_come())
            self._keep_decodes_moving(setting, budget, cap)

    def after(self) -> None:
        """Undo what was only for the step, also when the step failed."""
        scheduler = self._scheduler
        if self._held:
            unhide(scheduler.waiting, self._before, self._held)
            self._held, self._before = [], []
        for request, eligible in self._skipped:
            request.next_decode_eligible_step = eligible
        self._skipped.clear()
        if self._places is not None:
            places, newest = self._places, len(self._places)
            scheduler.running.sort(key=lambda request: places.get(id(request), newest))
            self._places = None
        self._disappointed = 0 <= self._expected != len(scheduler.running)
        self._expected = -1

    # --- parts of before() ---

    def _follow(self, setting: Setting, now_s: float) -> None:
        """The lists in the policy's order, or back in vLLM's own."""
        scheduler, recorder = self._scheduler, self._recorder
        self.order.sort(scheduler.waiting, recorder.tracks, setting, now_s, self._aged_first)
        back = self._reordered and setting.order_policy == FCFS
        self._reordered = setting.order_policy != FCFS
        if back or self._joins != recorder.joins:
            self._joins = recorder.joins
            by_admission(scheduler.running, recorder.tracks)

    def _keep_decodes_moving(self, setting: Setting, budget: int, cap: int) -> None:
        """While decodes stand behind a partial prefill it leaves a token for each of them."""
        recorder, running = self._recorder, self._scheduler.running
        partials = recorder.partials
        if recorder.decoders > 0 and partials and not self._partials_are_last():
            room = effective_chunk_cap(cap, budget, recorder.decoders)
            if len(partials) == 1 and room >= 1:
                if room < cap:
                    self._knobs.set_cap(room, False)
                    return
            elif wanted_tokens(list(partials.values()), cap) > budget - recorder.decoders:
                self._places = {id(request): place for place, request in enumerate(running)}
                decodes_first(running, partials, list(partials.values()))
        self._set_cap(setting, cap)

    def _set_cap(self, setting: Setting, cap: int) -> None:
        """The cap as vLLM would have it, also while requests are hidden from its count of those eligible."""
        if self._held and cap < NO_CAP:
            visible = len(self._scheduler.running) + len(self._scheduler.waiting)
            if visible == 1:  # it would not apply the cap to what looks like a lone request
                self._knobs.set_budget(min(self._scheduler.max_num_scheduled_tokens, cap))
            self._knobs.set_cap(cap, False)
        else:
            self._knobs.set_cap(setting.chunk_cap_tokens, setting.adaptive_chunk_cap != 0)

    def _partials_are_last(self) -> bool:
        partials, running = self._recorder.partials, self._scheduler.running
        return all(request.request_id in partials for request in running[len(running) - len(partials) :])

    def _hold_back(self, outlook: Outlook) -> None:
        """Requests that a partial-prefill cap forbids to admit are hidden, so that vLLM admits only foreseen ones."""
        if outlook.held:
            self._hide(outlook.held)
            self._admit_only(len(outlook.admitted))

    def _by_policy(self, setting: Setting, outlook: Outlook, space: int, cap: int) -> None:
        """Prefills, running and waiting alike, get the tokens that decodes leave in the policy's order."""
        running, admitted = self._scheduler.running, outlook.admitted
        if outlook.order:
            decodes_first(running, self._recorder.partials, outlook.order)
        self._hide(outlook.held)
        if running or admitted:
            self._admit_only(len(admitted))
        if not self._disappointed:
            self._expected = len(running) + len(admitted)
        if outlook.passed:
            self._knobs.set_cap(self._make_room(outlook, space, cap), False)
        else:
            self._set_cap(setting, cap)

    def _make_room(self, outlook: Outlook, space: int, cap: int) -> int:
        """The cap under which running prefills leave those admitted their tokens; passes over those that are to get
        none. space: what decodes leave."""
        order, count, total = outlook.order, len(outlook.served), sum(outlook.served)
        if self._can_skip:
            for request in order[count:]:
                self._skip(request)
        else:
            count = len(order)
        if count == 0:
            return cap
        if count == 1 and total >= max(outlook.admitted):
            room = total
        elif count == 1 and self._can_skip and 4 * total <= space:
            self._skip(order[0])  # a small rest: better unused for a step than taken from requests that go first
            return cap
        else:
            room = max(total // count, space // (count + 1), 1)
        return min(room, cap)

    def _skip(self, request: Any) -> None:
        """vLLM passes over a running request whose next step is not due; ``schedule`` counts its step first."""
        if hasattr(request, "next_decode_eligible_step"):
            self._skipped.append((request, request.next_decode_eligible_step))
            request.next_decode_eligible_step = self._scheduler.current_step + 2

    def _hide(self, held: list[Any]) -> None:
        if held:
            self._held = held
            self._before = hide(self._scheduler.waiting, held)

    def _admit_only(self, count: int) -> None:
        """At most ``count`` of the waiting requests, from the front."""
        scheduler = self._scheduler
        if self._knobs.has_active_cap:
            self._knobs.set_active(len(scheduler.running) + count)
            return
        ready = [request for request in scheduler.waiting if not blocked(request)]
        rest = ready[count:]
        if rest:
            before = self._before or list(scheduler.waiting)
            hide(scheduler.waiting, rest)
            self._held, self._before = [*self._held, *rest], before
