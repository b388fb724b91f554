"""Whether the KV blocks add up: nothing lost, nothing held twice, every list whole in both directions."""

from collections import Counter

from rooftune.policies import request as r
from rooftune.policies.kv import blocks_for
from rooftune.policies.request import Boot, State


def check_blocks(state: State, boot: Boot, running: list[int], waiting: list[int], pool: int) -> None:
    """Assert that held and free blocks make up the pool, and that all lists of blocks are consistent."""
    for request in waiting:
        assert state.requests[request, r.HELD] == 0 and state.requests[request, r.COMPUTED] == 0
    for request in running:
        row = state.requests[request]
        assert row[r.HELD] == blocks_for(int(row[r.COMPUTED]), boot.block_tokens)
    free = int(state.counters[r.FREE_BLOCKS])
    if boot.contents == 0:
        assert free >= 0 and free + sum(int(state.requests[q, r.HELD]) for q in running) == pool
        return
    blocks = state.blocks.tolist()
    references: Counter[int] = Counter()
    for request in running:
        at, held = state.requests[request, r.TABLE_AT], state.requests[request, r.HELD]
        own = state.table[at : at + held].tolist()
        assert len(set(own)) == len(own)
        references.update(own)
    assert [blocks[b][r.REFERENCES] for b in range(pool)] == [references[b] for b in range(pool)]
    in_line = _line(
        blocks, int(state.counters[r.FREE_HEAD]), int(state.counters[r.FREE_TAIL]), r.NEXT_FREE, r.PREV_FREE
    )
    assert len(in_line) == free and free + len(references) == pool
    assert not set(in_line) & set(references)
    findable = [b for b in range(pool) if blocks[b][r.KEY] >= 0]
    listed = []
    for key in {blocks[b][r.KEY] for b in findable}:
        same = _line(blocks, int(state.key_head[key]), int(state.key_tail[key]), r.NEXT_SAME, r.PREV_SAME)
        assert all(blocks[b][r.KEY] == key for b in same)
        listed += same
    assert sorted(listed) == findable
    assert (
        int((state.key_head >= 0).sum())
        == int((state.key_tail >= 0).sum())
        == len({blocks[b][r.KEY] for b in findable})
    )
    for request in running:
        row = state.requests[request]
        assert row[r.HASHED] <= row[r.COMPUTED] // boot.block_tokens
        for index in range(row[r.HASHED]):
            block = state.table[row[r.TABLE_AT] + index]
            assert blocks[block][r.KEY] == state.keys[row[r.KEY_AT] + index]


def _line(blocks: list[list[int]], head: int, tail: int, following: int, preceding: int) -> list[int]:
    found, before, block = [], -1, head
    while block >= 0:
        assert blocks[block][preceding] == before and len(found) < len(blocks)
        found.append(block)
        before, block = block, blocks[block][following]
    assert before == tail
    return found
