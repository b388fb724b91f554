"""Propose: when to search, what the child is asked, and what its answer is worth now."""

import math
from dataclasses import dataclass

import numpy as np

from policies.errors import InputError
from policies.guard import Reason
from policies.request import Setting
from policies.step_time import StepModel
from policies.targets import Slo
from tuner.control.canonical import canonical
from tuner.control.effects import proven, refuted
from tuner.control.fit_stage import noise_pairs
from tuner.control.job import Answer, EngineFacts, Job, LiveTrial, TargetRow, WorkerError
from tuner.control.memory import Traffic, Tried, knobs_of, setting_of
from tuner.control.observe_stage import Seen, alike
from tuner.control.options import LoopOptions
from tuner.control.outcome import CycleReason, ProposalPart, TwinPart
from tuner.control.parts import Searcher
from tuner.control.push_stage import one_line
from tuner.control.trust import Bounds
from tuner.control.windowing import window_part

# A searched window is bounded: the twin's time grows with it, and older requests say less.
MOST_REQUESTS = 4000
# The engine does not tell its KV pool: the twin gets one that never fills, so that it invents no preemptions.
UNKNOWN_KV_BLOCKS = 1 << 20
DEFAULT_BLOCK_TOKENS = 16

Why = CycleReason | Reason


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
    why: Why
    twin: TwinPart | None = None
    part: ProposalPart | None = None
    detail: str = ""


def make_job(
    seen: Seen, options: LoopOptions, model: StepModel, bounds: Bounds, tried: tuple[Tried, ...], number: int
) -> Job:
    """The window of ``seen`` for the child. tried: live trials; only those under like traffic are told.

    Where the steps show a smaller budget than the one that is set, the window ran under that one, and nothing above it
    can be had.
    """
    rows = seen.demand
    if len(rows) > MOST_REQUESTS:
        rows = rows.select(slice_of(len(rows)))
    start_s = float(rows.arrival_s[0])
    modelled, measured = noise_pairs(model, seen.window.steps)
    envelope = seen.state.envelope
    in_force, ceiling = seen.setting, seen.ceiling_tokens
    if ceiling is not None and ceiling < in_force.step_tokens:
        in_force = in_force._replace(step_tokens=ceiling)
        low, high = bounds.get("step_tokens", (ceiling, ceiling))
        bounds = bounds | {"step_tokens": (min(low, ceiling), min(high, ceiling))}
    return Job(
        window=window_part(rows, start_s),
        engine=EngineFacts(
            ceiling_tokens=max(envelope.ceiling_tokens, 1),
            kv_blocks=envelope.kv_blocks or UNKNOWN_KV_BLOCKS,
            block_tokens=envelope.kv_block_tokens or DEFAULT_BLOCK_TOKENS,
            sequence_ceiling=max(envelope.max_running, 1),
            chunking=envelope.chunking,
        ),
        model=dict(model._asdict()),
        noise_modelled_s=modelled,
        noise_measured_s=measured,
        targets=target_rows(seen.slo),
        current=knobs_of(in_force),
        base=knobs_of(in_force),
        bounds=bounds,
        trials=options.trials,
        seed=options.seed + number,
        study=options.study,
        storage=options.storage,
        live=tuple(live_trials(tried, seen.traffic)),
    )


def slice_of(count: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.arange(count - MOST_REQUESTS, count)


def target_rows(slo: Slo) -> tuple[TargetRow, ...]:
    """The targets that hold for everybody; overrides have no place in a job."""
    return tuple(TargetRow(metric=t.metric, bound_s=t.bound_s, quantile=t.quantile) for t in slo.targets)


def live_trials(tried: tuple[Tried, ...], traffic: Traffic | None) -> list[LiveTrial]:
    """What ran live under traffic like this one, newest first; what other traffic taught is forgotten here."""
    return [
        LiveTrial(
            setting=one.setting,
            attainment=one.attainment,
            goodput_rps=one.goodput_rps,
            requests=one.requests,
            twin_attainment=one.predicted_attainment,
        )
        for one in reversed(tried)
        if one.attainment is not None and one.goodput_rps is not None and traffic and alike(one.traffic, traffic)
    ]


def proposal_of(answer: Answer, base: Setting, traffic: Traffic | None) -> Proposal | None:
    """What an answer proposes; None when it proposes nothing. Raises InputError for a setting that is none."""
    part = answer.proposal
    if part is None or part.verdict == "keep":
        return None
    try:
        setting = canonical(setting_of(part.setting))
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
    """Knobs that differ from the base although they were not asked about, or lie outside of what was."""
    wrong = []
    for name, old, new in zip(Setting._fields, base, setting, strict=True):
        if old == new or name in FOLLOWERS:
            continue
        low, high = bounds.get(name, (math.nan, math.nan))
        # A chunk cap of 0 is none, which is where large caps lead.
        if not (low <= new <= high or (name == "chunk_cap_tokens" and new == 0 and name in bounds)):
            wrong.append(name)
    return wrong


# What a policy brings along; it has no bounds of its own in a search.
FOLLOWERS = frozenset(
    {
        "budget_target_s", "budget_floor_tokens", "pressure_tokens", "pressure_prefills", "aging_s", "ttft_target_s",
        "prefill_s_per_token", "long_prompt_tokens",
    }
)  # fmt: skip


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
        self._asked_s = -math.inf
        self._asked_base: Setting | None = None
        self._asked_traffic: Traffic | None = None
        self._asked_bounds: Bounds = {}
        self._discard = False
        self.standing: Proposal | None = None
        self._why: Why = CycleReason.SEARCHING

    def forget(self) -> None:
        """The engine was started anew, or the setting moved: what was asked is about something else."""
        self._discard = self._searcher.busy
        self._asked_s = -math.inf
        self._asked_base = None
        self.standing = None

    def harvest(self, seen: Seen, tried: tuple[Tried, ...]) -> Found | None:
        """The answer, when one came; None: none did."""
        try:
            answer = self._searcher.answer()
        except WorkerError as error:
            self.standing, self._why = None, CycleReason.WORKER_FAILED
            return Found(None, self._why, detail=one_line(f"{error.fault.value}: {error}"))
        if answer is None:
            return None
        if self._discard or self._asked_base != seen.setting:
            self._discard, self._asked_s = False, -math.inf
            return None
        return self._judge(answer, seen, tried)

    def _judge(self, answer: Answer, seen: Seen, tried: tuple[Tried, ...]) -> Found:
        self.standing, detail = None, ""
        try:
            found = proposal_of(answer, seen.setting, self._asked_traffic)
        except InputError as error:
            self._why = CycleReason.WORKER_FAILED
            return Found(None, self._why, answer.twin, None, one_line(str(error)))
        if answer.proposal is None:
            self._why = Reason.TWIN_NOT_TRUSTED
        elif found is None:
            self._why = CycleReason.NULL_RESULT
        elif wrong := outside(found.setting, seen.setting, self._asked_bounds):
            self._why = CycleReason.WORKER_FAILED
            detail = f"the child proposes {', '.join(wrong)} outside of what it was asked; dropped"
        elif refuted(found.setting, tried, self._asked_traffic):
            self._why = CycleReason.NULL_RESULT
            detail = "the proposal was tried live under traffic like this and was not better"
        else:
            self.standing = found
        return Found(self.standing, self._why, answer.twin, answer.proposal, detail)

    def current(self, seen: Seen) -> Found:
        """The proposal that stands, or why there is none; one that no longer fits is dropped."""
        standing = self.standing
        if standing is not None and (standing.base != seen.setting or _differ(standing.traffic, seen.traffic)):
            standing = self.standing = None
            self._why = CycleReason.SEARCHING
        return Found(standing, self._why)

    def due(self, seen: Seen, now_s: float) -> bool:
        """Whether a search would tell something new."""
        if self._searcher.busy:
            return False
        aged = now_s - self._asked_s >= self._options.search_every_s
        return aged or self._asked_base != seen.setting or _differ(self._asked_traffic, seen.traffic)

    def ask(self, job: Job, seen: Seen, now_s: float) -> str:
        """Start a search; returns why it could not be started, "" when it was."""
        try:
            started = self._searcher.ask(job)
        except WorkerError as error:
            self._asked_s, self._why = now_s, CycleReason.WORKER_FAILED
            return one_line(f"{error.fault.value}: {error}")
        if started:
            self._asked_s, self._asked_base, self._asked_traffic = now_s, seen.setting, seen.traffic
            self._asked_bounds, self._discard = job.bounds, False
            if self.standing is None:
                self._why = CycleReason.SEARCHING
        return ""

    @property
    def busy(self) -> bool:
        return self._searcher.busy
