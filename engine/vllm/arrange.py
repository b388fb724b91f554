"""Who gets the tokens of the next step, arranged before vLLM plans it.

vLLM serves what runs in list order, then what waits in list order, under one chunk cap for all. Whatever our rules want
beyond that is brought about from outside, for one step at a time: the order of the two lists, a request that is not
shown, a lower cap, a prefill that is passed over. ``Arranger.after`` takes all of it back.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from engine.vllm.knobs import NO_CAP, Knobs
from engine.vllm.lists import WaitingOrder, by_admission, decodes_first, hide, prefill_key, unhide
from engine.vllm.records import Recorder
from policies.packing import effective_chunk_cap
from policies.request import FCFS, Setting


class Arranger:
    """One scheduler's arrangement. Everything for the engine's thread."""

    def __init__(self, scheduler: Any, knobs: Knobs, recorder: Recorder) -> None:
        self._scheduler, self._knobs, self._recorder = scheduler, knobs, recorder
        self._block_tokens = int(getattr(scheduler, "block_size", 1))
        self._can_skip = hasattr(scheduler, "current_step")
        self._before: list[Any] = []
        self._held: list[Any] = []
        self._skipped: list[tuple[Any, int]] = []
        self._places: dict[int, int] | None = None  # of running requests before a reorder for one step
        self._reordered = False
        self._joins = -1
        self._expected = -1  # requests that should run after this step
        self._disappointed = False
        self.order = WaitingOrder()

    def before(self, setting: Setting, budget: int, now_s: float) -> None:
        """Budget and caps of this step and whatever else the setting asks for."""
        knobs, recorder, scheduler = self._knobs, self._recorder, self._scheduler
        knobs.set_budget(budget)
        knobs.set_active(setting.max_running)
        if setting.order_policy != FCFS or self._reordered:
            self._follow(setting, now_s)
        capped = setting.max_partial_prefills > 0 or setting.max_long_partial_prefills > 0
        cap = self._cap(setting)
        if not recorder.partials and not scheduler.waiting:
            knobs.set_cap(setting.chunk_cap_tokens, setting.adaptive_chunk_cap != 0)
        elif setting.order_policy != FCFS:
            self._by_policy(setting, budget, cap, now_s)
        else:
            if capped and scheduler.waiting:
                self._hold_back(setting, budget, cap, now_s)
            self._keep_decodes_moving(setting, budget, cap)

    def after(self) -> None:
        """What was only for the step is taken back, also when it failed."""
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

    def _cap(self, setting: Setting) -> int:
        """The chunk cap that vLLM would apply: none for a lone request, never below a fair share when adaptive."""
        eligible = len(self._scheduler.running) + len(self._scheduler.waiting)
        cap = setting.chunk_cap_tokens
        if cap <= 0 or eligible <= 1:
            return NO_CAP
        return max(cap, self._knobs.ceiling_tokens // eligible) if setting.adaptive_chunk_cap else cap

    def _follow(self, setting: Setting, now_s: float) -> None:
        """The lists in the policy's order, or back in vLLM's own."""
        scheduler, recorder = self._scheduler, self._recorder
        self.order.sort(scheduler.waiting, recorder.tracks, setting, now_s)
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
            elif _wanted(partials, cap) > budget - recorder.decoders:
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

    def _hold_back(self, setting: Setting, budget: int, cap: int, now_s: float) -> None:
        """Hide waiting requests that a partial-prefill cap forbids to admit; first come, first served."""
        recorder, scheduler = self._recorder, self._scheduler
        caps = _Caps(setting)
        left = budget - recorder.decoders
        for request in recorder.partials.values():
            take = min(_missing(request), cap, max(left, 0))
            left -= take
            if take < _missing(request):
                caps.add(request)
        places = setting.max_running - len(scheduler.running)
        held: list[Any] = []
        waiting = iter(scheduler.waiting)
        for request in waiting:
            if left <= 0 or places <= 0:
                break
            if _blocked(request):
                continue
            missing = _missing(request) - self._cached(request)
            take = min(missing, cap, left)
            if take < missing and caps.reached(request):
                held.append(request)
                if self._waited_s(request, now_s) >= setting.pass_over_max_s:
                    held.extend(waiting)
                    break
                continue
            left -= take
            places -= 1
            if take < missing:
                caps.add(request)
        self._hide(held)

    def _by_policy(self, setting: Setting, budget: int, cap: int, now_s: float) -> None:
        """Prefills, running and waiting alike, get the tokens that decodes leave in the policy's order."""
        scheduler, recorder, knobs = self._scheduler, self._recorder, self._knobs
        partials = recorder.partials
        keyed = [
            (prefill_key(request, recorder.tracks[name], setting, now_s)[0], request)
            for name, request in partials.items()
        ]
        keyed.sort(key=itemgetter(0))
        caps = _Caps(setting)
        for _, request in keyed:
            caps.add(request)
        space = left = budget - recorder.decoders
        need = sum(_missing(request) + self._block_tokens for _, request in keyed)
        free_tokens = self._free_tokens()
        places = setting.max_running - len(scheduler.running)
        served: list[tuple[Any, int]] = []
        admitted: list[int] = []
        held: list[Any] = []
        passed = False  # somebody who waits goes before somebody who runs
        at = 0
        waiting = iter(() if self._disappointed else scheduler.waiting)
        request = next(waiting, None)
        while left > 0 and (at < len(keyed) or request is not None):
            key = None
            if request is not None:
                if _blocked(request):
                    request = next(waiting, None)
                    continue
                key = prefill_key(request, recorder.tracks[request.request_id], setting, now_s)[0]
            if at < len(keyed) and (key is None or keyed[at][0] < key):
                runs = keyed[at][1]
                take = min(_missing(runs), cap, left)
                served.append((runs, take))
                left -= take
                if take == _missing(runs):
                    caps.remove(runs)
                at += 1
                continue
            assert request is not None
            missing = _missing(request) - self._cached(request)
            take = min(missing, cap, left)
            if places <= 0 or (keyed and request.num_tokens + need > free_tokens):
                request = None  # admission is over
                continue
            if take < missing and caps.reached(request):
                held.append(request)
                over = self._waited_s(request, now_s) >= setting.pass_over_max_s
                request = None if over else next(waiting, None)
                continue
            admitted.append(take)
            places -= 1
            left -= take
            need += missing + self._block_tokens
            if take < missing:
                caps.add(request)
            passed = passed or at < len(keyed)
            request = next(waiting, None)
        order = [runs for _, runs in keyed]
        if order:
            decodes_first(scheduler.running, partials, order)
        self._hide(held)
        if scheduler.running or admitted:
            self._admit_only(len(admitted))
        if not self._disappointed:
            self._expected = len(scheduler.running) + len(admitted)
        if passed and admitted:
            knobs.set_cap(self._make_room(served, admitted, order, space, cap), False)
        else:
            self._set_cap(setting, cap)

    def _make_room(
        self, served: Sequence[tuple[Any, int]], admitted: Sequence[int], order: Sequence[Any], space: int, cap: int
    ) -> int:
        """The cap under which running prefills leave the tokens that ``admitted`` are to get; passes over those
        prefills that are to get none."""
        count = sum(take > 0 for _, take in served)
        total = sum(take for _, take in served)
        if self._can_skip:
            for request in order[count:]:
                self._skip(request)
        else:
            count = len(order)
        if count == 0:
            return cap
        most = max(admitted)
        if count == 1 and total >= most:
            room = total
        elif count == 1 and self._can_skip and 4 * total <= space:
            self._skip(order[0])  # a scrap: rather unused for a step than at the price of those who go first
            return cap
        else:
            room = max(total // count, space // (count + 1), 1)
        return min(room, cap)

    # --- small ones ---

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
        ready = [request for request in scheduler.waiting if not _blocked(request)]
        rest = ready[count:]
        if rest:
            before = self._before or list(scheduler.waiting)
            hide(scheduler.waiting, rest)
            self._held, self._before = [*self._held, *rest], before

    def _waited_s(self, request: Any, now_s: float) -> float:
        return now_s - self._recorder.tracks[request.request_id].arrival_s

    def _cached(self, request: Any) -> int:
        """Tokens that the prefix cache would spare a waiting request: a look that changes nothing."""
        manager = self._scheduler.kv_cache_manager
        if request.num_computed_tokens > 0 or not request.block_hashes or not manager.enable_caching:
            return 0
        found = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return int(found[1])

    def _free_tokens(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()) * self._block_tokens


class _Caps:
    """Counts the requests that stay part-way through their prompt in the step being arranged."""

    def __init__(self, setting: Setting) -> None:
        self._most, self._most_long = setting.max_partial_prefills, setting.max_long_partial_prefills
        self._long_tokens = setting.long_prompt_tokens
        self._count = self._long = 0

    def add(self, request: Any) -> None:
        self._count += 1
        self._long += request.num_prompt_tokens >= self._long_tokens

    def remove(self, request: Any) -> None:
        self._count -= 1
        self._long -= request.num_prompt_tokens >= self._long_tokens

    def reached(self, request: Any) -> bool:
        """Whether one more, this one, would be above a cap."""
        if 0 < self._most <= self._count:
            return True
        return 0 < self._most_long <= self._long and request.num_prompt_tokens >= self._long_tokens


def _missing(request: Any) -> int:
    return int(request.num_tokens - request.num_computed_tokens)


def _wanted(partials: dict[str, Any], cap: int) -> int:
    return sum(min(_missing(request), cap) for request in partials.values())


def _blocked(request: Any) -> bool:
    """Waits for something else than a place (a grammar, remote KV): vLLM passes over it by itself."""
    return request.status.name not in ("WAITING", "PREEMPTED")
