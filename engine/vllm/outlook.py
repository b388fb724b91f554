"""Predicts what the next step gives to prefills under our caps and orders, without changing anything.

The same walks as ``rooftune.policies.packing`` over vLLM's own requests; ``arrange`` brings about what they find.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any

from rooftune.engine.vllm.lists import Key, prefill_key
from rooftune.engine.vllm.records import Recorder
from rooftune.policies.request import Setting

# Waiting requests looked at in one step; those behind them wait for the next.
MOST_LOOKED_AT = 64


class PartialCaps:
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


@dataclass
class Outlook:
    """served: tokens of running prefills, in order, until none is left. admitted: tokens of those admitted, from the
    front of the waiting list. held: held back by a cap. passed: a waiting request goes before a running one."""

    order: list[Any] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    passed: bool = False


class Lookout:
    """One step of one scheduler. budget, cap: of the step (tokens); left: what decodes leave of the budget.

    aged_first: an order policy serves the aged first in this step, else last.
    """

    def __init__(
        self,
        scheduler: Any,
        recorder: Recorder,
        setting: Setting,
        budget: int,
        cap: int,
        now_s: float,
        *,
        aged_first: bool = False,
    ) -> None:
        self._scheduler, self._recorder, self._setting = scheduler, recorder, setting
        self._cap, self._now_s, self._aged_first = cap, now_s, aged_first
        self._left = budget - recorder.decoders
        self._places = setting.max_running - len(scheduler.running)
        self._caps = PartialCaps(setting)
        self._found = Outlook()

    def first_come(self) -> Outlook:
        """First come, first served, under the partial-prefill caps."""
        for request in self._recorder.partials.values():
            take = min(missing_tokens(request), self._cap, max(self._left, 0))
            self._left -= take
            if take < missing_tokens(request):
                self._caps.add(request)
        for request in islice(self._scheduler.waiting, MOST_LOOKED_AT):
            if self._left <= 0 or self._places <= 0:
                break
            if not blocked(request) and not self._admit(request):
                break
        return self._found

    def by_policy(self, *, admitting: bool) -> Outlook:
        """Prefills, running and waiting alike, in the policy's order; the waiting list stands in it already."""
        found, recorder = self._found, self._recorder
        keyed = [(self._key(request), request) for request in recorder.partials.values()]
        keyed.sort(key=itemgetter(0))
        found.order = [request for _, request in keyed]
        for request in found.order:
            self._caps.add(request)
        block_tokens = int(self._scheduler.block_size)
        need = sum(missing_tokens(request) + block_tokens for request in found.order)
        free = int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()) * block_tokens
        at = 0
        ready = (request for request in islice(self._scheduler.waiting, MOST_LOOKED_AT) if not blocked(request))
        request = next(ready, None) if admitting else None
        while self._left > 0 and (at < len(keyed) or request is not None):
            if at < len(keyed) and (request is None or keyed[at][0] < self._key(request)):
                self._serve(keyed[at][1])
                at += 1
                continue
            assert request is not None
            if self._places <= 0 or (found.order and request.num_tokens + need > free):
                request = None  # all that is in flight must fit beside it, or admission is over
                continue
            before = len(found.admitted)
            goes_on = self._admit(request)
            if len(found.admitted) > before:
                need += missing_tokens(request) + block_tokens
                found.passed = found.passed or at < len(keyed)
            request = next(ready, None) if goes_on else None
        return found

    def _key(self, request: Any) -> Key:
        track = self._recorder.tracks[request.request_id]
        return prefill_key(request, track, self._setting, self._now_s, self._aged_first)[0]

    def _serve(self, request: Any) -> None:
        take = min(missing_tokens(request), self._cap, self._left)
        self._left -= take
        self._found.served.append(take)
        if take == missing_tokens(request):
            self._caps.remove(request)

    def _admit(self, request: Any) -> bool:
        """Admit or hold a waiting request; False when none behind it may be admitted."""
        missing = missing_tokens(request) - cached_tokens(self._scheduler, request)
        take = min(missing, self._cap, self._left)
        if take < missing and self._caps.reached(request):
            self._found.held.append(request)
            waited_s = self._now_s - self._recorder.tracks[request.request_id].arrival_s
            return waited_s < self._setting.pass_over_max_s
        self._found.admitted.append(take)
        self._left -= take
        self._places -= 1
        if take < missing:
            self._caps.add(request)
        return True


def missing_tokens(request: Any) -> int:
    """Known tokens without a KV entry."""
    return int(request.num_tokens - request.num_computed_tokens)


def wanted_tokens(requests: Sequence[Any], cap: int) -> int:
    """Tokens that prefills would take of an unlimited step."""
    return sum(min(missing_tokens(request), cap) for request in requests)


def cached_tokens(scheduler: Any, request: Any) -> int:
    """Tokens that the prefix cache would spare a waiting request: a look that changes nothing."""
    manager = scheduler.kv_cache_manager
    if request.num_computed_tokens > 0 or not request.block_hashes or not manager.enable_caching:
        return 0
    found = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
    return int(found[1])


def blocked(request: Any) -> bool:
    """Whether it waits for more than a place (a grammar, remote KV), so that vLLM passes over it by itself."""
    return request.status.name not in ("WAITING", "PREEMPTED")
