"""Where settings are tried: one traffic, a few replays at a time, each setting once."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo
from rooftune.policies.step_time import StepCost, StepModel
from rooftune.tuner.search.evaluation import Evaluation, Role
from rooftune.tuner.search.lessons import Lesson, correction
from rooftune.tuner.search.objective import MARGIN_CAP, evaluate
from rooftune.tuner.search.rank import rank
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.noise import QUIET, StepNoise
from rooftune.tuner.sim.twin import NEVER
from rooftune.tuner.traffic.reshape import window
from rooftune.tuner.traffic.workload import Traffic

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


class Corrected:
    """A track whose evaluations carry the live corrections."""

    def __init__(self, track: Track, lessons: Sequence[Lesson], slo: Slo) -> None:
        self.track, self._lessons = track, lessons
        # Who misses more requests than all targets together allow to miss cannot meet them all.
        self._least = 1.0 - sum(1.0 - target.quantile for target, _ in slo.all_targets())

    def look(self, settings: Sequence[Setting], role: Role) -> list[Evaluation]:
        return [self.mended(e) for e in self.track.look(settings, role)]

    def lead(self, looks: Sequence[Evaluation], role: Role, most: int, slo: Slo) -> list[Evaluation]:
        """The best looks on all of the traffic, from the twin's own values again."""
        chosen = list(dict.fromkeys(e.setting for e in sorted(looks, key=lambda e: rank(e, slo))))[:most]
        return [self.mended(e) for e in self.track.whole.run([(setting, role) for setting in chosen])]

    def mended(self, raw: Evaluation) -> Evaluation:
        change = correction(raw.setting, self._lessons)
        if change == 0.0:
            return raw
        share = min(max(raw.attainment + change, 0.0), 1.0)
        return replace(raw, attainment=share, feasible=raw.feasible and (change > 0.0 or share >= self._least))

    def constraint(self, mended: Evaluation) -> dict[str, float]:
        """Beside the targets' own: what live results say of them all together."""
        if not self._lessons:
            return {}
        contradicted = not mended.feasible and all(row.margin <= 0.0 for row in mended.margins if row.samples > 0)
        return {"live": MARGIN_CAP * max(self._least - mended.attainment, 1e-3) if contradicted else -1.0}


WINDOWS = 6
CANDIDATES = 60
# Between two windows everything drains: no queue outlasts this.
APART_S = 50_000.0


def slices(traffic: Traffic, share: float, windows: int = WINDOWS) -> Traffic:
    """About ``share`` (0..1) of the requests in so many windows: the busiest, and others spread evenly over the ranks.

    Windows are chosen by their tokens, so that a stretch of long prompts counts as busy. Deterministic.
    """
    length_s = traffic.span_s * share / windows
    if length_s <= 0.0 or share >= 1.0:
        return traffic
    starts = traffic.arrival_s[0] + np.linspace(0.0, traffic.span_s - length_s, CANDIDATES)
    work = np.concatenate([[0.0], np.cumsum((traffic.prompt_tokens + traffic.output_tokens).astype(np.float64))])
    first = np.searchsorted(traffic.arrival_s, starts)
    after = np.searchsorted(traffic.arrival_s, starts + length_s)
    ranked = np.argsort(work[first] - work[after], kind="stable")  # busiest first
    chosen: list[int] = []
    for place in np.linspace(0, CANDIDATES - 1, windows):
        nearest = ranked[np.argsort(np.abs(np.arange(CANDIDATES) - place), kind="stable")]
        apart = (w for w in nearest if all(abs(starts[w] - starts[c]) >= length_s for c in chosen))
        free = next((w for w in apart if first[w] < after[w]), None)
        if free is not None:
            chosen.append(int(free))
    chosen.sort(key=lambda w: float(starts[w]))
    parts = [window(traffic, float(starts[w]), length_s) for w in chosen]
    keys = [len(part.prefix_keys) for part in parts]
    before = np.concatenate([[0], np.cumsum(keys)[:-1]])
    offsets = [part.prefix_offsets[:-1] + base for part, base in zip(parts, before, strict=True)]
    return replace(
        traffic,
        arrival_s=np.concatenate([part.arrival_s + place * APART_S for place, part in enumerate(parts)]),
        prompt_tokens=np.concatenate([part.prompt_tokens for part in parts]),
        output_tokens=np.concatenate([part.output_tokens for part in parts]),
        cached_tokens=np.concatenate([part.cached_tokens for part in parts]),
        tenant=np.concatenate([part.tenant for part in parts]),
        prefix_offsets=np.concatenate([*offsets, [sum(keys)]])
        if len(traffic.prefix_offsets)
        else traffic.prefix_offsets,
        prefix_keys=np.concatenate([part.prefix_keys for part in parts]),
        name=f"{traffic.name} ({len(parts)} windows)",
    )
