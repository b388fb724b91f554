"""Bench ``vllm-overload``: a running vLLM near and above what it carries, at its default and with the controller.

vLLM's own load generator (``vllm bench serve``, from the vLLM environment) sends a fixed list, every eighth prompt
long, at 0.9 and 1.2 times the greatest rate of a short saturated run: ten minutes at the default, then the same ten
minutes with ``rooftune run --mode live`` from cold. The targets come from the default at half of that rate
(``bounds_between``); a request is good when it keeps both, by the times that the load generator saw. ``short``: one
load, less than half a minute of traffic each; it shows that the parts work together, and that nothing fails.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rooftune.policies.commands import Figure
from rooftune.policies.errors import RefusedError, UnreachableError
from rooftune.tuner.bench import vllm_gain
from rooftune.tuner.bench.children import Child, run_to_end, say, wait_for
from rooftune.tuner.bench.live_gain import cells, config_of
from rooftune.tuner.bench.live_gain_rounds import SERVED_NAME, Bed, Sizes, listed
from rooftune.tuner.bench.live_overload import calm_bounds, figures, pair
from rooftune.tuner.bench.vllm_bed import DEFAULT, FIRST_SPAN_S, Ground, open_ground
from rooftune.tuner.observe.rows import BoolArray
from rooftune.tuner.sim.twin import warm
from rooftune.tuner.traffic.workload import Traffic

# What `vllm bench serve` runs; the command itself wants a distribution named vllm, which CPU builds are not.
BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
# Of the greatest rate.
LOADS = (0.9, 1.2)
SHORT_LOADS = (1.2,)
# Beyond the list: the load generator's start, and the queue that an overloaded list leaves behind.
START_S, DRAIN_RATIO = 120.0, 4.0
TELL_EVERY_S = 60.0

SHORT = replace(
    vllm_gain.SHORT,
    span_s=20.0,
    settings=cells(DEFAULT, (128,), (0,)),
    cadence={**vllm_gain.SHORT.cadence, "search_every_s": 5},
    dwell_s=2.0,
)
FULL = replace(
    vllm_gain.FULL,
    sizes=Sizes((40, 120), (2100, 3900), (30, 60)),
    span_s=600.0,
    settings=cells(DEFAULT, (64,), (0,)),
    cadence={**vllm_gain.FULL.cadence, "verify_s": 30, "window_s": 120},
    dwell_s=30.0,
)


def bench(short: bool) -> Iterator[Figure]:
    """goodput_ratio_to_default, the lowest of all loads, and each load's with its interval."""
    size = SHORT if short else FULL
    warm()  # the controller's child would compile it while the clock runs
    with open_ground("rooftune-vllm-overload-") as ground, ground.bed("server") as bed:
        most_rps = bed.greatest_rps(size.sizes, FIRST_SPAN_S, times=1)
        ttft_s, gap_s = calm_bounds(bed, size.sizes, most_rps, size.span_s)
        config = config_of(bed.served.tuning, size, ttft_s, gap_s)
        send = Sender(ground, bed, ttft_s, gap_s)
        loads = SHORT_LOADS if short else LOADS
        pairs = [
            pair(bed, config, load, listed(size.sizes, load * most_rps, size.span_s, seed=3), send) for load in loads
        ]
    yield from figures(pairs)
    yield Figure("greatest_rate_rps", most_rps, "requests/s")
    yield Figure("target_ttft_s", ttft_s, "s")
    yield Figure("target_longest_gap_s", gap_s, "s")


@dataclass(frozen=True)
class Sender:
    """Sends a list with vLLM's load generator. ttft_s, gap_s: what a good request keeps."""

    ground: Ground
    bed: Bed
    ttft_s: float
    gap_s: float

    def __call__(self, name: str, requests: Traffic) -> BoolArray:
        """Which requests were good. Raises UnreachableError when it fails or takes too long, RefusedError when an
        answer is missing."""
        trace, result = self.bed.work / f"{name}.jsonl", self.bed.work / f"{name}.json"
        trace.write_text(trace_lines(requests))
        words = ["--backend", "openai", "--endpoint", "/v1/completions", "--base-url", self.bed.served.base]
        words += ["--model", SERVED_NAME, "--tokenizer", str(self.ground.model), "--dataset-name", "timed_trace"]
        words += ["--dataset-path", str(trace), "--num-prompts", str(len(requests)), "--disable-tqdm"]
        words += ["--timed-trace-chunk-hash-size", str(int(requests.prompt_tokens.max()))]
        words += ["--save-result", "--save-detailed", "--result-dir", str(result.parent)]
        words += ["--result-filename", result.name]
        # Prompts are made from hashes of strings, which are to be the same in both runs.
        environment = self.ground.environment | {"PYTHONHASHSEED": "0"}
        command = [str(self.ground.python), "-c", BENCH_SERVE, *words]
        span_s = float(requests.arrival_s[-1])
        client = self.bed.children.run(f"client-{name}", command, environment)
        follow(client, name, START_S + DRAIN_RATIO * span_s)
        return good_of(json.loads(result.read_text()), requests, self.ttft_s, self.gap_s)


def follow(client: Child, name: str, most_s: float) -> None:
    """Until it has ended, a line every minute. Raises UnreachableError."""
    began_s = time.monotonic()
    while not client.ended:
        passed_s = time.monotonic() - began_s
        if passed_s >= most_s:
            raise UnreachableError(f"{name} has not ended after {most_s:.0f} s: {client.last_words()}")
        if passed_s >= TELL_EVERY_S:
            say(f"{name}: sending for {passed_s:.0f} s")
        wait_for(client, lambda: None, min(TELL_EVERY_S, most_s - passed_s))
    run_to_end(client, 1.0)


def trace_lines(requests: Traffic) -> str:
    """The list as vLLM's ``timed_trace``: one hash a request, so that no two share a prefix."""
    columns = (requests.arrival_s, requests.prompt_tokens, requests.output_tokens)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return "".join(
        json.dumps({"timestamp": at_s, "input_length": prompt, "output_length": output, "hash_ids": [number]}) + "\n"
        for number, (at_s, prompt, output) in enumerate(rows)
    )


def good_of(result: dict[str, Any], requests: Traffic, ttft_s: float, gap_s: float) -> BoolArray:
    """From the load generator's file. Raises RefusedError unless every request got its whole answer."""
    errors = [error.strip().splitlines()[-1] for error in result["errors"] if error.strip()]
    if errors or result["completed"] != len(requests):
        why = errors[0] if errors else "it does not say why"
        raise RefusedError(f"{len(requests)} requests were sent and {result['completed']} answered: {why}")
    counted, listed_tokens = (
        (result["input_lens"], result["output_lens"]),
        (requests.prompt_tokens, requests.output_tokens),
    )
    if counted != tuple(column.tolist() for column in listed_tokens):
        raise RefusedError("the load generator counts other tokens than the list has")
    longest_s = np.array([max(gaps, default=0.0) for gaps in result["itls"]])
    good: BoolArray = (np.array(result["ttfts"]) <= ttft_s) & (longest_s <= gap_s)
    return good
