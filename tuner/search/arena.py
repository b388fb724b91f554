"""Where settings are tried: one traffic, a few replays at a time, each setting once."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo
from rooftune.policies.step_time import StepCost, StepModel
from rooftune.tuner.search.evaluation import Evaluation, Role
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.noise import QUIET, StepNoise
from rooftune.tuner.sim.twin import NEVER
from rooftune.tuner.sim.workload import Traffic

# Replays release the interpreter, so two run at a time; results come in the order asked, so nothing depends on it.
PARALLEL = 2


class Arena:
    """Evaluates settings on one traffic and remembers; ``paid_steps`` counts the steps really simulated."""

    def __init__(
        self,
        traffic: Traffic,
        engine: Engine,
        model: StepModel | StepCost,
        slo: Slo,
        *,
        whole_traffic: bool = True,
        noise: StepNoise = QUIET,
        max_steps: int = NEVER,
    ) -> None:
        self._traffic, self._engine, self._model, self._slo = traffic, engine, model, slo
        self._whole, self._noise, self._most = whole_traffic, noise, max_steps
        self._known: dict[Setting, Evaluation] = {}
        self.paid_steps = 0

    def run(
        self, wanted: Sequence[tuple[Setting, Role]], tell: Callable[[int], None] = lambda done: None
    ) -> list[Evaluation]:
        """Evaluate in parallel; tell(done) after each. A setting that is known already costs nothing."""
        fresh = list(dict.fromkeys(setting for setting, _ in wanted if setting not in self._known))
        with ThreadPoolExecutor(PARALLEL) as pool:
            for done, evaluation in enumerate(pool.map(self._evaluate, fresh), start=1):
                self._known[evaluation.setting] = evaluation
                self.paid_steps += evaluation.simulated_steps
                tell(len(wanted) - len(fresh) + done)
        return [replace(self._known[setting], role=role) for setting, role in wanted]

    def _evaluate(self, setting: Setting) -> Evaluation:
        asked = (self._traffic, self._engine, setting, self._model, self._slo, Role.SEARCH, self._noise, self._most)
        found = evaluate(*asked)[0]
        return replace(found, whole_traffic=self._whole)


class Track:
    """The two stages of one search: a look at windows of the traffic, then the leaders on all of it.

    windows: None when every trial runs on the whole traffic. enough(traffic): steps after which a replay of it is given
    up, because the setting is hopeless.
    """

    def __init__(
        self,
        windows: Traffic | None,
        traffic: Traffic,
        engine: Engine,
        model: StepModel | StepCost,
        slo: Slo,
        noise: StepNoise = QUIET,
        enough: Callable[[Traffic], int] = lambda traffic: NEVER,
    ) -> None:
        self.whole = self._short = Arena(traffic, engine, model, slo, noise=noise, max_steps=enough(traffic))
        if windows is not None:
            most = enough(windows)
            self._short = Arena(windows, engine, model, slo, whole_traffic=False, noise=noise, max_steps=most)

    @property
    def paid_steps(self) -> int:
        """Steps simulated so far in both stages."""
        return self.whole.paid_steps + (0 if self._short is self.whole else self._short.paid_steps)

    def look(self, settings: Sequence[Setting], role: Role) -> list[Evaluation]:
        """First stage."""
        return self._short.run([(setting, role) for setting in settings])

    def lead(
        self, looks: Sequence[Evaluation], role: Role, most: int, key: Callable[[Evaluation], Any]
    ) -> list[Evaluation]:
        """Second stage: the ``most`` best looks by ``key`` on all of the traffic (every look, if it ran on that)."""
        if self._short is self.whole:
            return list(looks)
        settings = list(dict.fromkeys(e.setting for e in sorted(looks, key=key)))[:most]
        return self.whole.run([(setting, role) for setting in settings])
