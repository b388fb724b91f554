"""One job in the child: judge the twin on the window, and search on it when it may be believed."""

from collections.abc import Callable
from functools import cache

import numpy as np
from rooftune.tuner.control.child_judge import figures_of, twin_part
from rooftune.tuner.control.child_window import (
    compared,
    engine_of,
    model_of,
    noise_of,
    observed_of,
    setting_of,
    slo_of,
    traffic_of,
)
from rooftune.tuner.control.job import Answer, Job
from rooftune.tuner.control.outcome import Knobs, ProposalPart, TwinPart
from rooftune.tuner.search.archive import Archive, TwinResult
from rooftune.tuner.search.lessons import LiveResult
from rooftune.tuner.search.live import research
from rooftune.tuner.search.live_values import LiveProposal, Question
from rooftune.tuner.sim.noise import QUIET
from rooftune.tuner.sim.twin import simulate

Tell = Callable[[str, int, int], None]

WARM = 4  # settings of earlier searches that this one begins with
JUDGE_SEEDS = 3  # replays of the window that the twin is judged by, where steps are noisy


def run_job(job: Job, tell: Tell, took_s: Callable[[], float]) -> Answer:
    """The answer to a job; took_s(): seconds since it came. Raises RooftuneError for a job that makes no sense."""
    traffic, observed = traffic_of(job.window), observed_of(job.window)
    engine, model = engine_of(job.engine), model_of(job.model, "model")
    slo, current, base = slo_of(job), setting_of(job.current, "current"), setting_of(job.base, "base")
    tell("twin", 0, 1)
    noise = noise_of(job, job.seed)
    bounds_s = sorted({*slo.gap_bounds(), *job.window.gap_bounds_s})
    others = [] if noise is QUIET else [noise_of(job, job.seed + k) for k in range(1, JUDGE_SEEDS)]
    replays = [
        simulate(traffic, engine, current, model, gap_bounds_s=bounds_s, noise=luck) for luck in (noise, *others)
    ]
    twin = twin_part(replays, observed, compared(observed), slo)
    span_s = float(np.max(observed.finish_s))
    now = figures_of(replays[0], slo, span_s)
    if twin.verdict == "not_good":
        return Answer(twin=twin, proposal=None, predicted_now=now, predicted_proposed=None, took_s=took_s())
    archive = None if job.storage is None else _archive(job.storage, job.study)
    question = Question(
        traffic=traffic,
        engine=engine,
        model=model,
        slo=slo,
        base=base,
        bounds=job.bounds,
        trials=job.trials,
        seed=job.seed,
        draws=[model_of(draw, "a draw of the model") for draw in job.draws],
        noise=noise,
        live=[
            _live(trial.setting, trial.attainment, trial.requests, trial.twin_attainment)
            for trial in reversed(job.live)
        ],
        now_error=_now_error(twin) if current == base else 0.0,
        warm=[] if archive is None else archive.remembered(WARM),
    )
    found = research(question, tell)
    if archive is not None:
        tell("keep", 0, 1)
        end = TwinResult(found.best.setting, found.best.attainment, len(traffic))
        archive.keep(frozenset(job.bounds), end, question.live)
    return Answer(
        twin=twin,
        proposal=_proposal(found),
        predicted_now=now,
        predicted_proposed=figures_of(found.best_result, slo, span_s),
        took_s=took_s(),
    )


@cache
def _archive(storage: str, study: str) -> Archive:
    """One connection for all jobs of this child."""
    return Archive(storage, study)


def _live(knobs: Knobs, attainment: float, requests: int, twin_attainment: float | None) -> LiveResult:
    return LiveResult(setting_of(knobs, "a live trial"), attainment, requests, twin_attainment)


def _now_error(twin: TwinPart) -> float:
    """Observed minus predicted; the other way round than in the record."""
    return 0.0 if twin.attainment_error is None else -twin.attainment_error


def _proposal(found: LiveProposal) -> ProposalPart:
    target = None if found.binding is None else found.binding.target
    return ProposalPart(
        setting=found.best.setting._asdict(),
        verdict=found.verdict.value,
        attainment_now=found.twin_now,
        attainment_proposed=found.twin_best,
        gain=found.gain,
        noise=found.noise,
        binding=None if target is None else f"{target.metric} p{target.quantile * 100:g} {target.bound_s:g} s",
        trials=found.trials,
        simulated_steps=found.simulated_steps,
        live_trials=found.live_trials,
        random_trials=found.random_trials,
        random_steps=found.random_steps,
        random_attainment=None if found.random_best is None else found.random_best.attainment,
        equal_attainment=None if found.equal_best is None else found.equal_best.attainment,
    )
