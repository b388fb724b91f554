"""Bench ``vllm-hook``: what the hook costs a real vLLM, beside vLLM's own ``schedule()`` in the same run.

Needs the vLLM environment ($ROOFTUNE_VLLM_ENV, or .venv-vllm in the project); without it the bench is passed over.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from policies.commands import Figure
from policies.errors import MissingDataError, UnreachableError
from policies.quantiles import median_interval

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "ROOFTUNE_VLLM_ENV"
# 5 us for a record and 20 us for a decision are meant on a machine on which vLLM's own schedule() takes 45 us. A step
# after a model's forward pass finds the caches cold and schedule() takes several times as long, and so do we.
RECORD_SHARE, POLICY_SHARE = 5.0 / 45.0, 20.0 / 45.0


def bench(short: bool) -> Iterator[Figure]:
    """record: writing a step down, a request's end included. policy: a budget and an order policy with requests
    waiting. Both in microseconds beside vLLM's own ``schedule()``, and as shares of it beside the aims.
    end_to_end_ratio: time with the hook over time without, the median of pairs in one server process; low and high:
    the interval of 95 % for it."""
    found = measure(short)
    record, policy, own = found["record_us"], found["policy_us"], found["schedule_us"]
    yield Figure("record_us_p50", _quantile(record, 0.5), "us", _quantile(own, 0.5))
    yield Figure("record_us_p99", _quantile(record, 0.99), "us", _quantile(own, 0.99))
    yield Figure("policy_us_p50", _quantile(policy, 0.5), "us", _quantile(own, 0.5))
    yield Figure("record_share", _quantile(record, 0.5) / _quantile(own, 0.5), "of schedule(), medians", RECORD_SHARE)
    yield Figure("policy_share", _quantile(policy, 0.5) / _quantile(own, 0.5), "of schedule(), medians", POLICY_SHARE)
    low, middle, high = median_interval(found["ratios"])
    yield Figure("end_to_end_ratio", middle, "", 1.0)
    yield Figure("end_to_end_ratio_low", low, "", 1.0)
    yield Figure("end_to_end_ratio_high", high, "", 1.0)


def measure(short: bool) -> dict[str, list[float]]:
    """What ``bench_inside`` prints. Raises MissingDataError without the environment, UnreachableError on a failure."""
    python = Path(os.environ.get(VARIABLE) or ROOT / ".venv-vllm") / "bin" / "python"
    if not python.exists():
        raise MissingDataError(f"no vLLM environment at {python.parents[1]}; make vllm-env, or set {VARIABLE}")
    with tempfile.TemporaryDirectory(prefix="rooftune-vllm-hook-") as folder:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }  # fmt: skip
        command = [str(python), "-m", "engine.vllm.bench_inside", folder, "short" if short else "full"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise UnreachableError(f"vLLM did not get through the bench: {done.stderr.strip()[-600:]}")
    answer: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
