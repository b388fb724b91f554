"""Random runs for the hook: the workloads of ``tests/twin`` with knobs of ours pushed meanwhile, and ``plan_step`` on
the same ones."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rooftune.policies import wire
from rooftune.policies.packing import finish_step, plan_step
from rooftune.policies.request import (
    FINISHED,
    PLANNED_COUNT,
    PREEMPTED_COUNT,
    RUNNING_COUNT,
    STATUS,
    WAITING_COUNT,
    Setting,
    append_waiting,
)
from rooftune.policies.step_time import StepModel
from tests.twin import our_scheduler
from tests.twin.workloads import make_workload

Run = dict[str, Any]
STEP_S = 0.01
MODEL = StepModel(0.0015, 1e-4, 0.004, 6e-8, 1e-4, 2e-9, 0.0)


def make_runs(count: int, first_seed: int, *, orders: bool, scarce: bool = False) -> Iterator[Run]:
    """``count`` runs. orders: with order policies; scarce: with the workload's own, often too small, KV pool."""
    for seed in range(first_seed, first_seed + count):
        yield make_run(seed, orders=orders, scarce=scarce)


def make_run(seed: int, *, orders: bool, scarce: bool) -> Run:
    run = make_workload(seed)
    engine, rng = run["engine"], np.random.default_rng(seed + 1)
    engine["chunked_prefill"] = True
    if not scarce:
        whole = (request["prompt_tokens"] + request["output_tokens"] for request in run["requests"])
        engine["num_blocks"] = 2 + sum(-(-tokens // engine["block_size"]) for tokens in whole)
    steps = sorted({0, *(int(step) for step in rng.integers(1, 80, size=int(rng.integers(1, 5))))})
    run["changes"] = [{"step": step, "push": _push(rng, engine, orders)} for step in steps]
    of_the_aged = np.random.default_rng(seed + 2)
    for change in run["changes"]:
        if change["push"]["order_policy"]["kind"] != "fcfs":
            parts = {
                "aged_share": float(of_the_aged.choice([1.0, 0.5, 0.3, 0.2])),
                "wait_tokens_per_s": float(of_the_aged.choice([0.0, 0.0, 300.0, 2_000.0])),
            }
            change["push"]["order_policy"] |= parts
    return run


def _push(rng: np.random.Generator, engine: dict[str, Any], orders: bool) -> dict[str, Any]:
    def pick(*options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    ceiling = engine["ceiling_tokens"]
    low = min(engine["max_num_seqs"], ceiling)
    knobs = {
        "step_tokens": int(rng.integers(low, ceiling + 1)) if rng.random() < 0.8 else int(rng.integers(1, ceiling + 1)),
        "chunk_cap_tokens": min(pick(0, 0, 5, 16, 48, 100), ceiling),
        "adaptive_chunk_cap": pick(False, False, True),
        "max_running": int(rng.integers(1, engine["max_num_seqs"] + 1))
        if rng.random() < 0.4
        else engine["max_num_seqs"],
        "max_partial_prefills": min(pick(0, 0, 1, 2), engine["max_num_seqs"]),
        "max_long_partial_prefills": min(pick(0, 0, 1), engine["max_num_seqs"]),
        "long_prompt_tokens": pick(10, 100),
        "pass_over_max_s": pick(30.0, 0.05),
    }
    budget: dict[str, Any] = pick(
        {"kind": "fixed"},
        {"kind": "fixed"},
        {"kind": "pressure", "tokens": min(pick(16, 64), ceiling), "prefills": min(pick(1, 2), engine["max_num_seqs"])},
        {"kind": "step_time_target", "target_s": pick(0.008, 0.02), "floor_tokens": min(8, ceiling),
         "step_model": MODEL._asdict()},
    )  # fmt: skip
    order: dict[str, Any] = {"kind": "fcfs"}
    if orders:
        order = pick(
            {"kind": "fcfs"},
            {"kind": "shortest_first", "aging_s": pick(10.0, 0.3)},
            {"kind": "shortest_first", "aging_s": 10.0},
            {
                "kind": "deadline",
                "aging_s": pick(10.0, 0.3),
                "ttft_target_s": pick(0.1, 2.0),
                "prefill_s_per_token": 1e-4,
            },
        )
    return {"knobs": knobs, "budget_policy": budget, "order_policy": order}


def settings_of(run: Run) -> dict[int, Setting]:
    """Step -> the setting in force from it on."""
    engine = run["engine"]
    setting = our_scheduler.setting_of(engine, engine)
    found = {}
    for change in run["changes"]:
        body = {"lease_s": 1000.0, "expected_revision": 0, "actor": "run", "reason": "a run"} | change["push"]
        wish = wire.PushRequest.model_validate(body).to_push()
        setting = Setting(**(setting._asdict() | dict(wish.changes)))
        found[change["step"]] = setting
    return found


def plans(run: Run) -> list[list[Any]]:
    """[[request, tokens], ...] and the preempted, for each step that ``plan_step`` makes of the run."""
    engine, requests = run["engine"], run["requests"]
    boot = our_scheduler.boot_of(engine)._replace(keep_decodes_moving=1)
    state, settings = our_scheduler.state_of(run), settings_of(run)
    setting, added = settings[0], 0
    steps: list[list[Any]] = []
    for step in range(run["max_steps"]):
        now_s = step * STEP_S
        setting = settings.get(step, setting)
        while added < len(requests) and requests[added]["arrive_step"] <= step:
            state.arrival_s[added] = now_s
            append_waiting(state, added)
            added += 1
        if added == len(requests) and not state.counters[RUNNING_COUNT] and not state.counters[WAITING_COUNT]:
            break
        plan_step(setting, boot, MODEL, state, now_s)
        planned = sorted(state.planned[: state.counters[PLANNED_COUNT]].tolist())
        preempted = sorted(state.preempted[: state.counters[PREEMPTED_COUNT]].tolist())
        steps.append([planned, preempted])
        finish_step(boot, state)
    run["done"] = bool((state.requests[:, STATUS] == FINISHED).all())
    return steps


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int | None:
    """The first step that differs."""
    for step, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return step
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
