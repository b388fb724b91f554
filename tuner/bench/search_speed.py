"""Bench ``search-speed``: how long a recommendation takes, cold and warm, and a controller's whole search again.

``recommend`` runs as a user runs it, a process of its own with the default depth, a report at the end; cold means that
no compiled twin lies in its cache. The traffic is the azure-conv hour at 1.8x; where it is not beside the project, and
in the short form, made traffic under names of its own. The search again is the live controller's, in its child process,
on ten minutes of traffic with noise and draws of the step model; the child has answered once before. Overloaded: the
same requests at ``OVERLOAD`` times the rate that the setting in force carries, beside ``EASY`` times it.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rooftune.policies.commands import Figure
from rooftune.policies.errors import UnreachableError
from rooftune.policies.outcomes import Outcomes
from rooftune.policies.request import Boot, Setting
from rooftune.policies.slo import Slo, Target
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.bench.children import cost_of
from rooftune.tuner.bench.mixes import AZURE_CONV
from rooftune.tuner.control.job import Job, SearchAnswer, WindowPart
from rooftune.tuner.control.searcher.worker import ChildSearcher
from rooftune.tuner.model.intervals import model_draws
from rooftune.tuner.search.evaluation import Case
from rooftune.tuner.search.load import sustainable_rps
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.traffic.file import write_traffic
from rooftune.tuner.traffic.generate import document_mix
from rooftune.tuner.traffic.reshape import scale_rate
from rooftune.tuner.traffic.workload import Traffic

# What the project promises, on two cores.
MOST_COLD_S, MOST_RESEARCH_S, MOST_OVERLOADED = 30.0, 2.0, 1.3
EASY, OVERLOAD = 0.7, 1.5
AZURE_RATE = "1.8"
MODEL = "8b-2tbs"
WINDOW_S, SHORT_SPAN_S = 600.0, 120.0
RATE_RPS, LONG_ONE_IN, LONG_TOKENS = 4.0, 8, (4_000, 8_000)
POLL_S, SEARCH_S = 0.005, 300.0
NOISE_STEPS = 2_000
GAP_S = 0.03
ENGINE = Engine(Boot(8192, 16, 1, 1, 0, 1), 37_500, 128)
IN_FORCE = Setting(2048, max_running=128)
SLO = Slo((Target("ttft", 2.0, 0.99), Target("gap", GAP_S, 0.99)))


def bench(short: bool) -> Iterator[Figure]:
    """recommend_cold_s (full form only), recommend_warm_s, research_s; each with the processor time beside it.

    overloaded_over_easy_time: processor time of the child's whole answer, the judgement of the twin included.
    """
    yield from _recommend(short)
    wall_s, cpu_s, answer = research_times(live_job(made(WINDOW_S), trials=100), repeats=3 if short else 9)
    yield Figure("research_s", wall_s, "s", MOST_RESEARCH_S)
    yield Figure("research_cpu_s", cpu_s, "s")
    if answer.proposal is not None:
        yield Figure("research_steps", answer.proposal.simulated_steps + answer.proposal.random_steps, "steps")
    yield from _overload(short)


def _overload(short: bool) -> Iterator[Figure]:
    """The longer of two ratios of search times, with order policies and without; and that nothing was skipped."""
    carried_rps = sustainable_rps(Case(made(WINDOW_S), ENGINE, NAMED_MODELS[MODEL], SLO), IN_FORCE, WINDOW_S)[0]
    ratios = []
    for more in ({}, {"order_policy": (0.0, 2.0)}):
        times_s = []
        for share in (EASY, OVERLOAD):
            traffic = scale_rate(made(WINDOW_S), share * carried_rps / RATE_RPS)
            job = live_job(traffic, trials=100)
            job = job.model_copy(update={"bounds": {**job.bounds, **more}})
            _, cpu_s, answer = research_times(job, repeats=1 if short else 5)
            if answer.proposal is None:
                raise UnreachableError("the search on overloaded traffic found no proposal; the twin was not believed")
            times_s.append(cpu_s)
        ratios.append(times_s[1] / times_s[0])
    yield Figure("overloaded_over_easy_time", max(ratios), "ratio", MOST_OVERLOADED)


def made(span_s: float) -> Traffic:
    """Chat with some long prompts."""
    return document_mix(2, RATE_RPS, span_s, LONG_ONE_IN, LONG_TOKENS)


def _recommend(short: bool) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="rooftune-speed-") as folder:
        work = Path(folder)
        if AZURE_CONV.is_file() and not short:
            name, words = "recommend", ["--traffic", str(AZURE_CONV), "--rate-scale", AZURE_RATE]
        else:
            name, words = "made_recommend", ["--traffic", str(work / "made.csv")]
            write_traffic(work / "made.csv", made(SHORT_SPAN_S if short else 3_600.0))
        words += ["--step-model", MODEL, "--ttft-p99", "2s", "--gap-p99", "30ms", "--quiet"]
        words += ["--out", str(work / "report")]
        env = dict(os.environ)
        if not short:
            env["ROOFTUNE_CACHE_DIR"] = str(work / "cache")
            wall_s, cpu_s = command_times(words, env)
            yield Figure(f"{name}_cold_s", wall_s, "s", MOST_COLD_S)
            yield Figure(f"{name}_cold_cpu_s", cpu_s, "s")
        # A process before the one that counts may still have to compile, in the short form.
        times = [command_times(words, env) for _ in range(2 if short else 3)]
        yield Figure(f"{name}_warm_s", min(wall_s for wall_s, _ in times), "s", MOST_COLD_S)
        yield Figure(f"{name}_warm_cpu_s", min(cpu_s for _, cpu_s in times), "s")


def command_times(words: list[str], env: dict[str, str]) -> tuple[float, float]:
    """Wall and processor seconds of one ``rooftune recommend``. Raises UnreachableError when it fails."""
    before, begun_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "rooftune.tuner.cli.main", "recommend", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    wall_s, after = time.perf_counter() - begun_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):  # 1: nothing meets every target, which takes no less work
        raise UnreachableError(f"recommend ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def live_job(traffic: Traffic, trials: int) -> Job:
    """What a controller asks after the window in which ``traffic`` ran under ``IN_FORCE``."""
    model = NAMED_MODELS[MODEL]
    rng = np.random.default_rng(1)
    modelled_s = rng.uniform(model.overhead_s + model.floor_s, 0.05, NOISE_STEPS)
    allowed = {
        name: (0.97 * getattr(model, name), 1.03 * getattr(model, name)) for name in ("floor_s", "slope_s_per_token")
    }
    return Job(
        window=window_part_of(simulate(traffic, ENGINE, IN_FORCE, model, gap_bounds_s=[GAP_S]).outcomes),
        engine=ENGINE,
        model=model,
        draws=model_draws(model, allowed),
        noise_modelled_s=tuple(modelled_s.tolist()),
        noise_measured_s=tuple((modelled_s * rng.lognormal(0.0, 0.02, NOISE_STEPS)).tolist()),
        slo=SLO,
        base=IN_FORCE,
        boot=IN_FORCE,
        bounds={"step_tokens": (128.0, 8192.0), "chunk_cap_tokens": (16.0, 8192.0)},
        trials=trials,
    )


def window_part_of(run: Outcomes) -> WindowPart:
    """Outcomes of requests that all finished, with one gap bound, as the controller tells them to its child."""
    assert run.finished.all()
    return WindowPart(
        arrival_s=tuple(run.arrival_s.tolist()),
        scheduled_s=tuple(run.scheduled_s.tolist()),
        ttft_s=tuple((run.first_token_s - run.arrival_s).tolist()),
        finish_s=tuple(run.finish_s.tolist()),
        longest_gap_s=tuple(np.nan_to_num(run.longest_gap_s).tolist()),
        prompt_tokens=tuple(run.prompt_tokens.tolist()),
        cached_tokens=tuple(run.cached_tokens.tolist()),
        output_tokens=tuple(run.output_tokens.tolist()),
        gap_count=tuple(run.gap_count.tolist()),
        gap_bounds_s=tuple(run.gap_bounds_s.tolist()),
        gap_over=(tuple(run.gap_over[:, 0].tolist()),),
    )


def research_times(job: Job, repeats: int) -> tuple[float, float, SearchAnswer]:
    """Median wall and processor seconds from the question to the answer, in a child that has answered once before."""
    searcher = ChildSearcher()
    walls_s, cpus_s = list[float](), list[float]()
    try:
        answer = _answer(searcher, job)
        for _ in range(repeats):
            before_s, begun_s = _cpu_s(searcher), time.perf_counter()
            answer = _answer(searcher, job)
            walls_s.append(time.perf_counter() - begun_s)
            cpus_s.append(_cpu_s(searcher) - before_s)
    finally:
        searcher.close()
    return statistics.median(walls_s), statistics.median(cpus_s), answer


def _cpu_s(searcher: ChildSearcher) -> float:
    pid = searcher.child_pid
    cost = None if pid is None else cost_of(pid)
    if cost is None:
        raise UnreachableError("the child of the search has ended; run the bench again")
    return cost.cpu_s


def _answer(searcher: ChildSearcher, job: Job) -> SearchAnswer:
    searcher.ask(job)
    until_s = time.monotonic() + SEARCH_S
    while (answer := searcher.answer()) is None:
        if time.monotonic() > until_s:
            raise UnreachableError(f"the search did not end in {SEARCH_S:g} s; it was at {searcher.stage!r}")
        time.sleep(POLL_S)
    assert isinstance(answer, SearchAnswer)
    return answer
