"""The CPU sweep beside the project: real vLLM runs of the same traffic under several budgets, read as our values."""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rooftune.policies.errors import InputError
from rooftune.policies.outcomes import Outcomes
from rooftune.policies.request import FloatArray, Setting
from rooftune.tuner.model.sample_file import read_steps
from rooftune.tuner.model.samples import StepSamples
from rooftune.tuner.traffic.traces import load_traffic
from rooftune.tuner.traffic.workload import Traffic
from tests.bench.outside import RequestStamps, StepStamps

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "vllm-cpu-sweep"
LISTS = {"a": "list_a_chat.csv", "b": "list_b_mixed.csv"}
MAX_RUNNING = 128


@dataclass(frozen=True, order=True)
class Case:
    """One setting on one list of requests."""

    traffic: str
    budget: int
    chunk_cap: int

    @property
    def name(self) -> str:
        return f"{self.traffic}_{self.budget}" + (f"_cap{self.chunk_cap}" if self.chunk_cap else "")

    @property
    def setting(self) -> Setting:
        return Setting(self.budget, chunk_cap_tokens=self.chunk_cap, max_running=min(MAX_RUNNING, self.budget))


def cases() -> dict[Case, list[str]]:
    """Every setting with its runs, in order. Raises InputError when the folder is absent."""
    found: dict[Case, list[str]] = {}
    for path in sorted(FOLDER.glob("*.requests.jsonl.gz")):
        run = path.name.split(".")[0]
        traffic, budget, cap, _ = run.split("_")
        found.setdefault(Case(traffic, int(budget), int(cap[1:])), []).append(run)
    if not found:
        raise InputError("no runs in ../shared/data/vllm-cpu-sweep; put the folder beside the project")
    return dict(sorted(found.items()))


def traffic_of(case: Case) -> Traffic:
    """The list of requests that was replayed."""
    return load_traffic(FOLDER / LISTS[case.traffic])


def steps_of(run: str) -> StepSamples:
    """What each step computed and how long it took."""
    return read_steps(FOLDER / f"{run}.steps.csv.gz")


def outcomes_of(run: str) -> Outcomes:
    """What the engine did to each request, on its own clock; TTFT counts from the arrival at the API server."""
    rows = list(_requests(run))
    gaps_s = [np.array(row["gaps_ms"], dtype=np.float64) / 1e3 for row in rows]
    every_s = np.concatenate(gaps_s)
    column = {
        name: np.array([row[name] for row in rows]) for name in ("prompt", "out", "arrival_s", "first_s", "last_s")
    }
    return Outcomes(
        arrival_s=column["arrival_s"],
        first_token_s=column["first_s"],
        finish_s=column["last_s"],
        prompt_tokens=column["prompt"],
        output_tokens=column["out"],
        longest_gap_s=np.array([gaps.max(initial=0.0) for gaps in gaps_s]),
        gap_count=np.array([len(gaps) for gaps in gaps_s]),
        gap_values_s=every_s,
        gap_weights=np.ones(len(every_s)),
    )


def stamps_of(run: str) -> tuple[RequestStamps, StepStamps]:
    """The instants from which the constants outside the step are learned."""
    rows = list(_requests(run))
    names = ("arrival_s", "add_s", "first_s", "last_s", "c_first_s", "c_last_s")
    requests = RequestStamps(*(np.array([row[name] for row in rows], dtype=np.float64) for name in names))
    with gzip.open(FOLDER / f"{run}.steps.csv.gz", "rt") as stream:
        steps = list(csv.DictReader(io.StringIO(stream.read())))
    start_s = _column(steps, "start_s")
    sequences = (_column(steps, "decode") + _column(steps, "prefill_reqs")).astype(np.int64)
    follows = np.array([row["cycle_ms"] != "" for row in steps])  # empty where the engine had been idle
    return requests, StepStamps(start_s, start_s + _column(steps, "dur_ms") / 1e3, sequences, follows)


def _requests(run: str) -> Iterator[dict[str, object]]:
    with gzip.open(FOLDER / f"{run}.requests.jsonl.gz", "rt") as stream:
        yield from map(json.loads, stream)


def _column(rows: list[dict[str, str]], name: str) -> FloatArray:
    return np.array([float(row[name]) for row in rows])
