"""The scheduler's state as this engine holds it, and which KV blocks hold which content.

The arrays of ``State`` are lists here, tables lists of lists: one step is a few thousand reads of
single cells, and a cell of a list costs a third of a cell of an array. So the policies write ``table[row][column]``,
which both understand. Only the block table stays an array, because the runner reads whole rows of it.
"""

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from rooftune.policies.kv import release
from rooftune.policies.request import (
    FINISHED,
    KEY_AT,
    RUNNING,
    RUNNING_COUNT,
    STATUS,
    TABLE_AT,
    Boot,
    State,
    new_state,
    remove_waiting,
)

NO_DIGEST = b""


def engine_state(slots: int, *, pool_blocks: int, row_blocks: int) -> State:
    """An empty state for ``slots`` requests of at most ``row_blocks`` KV blocks each; the pool knows contents.

    Every slot owns one row of the block table and one of the keys for good; keys are -1 (content not known).
    """
    state = new_state(slots, pool_blocks=pool_blocks, table_blocks=slots * row_blocks)
    for slot in range(slots):
        state.requests[slot, KEY_AT] = state.requests[slot, TABLE_AT] = slot * row_blocks
    listed: dict[str, Any] = {name: part.tolist() for name, part in state._asdict().items() if name != "table"}
    listed["keys"] = [-1] * (slots * row_blocks)
    return State(table=state.table, **listed)


def leave(boot: Boot, state: State, slot: int) -> None:
    """Take a request out between two steps, wherever it stands, and give its blocks back (a cancellation)."""
    if state.requests[slot][STATUS] == RUNNING:
        last = state.counters[RUNNING_COUNT] - 1
        place = next(index for index in range(last + 1) if state.running[index] == slot)
        for index in range(place, last):
            state.running[index] = state.running[index + 1]
        state.counters[RUNNING_COUNT] = last
        release(state, boot, slot)
    else:
        remove_waiting(state, slot)
    state.requests[slot][STATUS] = FINISHED


def chain_digests(token_ids: Sequence[int], block_tokens: int, before: bytes = NO_DIGEST) -> list[bytes]:
    """A digest for every whole block, over its tokens and all that stands before it.

    ``before``: the digest of the block in front of ``token_ids``. 32 bytes, so that no client can force a collision.
    """
    digests = []
    raw = array("q", token_ids).tobytes()
    for end in range(8 * block_tokens, len(raw) + 1, 8 * block_tokens):
        before = hashlib.blake2b(before + raw[end - 8 * block_tokens : end], digest_size=32).digest()
        digests.append(before)
    return digests


class ContentKeys:
    """Small integers for contents: what ``State.keys`` holds and ``State.key_head`` is indexed by.

    A key is freed once no live request names it and no block holds it. ``plan_step`` evicts blocks without a
    callback, so keys that no request names stand in a line, and every new key checks the two that wait longest.
    That keeps at most about twice as many keys as there are blocks and named keys.
    """

    _LOOKS = 2

    def __init__(self, state: State) -> None:
        self._keys = state.keys
        self._head = cast(list[int], state.key_head)
        self._tail = cast(list[int], state.key_tail)
        self._key_of: dict[bytes, int] = {}
        self._digest_of: list[bytes] = []
        self._named_by: list[int] = []  # live requests that name this key
        self._in_line: list[bool] = []
        self._line: deque[int] = deque()
        self._free: list[int] = []

    def name(self, at: int, digest: bytes) -> None:
        """Write the key of ``digest`` to place ``at`` of ``State.keys``."""
        key = self._key_of.get(digest)
        if key is None:
            for _ in range(min(self._LOOKS, len(self._line))):
                self._look_at_one()
            key = self._new_key(digest)
        self._named_by[key] += 1
        self._keys[at] = key

    def forget(self, at: int, count: int) -> None:
        """Release the ``count`` keys from ``at`` on of a request that ended."""
        for place in range(at, at + count):
            key = self._keys[place]
            self._keys[place] = -1
            self._named_by[key] -= 1
            if self._named_by[key] == 0 and not self._in_line[key]:
                self._in_line[key] = True
                self._line.append(key)

    def _look_at_one(self) -> None:
        key = self._line.popleft()
        if self._named_by[key] > 0:
            self._in_line[key] = False
        elif self._head[key] >= 0:
            self._line.append(key)
        else:
            self._in_line[key] = False
            del self._key_of[self._digest_of[key]]
            self._free.append(key)

    def _new_key(self, digest: bytes) -> int:
        if self._free:
            key = self._free.pop()
            self._digest_of[key] = digest
        else:
            key = len(self._digest_of)
            self._digest_of.append(digest)
            self._named_by.append(0)
            self._in_line.append(False)
            self._head.append(-1)
            self._tail.append(-1)
        self._key_of[digest] = key
        return key
