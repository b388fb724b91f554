"""What a controller's searches came to, over months, in Optuna's storage: live trials, and the best twin trial of each.

A window's own trials are worth nothing for the next window, whose traffic is another; what is kept is where they led
and how settings did live. Studies follow one another, ``name/000001`` and so on, so that old trials can go: a database
of Optuna's forgets whole studies only. Parameters have fixed wide ranges, so that no change of knobs, grid or bounds
can ever disagree with what is stored.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from rooftune.policies.request import Setting
from rooftune.tuner.search.evaluation import Case
from rooftune.tuner.search.lessons import LiveResult
from rooftune.tuner.search.space import SearchSpace
from rooftune.tuner.search.study import again, open_storage

T = TypeVar("T")

STUDY_TRIALS = 200  # then the next study begins
STUDIES = 2  # kept: the running one and the one before
# A controller must go on: it waits this long for another's lock, twice, and then says so.
LOCK_WAIT_S, TRIES = 3.0, 2
_KEY, _LIVE = "setting", "live"
_INTEGERS = {name for name, kind in Setting.__annotations__.items() if kind is int}


@dataclass(frozen=True)
class TwinResult:
    """The best setting of one search. attainment: share of good requests on the twin, 0..1."""

    setting: Setting
    attainment: float
    requests: int


class Archive:
    """Raises UnreachableError, from every method, when the database does not take part."""

    def __init__(self, url: str, name: str) -> None:
        self._name = name
        self._storage = open_storage(url, lock_wait_s=LOCK_WAIT_S, tries=TRIES)

    def remembered(self, most: int) -> list[Setting]:
        """Settings that searches ended in, each once, the latest first."""
        found = [_setting(trial) for trial in reversed(self._trials()) if not trial.user_attrs.get(_LIVE)]
        return list(dict.fromkeys(setting for setting in found if setting is not None))[:most]

    def live(self) -> list[LiveResult]:
        """Settings that ran live, the oldest first."""
        results = []
        for trial in self._trials():
            setting = _setting(trial)
            if trial.user_attrs.get(_LIVE) and setting is not None:
                attrs = trial.user_attrs
                results.append(LiveResult(setting, float(trial.values[0]), int(attrs["requests"]), attrs["twin"]))
        return results

    def keep(self, knobs: frozenset[str], best: TwinResult, live: Sequence[LiveResult]) -> None:
        """Add one search's end, and those live results that are not there yet; makes room where it must."""
        known = self.live()
        study = self._study()
        for one in live:
            if one not in known:
                attrs = {_LIVE: True, "requests": one.requests, "twin": one.twin_attainment}
                self._add(study, knobs, one.setting, one.attainment, attrs)
        self._add(study, knobs, best.setting, best.attainment, {_LIVE: False, "requests": best.requests})

    def _add(
        self, study: optuna.Study, knobs: frozenset[str], setting: Setting, value: float, attrs: Mapping[str, object]
    ) -> None:
        params = {name: getattr(setting, name) for name in sorted(knobs & {*Setting._fields})}
        trial = optuna.trial.create_trial(
            value=value,
            params=params,
            distributions={name: _range(name) for name in params},
            user_attrs={**attrs, _KEY: json.dumps(setting._asdict())},
        )
        _twice(lambda: study.add_trial(trial))

    def _names(self) -> list[str]:
        """Studies of this name, the oldest first."""
        known = _twice(lambda: optuna.get_all_study_names(self._storage))
        return sorted(name for name in known if name.startswith(f"{self._name}/") and name[-6:].isdigit())

    def _trials(self) -> list[FrozenTrial]:
        return [trial for name in self._names() for trial in _complete(self._open(name))]

    def _open(self, name: str) -> optuna.Study:
        return _twice(
            lambda: optuna.create_study(
                storage=self._storage, study_name=name, direction="maximize", load_if_exists=True
            )
        )

    def _study(self) -> optuna.Study:
        """The one to add to. The second process to ask finds it there."""
        names = self._names() or [f"{self._name}/000001"]
        study = self._open(names[-1])
        if len(_complete(study)) >= STUDY_TRIALS:
            names.append(f"{self._name}/{int(names[-1][-6:]) + 1:06d}")
            study = self._open(names[-1])
        for old in names[:-STUDIES]:
            _twice(partial(_forget, old, self._storage))
        return study


def _complete(study: optuna.Study) -> list[FrozenTrial]:
    return _twice(lambda: study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))


def _forget(name: str, storage: optuna.storages.BaseStorage) -> None:
    try:
        optuna.delete_study(study_name=name, storage=storage)
    except KeyError:  # another controller was faster
        pass


def _twice(call: Callable[[], T]) -> T:
    return again(call, TRIES)


def _range(name: str) -> BaseDistribution:
    return IntDistribution(0, (1 << 31) - 1) if name in _INTEGERS else FloatDistribution(0.0, 1e9)


def _setting(trial: FrozenTrial) -> Setting | None:
    """None for a trial of a release that knew other knobs."""
    try:
        return Setting(**json.loads(trial.user_attrs[_KEY]))
    except (KeyError, TypeError, ValueError):
        return None


def study_key(name: str, case: Case, space: SearchSpace) -> str:
    """``name`` and a short sum of all that a value depends on; ``case``: with the traffic that trials run on.

    How far budgets and caps may go is left out: a wider or narrower range is the same study.
    """
    # What a trial draws by itself does not count, what it takes over from the base does.
    drawn = dict.fromkeys(space.knobs & {*Setting._fields}, 0)
    engine, seen = case.engine, case.traffic
    boot = engine.boot._replace(ceiling_tokens=0)
    digest = sha256(repr((space.base._replace(**drawn), boot, engine.kv_blocks, case.slo)).encode())
    outside = (engine.outside_first_s, engine.outside_token_s)
    columns = [getattr(seen, field.name) for field in fields(seen) if field.name not in ("name", "tenant_names")]
    for part in _flat((*columns, *outside, *case.model)):
        digest.update(part)
    return f"{name}/{digest.hexdigest()[:12]}"


def _flat(value: Any) -> Iterator[bytes]:
    if isinstance(value, tuple):
        for part in value:
            yield from _flat(part)
    else:
        yield np.asarray(value).tobytes()
