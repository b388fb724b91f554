"""The digital twin: one call replays traffic under a setting and returns a ``RunResult``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from rooftune.policies.errors import bad_value
from rooftune.policies.request import (
    CACHED,
    KEY_AT,
    KNOWN,
    OUTPUT,
    PROMPT,
    TABLE_AT,
    Boot,
    IntArray,
    Setting,
    State,
    new_state,
)
from rooftune.policies.step_time import NAMED_MODELS, StepCost, StepModel, priced
from rooftune.tuner.sim import kernel
from rooftune.tuner.sim.compile import compiled
from rooftune.tuner.sim.engine import Engine, check_setting
from rooftune.tuner.sim.noise import QUIET, StepNoise
from rooftune.tuner.sim.progress import Progress
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.traffic.workload import Traffic


class Ends(NamedTuple):
    """When a replay ends early: after so many steps, at an instant of the traffic's clock, as soon as more than
    ``most_late`` requests have waited longer than ``patience_s`` for their first token, or with ``decided`` as soon as
    every request has waited too long or finished. In the kernel's order."""

    most_steps: float = math.inf
    at_s: float = math.inf
    most_late: float = math.inf
    patience_s: float = math.inf
    decided: bool = False


TO_THE_END = Ends()


@dataclass(frozen=True)
class Change:
    """A setting, in force from the first step that starts at or after ``at_s``."""

    at_s: float
    setting: Setting


def like() -> list[tuple[Any, ...]]:
    """One value of each named tuple that the kernel's helpers take."""
    cost = priced(NAMED_MODELS["8b-2tbs"])
    state, run = new_state(1, pool_blocks=1), kernel.new_run(1, (), 1)
    return [Setting(1), Boot(1, 1, 1, 1, 1, 1), state, cost.formula, cost.attention, cost, QUIET, run]


@cache
def _replay() -> Callable[..., Any]:
    twin: Callable[..., Any] = compiled(kernel.replay, like=like())
    return twin


def warm() -> None:
    """Compile the twin, or load it from the cache: half a minute on a busy machine, so do it before what is timed."""
    one, none = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    traffic = Traffic(np.zeros(1), one, one, none, none)
    engine = Engine(Boot(64, 16, 1, 1, 0, 0), kv_blocks=8, sequence_ceiling=8)
    simulate(traffic, engine, Setting(64, max_running=8), StepModel(1e-3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))


def prepare(traffic: Traffic, engine: Engine) -> State:
    """The scheduler's state before the first arrival, one row a request."""
    n = len(traffic)
    block = engine.boot.block_tokens
    if engine.boot.contents == 0:
        state = new_state(n, pool_blocks=engine.kv_blocks)
    else:
        rows = (traffic.prompt_tokens + traffic.output_tokens + block - 1) // block
        offsets = np.concatenate([[0], np.cumsum(rows)])
        keys, kinds = _content_keys(traffic, block, rows, offsets)
        state = new_state(
            n,
            pool_blocks=engine.kv_blocks,
            table_blocks=int(offsets[-1]),
            key_blocks=int(offsets[-1]),
            key_kinds=kinds,
        )
        state.keys[:] = keys
        state.requests[:, KEY_AT] = state.requests[:, TABLE_AT] = offsets[:-1]
    state.requests[:, PROMPT] = state.requests[:, KNOWN] = traffic.prompt_tokens
    state.requests[:, OUTPUT] = traffic.output_tokens
    if engine.boot.contents == 0:
        state.requests[:, CACHED] = traffic.cached_tokens
    state.arrival_s[:] = traffic.arrival_s
    return state


def _content_keys(traffic: Traffic, block: int, rows: IntArray, offsets: IntArray) -> tuple[IntArray, int]:
    """One key per KV block of every request; blocks with equal known content get equal keys, all others their own."""
    keys = np.arange(int(offsets[-1]), dtype=np.int64)
    kinds = len(keys)
    if len(traffic.prefix_offsets) == 0:
        return keys, max(kinds, 1)
    span = traffic.prefix_span_tokens
    if span % block != 0:
        raise bad_value(
            "KV block", block, f"a divisor of the traffic's prefix span {span}", "choose another block size"
        )
    per_span = span // block
    for request in range(len(traffic)):
        spans = traffic.prefix_keys[traffic.prefix_offsets[request] : traffic.prefix_offsets[request + 1]]
        whole = min(len(spans) * per_span, int(traffic.prompt_tokens[request]) // block, int(rows[request]))
        if whole > 0:
            expanded = (spans[:, None] * per_span + np.arange(per_span)[None, :]).ravel()[:whole]
            keys[offsets[request] : offsets[request] + whole] = kinds + expanded
    return keys, int(keys.max()) + 1


def simulate(
    traffic: Traffic,
    engine: Engine,
    setting: Setting,
    model: StepModel | StepCost,
    *,
    changes: Sequence[Change] = (),
    gap_bounds_s: Sequence[float] = (),
    skip: bool = True,
    keep_log: bool = False,
    ends: Ends = TO_THE_END,
    noise: StepNoise = QUIET,
    progress: Progress | None = None,
) -> RunResult:
    """Replay ``traffic`` under ``setting``, and under ``changes`` from their instants on.

    progress: where the engine stands at the beginning, its requests being the first rows of the traffic; None: empty
    at 0 s. Gaps above ``gap_bounds_s`` count from the beginning on.

    gap_bounds_s: bounds for which gaps above are counted per request. skip: False plans every single step.
    keep_log: keep (step, request, tokens) of everything planned. ends: when to stop early.
    noise: factors on the duration of each step; budget and order policies still use the model's.
    Raises InputError for a setting outside the envelope.
    """
    for wanted in (setting, *(change.setting for change in changes)):
        check_setting(wanted, engine)
    for before, change in pairwise((Change(-math.inf, setting), *changes)):
        if not before.at_s <= change.at_s < math.inf:
            raise bad_value(
                "instant of a change", change.at_s, f"finite and at least {before.at_s:g}", "sort the changes by time"
            )
    state, run = prepare(traffic, engine), kernel.new_run(len(traffic), gap_bounds_s, engine.kv_blocks, ends)
    if progress is not None:
        progress.check(traffic, engine)
        progress.enter(state, run, engine)
    rows = np.array([[float(v) for v in s] for s in (setting, *(c.setting for c in changes))], dtype=np.float64)
    at_s = np.array([-np.inf, *(c.at_s for c in changes)], dtype=np.float64)
    values, weights, log, log_times = _replay()(
        rows, at_s, engine.boot, priced(model), noise, state, run, int(skip), int(keep_log)
    )
    return RunResult.from_run(traffic, engine, state, run, (values, weights), (log, log_times))
