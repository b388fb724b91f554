"""One job in the child: judge the twin on the window, and search on it when it may be believed; or foretell blocks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np

from rooftune.policies.errors import InputError
from rooftune.policies.outcomes import BoolArray, Outcomes
from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo, attainment
from rooftune.tuner.control.job import Answer, Expected, Job, SearchAnswer, Span
from rooftune.tuner.control.outcome import Carries, FigurePart, LoadPart, ProposalPart, TwinPart
from rooftune.tuner.control.searcher.window import (
    block_of,
    compared,
    noise_of,
    observed_of,
    progress_of,
    slo_of,
    traffic_of,
)
from rooftune.tuner.model.model_file import check_step_model
from rooftune.tuner.search.archive import Archive, TwinResult
from rooftune.tuner.search.live import LiveProposal, Question, research
from rooftune.tuner.search.load import Carried, Load
from rooftune.tuner.sim.calibrate import QUALITY, Fidelity, FigureError, calibrate
from rooftune.tuner.sim.noise import QUIET
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.sim.twin import simulate

_PER_RUN = ("tenant_names", "gap_bounds_s", "gap_values_s", "gap_weights")


def twin_part(replays: Sequence[RunResult], observed: Outcomes, kept: BoolArray, slo: Slo) -> TwinPart:
    """Replays of the window, one a seed of the noise, beside what was seen of the requests ``kept``."""
    seen = rows_of(observed, kept)
    predicted = [rows_of(replay.outcomes, kept) for replay in replays]
    found = calibrate(predicted, seen, slo=slo)
    latencies = [row for row in found.rows if row.metric and math.isfinite(row.error)]
    errors = {row.name: row.error for row in latencies}
    errors.update(_gap_errors(predicted, seen))
    deciding = [row for row in found.rows if row.decides]
    judged = [row for row in latencies if row.verdict is not Fidelity.TOO_FEW]
    shares = [attainment(outcomes, slo) for outcomes in predicted]
    error = float(np.mean(shares)) - attainment(seen, slo)
    return TwinPart(
        verdict=found.verdict.value,
        worst_error=max((abs(row.error) for row in judged), default=None),
        attainment_error=error if math.isfinite(error) else None,
        errors=errors,
        figures={row.name: _figure(row) for row in deciding},
        missing_requests=found.missing or None,
    )


def _figure(row: FigureError) -> FigurePart:
    known = [value if math.isfinite(value) else None for value in (row.foretold, row.observed, row.half_width)]
    foretold, observed, half_width = known
    return FigurePart(
        unit="s" if row.metric else "share",
        foretold=foretold,
        observed=observed,
        half_width=half_width,
        verdict=row.verdict.value,
    )


def _gap_errors(predicted: Sequence[Outcomes], seen: Outcomes) -> dict[str, float]:
    """Share of gaps above each bound, predicted over observed - 1, where enough were seen to say so."""
    errors = {}
    for column, bound_s in enumerate(seen.gap_bounds_s):
        over, gaps = int(seen.gap_over[:, column].sum()), int(seen.gap_count.sum())
        if over < QUALITY.min_beyond:
            continue
        shares = []
        for outcomes in predicted:
            at = np.flatnonzero(np.isclose(outcomes.gap_bounds_s, bound_s))
            if at.size and int(outcomes.gap_count.sum()):
                shares.append(float(outcomes.gap_over[:, at[0]].sum()) / int(outcomes.gap_count.sum()))
        if shares:
            errors[f"gaps over {bound_s * 1e3:g} ms"] = float(np.mean(shares)) / (over / gaps) - 1.0
    return errors


def rows_of(outcomes: Outcomes, kept: BoolArray) -> Outcomes:
    """Some of the requests; the distribution of all gaps is of all of them and stays behind."""
    per_request = [f.name for f in fields(outcomes) if f.name not in _PER_RUN and len(getattr(outcomes, f.name))]
    chosen: dict[str, Any] = {name: getattr(outcomes, name)[kept] for name in per_request}
    return replace(outcomes, **chosen, gap_values_s=np.zeros(0), gap_weights=np.zeros(0))


Tell = Callable[[str, int, int], None]

WARM = 4  # settings of earlier searches that this one begins with
JUDGE_SEEDS = 3  # replays that the twin is judged by, and that foretell a block, where steps are noisy


def answer_to(job: Job, tell: Tell) -> Answer:
    """The answer to a job of either kind. Raises RooftuneError for a job that makes no sense."""
    return expected_of(job) if job.expect else run_job(job, tell)


def expected_of(job: Job) -> Expected:
    """What the twin says of each block's own arrivals, under the setting before and the one after."""
    if job.after is None:
        raise InputError("blocks are foretold under two settings; give the second one, after")
    check_step_model(job.model, "model")
    return Expected(shares=tuple(_share_of(job, span, (job.base, job.after)) for span in job.expect))


def _share_of(job: Job, span: Span, settings: Sequence[Setting]) -> float | None:
    start_s, from_s, until_s = span
    block, slo = block_of(job.window, start_s, until_s), slo_of(job)
    kept: BoolArray = np.array(block.arrival_s) >= from_s - start_s
    if not kept.any():
        return None
    traffic, progress, noise = traffic_of(block), progress_of(block), noise_of(job, job.seed)
    luck = [noise] if noise is QUIET else [noise_of(job, job.seed + k) for k in range(JUDGE_SEEDS)]
    replays = (
        simulate(traffic, job.engine, one, job.model, gap_bounds_s=slo.gap_bounds(), noise=n, progress=progress)
        for one in settings
        for n in luck
    )
    return float(np.mean([attainment(rows_of(replay.outcomes, kept), slo) for replay in replays]))


def run_job(job: Job, tell: Tell) -> SearchAnswer:
    """The answer to a search. Raises RooftuneError for a job that makes no sense."""
    traffic, observed, progress = traffic_of(job.window), observed_of(job.window), progress_of(job.window)
    model, slo = check_step_model(job.model, "model"), slo_of(job)
    for draw in job.draws:
        check_step_model(draw, "a draw of the model")
    tell("twin", 0, 1)
    noise = noise_of(job, job.seed)
    bounds_s = sorted({*slo.gap_bounds(), *job.window.gap_bounds_s})
    others = [] if noise is QUIET else [noise_of(job, job.seed + k) for k in range(1, JUDGE_SEEDS)]
    replays = [
        simulate(traffic, job.engine, job.base, model, gap_bounds_s=bounds_s, noise=luck, progress=progress)
        for luck in (noise, *others)
    ]
    twin = twin_part(replays, observed, compared(observed, 0.0 if progress is None else progress.at_s), slo)
    if twin.verdict == "not_good":
        return SearchAnswer(twin=twin, proposal=None)
    archive = None if job.storage is None else _archive(job.storage, job.study)
    question = Question(
        traffic=traffic_of(job.window, 0.0),  # what is left of earlier arrivals would make the rate look lower
        engine=job.engine,
        model=model,
        slo=slo,
        base=job.base,
        bounds=job.bounds,
        trials=job.trials,
        seed=job.seed,
        draws=job.draws,
        noise=noise,
        live=job.live,
        # Observed minus predicted; the other way round than in the record.
        now_error=-(twin.attainment_error or 0.0),
        warm=[] if archive is None else archive.remembered(WARM),
        boot=job.boot,
        headroom=job.headroom,
        horizon_s=job.horizon_s,
        largest_ratio=job.largest_ratio,
    )
    found = research(question, tell)
    if archive is not None:
        tell("keep", 0, 1)
        end = TwinResult(found.best.setting, found.best.attainment, len(question.traffic))
        archive.keep(frozenset(job.bounds), end, job.live[::-1])
    return SearchAnswer(twin=twin, proposal=_proposal(found), load=_load(found.load))


@cache
def _archive(storage: str, study: str) -> Archive:
    """One connection for all jobs of this child."""
    return Archive(storage, study)


def _load(found: Load | None) -> LoadPart | None:
    if found is None:
        return None

    def part(one: Carried | None) -> Carries:
        return Carries() if one is None else Carries(sustainable_rps=one.sustainable_rps, busy_share=one.busy_share)

    return LoadPart(
        offered_rps=found.offered_rps,
        in_force=part(found.in_force),
        boot=part(found.boot),
        proposed=part(found.proposed),
        overload=found.overload,
    )


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
        path=tuple((setting._asdict(), share) for setting, share in found.path),
    )
