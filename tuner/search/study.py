"""Optuna, ask and tell. The one file that knows it: the rest of the search sees settings and evaluations.

A database may hold many studies and several workers may share one. What a worker leaves behind when it dies is a
trial that runs for ever: samplers pass such trials over, and the next opening of the study marks old ones failed.
"""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from socket import gethostname
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from rooftune.policies.errors import InputError, RefusedError, UnreachableError
from rooftune.policies.request import Setting
from rooftune.policies.slo import MarginRow
from rooftune.tuner.search.evaluation import Evaluation
from rooftune.tuner.search.objective import constraint
from rooftune.tuner.search.space import Recorded, SearchSpace

T = TypeVar("T")

STARTUP_TRIALS = 16
SAMPLERS = ("tpe", "gp", "random")
# How long a writer waits for another one's lock, and how often a refused call is tried: on a busy machine the worker
# that makes the tables needs seconds, and the others are refused at once.
LOCK_WAIT_S = 60
TRIES = 6
# A trial of a shared study that began longer ago than this was abandoned: a replay takes seconds.
STALE_S = 600.0

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass(frozen=True)
class Ticket:
    """A setting to try; ``tell`` takes its result."""

    number: int
    setting: Setting


@dataclass(frozen=True)
class Finished:
    """A trial with a result. value: what the sampler maximises; violation: sum of its positive constraints."""

    setting: Setting
    value: float
    violation: float

    @property
    def feasible(self) -> bool:
        """Whether every target was met."""
        return self.violation <= 0.0


class _FromTrial:
    """Suggest by an Optuna trial."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial

    def integer(self, name: str, low: int, high: int) -> int:
        # Rounded here: TPE over whole numbers adds up the mass of every number's interval, several times the work.
        # A warm start that another run put in with a wider range comes back as it went in.
        return min(max(round(self._trial.suggest_float(name, *_span(low, high), log=True)), low), high)

    def choice(self, name: str, options: tuple[int, ...]) -> int:
        return int(self._trial.suggest_categorical(name, options))


class _Noted(Recorded):
    """Numbers from a mapping, with the distributions that a sampler has for them."""

    def __init__(self, params: Mapping[str, int]) -> None:
        super().__init__(params)
        self.distributions: dict[str, BaseDistribution] = {}

    def integer(self, name: str, low: int, high: int) -> int:
        self.distributions[name] = FloatDistribution(*_span(low, high), log=True)
        return super().integer(name, low, high)

    def choice(self, name: str, options: tuple[int, ...]) -> int:
        self.distributions[name] = CategoricalDistribution(options)
        return super().choice(name, options)


def _span(low: int, high: int) -> tuple[float, float]:
    """Whole numbers as a stretch of the line in which each has its own part."""
    return low - 0.5, high + 0.5


def constraint_names(rows: Sequence[MarginRow]) -> list[str]:
    """One stable name a target: metric, quantile, bound and override."""
    return [
        f"{row.target.metric}-p{row.target.quantile * 100:g}-{row.target.bound_s:g}s"
        + ("" if row.override_index is None else f"-override{row.override_index}")
        for row in rows
    ]


def constraints_of(evaluation: Evaluation) -> dict[str, float]:
    """Every target as a constraint for the sampler, by its name.

    A target without samples says nothing where others have some: gaps, when every answer is one token.
    """
    rows = list(zip(constraint_names(evaluation.margins), evaluation.margins, evaluation.missed, strict=True))
    some = any(row.samples for _, row, _ in rows)
    return {name: constraint(row, missed) for name, row, missed in rows if row.samples or not some}


class SettingStudy:
    """One study over a ``SearchSpace``: maximise a value under one constraint per target.

    sampler: one of SAMPLERS; "gp" needs torch. storage: an Optuna storage URL, None for memory. name: the study is
    kept under it and shared with every run that gives the same one (and the same choices; wider or narrower number
    ranges are the same study); None: a study of its own, where same seed and same evaluations give same proposals.
    Raises UnreachableError when the database does not take part, InputError for a sampler that is not installed.
    """

    def __init__(
        self, space: SearchSpace, *, sampler: str, seed: int, storage: str | None = None, name: str | None = None
    ) -> None:
        self.space = space
        self._trials: dict[int, optuna.Trial] = {}
        self._shared = name is not None
        chosen = _sampler(sampler, seed)
        held = None if storage is None else open_storage(storage)
        self._study = again(
            partial(
                optuna.create_study,
                direction="maximize",
                sampler=chosen,
                storage=held,
                study_name=None if name is None else f"{name}/{_choices(space)}",
                load_if_exists=self._shared,
            )
        )
        if self._shared:
            self.fail_stale(STALE_S)
            # Workers that share a study must not draw the same numbers.
            self._study.sampler = _sampler(sampler, hash((seed, os.getpid(), len(self._all()))) % 2**32)

    def enqueue(self, setting: Setting) -> None:
        """Try this setting before the sampler has its say (a warm start)."""
        recorded = Recorded(self.space.params(setting))
        self.space.draw(recorded)
        again(lambda: self._study.enqueue_trial(recorded.used, skip_if_exists=True))

    def ask(self) -> Ticket:
        """The next setting to try."""
        return again(self._ask)

    def _ask(self) -> Ticket:
        trial = self._study.ask()
        if self._shared:
            trial.set_user_attr("worker", f"{gethostname()}:{os.getpid()}")  # whose it was, should it never end
        setting = self.space.draw(_FromTrial(trial))
        self._trials[trial.number] = trial
        return Ticket(trial.number, setting)

    def holds(self, setting: Setting) -> bool:
        """Whether the sampler could ask for exactly this setting."""
        return self.space.draw(Recorded(self.space.params(setting))) == setting

    def add_live(self, setting: Setting, value: float, constraints: Mapping[str, float], requests: int) -> None:
        """A setting that ran live, as a trial of its own, marked live=True; see ``holds``."""
        noted = _Noted(self.space.params(setting))
        self.space.draw(noted)
        trial = optuna.trial.create_trial(
            value=value,
            params=dict(noted.used),
            distributions=noted.distributions,
            user_attrs={"live": True, "requests": requests},
            constraints=dict(constraints),
        )
        again(partial(self._study.add_trial, trial))

    def tell(
        self, ticket: Ticket, evaluation: Evaluation, value: float, more: Mapping[str, float] | None = None
    ) -> None:
        """Book an evaluation; more: constraints beside those of the targets, by name, met when <= 0.

        A value that is not finite fails the trial: failed is not infeasible.
        """
        trial = self._trials.pop(ticket.number, None)
        if trial is None:
            raise RefusedError(f"trial {ticket.number} has its result already or was never asked for; ask first")
        bounds = {**constraints_of(evaluation), **(more or {})}
        state = None if abs(value) < float("inf") else TrialState.FAIL

        def book() -> None:
            try:
                if state is None:
                    for name, bound in bounds.items():
                        trial.set_constraint(name, bound)
                self._study.tell(trial, None if state else value, state=state, skip_if_finished=self._shared)
            except UpdateFinishedTrialError:  # it took so long that another worker gave it up, or it is a second try
                pass

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The constraint value is ignored")  # a second try
            again(book)

    def finished(self) -> list[Finished]:
        """Every trial with a value, other workers' too, best first: those that meet every target by their value, then
        the others by how little they violate. Empty when none came to an end: then nothing is known.
        """
        done = [trial for trial in self._all() if trial.state is TrialState.COMPLETE and trial.value is not None]
        found = [
            Finished(
                self.space.draw(Recorded({**self.space.params(self.space.base), **trial.params})),
                float(trial.values[0]),
                sum(max(value, 0.0) for value in trial.constraints.values()),
            )
            for trial in done
        ]
        return sorted(found, key=lambda trial: (trial.violation, -trial.value))

    def fail_stale(self, older_than_s: float) -> int:
        """Mark trials that began longer ago and never ended as failed; how many. Not this worker's own."""
        begun_before = datetime.now() - timedelta(seconds=older_than_s)
        failed = 0
        for trial in self._all():
            begun = trial.datetime_start
            if trial.state is TrialState.RUNNING and trial.number not in self._trials:
                if begun is not None and begun < begun_before:
                    again(partial(self._study.tell, trial.number, state=TrialState.FAIL, skip_if_finished=True))
                    failed += 1
        return failed

    def _all(self) -> list[optuna.trial.FrozenTrial]:
        return again(lambda: self._study.get_trials(deepcopy=False))


def _choices(space: SearchSpace) -> str:
    """A short name for what Optuna cannot change within a study: the choices, and what a unit of a number means."""
    options = _Options()
    for _ in range(8):
        space.draw(options)
        options.turn += 1
    return sha256(
        repr(("float", space.grid_tokens, sorted(space.knobs), sorted(options.seen.items()))).encode()
    ).hexdigest()[:10]


class _Options:
    """Notes the options of every choice; takes another one at each turn, so that all branches are seen."""

    def __init__(self) -> None:
        self.turn = 0
        self.seen: dict[str, tuple[int, ...]] = {}

    def integer(self, name: str, low: int, high: int) -> int:
        return high

    def choice(self, name: str, options: tuple[int, ...]) -> int:
        self.seen[name] = options
        return options[self.turn % len(options)]


def open_storage(url: str, *, lock_wait_s: float | None = None, tries: int = TRIES) -> BaseStorage:
    """A database that waits for locks and survives a lost connection; several workers may make its tables at once.

    lock_wait_s: None for LOCK_WAIT_S.
    """
    more: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("sqlite"):
        more["connect_args"] = {"timeout": LOCK_WAIT_S if lock_wait_s is None else lock_wait_s}
    return again(lambda: RDBStorage(url, engine_kwargs=more), tries)


def again(call: Callable[[], T], tries: int = TRIES) -> T:
    """Call again when the database refused: a lock, tables that another worker is making, a lost connection.

    Raises UnreachableError after ``tries`` refusals.
    """
    for tried in range(1, tries + 1):
        try:
            return call()
        except (StorageInternalError, SQLAlchemyError) as error:
            if tried == tries:
                reason = " ".join(str(_origin(error)).split())
                raise UnreachableError(f"the database of the trials does not answer: {reason}; check it") from None
            time.sleep(0.05 * 2**tried)
    raise AssertionError("unreachable")


def _origin(error: BaseException) -> object:
    """The driver's own words, however often they were wrapped."""
    found: BaseException | None = error
    while found is not None:
        if getattr(found, "orig", None) is not None:
            return found.orig  # type: ignore[attr-defined]  # it has it
        found = found.__cause__ or found.__context__
    return type(error).__name__


def _sampler(name: str, seed: int) -> BaseSampler:
    if name == "random":
        return RandomSampler(seed=seed)
    if name == "gp":
        missing = [module for module in ("torch", "scipy") if find_spec(module) is None]
        if missing:
            raise InputError(f"sampler 'gp' needs {missing[0]}, which is not installed; use 'tpe', or install it")
        return GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS, warn_independent_sampling=False)
    if name != "tpe":
        raise RefusedError(f"sampler is {name!r}, must be one of {', '.join(SAMPLERS)}; choose one")
    with warnings.catch_warnings():
        # Multivariate TPE is marked experimental; the choice and its figures stand in docs/decisions.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=STARTUP_TRIALS)
