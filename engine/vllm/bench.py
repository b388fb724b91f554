"""Bench ``vllm-hook``: what the hook costs a real vLLM, beside vLLM's own ``schedule()`` in the same run.

Needs the vLLM environment ($ROOFTUNE_VLLM_ENV, or .venv-vllm in the project); without it the bench is skipped.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rooftune.policies.commands import Figure
from rooftune.policies.errors import MissingDataError, UnreachableError
from rooftune.policies.quantiles import median_interval, quantile

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "ROOFTUNE_VLLM_ENV"
# Targets for the hook where vLLM's own schedule() takes 45 us: a step's record 5 us, a decision 20 us. After a model's
# forward pass the caches are cold, and schedule() and the hook take several times as long.
RECORD_SHARE, POLICY_SHARE = 5.0 / 45.0, 20.0 / 45.0
LOADS = ("few", "many")


def bench(short: bool) -> Iterator[Figure]:
    """Two loads: ``few`` requests run, or ``many``; microseconds a step, beside vLLM's own ``schedule()``.

    clock: what the clocks find where the hook only passes by. record: what the hook adds to schedule(), to
    update_from_output() and to requests that come and go, with the median clock taken off. policy: a budget and an
    order policy, with requests waiting where more come than may run. fold: records made of some steps' notes while the
    model computes, each time; deferred: the same, a step. read: what a reader's own thread does, a step.
    work: all of it.
    end_to_end_ratio: time with the hook over time without, the median of pairs in one server process; low and high:
    the interval of 95 % for it."""
    found = measure(short)
    for load in LOADS:
        yield from _of_load(load, found[load])
    low, middle, high = median_interval(found["ratios"])
    yield Figure("end_to_end_ratio", middle, "", 1.0)
    yield Figure("end_to_end_ratio_low", low, "", 1.0)
    yield Figure("end_to_end_ratio_high", high, "", 1.0)


def _of_load(load: str, found: dict[str, Any]) -> Iterator[Figure]:
    clock = median(found["clock"]["record"])
    record, own, policy = [value - clock for value in found["record"]], found["schedule"], median(found["policy"])
    own_us = median(own)
    passing = median(found["clock"]["deferred"])
    # The steps that fold nothing only look whether it is time.
    folds = [value for value in found["deferred"] if value > 4 * passing]
    deferred = (median(folds) * len(folds) if folds else 0.0) / len(record)
    looked = max(0.0, median(found["deferred"]) - passing)
    read = median(found["read"]) * len(found["read"]) / len(record)
    yield Figure(f"{load}_clock_us_p50", clock, "us", own_us)
    yield Figure(f"{load}_clock_us_p99", quantile(found["clock"]["record"], 0.99), "us", quantile(own, 0.99))
    yield Figure(f"{load}_record_us_p50", median(record), "us", own_us)
    yield Figure(f"{load}_record_us_p99", quantile(record, 0.99), "us", quantile(own, 0.99))
    yield Figure(f"{load}_record_share", median(record) / own_us, "of schedule(), medians", RECORD_SHARE)
    yield Figure(f"{load}_policy_us_p50", policy, "us", own_us)
    yield Figure(f"{load}_policy_share", policy / own_us, "of schedule(), medians", POLICY_SHARE)
    yield Figure(f"{load}_fold_us_p50", median(folds) if folds else 0.0, "us", own_us)
    yield Figure(f"{load}_fold_us_worst", max(folds, default=0.0), "us", max(own))
    yield Figure(f"{load}_deferred_us", deferred + looked, "us a step", own_us)
    yield Figure(f"{load}_read_us", read, "us a step", own_us)
    yield Figure(f"{load}_work_us", median(record) + deferred + looked + read, "us a step", own_us)


def measure(short: bool) -> dict[str, Any]:
    """What ``bench_inside`` prints. Raises MissingDataError without the environment, UnreachableError on a failure."""
    python = Path(os.environ.get(VARIABLE) or ROOT / ".venv-vllm") / "bin" / "python"
    if not python.exists():
        raise MissingDataError(f"no vLLM environment at {python.parents[1]}; make vllm-env, or set {VARIABLE}")
    with tempfile.TemporaryDirectory(prefix="rooftune-vllm-hook-") as folder:
        links = Path(folder, "import", "rooftune")  # nothing of ours need be installed beside vLLM
        links.mkdir(parents=True)
        for name in ("policies", "engine"):
            (links / name).symlink_to(ROOT / name, target_is_directory=True)
        environment = os.environ | {
            "PYTHONPATH": str(links.parent), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }  # fmt: skip
        command = [str(python), "-m", "rooftune.engine.vllm.bench_inside", folder, "short" if short else "full"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise UnreachableError(f"vLLM did not get through the bench: {done.stderr.strip()[-600:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
