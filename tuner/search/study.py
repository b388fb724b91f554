"""Optuna, ask and tell. The one file that knows it: the rest of the search sees settings and evaluations."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from policies.errors import RefusedError
from policies.request import Setting
from policies.slo import MarginRow
from tuner.search.evaluation import Evaluation
from tuner.search.objective import constraint
from tuner.search.space import Recorded, SearchSpace

STARTUP_TRIALS = 16
SAMPLERS = ("tpe", "random")

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass(frozen=True)
class Ticket:
    """A setting that was asked for and waits to be told."""

    number: int
    setting: Setting


class _FromTrial:
    """Suggest by an Optuna trial."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial

    def integer(self, name: str, low: int, high: int) -> int:
        return self._trial.suggest_int(name, low, high, log=True)

    def choice(self, name: str, options: tuple[int, ...]) -> int:
        return int(self._trial.suggest_categorical(name, options))


def constraint_names(rows: Sequence[MarginRow]) -> list[str]:
    """One stable name a target: metric, quantile, bound and override."""
    return [
        f"{row.target.metric}-p{row.target.quantile * 100:g}-{row.target.bound_s:g}s"
        + ("" if row.override_index is None else f"-override{row.override_index}")
        for row in rows
    ]


class SettingStudy:
    """One study over a ``SearchSpace``: maximise a value under one constraint per target.

    sampler: "tpe" or "random". storage: an Optuna storage URL, None for memory. Same seed and same evaluations,
    same proposals.
    """

    def __init__(self, space: SearchSpace, *, sampler: str, seed: int, storage: str | None = None) -> None:
        self.space = space
        self._trials: dict[int, optuna.Trial] = {}
        self._study = optuna.create_study(direction="maximize", sampler=_sampler(sampler, seed), storage=storage)

    def enqueue(self, setting: Setting) -> None:
        """Try this setting before the sampler has its say (a warm start)."""
        recorded = Recorded(self.space.params(setting))
        self.space.draw(recorded)
        self._study.enqueue_trial(recorded.asked, skip_if_exists=True)

    def ask(self) -> Ticket:
        """The next setting to try."""
        trial = self._study.ask()
        self._trials[trial.number] = trial
        return Ticket(trial.number, self.space.draw(_FromTrial(trial)))

    def tell(self, ticket: Ticket, evaluation: Evaluation, value: float) -> None:
        """Book an evaluation. A value that is not finite fails the trial: failed is not infeasible."""
        trial = self._trials.pop(ticket.number, None)
        if trial is None:
            raise RefusedError(f"trial {ticket.number} was told already or never asked; ask first")
        for name, row, missed in zip(
            constraint_names(evaluation.margins), evaluation.margins, evaluation.missed, strict=True
        ):
            trial.set_constraint(name, constraint(row, missed))
        if value != value or value in (float("inf"), float("-inf")):
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, value)


def _sampler(name: str, seed: int) -> BaseSampler:
    if name == "random":
        return RandomSampler(seed=seed)
    if name != "tpe":
        raise RefusedError(f"sampler is {name!r}, must be one of {', '.join(SAMPLERS)}; choose one")
    with warnings.catch_warnings():
        # Multivariate TPE is marked experimental; the choice and its figures stand in docs/decisions.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=STARTUP_TRIALS)
