"""The order of vLLM's two lists, what runs and what waits. Pure over lists; requests are vLLM's own."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rooftune.engine.vllm.tracks import Track
from rooftune.policies.order import AGED, BEHIND, FIRST, IN_TIME, LATE
from rooftune.policies.request import DEADLINE, FCFS, Setting

Key = tuple[int, float, float, int]


def prefill_key(request: Any, track: Track, setting: Setting, now_s: float, aged_first: bool) -> tuple[Key, float]:
    """Where a prefill stands (smallest first), and until when that holds (s). aged_first: in a step of the aged."""
    left = request.num_tokens - request.num_computed_tokens
    arrival_s = track.arrival_s
    if request.num_output_tokens > 0:
        return (FIRST, 0, arrival_s, track.number), math.inf
    ages_s = arrival_s + setting.aging_s
    if now_s >= ages_s:
        return (AGED if aged_first else BEHIND, 0, arrival_s, track.number), math.inf
    if setting.order_policy == DEADLINE:
        late_s = arrival_s + setting.ttft_target_s - left * setting.prefill_s_per_token
        if now_s > late_s:
            return (LATE, left, arrival_s, track.number), ages_s
        ages_s = min(ages_s, late_s)
    return (IN_TIME, left + setting.wait_tokens_per_s * arrival_s, arrival_s, track.number), ages_s


def arrival_key(request: Any, track: Track) -> tuple[int, int, int]:
    """vLLM's own order of what waits: preempted ones in their order of admission, then by arrival."""
    preempted = request.num_preemptions > 0
    return (0, track.admitted, track.number) if preempted else (1, track.number, 0)


class WaitingOrder:
    """Keeps the waiting list sorted, and sorts it only when its content or a rank may have changed."""

    def __init__(self) -> None:
        self._policy = FCFS
        self._setting: Setting | None = None
        self._stale = True
        self._holds_until_s = math.inf
        self._aged_first = True
        self._some_aged = False  # in the sorted list

    def changed(self) -> None:
        """A request arrived or was put back."""
        self._stale = True

    def sort(self, waiting: Any, tracks: dict[str, Track], setting: Setting, now_s: float, aged_first: bool) -> None:
        """``waiting`` is vLLM's deque; changed in place. aged_first: in a step of the aged."""
        policy = setting.order_policy
        if policy == FCFS:
            if self._policy != FCFS:
                self._policy = FCFS
                _rewrite(waiting, sorted(waiting, key=lambda request: arrival_key(request, tracks[request.request_id])))
            return
        if not self._stale and setting == self._setting and now_s <= self._holds_until_s:
            if aged_first != self._aged_first and self._some_aged:
                self._turn(waiting, tracks, setting, now_s, aged_first)
            self._aged_first = aged_first
            return
        keys, until_s = {}, math.inf
        for request in waiting:
            key, holds_s = prefill_key(request, tracks[request.request_id], setting, now_s, aged_first)
            keys[request.request_id] = key
            until_s = min(until_s, holds_s)
        _rewrite(waiting, sorted(waiting, key=lambda request: keys[request.request_id]))
        self._policy, self._setting, self._stale, self._holds_until_s = policy, setting, False, until_s
        self._aged_first = aged_first
        self._some_aged = any(key[0] in (AGED, BEHIND) for key in keys.values())

    def _turn(self, waiting: Any, tracks: dict[str, Track], setting: Setting, now_s: float, aged_first: bool) -> None:
        """The aged from one end of those without output to the other, which is less work than another sort."""
        ranked = [
            (prefill_key(request, tracks[request.request_id], setting, now_s, aged_first)[0][0], request)
            for request in waiting
        ]
        line = [request for rank, request in ranked if rank not in (FIRST, AGED, BEHIND)]
        front = [request for rank, request in ranked if rank == FIRST]
        aged = [request for rank, request in ranked if rank in (AGED, BEHIND)]
        _rewrite(waiting, front + (aged + line if aged_first else line + aged))


def _rewrite(waiting: Any, items: Sequence[Any]) -> None:
    waiting.clear()
    waiting.extend(items)


def hide(waiting: Any, held: Iterable[Any]) -> list[Any]:
    """Take requests out of the waiting list for one step; returns the list as it was."""
    before = list(waiting)
    gone = set(map(id, held))
    _rewrite(waiting, [request for request in before if id(request) not in gone])
    return before


def unhide(waiting: Any, before: Sequence[Any], held: Iterable[Any]) -> None:
    """Put held requests back in their places; those vLLM put back meanwhile stay in front."""
    old, stays = set(map(id, before)), set(map(id, waiting)) | set(map(id, held))
    put_back = [request for request in waiting if id(request) not in old]
    _rewrite(waiting, put_back + [request for request in before if id(request) in stays])


def decodes_first(running: list[Any], partials: dict[str, Any], order: Sequence[Any]) -> None:
    """Decodes in the order they have, then ``order`` (the partial prefills); in place."""
    running[:] = [request for request in running if request.request_id not in partials] + list(order)


def by_admission(running: list[Any], tracks: dict[str, Track]) -> None:
    """vLLM's own order of what runs; in place."""
    running.sort(key=lambda request: tracks[request.request_id].admitted)
