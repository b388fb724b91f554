"""KV blocks: counted, or in a pool that finds prefixes by content, as vLLM's does.

With ``Boot.contents`` off only ``counters[FREE_BLOCKS]`` moves. With it on every block has an id, a reference count
and, once full, a content key. Free blocks form one list in eviction order: those without a key go to the front (last
freed, first reused), the others to the end (oldest evicted first). Of blocks with the same key the first registered is
found. Behaviour as in vLLM 0.32 (v1/core/block_pool.py, single_type_kv_cache_manager.py).
"""

from rooftune.policies.request import (
    CACHED,
    COMPUTED,
    FREE_BLOCKS,
    FREE_HEAD,
    FREE_TAIL,
    HASHED,
    HELD,
    KEY,
    KEY_AT,
    KNOWN,
    NEXT_FREE,
    NEXT_SAME,
    PREV_FREE,
    PREV_SAME,
    REFERENCES,
    TABLE_AT,
    Boot,
    State,
)


def blocks_for(tokens: int, block_tokens: int) -> int:
    return (tokens + block_tokens - 1) // block_tokens


def _pop_free(state: State) -> int:
    """Take the first block of the free list and forget its content."""
    block = state.counters[FREE_HEAD]
    _unlink_free(state, block)
    if state.blocks[block][KEY] >= 0:
        _forget(state, block)
    return int(block)


def _forget(state: State, block: int) -> None:
    """Take a block out of the list of blocks with its key."""
    blocks = state.blocks
    key, before, after = blocks[block][KEY], blocks[block][PREV_SAME], blocks[block][NEXT_SAME]
    if before < 0:
        state.key_head[key] = after
    else:
        blocks[before][NEXT_SAME] = after
    if after < 0:
        state.key_tail[key] = before
    else:
        blocks[after][PREV_SAME] = before
    blocks[block][KEY] = -1
    blocks[block][NEXT_SAME] = -1
    blocks[block][PREV_SAME] = -1


def _unlink_free(state: State, block: int) -> None:
    """Take a block out of the free list."""
    blocks, counters = state.blocks, state.counters
    before, after = blocks[block][PREV_FREE], blocks[block][NEXT_FREE]
    if before < 0:
        counters[FREE_HEAD] = after
    else:
        blocks[before][NEXT_FREE] = after
    if after < 0:
        counters[FREE_TAIL] = before
    else:
        blocks[after][PREV_FREE] = before


def _insert_free(state: State, block: int, after_block: int) -> None:
    """Put a block behind ``after_block``, or at the head when that is -1."""
    blocks, counters = state.blocks, state.counters
    following = counters[FREE_HEAD] if after_block < 0 else blocks[after_block][NEXT_FREE]
    blocks[block][PREV_FREE] = after_block
    blocks[block][NEXT_FREE] = following
    if after_block < 0:
        counters[FREE_HEAD] = block
    else:
        blocks[after_block][NEXT_FREE] = block
    if following < 0:
        counters[FREE_TAIL] = block
    else:
        blocks[following][PREV_FREE] = block


def find_prefix(state: State, boot: Boot, request: int) -> int:
    """Cached leading tokens of a waiting request: whole blocks, never the whole request."""
    row = state.requests[request]
    whole = (row[KNOWN] - 1) // boot.block_tokens
    if boot.contents == 0:
        hit = row[CACHED] // boot.block_tokens
        return int((hit if hit < whole else whole) * boot.block_tokens)
    at = row[KEY_AT]
    found = 0
    while found < whole:
        key = state.keys[at + found]
        if key < 0 or state.key_head[key] < 0:
            break
        found += 1
    return int(found * boot.block_tokens)


def fits(state: State, boot: Boot, request: int, hit_tokens: int, total_tokens: int) -> bool:
    """True when ``total_tokens`` of a waiting request fit the free blocks; it shares the found ones."""
    found = hit_tokens // boot.block_tokens if boot.contents != 0 else 0
    need = blocks_for(total_tokens, boot.block_tokens) - found
    at = state.requests[request][KEY_AT]
    for index in range(found):
        # A found block without a holder is in the free list: taking it uses a free block.
        if state.blocks[state.key_head[state.keys[at + index]]][REFERENCES] == 0:
            need += 1
    return bool(need <= state.counters[FREE_BLOCKS])


def take_prefix(state: State, boot: Boot, request: int, hit_tokens: int) -> None:
    """Share the blocks that ``find_prefix`` found with a request that holds none."""
    row = state.requests[request]
    row[COMPUTED] = hit_tokens
    if boot.contents == 0:
        return
    found = hit_tokens // boot.block_tokens
    for index in range(found):
        block = state.key_head[state.keys[row[KEY_AT] + index]]
        if state.blocks[block][REFERENCES] == 0:
            _unlink_free(state, block)
            state.counters[FREE_BLOCKS] -= 1
        state.blocks[block][REFERENCES] += 1
        state.table[row[TABLE_AT] + index] = block
    row[HELD] = found
    row[HASHED] = found


def grow(state: State, boot: Boot, request: int, total_tokens: int) -> bool:
    """Hold blocks for ``total_tokens`` tokens; False, without any change, when they do not fit."""
    row = state.requests[request]
    if total_tokens <= row[HELD] * boot.block_tokens and (
        boot.contents == 0 or total_tokens // boot.block_tokens <= row[HASHED]
    ):
        return True  # nearly every decode: there is room, and its token fills no block
    need = blocks_for(total_tokens, boot.block_tokens) - row[HELD]
    if need > state.counters[FREE_BLOCKS]:
        return False
    if boot.contents == 0:
        if need > 0:
            state.counters[FREE_BLOCKS] -= need
            row[HELD] += need
        return True
    for index in range(row[HELD], row[HELD] + need):
        block = _pop_free(state)
        state.blocks[block][REFERENCES] = 1
        state.table[row[TABLE_AT] + index] = block
    if need > 0:
        state.counters[FREE_BLOCKS] -= need
        row[HELD] += need
    _register(state, boot, request, total_tokens)
    return True


def _register(state: State, boot: Boot, request: int, total_tokens: int) -> None:
    """Make the full blocks findable, already in the step that fills them (as vLLM does)."""
    row = state.requests[request]
    tokens = total_tokens if total_tokens < row[KNOWN] else row[KNOWN]
    blocks = state.blocks
    for index in range(row[HASHED], tokens // boot.block_tokens):
        block = state.table[row[TABLE_AT] + index]
        key = state.keys[row[KEY_AT] + index]
        if key < 0:  # unknown content: neither this block nor a later one can be found
            return
        tail = state.key_tail[key]
        blocks[block][KEY] = key
        blocks[block][PREV_SAME] = tail
        blocks[block][NEXT_SAME] = -1
        if tail < 0:
            state.key_head[key] = block
        else:
            blocks[tail][NEXT_SAME] = block
        state.key_tail[key] = block
        row[HASHED] = index + 1


def release(state: State, boot: Boot, request: int) -> None:
    """Give all blocks back, the tail first, so that the tail of a prefix is evicted before its head."""
    row = state.requests[request]
    if boot.contents == 0:
        state.counters[FREE_BLOCKS] += row[HELD]
    else:
        front = -1
        for index in range(row[HELD] - 1, -1, -1):
            block = state.table[row[TABLE_AT] + index]
            state.blocks[block][REFERENCES] -= 1
            if state.blocks[block][REFERENCES] > 0:
                continue
            state.counters[FREE_BLOCKS] += 1
            if state.blocks[block][KEY] < 0:
                _insert_free(state, block, front)
                front = block
            else:
                _insert_free(state, block, state.counters[FREE_TAIL])
    row[HELD] = 0
    row[HASHED] = 0
    row[COMPUTED] = 0
