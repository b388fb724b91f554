"""The plans of a hooked vLLM against ``plan_step``, on random runs in which knobs are pushed."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.endpoint import ROOT, environment
from tests.vllm.hook_runs import Run, first_difference, make_run, make_runs, plans

pytestmark = pytest.mark.vllm
RUNS = 150


def ask(python: Path, runs: list[Run]) -> list[dict[str, Any]]:
    command = [str(python), str(ROOT / "tests/vllm/driver.py"), "plans"]
    lines = "".join(json.dumps(run) + "\n" for run in runs)
    done = subprocess.run(command, env=environment(), input=lines, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("orders", "scarce", "share"),
    [
        # What cannot be set before vLLM plans: a prefix that the same step writes, which of several partial
        # prefills is the newest in a step without KV blocks, unequal chunks under its one cap (order policies).
        pytest.param(False, False, 0.95, id="first come, first served"),
        pytest.param(False, True, 0.85, id="and too few KV blocks"),
        pytest.param(True, False, 0.7, id="order policies"),
        pytest.param(True, True, 0.5, id="order policies and too few KV blocks"),
    ],
)
def test_the_hook_plans_what_plan_step_plans(vllm_python: Path, orders: bool, scarce: bool, share: float) -> None:
    runs = list(make_runs(RUNS, 50_000, orders=orders, scarce=scarce))
    records = ask(vllm_python, runs)
    same = whole = 0
    for run, record in zip(runs, records, strict=True):
        name = f"run {run['seed']}"
        assert record["on"], (name, record["notes"])
        assert record["sums_wrong"] == 0, name
        ours = plans(run)
        same += first_difference(ours, record["steps"]) is None
        assert run["done"] <= record["done"], f"{name}: vLLM did not come to an end"
        whole += record["done"]
        check_records(run, record)
    print(f"{same} of {RUNS} runs identical, {whole} came to their end")
    assert same / RUNS >= share
    if not scarce and not orders:
        plain = [not run["engine"]["prefix_caching"] for run in runs]
        equal = [
            first_difference(plans(run), record["steps"]) is None for run, record in zip(runs, records, strict=True)
        ]
        assert all(same for same, without in zip(equal, plain, strict=True) if without), "without prefixes, all of them"


@pytest.mark.parametrize("ahead", [False, True])
def test_records_folded_from_many_notes_equal_immediate_ones(vllm_python: Path, ahead: bool) -> None:
    """Nothing is pushed, so nothing asks for the sums: notes wait for their turn, preemptions and prefixes or not."""
    wait, at_once = ([make_run(seed, orders=False, scarce=True) for seed in range(900, 900 + RUNS // 3)] for _ in "12")
    for runs, how in ((wait, "waits"), (at_once, "at_once")):
        for run in runs:
            run["changes"] = []
            run["engine"] |= {"ahead": ahead, how: True}
    found = list(zip(ask(vllm_python, wait), ask(vllm_python, at_once), strict=True))
    for ours, theirs in found:
        for rows in ("step_rows", "request_rows"):
            one, other = ({k: v for k, v in part[rows].items() if k not in ("boot_id",)} for part in (ours, theirs))
            assert one == other, (ours["seed"], rows)
    assert sum(sum(ours["step_rows"]["preemptions"]) for ours, _ in found) > 20
    assert sum(len(ours["step_rows"]["step"]) for ours, _ in found) > 2000


def check_records(run: Run, record: dict[str, Any]) -> None:
    """The records say what was planned."""
    name, rows = f"run {run['seed']}", record["step_rows"]
    planned = [(sum(tokens for _, tokens in plan), len(plan)) for plan, _ in record["steps"] if plan]
    computed = [p + d for p, d in zip(rows["prefill_tokens"], rows["decode_tokens"], strict=True)]
    assert list(zip(computed, rows["sequences"], strict=True)) == planned, name
    assert all(tokens <= budget for tokens, budget in zip(computed, rows["budget_tokens"], strict=True)), name
    contexts = context_of(run, record)
    found = [p + d for p, d in zip(rows["prefill_context_tokens"], rows["decode_context_tokens"], strict=True)]
    assert contexts is None or found == contexts, name
    ended = record["request_rows"]
    if record["done"]:
        wanted = sorted((request["prompt_tokens"], request["output_tokens"]) for request in run["requests"])
        assert sorted(zip(ended["prompt_tokens"], ended["output_tokens"], strict=True)) == wanted, name
        assert [o - 1 for o in ended["output_tokens"]] == ended["gap_count"], name


def context_of(run: Run, record: dict[str, Any]) -> list[int] | None:
    """KV entries that each step reads, followed from the plans; None where a preemption or a prefix changes them."""
    if run["engine"]["prefix_caching"] or any(preempted for _, preempted in record["steps"]):
        return None
    computed: dict[int, int] = {}
    found = []
    for plan, _ in record["steps"]:
        if plan:
            found.append(sum(computed.get(request, 0) for request, _ in plan))
        for request, tokens in plan:
            computed[request] = computed.get(request, 0) + tokens
    return found
