"""A small scheduler state for unit tests of the policies."""

from collections.abc import Sequence

import numpy as np

from rooftune.policies import request as r
from rooftune.policies.packing import plan_step
from rooftune.policies.request import Boot, Setting, State, append_waiting, new_state
from rooftune.policies.step_time import StepModel

BOOT = Boot(
    ceiling_tokens=1_000, block_tokens=16, chunking=1, reserve_whole_prompt=1, contents=0, keep_decodes_moving=0
)
# 10 ms a step and 1 ms a token.
MODEL = StepModel(0.010, 0.0, 0.0, 0.0, 0.001, 0.0, 0.0)


def waiting(
    prompts: Sequence[int], *, outputs: int = 10, pool_blocks: int = 10_000, arrival_s: Sequence[float] = ()
) -> State:
    """All prompts waiting, in this order."""
    state = new_state(len(prompts), pool_blocks=pool_blocks)
    state.requests[:, r.PROMPT] = state.requests[:, r.KNOWN] = prompts
    state.requests[:, r.OUTPUT] = outputs
    if len(arrival_s):
        state.arrival_s[:] = arrival_s
    for request in range(len(prompts)):
        append_waiting(state, request)
    return state


def plan(state: State, setting: Setting, boot: Boot = BOOT, now_s: float = 0.0) -> list[list[int]]:
    """[request, tokens] of one step."""
    count = plan_step(setting, boot, MODEL, state, now_s)
    rows: list[list[int]] = state.planned[:count].tolist()
    return rows


def with_contents(key_rows: Sequence[Sequence[int]], *, block_tokens: int, pool_blocks: int, extra: int = 8) -> State:
    """Requests whose full blocks have these content keys (-1 unknown); one more token than that, none waiting yet."""
    wide = max(len(row) for row in key_rows) + extra
    n = len(key_rows)
    state = new_state(n, pool_blocks=pool_blocks, table_blocks=n * wide, key_blocks=n * wide, key_kinds=100)
    state.keys[:] = -1
    for request, row in enumerate(key_rows):
        state.keys[request * wide : request * wide + len(row)] = row
        state.requests[request, r.PROMPT] = state.requests[request, r.KNOWN] = len(row) * block_tokens + 1
    state.requests[:, r.KEY_AT] = state.requests[:, r.TABLE_AT] = np.arange(n) * wide
    state.requests[:, r.OUTPUT] = 1
    return state
