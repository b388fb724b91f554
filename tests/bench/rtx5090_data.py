"""610 runs of a real vLLM 0.22.1 on an RTX 5090, read as our values; and their traffic, regenerated.

The runs name phases and a seed, not arrivals. Their published script draws them with Python's own generator, phase by
phase; ``arrivals`` does the same, and every run's count of requests and busiest second are checked against the file.
"""

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.request import IntArray
from rooftune.tuner.traffic.workload import Traffic

FILE = Path(__file__).resolve().parents[3] / "shared" / "data" / "profiles" / "ppas-rtx5090" / "runs.csv"
METRICS = ("avg_ttft", "p95_ttft", "avg_tpot", "p95_tpot", "avg_latency", "p95_latency")
ADAPTIVE = 0
_MODELS = {"05b": "qwen2.5-0.5b", "smollm3": "smollm3-3b"}


@dataclass(frozen=True, order=True)
class Load:
    """What a row of runs has in common: model, lengths (tokens), and the rate of the busy phases (requests/s)."""

    model: str
    prompt_tokens: int
    output_tokens: int
    rate_rps: float
    phases: tuple[tuple[float, float], ...]

    @property
    def name(self) -> str:
        return f"{self.model}_{self.prompt_tokens}x{self.output_tokens}_{self.rate_rps:g}rps"


@dataclass(frozen=True)
class Served:
    """One run. budget: tokens a step, ADAPTIVE (0) for the pressure policy; values: METRICS in seconds, in order."""

    load: Load
    budget: int
    seed: int
    values: tuple[float, ...]


def read_runs(path: Path = FILE) -> list[Served]:
    """All runs in order of the file. Raises InputError when it is absent or contradicts its traffic."""
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read: {error}; put the folder shared/data beside the project") from error
    if not rows:
        raise InputError(f"{path} holds no runs; put the folder shared/data beside the project")
    return [_run(path, line, row) for line, row in enumerate(rows, start=2)]


def _run(path: Path, line: int, row: dict[str, str]) -> Served:
    try:
        phases = tuple(
            (float(span), float(rate)) for span, rate in (p.split(":") for p in row["phase_schedule"].split(","))
        )
        source = Path(row["source_file"]).stem.split("_")[-1]
        model = _MODELS.get(source, "qwen2.5-3b")
        rate_rps = max(rate for _, rate in phases)
        load = Load(model, int(row["configured_prompt_tokens"]), int(row["configured_output_tokens"]), rate_rps, phases)
        budget = ADAPTIVE if row["config_name"].startswith("ppas") else int(row["max_num_batched_tokens"])
        served = Served(load, budget, int(row["seed"]), tuple(float(row[name]) for name in METRICS))
        stated = (int(row["num_requests"]), int(row["peak_arrivals_1s"]))
    except (KeyError, ValueError) as error:
        raise InputError(f"{path} line {line} is not a run ({error!r}); give the file unchanged") from error
    if not all(value > 0.0 for value in served.values):
        raise bad_value(f"{path} line {line}: latencies", min(served.values), "above 0", "give the file unchanged")
    at_s = arrivals(phases, served.seed)
    if (len(at_s), busiest_second(at_s)) != stated:
        raise bad_value(
            f"{path} line {line}: requests and busiest second",
            stated,
            f"{len(at_s), busiest_second(at_s)}",
            "its traffic is not what its seed makes",
        )
    return served


def arrivals(phases: Sequence[tuple[float, float]], seed: int) -> list[float]:
    """Arrivals in seconds: a Poisson process in each phase of (span_s, rate_rps), all drawn from one generator."""
    rng = random.Random(seed)
    at_s: list[float] = []
    start_s = 0.0
    for span_s, rate_rps in phases:
        now_s = start_s + rng.expovariate(rate_rps)
        while now_s < start_s + span_s:
            at_s.append(now_s)
            now_s += rng.expovariate(rate_rps)
        start_s += span_s
    return at_s


def busiest_second(at_s: Sequence[float]) -> int:
    """Most arrivals within a second from any arrival on."""
    return max((sum(first <= other < first + 1.0 for other in at_s) for first in at_s), default=0)


def traffic_of(load: Load, seed: int) -> Traffic:
    """The requests of a run; every prompt begins with its own random tokens, so none finds a prefix."""
    at_s = np.array(arrivals(load.phases, seed))
    each: IntArray = np.ones(len(at_s), dtype=np.int64)
    return Traffic(at_s, each * load.prompt_tokens, each * load.output_tokens, 0 * each, 0 * each, name=load.name)
