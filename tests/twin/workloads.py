"""Random scheduler workloads as plain dictionaries, small enough to run a thousand of them in a minute.

One workload is one JSON object; instants are step numbers, so no clock takes part::

    seed      int
    engine    ceiling_tokens, step_tokens, chunk_cap_tokens (0 = none), adaptive, max_num_seqs,
              max_active (null = max_num_seqs), block_size, num_blocks (block 0 is vLLM's null block, so
              num_blocks - 1 are usable), prefix_caching, chunked_prefill, reserve_full,
              max_model_tokens (above every request's prompt + output)
    requests  [{arrive_step, prompt_tokens, output_tokens, content}], by arrive_step
    changes   [{step, step_tokens, chunk_cap_tokens, max_active}], by step; in force from that step on
    max_steps int, where both sides stop

``content`` holds one id for each *full* block of the prompt. An id names the whole prefix that ends with
its block: equal ids mean equal tokens from the first on, so equal ids and nothing else are equal hashes.
Whatever comes after the last full prompt block is never shared between two requests.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

Workload = dict[str, Any]

MAX_STEPS = 400


def make_workloads(count: int, first_seed: int = 0) -> Iterator[Workload]:
    """``count`` workloads, each from its own seed, so that one can be made again alone."""
    for seed in range(first_seed, first_seed + count):
        yield make_workload(seed)


def make_workload(seed: int) -> Workload:
    """One workload. The same seed gives the same workload."""
    rng = np.random.default_rng(seed)
    block_size = int(rng.choice([16, 16, 8, 8, 8, 32]))
    prefix_caching = bool(rng.random() < 0.6)
    requests = _requests(rng, block_size, shared=prefix_caching)
    whole = [request["prompt_tokens"] + request["output_tokens"] for request in requests]
    chunked_prefill = bool(rng.random() < 0.8)
    max_num_seqs = int(rng.choice([1, 2, 3, 4, 6, 8, 16, 32]))
    max_active = int(rng.integers(1, max_num_seqs + 1)) if rng.random() < 0.3 else None
    max_model_tokens = max(whole) + 1
    # A step budget that lets the whole workload end well before the bound, at least without recomputation.
    least = max(sum(whole) // 200, 1)
    step_tokens = max(_log_uniform(rng, 8, 512), least)
    ceiling_tokens = step_tokens + (int(rng.integers(0, 512)) if rng.random() < 0.7 else 0)
    ceiling_tokens = max(ceiling_tokens, max_num_seqs)
    if not chunked_prefill:
        # vLLM refuses to boot with chunking off and a ceiling below its longest sequence.
        ceiling_tokens = max(ceiling_tokens, max_model_tokens)
        step_tokens = int(rng.integers(max_model_tokens, ceiling_tokens + 1))
    engine = {
        "ceiling_tokens": ceiling_tokens,
        "step_tokens": step_tokens,
        "chunk_cap_tokens": _chunk_cap(rng, max_model_tokens),
        "adaptive": bool(rng.random() < 0.4),
        "max_num_seqs": max_num_seqs,
        "max_active": max_active,
        "block_size": block_size,
        "num_blocks": _num_blocks(rng, whole, block_size),
        "prefix_caching": prefix_caching,
        "chunked_prefill": chunked_prefill,
        "reserve_full": bool(rng.random() < 0.6),
        "max_model_tokens": max_model_tokens,
    }
    return {
        "seed": seed,
        "engine": engine,
        "requests": requests,
        "changes": _changes(rng, engine, least),
        "max_steps": MAX_STEPS,
    }


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))


def _chunk_cap(rng: np.random.Generator, max_model_tokens: int) -> int:
    if rng.random() < 0.4:
        return 0
    return min(_log_uniform(rng, 1 if rng.random() < 0.2 else 5, 200), max_model_tokens)


def _prompt_tokens(rng: np.random.Generator, block_size: int, longest: int) -> int:
    """A third of the prompts end on, one before or one after a block boundary."""
    if rng.random() < 0.33:
        edge = int(rng.integers(1, max(longest // block_size, 1) + 1)) * block_size
        return edge + int(rng.integers(-1, 2))
    return _log_uniform(rng, 1, longest)


def _requests(rng: np.random.Generator, block_size: int, *, shared: bool) -> list[dict[str, Any]]:
    count = int(rng.integers(3, 26))
    spread = int(rng.choice([0, 5, 20, 60]))
    longest = 400 if rng.random() < 0.93 else 2000
    arrivals = np.sort(rng.integers(0, spread + 1, size=count))
    reuse = float(rng.choice([0.3, 0.6, 0.9])) if shared else 0.2
    chains: list[list[int]] = []
    fresh_id = 0
    requests = []
    for arrive_step in arrivals.tolist():
        prompt_tokens = _prompt_tokens(rng, block_size, longest)
        full = prompt_tokens // block_size
        chain: list[int] = []
        if chains and rng.random() < reuse:
            parent = chains[int(rng.integers(len(chains)))]
            chain = parent[: int(rng.integers(0, len(parent) + 1)) if rng.random() < 0.6 else len(parent)]
        chain = chain[:full]
        while len(chain) < full:
            chain.append(fresh_id)
            fresh_id += 1
        chains.append(chain)
        output_tokens = int(rng.choice([1, _log_uniform(rng, 2, 60), int(rng.integers(8, 90))], p=[0.15, 0.6, 0.25]))
        requests.append(
            {
                "arrive_step": arrive_step,
                "prompt_tokens": prompt_tokens,
                "output_tokens": output_tokens,
                "content": chain,
            }
        )
    return requests


def _num_blocks(rng: np.random.Generator, whole: list[int], block_size: int) -> int:
    """A pool between "the longest request just fits" and "everything fits at once"; one null block."""
    # The last output token is never computed, so it needs no slot.
    least = max(-(-(tokens - 1) // block_size) for tokens in whole) + 1
    everything = sum(-(-tokens // block_size) for tokens in whole) + 1
    kind = rng.random()
    if kind < 0.15:
        return least
    if kind < 0.75:
        return least + int(rng.integers(0, max(least, 2)))
    return least + int(rng.integers(0, max(everything - least, 1) + 1))


def _changes(rng: np.random.Generator, engine: dict[str, Any], least: int) -> list[dict[str, Any]]:
    if rng.random() < 0.5:
        return []
    steps = sorted({int(step) for step in rng.integers(1, 60, size=int(rng.integers(1, 5)))})
    changes = []
    for step in steps:
        step_tokens = min(max(_log_uniform(rng, 4, engine["ceiling_tokens"]), least), engine["ceiling_tokens"])
        if rng.random() < 0.25:
            # Below what the decodes alone need: vLLM lets the latest admitted ones starve.
            step_tokens = int(rng.integers(1, min(engine["max_num_seqs"], engine["ceiling_tokens"]) + 1))
        max_active = engine["max_active"]
        if rng.random() < 0.3:
            max_active = int(rng.integers(1, engine["max_num_seqs"] + 1))
        changes.append(
            {
                "step": step,
                "step_tokens": step_tokens,
                "chunk_cap_tokens": _chunk_cap(rng, engine["max_model_tokens"]),
                "max_active": max_active,
            }
        )
    # The last word: the boot setting again, so that a starving setting does not swallow the rest of the workload.
    last = {"step": steps[-1] + int(rng.integers(10, 40)), "max_active": engine["max_active"]}
    changes.append(last | {name: engine[name] for name in ("step_tokens", "chunk_cap_tokens")})
    return changes
