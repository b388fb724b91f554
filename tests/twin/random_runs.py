"""Random runs for the twin: traffic, engine, setting, step model and changes of setting in mid-run.

Hypothesis draws the sizes (so that a failure shrinks) and one seed; the rest comes from that seed, because a run in
which caps, blocks and policies meet needs values that are spread evenly, not many small ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rooftune.policies.request import FIXED_BUDGET, Boot, Setting
from rooftune.policies.step_time import AttentionTable, StepCost, StepModel
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.twin import Change
from rooftune.tuner.traffic.workload import Traffic

SPAN_TOKENS = 16


@dataclass(frozen=True)
class Run:
    traffic: Traffic
    engine: Engine
    setting: Setting
    model: StepModel | StepCost
    changes: tuple[Change, ...]


Pick = Callable[[Sequence[Any]], Any]


def picker(seed: int) -> Pick:
    """A function that picks one of its options, each as likely as the others."""
    rng = np.random.default_rng(seed)
    return lambda options: options[int(rng.integers(len(options)))]


def make_traffic(pick: Pick, n: int) -> Traffic:
    """Bursts and pauses, prompts on and beside block boundaries, shared prefixes, single-token outputs."""
    pauses_s = pick([[0.0], [0.0, 0.0, 0.004, 0.02], [0.0, 0.05, 0.2]])
    prompts = pick([[1, 15, 16, 17, 33, 64, 90], [5, 16, 48, 120, 230, 301, 400], [20, 20, 20, 350]])
    outputs = pick([[1, 2, 3, 8], [5, 20, 33, 50]])
    prompt = [pick(prompts) + pick([0, 0, 1, 7]) for _ in range(n)]
    keys = []
    for request, tokens in enumerate(prompt):
        common = pick([0, 2, 5, 30])  # spans that follow the common prompt; behind them the content is one of two
        keys.append([2 * span + (span >= common and request % 2) for span in range(tokens // SPAN_TOKENS)])
    return Traffic(
        np.cumsum([pick(pauses_s) for _ in range(n)]),
        np.array(prompt, dtype=np.int64),
        np.array([pick(outputs) for _ in range(n)], dtype=np.int64),
        np.array([int(pick([0.0, 0.0, 0.5, 0.99]) * (tokens - 1)) for tokens in prompt], dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        prefix_offsets=np.concatenate([[0], np.cumsum([len(row) for row in keys])]).astype(np.int64),
        prefix_keys=np.array([key for row in keys for key in row], dtype=np.int64),
        prefix_span_tokens=SPAN_TOKENS,
    )


def make_setting(pick: Pick, least_tokens: int, ceiling_tokens: int, most_running: int) -> Setting:
    """Any setting that ``check_setting`` accepts: the budget is at least the sequence cap."""
    max_running = min(pick([16, 8, 5, 3, 1]), most_running)
    budget = pick([1.0, 0.5, 0.3, 0.1, 0.0]) * ceiling_tokens - pick([0, 1])
    any_setting = Setting(
        step_tokens=max(max_running, least_tokens, int(budget)),
        chunk_cap_tokens=pick([0, 5, 16, 100]),
        adaptive_chunk_cap=pick([0, 0, 1]),
        max_partial_prefills=pick([0, 0, 1, 2]),
        max_long_partial_prefills=pick([0, 0, 1]),
        long_prompt_tokens=pick([10, 100]),
        pass_over_max_s=pick([30.0, 30.0, 0.05]),
        max_running=max_running,
        budget_policy=pick([0, 1, 2]),
        budget_target_s=pick([0.0105, 0.03, 0.05, 0.0]),
        budget_floor_tokens=pick([0, 8, 16]),
        pressure_tokens=pick([1, 16, 64]),
        pressure_prefills=pick([1, 2]),
        order_policy=pick([0, 1, 2]),
        aging_s=pick([10.0, 0.03, 0.1, 0.0]),
        aged_share=pick([1.0, 0.5, 0.3, 0.2, 0.07]),
        wait_tokens_per_s=pick([0.0, 0.0, 100.0, 2_000.0]),
        ttft_target_s=pick([0.05, 2.0]),
        prefill_s_per_token=4e-4,
    )
    if pick([1, 1, 1, 0]):
        return any_setting
    # By chance alone a cap seldom holds a request back while there is room for those behind.
    roomy = any_setting._replace(step_tokens=ceiling_tokens, max_running=most_running, budget_policy=FIXED_BUDGET)
    return roomy._replace(chunk_cap_tokens=16, adaptive_chunk_cap=0, max_partial_prefills=1)


def make_model(pick: Pick) -> StepModel | StepCost:
    """Floor 8 ms, 0.2 ms a token, so that the time targets above bind; hard and soft maximum; measured tables."""
    formula = StepModel(0.0015, pick([0.0, 1e-4]), pick([0.008, 0.0]), 6e-8, 2e-4, 2e-9, pick([0.0, 1.7, 4.0]))
    if pick([1, 1, 1, 0]):
        return formula
    tokens = np.arange(pick([40, 2_000]) + 1)  # shorter than some steps: the last entry holds beyond
    base_s = 0.008 + 2e-4 * tokens + 1e-3 * (tokens % 8 == 0)
    sequences_s = pick([np.zeros(0), 1e-4 * np.arange(5)])
    return StepCost(formula, base_s, sequences_s, 5e-5, 6e-8, 4e-8, 2e-9)


def make_attention(pick: Pick) -> AttentionTable:
    """Unequal times on a coarse grid that many steps lie beyond."""
    axes = (np.array([0.0, 16, 64]), np.array([-32.0, 0, 64, 256]), np.array([0.0, 1, 4]), np.array([0.0, 32, 128]))
    cells = np.arange(3 * 4 * 3 * 3)
    return AttentionTable(*axes, (1e-3 * (1 + cells * pick([1, 7]) % 5)).reshape(3, 4, 3, 3))


def make_run(pick: Pick, n: int, changes: int, scarce_blocks: bool) -> Run:
    """A whole run. scarce_blocks: the pool only just holds the largest request (or not even that)."""
    traffic = make_traffic(pick, n)
    block_tokens, chunking = pick([4, 16]), pick([1, 1, 1, 1, 0])
    least = int((traffic.prompt_tokens + traffic.output_tokens).max()) if chunking == 0 and pick([1, 1, 1, 0]) else 1
    ceiling = max(pick([16, 64, 256, 1024]), least)
    boot = Boot(ceiling, block_tokens, chunking, pick([0, 1]), pick([0, 1]), pick([0, 1]))
    whole = (traffic.prompt_tokens + traffic.output_tokens + block_tokens - 1) // block_tokens
    spare = pick(range(-1, 12)) if scarce_blocks else int(whole.sum())
    most_running = min(pick([16, 16, 4]), ceiling)
    at_s = sorted(pick(range(1000)) / 1000.0 for _ in range(changes))
    fixed = {} if chunking else {"budget_policy": FIXED_BUDGET}  # a whole prompt never fits a budget that shrinks
    setting = make_setting(pick, least, ceiling, most_running)._replace(**fixed)
    changes = tuple(Change(t, make_setting(pick, least, ceiling, most_running)._replace(**fixed)) for t in at_s)
    model = make_model(pick)
    if isinstance(model, StepCost) and pick([1, 1, 0]):
        model = model._replace(attention=make_attention(pick))
    boot = boot._replace(plan_ahead=pick([0, 0, 1]))
    return Run(
        traffic,
        Engine(boot, max(int(whole.max()) + spare, 1), most_running, 0.001, 0.002),
        setting,
        model,
        changes,
    )


def runs(most: int = 16) -> st.SearchStrategy[Run]:
    """Random runs of 1..most requests with 0..3 changes of setting."""
    return st.builds(make_run, st.builds(picker, SEEDS), st.integers(1, most), st.integers(0, 3), st.booleans())


SEEDS = st.integers(0, 2**32 - 1)
