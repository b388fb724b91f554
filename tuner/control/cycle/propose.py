"""Propose: the job for the child, and the proposal in its answer. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooftune.policies.envelope import FOLLOWERS, canonical
from rooftune.policies.errors import InputError
from rooftune.policies.guard import Reason
from rooftune.policies.request import Boot, Setting
from rooftune.policies.step_time import StepModel
from rooftune.tuner.control.cycle.fit import noise_pairs
from rooftune.tuner.control.cycle.learned import proven
from rooftune.tuner.control.cycle.observe import Seen, boot_of, keeps_decodes_moving
from rooftune.tuner.control.job import Job, SearchAnswer, Span, WindowPart
from rooftune.tuner.control.memory import Bounds, Traffic, Trial, Tried, Trust, alike, region, setting_of
from rooftune.tuner.control.options import LoopOptions
from rooftune.tuner.control.outcome import Carries, FitPart, LoadPart
from rooftune.tuner.control.searcher.window import window_part, with_unended
from rooftune.tuner.model.intervals import model_draws
from rooftune.tuner.observe.rows import RequestRows
from rooftune.tuner.observe.window import Window, arrived_between
from rooftune.tuner.search.lessons import LiveResult
from rooftune.tuner.sim.engine import Engine

# The twin's time grows with the window, and older requests say less.
MOST_REQUESTS = 4000
# When the engine hides its KV pool's size, the twin's pool never fills, so that it invents no preemptions.
UNKNOWN_KV_BLOCKS = 1 << 20
DEFAULT_BLOCK_TOKENS = 16
# Arrivals count as more than what is carried beyond two standard deviations; and as many as before from this share on.
CHANCE, STILL_SHARE = 2.0, 0.9


@dataclass(frozen=True)
class Proposal:
    """A proposed setting; valid while ``base`` is in force and the traffic is like ``traffic``.

    gain, error: in attainment, NaN when unknown; error: the larger of twin error and noise.
    """

    setting: Setting
    base: Setting
    gain: float
    error: float
    trusted: bool
    traffic: Traffic | None
    predicted_attainment: float | None


@dataclass(frozen=True)
class Found:
    """A proposal, or why there is none."""

    proposal: Proposal | None
    why: Reason


def effective(seen: Seen) -> Setting:
    """The setting that the window ran under: with the smaller budget where the steps show one.

    Never below ``max_running``, the least that a budget can be.
    """
    ceiling, setting = seen.ceiling_tokens, seen.setting
    if ceiling is None or ceiling >= setting.step_tokens:
        return setting
    return setting._replace(step_tokens=min(setting.step_tokens, max(ceiling, setting.max_running)))


def searched(seen: Seen, operator: Mapping[str, tuple[float, float]], trust: Trust, silent: Iterable[str]) -> Bounds:
    """Bounds of the search around ``effective``, which caps the budget.

    When the operator's least budget lies above that cap, the budget is not searched.
    """
    ran = effective(seen)
    bounds = region(ran, seen.envelope, operator, trust, silent)
    if ran != seen.setting and "step_tokens" in bounds:
        low, high = bounds.pop("step_tokens")
        if low < min(high, ran.step_tokens):
            bounds["step_tokens"] = (low, float(min(high, ran.step_tokens)))
    if "order_policy" in bounds:  # an engine of the release before does not know these two
        for name in {"aged_share", "wait_tokens_per_s"} - set(seen.envelope.by_name):
            bounds[name] = (Setting._field_defaults[name],) * 2
    return bounds


def draws_of(fit: FitPart, seed: int) -> tuple[StepModel, ...]:
    """Other models within the fit's intervals; the same until the next fit."""
    known = {name: (low, high) for name, (low, high) in fit.intervals.items() if low is not None and high is not None}
    return model_draws(StepModel(**fit.coefficients), known, seed=seed)


def make_job(
    seen: Seen, options: LoopOptions, fit: FitPart, bounds: Bounds, tried: tuple[Tried, ...], number: int
) -> Job:
    """The child's job. bounds: see ``searched``. tried: live trials; the child gets those under like traffic.

    The best setting under the accepted fit must also hold under other models within its intervals.
    """
    rows, flights = seen.demand, seen.window.in_flight
    start_s = float(seen.arrivals_s[-MOST_REQUESTS:][0])
    rows = RequestRows.join([seen.window.in_flight_at(start_s), rows.select(rows.arrival_s >= start_s)])
    window = window_part(rows, start_s)
    return _job(
        window if flights is None else with_unended(window, flights, start_s),
        seen,
        fit,
        draws=draws_of(fit, options.seed),
        base=effective(seen),
        bounds=bounds,
        trials=options.trials,
        seed=options.seed + number,
        storage=options.storage,
        live=live_results(tried, seen.traffic),
        headroom=options.limits.headroom,
        horizon_s=options.horizon_s,
        largest_ratio=options.limits.largest_ratio,
    )


def foretell_job(window: Window, spans: Sequence[Span], trial: Trial, seen: Seen, fit: FitPart) -> Job:
    """The question what the twin says of blocks of a trial. spans: on the engine's clock, with their rows in window."""
    start_s, until_s = spans[0][0], spans[-1][2]
    rows = RequestRows.join([window.in_flight_at(start_s), arrived_between(window.requests, start_s, until_s)])
    return _job(
        window_part(rows, start_s),
        seen,
        fit,
        base=setting_of(trial.before),
        after=setting_of(trial.after),
        bounds={},
        seed=trial.push_cycle,
        expect=tuple((at_s - start_s, from_s - start_s, end_s - start_s) for at_s, from_s, end_s in spans),
    )


def _job(window: WindowPart, seen: Seen, fit: FitPart, **question: Any) -> Job:
    """A question to the twin of this engine about a window."""
    model = StepModel(**fit.coefficients)
    modelled, measured = noise_pairs(model, seen.window.steps)
    return Job(
        window=window,
        engine=_engine(seen),
        model=model,
        noise_modelled_s=modelled,
        noise_measured_s=measured,
        slo=seen.slo,
        boot=boot_of(seen.state),
        **question,
    )


def _engine(seen: Seen) -> Engine:
    """The twin's engine. The window tells each prompt's cached tokens, so the pool need not know contents."""
    envelope = seen.state.envelope
    boot = Boot(
        ceiling_tokens=max(envelope.ceiling_tokens, 1),
        block_tokens=envelope.kv_block_tokens or DEFAULT_BLOCK_TOKENS,
        chunking=int(envelope.chunking),
        reserve_whole_prompt=1,
        contents=0,
        keep_decodes_moving=int(keeps_decodes_moving(seen.state)),
        plan_ahead=int(envelope.plan_ahead),
    )
    return Engine(boot, envelope.kv_blocks or UNKNOWN_KV_BLOCKS, max(envelope.max_running, 1))


def live_results(tried: tuple[Tried, ...], traffic: Traffic | None) -> tuple[LiveResult, ...]:
    """Settings that ran live under like traffic, newest first."""
    return tuple(
        LiveResult(setting_of(one.setting), one.attainment, one.requests, one.predicted_attainment)
        for one in reversed(tried)
        if one.attainment is not None and traffic and alike(one.traffic, traffic)
    )


def proposal_of(
    answer: SearchAnswer, base: Setting, traffic: Traffic | None, ran: Setting | None = None
) -> Proposal | None:
    """The proposal of an answer; None without one. Raises InputError for an invalid setting.

    ran: the job's setting in force (``effective``; default: base). A proposal with its budget keeps the budget of
    ``base``.
    """
    part = answer.proposal
    if part is None or part.verdict == "keep":
        return None
    try:
        setting = canonical(setting_of(part.setting))
        if ran is not None and setting.step_tokens == ran.step_tokens:
            setting = setting._replace(step_tokens=base.step_tokens)
        if setting == base:
            return None
    except TypeError:
        raise InputError(f"the child proposes {sorted(part.setting)}, which are not all knobs") from None
    parts = [value for value in (answer.twin.attainment_error, part.noise) if value is not None]
    known = answer.twin.attainment_error is not None
    return Proposal(
        setting=setting,
        base=base,
        gain=math.nan if part.gain is None else part.gain,
        error=max(map(abs, parts)) if known else math.nan,
        trusted=answer.twin.verdict == "good",
        traffic=traffic,
        predicted_attainment=part.attainment_proposed,
    )


def carried_by(answer: SearchAnswer, load: LoadPart, seen: Seen) -> dict[Setting, Carries]:
    """What an answer knows of the settings that may come into force. seen: the job's base is in force."""
    found = {seen.boot: load.boot}
    if answer.proposal is not None and set(answer.proposal.setting) == set(Setting._fields):
        found[canonical(setting_of(answer.proposal.setting))] = load.proposed
    return found | {seen.setting: load.in_force}


def load_part(seen: Seen, latest: LoadPart | None, carried: Mapping[Setting, Carries]) -> LoadPart:
    """This cycle's load beside what the latest search knows. Chance in the count of arrivals is no overload, and an
    overload that the search found stands while as much arrives."""
    arrived, span_s = seen.arrived
    offered_rps = arrived / span_s if span_s > 0.0 else None
    if offered_rps is None or latest is None or latest.offered_rps is None:
        return LoadPart(offered_rps=offered_rps)
    in_force = carried.get(seen.setting, Carries())
    least_rps = max(arrived - CHANCE * math.sqrt(arrived), 0.0) / span_s
    over = in_force.sustainable_rps is not None and least_rps > in_force.sustainable_rps
    still = latest.overload and offered_rps >= STILL_SHARE * latest.offered_rps
    return latest.model_copy(update={"offered_rps": offered_rps, "in_force": in_force, "overload": over or still})


def outside(setting: Setting, base: Setting, bounds: Bounds) -> list[str]:
    """Knobs that the proposal moves beyond the bounds, or without any."""
    wrong = []
    for name, old, new in zip(Setting._fields, base, setting, strict=True):
        if old == new or name in FOLLOWERS:
            continue
        low, high = bounds.get(name, (math.nan, math.nan))
        # A chunk cap of 0 (none) is the limit of large caps.
        if not (low <= new <= high or (name == "chunk_cap_tokens" and new == 0 and name in bounds)):
            wrong.append(name)
    return wrong


def remembered(seen: Seen, tried: tuple[Tried, ...], bounds: Bounds) -> Proposal | None:
    """A setting that beat the one in force under like traffic, to push without a search. Its trial is like any other;
    the earlier gain is the prediction."""
    known = proven(seen.setting, tried, seen.traffic)
    if known is None or known.observed_gain is None or known.half_width is None:
        return None
    setting = setting_of(known.setting)
    if outside(setting, seen.setting, bounds):
        return None
    return Proposal(setting, seen.setting, known.observed_gain, known.half_width, True, seen.traffic, known.attainment)


def differ(before: Traffic | None, now: Traffic | None) -> bool:
    return before is not None and now is not None and not alike(before, now)
