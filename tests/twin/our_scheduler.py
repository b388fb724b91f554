"""Runs ``plan_step`` on the workloads of ``workloads.py`` and records what it decides, as ``vllm_driver.py`` does."""

from typing import Any

from rooftune.policies.packing import finish_step, plan_step
from rooftune.policies.request import (
    COMPUTED,
    FINISHED,
    FREE_BLOCKS,
    HIT,
    KEY_AT,
    KNOWN,
    OUTPUT,
    PLANNED_COUNT,
    PREEMPTED_COUNT,
    PROMPT,
    RUNNING_COUNT,
    STATUS,
    TABLE_AT,
    WAITING,
    WAITING_COUNT,
    Boot,
    Setting,
    State,
    append_waiting,
    new_state,
)
from rooftune.policies.step_time import NAMED_MODELS

Workload = dict[str, Any]
# No budget policy used here reads it.
NO_MODEL = NAMED_MODELS["teaching-lab"]


def boot_of(engine: dict[str, Any]) -> Boot:
    """vLLM exactly: the no-starvation rule is off."""
    return Boot(
        ceiling_tokens=engine["ceiling_tokens"],
        block_tokens=engine["block_size"],
        chunking=int(engine["chunked_prefill"]),
        reserve_whole_prompt=int(engine["reserve_full"]),
        contents=int(engine["prefix_caching"]),
        keep_decodes_moving=0,
    )


def setting_of(engine: dict[str, Any], knobs: dict[str, Any]) -> Setting:
    """The live knobs: ``knobs`` is the engine itself or one of the workload's changes."""
    return Setting(
        step_tokens=knobs["step_tokens"],
        chunk_cap_tokens=knobs["chunk_cap_tokens"],
        adaptive_chunk_cap=int(engine["adaptive"]),
        max_running=min(engine["max_num_seqs"], knobs["max_active"] or engine["max_num_seqs"]),
    )


def state_of(workload: Workload) -> State:
    """Requests, block tables and content keys; no request has arrived yet."""
    engine, requests = workload["engine"], workload["requests"]
    block_size = engine["block_size"]
    rows = [-(-(request["prompt_tokens"] + request["output_tokens"]) // block_size) for request in requests]
    total = sum(rows) if engine["prefix_caching"] else 0
    kinds = 1 + max((content for request in requests for content in request["content"]), default=-1)
    state = new_state(
        len(requests),
        pool_blocks=engine["num_blocks"] - 1,  # vLLM's null block is never handed out
        table_blocks=total,
        key_blocks=total,
        key_kinds=kinds + total if total else 0,
    )
    at = 0
    for index, (request, blocks) in enumerate(zip(requests, rows, strict=True)):
        row = state.requests[index]
        row[PROMPT] = row[KNOWN] = request["prompt_tokens"]
        row[OUTPUT] = request["output_tokens"]
        row[KEY_AT] = row[TABLE_AT] = at
        if total:
            shared = len(request["content"])
            state.keys[at : at + shared] = request["content"]
            # What follows the last full prompt block is this request's own.
            state.keys[at + shared : at + blocks] = range(kinds + at + shared, kinds + at + blocks)
            at += blocks
    return state


def drive(workload: Workload) -> dict[str, Any]:
    """Run one workload to its end or to its bound."""
    engine, requests = workload["engine"], workload["requests"]
    boot, setting, state = boot_of(engine), setting_of(engine, engine), state_of(workload)
    changes = {change["step"]: change for change in workload["changes"]}
    steps: list[list[Any]] = []
    added = 0
    for step in range(workload["max_steps"]):
        if step in changes:
            setting = setting_of(engine, changes[step])
        while added < len(requests) and requests[added]["arrive_step"] <= step:
            append_waiting(state, added)
            added += 1
        idle = not state.counters[RUNNING_COUNT] and not state.counters[WAITING_COUNT]
        if added == len(requests) and idle:
            break
        steps.append(_step(setting, boot, state, step))
    done = bool((state.requests[:, STATUS] == FINISHED).all())
    return {"seed": workload["seed"], "done": done, "steps": steps}


def _step(setting: Setting, boot: Boot, state: State, step: int) -> list[Any]:
    waiting = state.requests[:, STATUS] == WAITING
    plan_step(setting, boot, NO_MODEL, state, float(step))
    counters = state.counters
    plan = state.planned[: counters[PLANNED_COUNT]].tolist()
    preempted = state.preempted[: counters[PREEMPTED_COUNT]].tolist()
    admitted = [[request, int(state.requests[request, HIT])] for request, _ in plan if waiting[request]]
    free_blocks = int(counters[FREE_BLOCKS])
    assert (state.requests[:, COMPUTED] <= state.requests[:, KNOWN]).all()
    finish_step(boot, state)
    finished = [request for request, _ in plan if state.requests[request, STATUS] == FINISHED]
    return [plan, preempted, admitted, finished, free_blocks]
