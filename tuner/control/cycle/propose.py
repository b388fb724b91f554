"""Propose: when to search, the job for the child, and what its answer is worth now."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rooftune.policies.envelope import FOLLOWERS, canonical
from rooftune.policies.errors import InputError
from rooftune.policies.guard import Reason
from rooftune.policies.request import Boot, Setting
from rooftune.policies.step_time import StepModel
from rooftune.tuner.control.cycle.fit import noise_pairs
from rooftune.tuner.control.cycle.learned import proven, refuted
from rooftune.tuner.control.cycle.observe import Seen, keeps_decodes_moving
from rooftune.tuner.control.cycle.push import one_line
from rooftune.tuner.control.job import Job, SearchAnswer, WorkerError
from rooftune.tuner.control.memory import Bounds, Traffic, Tried, Trust, alike, region, setting_of
from rooftune.tuner.control.options import LoopOptions
from rooftune.tuner.control.outcome import FitPart, ProposalPart, TwinPart
from rooftune.tuner.control.ports import Searcher
from rooftune.tuner.control.searcher.window import window_part
from rooftune.tuner.model.intervals import model_draws
from rooftune.tuner.search.lessons import LiveResult
from rooftune.tuner.sim.engine import Engine

# A searched window is bounded: the twin's time grows with it, and older requests say less.
MOST_REQUESTS = 4000
# The engine does not tell its KV pool: the twin gets one that never fills, so that it invents no preemptions.
UNKNOWN_KV_BLOCKS = 1 << 20
DEFAULT_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Proposal:
    """An answer that may be acted on while ``base`` is in force and the traffic is like ``traffic``.

    gain, error: in attainment, NaN when not known; error: the larger of the twin's own error and the noise.
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
    """What this stage brought: a proposal, or why there is none. twin, part: of an answer that came now."""

    proposal: Proposal | None
    why: Reason
    twin: TwinPart | None = None
    part: ProposalPart | None = None
    detail: str = ""


def effective(seen: Seen) -> Setting:
    """What the window ran under: where the steps show a smaller budget than the one that is set, that one.

    Never below a token for each request that may run, which is the least that a budget can be.
    """
    ceiling, setting = seen.ceiling_tokens, seen.setting
    if ceiling is None or ceiling >= setting.step_tokens:
        return setting
    return setting._replace(step_tokens=min(setting.step_tokens, max(ceiling, setting.max_running)))


def searched(seen: Seen, operator: Mapping[str, tuple[float, float]], trust: Trust, silent: Iterable[str]) -> Bounds:
    """Where to search, around what is in effect; a budget above the one that the steps show cannot be had.

    Never beyond the operator's bounds: where they begin above it, the budget is not searched.
    """
    ran = effective(seen)
    bounds = region(ran, seen.envelope, operator, trust, silent)
    if ran != seen.setting and "step_tokens" in bounds:
        low, high = bounds.pop("step_tokens")
        if low < min(high, ran.step_tokens):
            bounds["step_tokens"] = (low, float(min(high, ran.step_tokens)))
    return bounds


def draws_of(fit: FitPart, seed: int) -> tuple[StepModel, ...]:
    """Other models that the intervals of a fit allow; the same in every cycle until there is another fit."""
    known = {name: (low, high) for name, (low, high) in fit.intervals.items() if low is not None and high is not None}
    return model_draws(StepModel(**fit.coefficients), known, seed=seed)


def make_job(
    seen: Seen, options: LoopOptions, fit: FitPart, bounds: Bounds, tried: tuple[Tried, ...], number: int
) -> Job:
    """The window of ``seen`` for the child.

    fit: the accepted one; what leads under its model must also hold under others that its intervals allow. bounds: see
    ``searched``. tried: live trials, of which the child gets those under like traffic.
    """
    model = StepModel(**fit.coefficients)
    rows = seen.demand
    if len(rows) > MOST_REQUESTS:
        rows = rows.select(np.arange(len(rows) - MOST_REQUESTS, len(rows)))
    start_s = float(rows.arrival_s[0])
    modelled, measured = noise_pairs(model, seen.window.steps)
    in_force = effective(seen)
    return Job(
        window=window_part(rows, start_s),
        engine=_engine(seen),
        model=model,
        draws=draws_of(fit, options.seed),
        noise_modelled_s=modelled,
        noise_measured_s=measured,
        slo=seen.slo,
        current=in_force,
        base=in_force,
        bounds=bounds,
        trials=options.trials,
        seed=options.seed + number,
        study=options.study,
        storage=options.storage,
        live=live_results(tried, seen.traffic),
    )


def _engine(seen: Seen) -> Engine:
    """The twin's engine. The window says how much of each prompt was cached, so the pool need not know contents."""
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
    """What ran live under traffic like this one, newest first; what other traffic taught is forgotten here."""
    return tuple(
        LiveResult(setting_of(one.setting), one.attainment, one.requests, one.predicted_attainment)
        for one in reversed(tried)
        if one.attainment is not None and traffic and alike(one.traffic, traffic)
    )


def proposal_of(
    answer: SearchAnswer, base: Setting, traffic: Traffic | None, ran: Setting | None = None
) -> Proposal | None:
    """What an answer proposes; None when it proposes nothing. Raises InputError for a setting that is none.

    ran: the setting in force by the job (``effective``; default: base); its budget left as it is means that
    the one in force is not moved.
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


def outside(setting: Setting, base: Setting, bounds: Bounds) -> list[str]:
    """Knobs that differ from the base although they were not searched, or lie outside of their bounds."""
    wrong = []
    for name, old, new in zip(Setting._fields, base, setting, strict=True):
        if old == new or name in FOLLOWERS:
            continue
        low, high = bounds.get(name, (math.nan, math.nan))
        # A chunk cap of 0 is none, which is where large caps lead.
        if not (low <= new <= high or (name == "chunk_cap_tokens" and new == 0 and name in bounds)):
            wrong.append(name)
    return wrong


def remembered(seen: Seen, tried: tuple[Tried, ...], bounds: Bounds) -> Proposal | None:
    """A setting that was found better than the one in force under traffic like this, so that nothing need be searched
    before it is pushed. It is a trial like any other: what it gained then is what is predicted now."""
    known = proven(seen.setting, tried, seen.traffic)
    if known is None or known.observed_gain is None or known.half_width is None:
        return None
    setting = setting_of(known.setting)
    if outside(setting, seen.setting, bounds):
        return None
    return Proposal(setting, seen.setting, known.observed_gain, known.half_width, True, seen.traffic, known.attainment)


def _differ(before: Traffic | None, now: Traffic | None) -> bool:
    return before is not None and now is not None and not alike(before, now)


class SearchDesk:
    """The one search that may run, and the one proposal that may stand. now_s: on the controller's clock."""

    def __init__(self, searcher: Searcher, options: LoopOptions) -> None:
        self._searcher, self._options = searcher, options
        self._searched_s = -math.inf
        self._base: Setting | None = None
        self._job_base: Setting | None = None  # in force by the job: with the budget in effect
        self._traffic: Traffic | None = None
        self._bounds: Bounds = {}
        self._discard = False
        self.standing: Proposal | None = None
        self._why: Reason = Reason.SEARCHING

    def forget(self) -> None:
        """The engine restarted or the setting moved: the job is about something else."""
        self._discard = self._searcher.busy
        self._searched_s = -math.inf
        self._base = None
        self.standing = None

    def harvest(self, seen: Seen, tried: tuple[Tried, ...]) -> Found | None:
        """The answer, when one came; None: none did."""
        try:
            answer = self._searcher.answer()
        except WorkerError as error:
            self.standing, self._why = None, Reason.WORKER_FAILED
            return Found(None, self._why, detail=one_line(f"{error.fault.value}: {error}"))
        if answer is None:
            return None
        if self._discard or self._base != seen.setting:
            self._discard, self._searched_s = False, -math.inf
            return None
        return self._judge(answer, seen, tried)

    def _judge(self, answer: SearchAnswer, seen: Seen, tried: tuple[Tried, ...]) -> Found:
        self.standing, detail = None, ""
        try:
            found = proposal_of(answer, seen.setting, self._traffic, self._job_base)
        except InputError as error:
            self._why = Reason.WORKER_FAILED
            return Found(None, self._why, answer.twin, None, one_line(str(error)))
        if answer.proposal is None:
            self._why = Reason.TWIN_NOT_TRUSTED
        elif found is None:
            self._why = Reason.NULL_RESULT
        elif wrong := outside(found.setting, seen.setting, self._bounds):
            self._why = Reason.WORKER_FAILED
            detail = f"the child proposes {', '.join(wrong)} outside of the job's bounds; dropped"
        elif refuted(found.setting, tried, self._traffic):
            self._why = Reason.NULL_RESULT
            detail = "the proposal was tried live under traffic like this and was not better"
        elif _differ(found.traffic, seen.traffic):
            self._why = Reason.SEARCHING
            detail = "the traffic has shifted while this was searched; dropped"
        else:
            self.standing = found
        return Found(self.standing, self._why, answer.twin, answer.proposal, detail)

    def current(self, seen: Seen) -> Found:
        """The proposal that stands, or why there is none; one that no longer fits is dropped."""
        standing = self.standing
        if standing is not None and (standing.base != seen.setting or _differ(standing.traffic, seen.traffic)):
            standing = self.standing = None
            self._why = Reason.SEARCHING
        return Found(standing, self._why)

    def due(self, seen: Seen, now_s: float) -> bool:
        """Whether a search would tell something new."""
        if self._searcher.busy:
            return False
        aged = now_s - self._searched_s >= self._options.search_every_s
        return aged or self._base != seen.setting or _differ(self._traffic, seen.traffic)

    def ask(self, job: Job, seen: Seen, now_s: float) -> str:
        """Start a search; returns why it could not be started, "" when it was."""
        if self._searcher.busy:
            return ""
        # Noted first: one that cannot be started is tried again when it is due, not in every cycle.
        self._searched_s, self._base, self._traffic = now_s, seen.setting, seen.traffic
        self._job_base, self._bounds, self._discard = job.base, job.bounds, False
        try:
            self._searcher.ask(job)
        except WorkerError as error:
            self._why = Reason.WORKER_FAILED
            return one_line(f"{error.fault.value}: {error}")
        if self.standing is None:
            self._why = Reason.SEARCHING
        return ""

    @property
    def busy(self) -> bool:
        return self._searcher.busy
