"""The scheduler's state as plain arrays, one row per request, so that the same code runs interpreted and compiled.

A row of ``State.requests`` is two cache lines of int64; the names below are its columns.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Fixed per request.
PROMPT = 0  # prompt tokens
OUTPUT = 1  # output tokens after which the request is finished
CACHED = 2  # prompt tokens that a prefix cache outside the block pool will spare (0 when the pool has the contents)
KEY_AT = 3  # where this request's content keys start in State.keys, one key per block
TABLE_AT = 4  # where this request's block table starts in State.table
# Changes from step to step.
KNOWN = 5  # prompt tokens plus tokens produced so far (vLLM: num_tokens)
COMPUTED = 6  # tokens whose KV entries exist (vLLM: num_computed_tokens)
HELD = 7  # KV blocks held
HASHED = 8  # leading held blocks that can be found by content
STATUS = 9  # one of the four below
NEXT = 10  # waiting list: next request, -1 at the end
PREV = 11  # waiting list: previous request, -1 at the start
PREEMPTIONS = 12
ADMITTED = 13  # running number of the latest admission
PLANNED_IN = 14  # step in which this request was last planned
HIT = 15  # tokens found in the prefix cache at the latest admission
COLUMNS = 16

NEW = 0
WAITING = 1
RUNNING = 2
FINISHED = 3

# State.counters
RUNNING_COUNT = 0
WAITING_COUNT = 1
WAITING_HEAD = 2
WAITING_TAIL = 3
FREE_BLOCKS = 4
FREE_HEAD = 5
FREE_TAIL = 6
PLANNED_COUNT = 7
PREEMPTED_COUNT = 8
STEP = 9
ADMISSIONS = 10
BUDGET = 11  # tokens the latest step was allowed
REORDERED = 12  # 1 while State.running is not in admission order
HELD_BACK = 13  # waiting requests that a cap passed over in the latest step
LEAVING_COUNT = 14  # finished requests that still hold their blocks and their place (Boot.plan_ahead)
ORDERED_STEPS = 15  # steps that gave prefills tokens by an order policy
AGED_FIRST = 16  # 1 when the latest of these was a turn of the aged
COUNTERS = 24

# State.blocks (only filled when the pool knows contents)
REFERENCES = 0
KEY = 1  # content key, -1 while not findable
NEXT_FREE = 2
PREV_FREE = 3
NEXT_SAME = 4  # next block with the same key, in order of registration
PREV_SAME = 5
BLOCK_COLUMNS = 6


class State(NamedTuple):
    """Everything ``plan_step`` reads and writes.

    requests: (n, COLUMNS). arrival_s: (n,). running: request indices in serving order, first
    counters[RUNNING_COUNT] valid. planned: (capacity, 2) request and tokens of the latest step.
    preempted: requests preempted in the latest step. leaving: finished requests, first counters[LEAVING_COUNT] valid.
    blocks: (pool blocks, BLOCK_COLUMNS).
    table: block ids of every request, rows at TABLE_AT. keys: content key per block, rows at KEY_AT.
    key_head, key_tail: first and last block with a key, -1 for none.
    """

    requests: IntArray
    arrival_s: FloatArray
    running: IntArray
    planned: IntArray
    preempted: IntArray
    leaving: IntArray
    counters: IntArray
    blocks: IntArray
    table: IntArray
    keys: IntArray
    key_head: IntArray
    key_tail: IntArray


class Boot(NamedTuple):
    """What an engine fixes at start.

    ceiling_tokens: most tokens of any step. block_tokens: tokens per KV block. chunking: 0 = a prompt runs whole or
    waits. reserve_whole_prompt: 1 = admit only when all known tokens fit the free blocks (vLLM's default). contents:
    1 = blocks carry content keys, so that prefixes are shared and found again; 0 = blocks are only counted.
    keep_decodes_moving: 1 = the no-starvation rule of docs/tuning-protocol.md; 0 = vLLM exactly. plan_ahead: 1 = a step
    is planned while the one before it runs (vLLM's async scheduling): requests that finish in it keep blocks and place
    until the plan is made, and arrivals are seen one step later; 0 = it is planned after the one before it.
    """

    ceiling_tokens: int
    block_tokens: int
    chunking: int
    reserve_whole_prompt: int
    contents: int
    keep_decodes_moving: int
    plan_ahead: int = 0


FIXED_BUDGET = 0
STEP_TIME_TARGET = 1
PRESSURE = 2

FCFS = 0
SHORTEST_FIRST = 1
DEADLINE = 2


class Setting(NamedTuple):
    """The live knobs and policies; names and units of docs/glossary.md, 0 = no limit for every cap.

    Budget policy STEP_TIME_TARGET: ``budget_target_s`` and ``budget_floor_tokens``. PRESSURE: at most
    ``pressure_tokens`` while at least ``pressure_prefills`` prefills and one decode are active.
    Order policies: ``aging_s``; ``aged_share``, of the steps (1, as before that knob: the aged always go first);
    ``wait_tokens_per_s``, prompt tokens that a second of waiting outweighs (0, as before that knob: none). DEADLINE
    also ``ttft_target_s`` and ``prefill_s_per_token``.
    """

    step_tokens: int
    chunk_cap_tokens: int = 0
    adaptive_chunk_cap: int = 0
    max_partial_prefills: int = 0
    max_long_partial_prefills: int = 0
    long_prompt_tokens: int = 0
    pass_over_max_s: float = 30.0
    max_running: int = 256
    budget_policy: int = FIXED_BUDGET
    budget_target_s: float = 0.0
    budget_floor_tokens: int = 0
    pressure_tokens: int = 0
    pressure_prefills: int = 2
    order_policy: int = FCFS
    aging_s: float = 10.0
    ttft_target_s: float = 0.0
    prefill_s_per_token: float = 0.0
    aged_share: float = 1.0
    wait_tokens_per_s: float = 0.0


def setting_from_row(row: FloatArray) -> Setting:
    """A Setting from a row of floats in field order, the form in which compiled code gets changes."""
    return Setting(
        int(row[0]), int(row[1]), int(row[2]), int(row[3]), int(row[4]), int(row[5]), float(row[6]), int(row[7]),
        int(row[8]), float(row[9]), int(row[10]), int(row[11]), int(row[12]), int(row[13]), float(row[14]),
        float(row[15]), float(row[16]), float(row[17]), float(row[18]),
    )  # fmt: skip


def new_state(
    capacity: int, *, pool_blocks: int, table_blocks: int = 0, key_blocks: int = 0, key_kinds: int = 0
) -> State:
    """An empty state for ``capacity`` requests and ``pool_blocks`` KV blocks.

    table_blocks, key_blocks, key_kinds: sizes of block tables and key rows, and the number of distinct keys; all 0 when
    the pool only counts.
    """
    with_contents = table_blocks > 0
    blocks = np.zeros((pool_blocks if with_contents else 0, BLOCK_COLUMNS), dtype=np.int64)
    counters = np.zeros(COUNTERS, dtype=np.int64)
    counters[WAITING_HEAD] = counters[WAITING_TAIL] = -1
    counters[FREE_BLOCKS] = pool_blocks
    counters[FREE_HEAD] = counters[FREE_TAIL] = -1
    if len(blocks):
        blocks[:, KEY] = blocks[:, NEXT_SAME] = blocks[:, PREV_SAME] = -1
        blocks[:, NEXT_FREE] = np.arange(1, pool_blocks + 1)
        blocks[-1, NEXT_FREE] = -1
        blocks[:, PREV_FREE] = np.arange(-1, pool_blocks - 1)
        counters[FREE_HEAD] = 0
        counters[FREE_TAIL] = pool_blocks - 1
    requests = np.zeros((capacity, COLUMNS), dtype=np.int64)
    requests[:, NEXT] = requests[:, PREV] = requests[:, PLANNED_IN] = -1
    return State(
        requests=requests,
        arrival_s=np.zeros(capacity, dtype=np.float64),
        running=np.zeros(capacity + 1, dtype=np.int64),
        planned=np.zeros((capacity + 1, 2), dtype=np.int64),
        preempted=np.zeros(capacity + 1, dtype=np.int64),
        leaving=np.zeros(capacity + 1, dtype=np.int64),
        counters=counters,
        blocks=blocks,
        table=np.zeros(table_blocks, dtype=np.int64),
        keys=np.zeros(key_blocks, dtype=np.int64),
        key_head=np.full(key_kinds, -1, dtype=np.int64),
        key_tail=np.full(key_kinds, -1, dtype=np.int64),
    )


def append_waiting(state: State, request: int) -> None:
    """Put an arrival at the end of the waiting list."""
    _put_waiting(state, request, state.counters[WAITING_TAIL], -1)


def prepend_waiting(state: State, request: int) -> None:
    """Put a preempted request at the head of the waiting list."""
    _put_waiting(state, request, -1, state.counters[WAITING_HEAD])


def _put_waiting(state: State, request: int, before: int, after: int) -> None:
    """Put a request between two neighbours; -1 for none."""
    requests, counters = state.requests, state.counters
    requests[request][STATUS] = WAITING
    requests[request][PREV] = before
    requests[request][NEXT] = after
    if before < 0:
        counters[WAITING_HEAD] = request
    else:
        requests[before][NEXT] = request
    if after < 0:
        counters[WAITING_TAIL] = request
    else:
        requests[after][PREV] = request
    counters[WAITING_COUNT] += 1


def remove_waiting(state: State, request: int) -> None:
    requests, counters = state.requests, state.counters
    before, after = requests[request][PREV], requests[request][NEXT]
    if before < 0:
        counters[WAITING_HEAD] = after
    else:
        requests[before][NEXT] = after
    if after < 0:
        counters[WAITING_TAIL] = before
    else:
        requests[after][PREV] = before
    counters[WAITING_COUNT] -= 1


def is_decode(state: State, request: int) -> bool:
    """True when one token is missing and the request has produced at least one."""
    row = state.requests[request]
    return bool(row[KNOWN] - row[COMPUTED] == 1 and row[KNOWN] > row[PROMPT])
