"""KV blocks: counted, shared by content, freed in the order in which they may be reused."""

import pytest

from rooftune.policies import request as r
from rooftune.policies.kv import blocks_for, find_prefix, fits, grow, release, take_prefix
from rooftune.policies.request import State, append_waiting
from tests.policies.scheduler import BOOT, waiting, with_contents
from tests.properties.block_check import check_blocks

POOL = BOOT._replace(block_tokens=4, contents=1)


def held(state: State, request: int) -> list[int]:
    at = state.requests[request, r.TABLE_AT]
    found: list[int] = state.table[at : at + state.requests[request, r.HELD]].tolist()
    return found


def free_line(state: State) -> list[int]:
    found, block = [], int(state.counters[r.FREE_HEAD])
    while block >= 0:
        found.append(block)
        block = int(state.blocks[block, r.NEXT_FREE])
    return found


def run(state: State, request: int, tokens: int) -> int:
    """Admit a request with its prefix and compute up to ``tokens``; returns the hit."""
    hit = find_prefix(state, POOL, request)
    take_prefix(state, POOL, request, hit)
    assert grow(state, POOL, request, tokens)
    state.requests[request, r.COMPUTED] = tokens
    state.requests[request, r.STATUS] = r.RUNNING
    return hit


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


def test_counted_blocks() -> None:
    state = waiting([40], pool_blocks=3)
    assert fits(state, BOOT, 0, 0, 48) and not fits(state, BOOT, 0, 0, 49)
    assert grow(state, BOOT, 0, 33) and state.counters[r.FREE_BLOCKS] == 0
    assert not grow(state, BOOT, 0, 49) and state.requests[0, r.HELD] == 3
    release(state, BOOT, 0)
    assert state.counters[r.FREE_BLOCKS] == 3 and state.requests[0, r.HELD] == 0


@pytest.mark.parametrize(("cached", "hit"), [(0, 0), (15, 0), (16, 16), (39, 32)])
def test_a_known_hit_counts_whole_blocks(cached: int, hit: int) -> None:
    state = waiting([40])
    state.requests[0, r.CACHED] = cached
    assert find_prefix(state, BOOT, 0) == hit


def test_a_hit_never_spares_the_last_token() -> None:
    state = waiting([32])
    state.requests[0, r.CACHED] = 31
    assert find_prefix(state, BOOT, 0) == 16
    full = with_contents([[1, 2], [1, 2]], block_tokens=4, pool_blocks=8)
    full.requests[:, r.PROMPT] = full.requests[:, r.KNOWN] = 8
    run(full, 0, 8)
    assert find_prefix(full, POOL, 1) == 4


def test_equal_contents_share_blocks_and_the_first_difference_ends_it() -> None:
    state = with_contents([[1, 2, 3], [1, 2, 9]], block_tokens=4, pool_blocks=10)
    assert run(state, 0, 13) == 0
    assert run(state, 1, 13) == 8
    assert held(state, 1)[:2] == held(state, 0)[:2] and held(state, 1)[2] != held(state, 0)[2]
    assert state.counters[r.FREE_BLOCKS] == 10 - 4 - 2
    check_blocks(state, POOL, [0, 1], [], 10)
    release(state, POOL, 0)
    check_blocks(state, POOL, [1], [], 10)
    assert state.counters[r.FREE_BLOCKS] == 10 - 4


def test_a_freed_prefix_is_found_until_it_is_evicted_tail_first() -> None:
    state = with_contents([[1, 2], [7, 8, 9], [1, 2], [1, 2]], block_tokens=4, pool_blocks=4)
    run(state, 0, 9)
    first = held(state, 0)
    release(state, POOL, 0)
    # Blocks without a key go first, then the tail of the prefix, then its head.
    assert free_line(state) == [first[2], 3, first[1], first[0]]
    assert find_prefix(state, POOL, 2) == 8
    assert run(state, 1, 9) == 0
    assert find_prefix(state, POOL, 2) == 4
    check_blocks(state, POOL, [1], [], 4)
    release(state, POOL, 1)
    assert run(state, 3, 9) == 4
    check_blocks(state, POOL, [3], [], 4)


def test_found_blocks_without_a_holder_use_up_free_blocks() -> None:
    state = with_contents([[1, 2], [1, 2]], block_tokens=4, pool_blocks=3)
    run(state, 0, 9)
    release(state, POOL, 0)
    assert fits(state, POOL, 1, 8, 9) and fits(state, POOL, 1, 8, 12)
    assert not fits(state, POOL, 1, 8, 13)


def test_of_two_blocks_with_the_same_content_the_first_registered_is_found() -> None:
    state = with_contents([[5], [5], [5]], block_tokens=4, pool_blocks=6)
    take_prefix(state, POOL, 1, 0)  # both start before either block is full
    run(state, 0, 5)
    assert grow(state, POOL, 1, 5)
    state.requests[1, r.COMPUTED] = 5
    assert held(state, 0)[0] != held(state, 1)[0]
    check_blocks(state, POOL, [0, 1], [], 6)
    run(state, 2, 5)
    assert held(state, 2)[0] == held(state, 0)[0]
    release(state, POOL, 0)
    release(state, POOL, 2)
    check_blocks(state, POOL, [1], [], 6)


def test_unknown_content_is_never_found() -> None:
    state = with_contents([[1, -1, 3], [1, -1, 3]], block_tokens=4, pool_blocks=10)
    run(state, 0, 13)
    assert state.requests[0, r.HASHED] == 1
    assert find_prefix(state, POOL, 1) == 4
    blocks = held(state, 0)
    release(state, POOL, 0)
    # The last three have no key: reused before anything else, tail first; the known one last.
    line = free_line(state)
    assert line[:3] == blocks[:0:-1] and line[-1] == blocks[0]


def test_a_waiting_request_holds_nothing() -> None:
    state = with_contents([[1]], block_tokens=4, pool_blocks=4)
    append_waiting(state, 0)
    check_blocks(state, POOL, [], [0], 4)
