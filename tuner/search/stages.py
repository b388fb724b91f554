"""What the search of ``recommend`` and that of a controller share: the two stages of a trial, and both loops.

Trials run on a few windows of long traffic, and only what leads there runs on all of it. Random search pays for
simulated steps in the same two stages.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from rooftune.policies.errors import bad_value
from rooftune.policies.request import Setting
from rooftune.tuner.search.arena import PARALLEL, WINDOWS, Arena, slices
from rooftune.tuner.search.baselines import random_settings
from rooftune.tuner.search.evaluation import Case, Evaluation, Model, Role
from rooftune.tuner.search.lessons import Lesson, correction
from rooftune.tuner.search.load import Demand, estimated_rps
from rooftune.tuner.search.objective import MARGIN_CAP, evaluate
from rooftune.tuner.search.rank import rank, value
from rooftune.tuner.search.space import SearchSpace
from rooftune.tuner.search.study import SettingStudy, constraints_of
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.sim.twin import TO_THE_END, Ends
from rooftune.tuner.traffic.reshape import Burst, add_burst

# The burst: twice the rate, for a tenth of the time, from 40 % on. A share this much lower under it is no difference.
BURST_FACTOR, BURST_START, BURST_LENGTH = 2.0, 0.4, 0.1
BURST_TOLERANCE = 0.01
# How far the estimate of what a setting carries may be too low (docs/decisions/026-headroom.md); leaders are replayed.
ESTIMATE_ERROR = 0.1


def with_burst(calm: Arena) -> Arena:
    """The same requests with a burst; what comes all at once is a burst already."""
    traffic = calm.case.traffic
    if traffic.span_s > 0.0:
        traffic = add_burst(traffic, Burst(BURST_FACTOR, traffic.span_s * BURST_LENGTH, start_share=BURST_START))
    return replace(calm, case=replace(calm.case, traffic=traffic))


def under(arena: Arena, draw: Model) -> Arena:
    """The same traffic with steps as another model has them."""
    return replace(arena, case=replace(arena.case, model=draw))


def excerpt(
    whole: Arena, steps: float, paid_steps: int, least_share: float, whole_share: float, window_s: float = math.inf
) -> Arena | None:
    """A few windows of the traffic, each of about ``window_s`` at least, that cost ``paid_steps`` in all trials.

    steps: what all trials would cost on all of the traffic. None when more than ``whole_share`` of it is affordable.
    """
    share = max(paid_steps / max(steps, 1.0), least_share)
    if share >= whole_share:
        return None
    traffic = whole.case.traffic
    count = min(max(int(traffic.span_s * share / window_s), 1), WINDOWS)
    return replace(whole, case=replace(whole.case, traffic=slices(traffic, share, count)), whole_traffic=False)


def replay_in_force(case: Case, setting: Setting, remedy: str, ends: Ends = TO_THE_END) -> tuple[Evaluation, RunResult]:
    """The setting in force on all of the traffic.

    Raises InputError, which ends with ``remedy``, when no request fits the KV pool.
    """
    now, result = evaluate(case, setting, Role.CURRENT, ends)
    if now.refused == len(case.traffic):
        pool = case.engine.kv_blocks * case.engine.boot.block_tokens
        raise bad_value("KV pool", pool, "large enough for at least one request", remedy)
    return now, result


@dataclass(frozen=True)
class Track:
    """The two stages of one search: a look at windows of the traffic, then the leaders on all of it.

    windows: None when every trial runs on the whole traffic. lessons: corrections by what ran live, on everything that
    comes out. demand: what a setting must carry; None: not asked. give_up: a trial that must stay this far below the
    best is not replayed to its end; so far the sampler still sees which of two bad settings is the worse.
    """

    whole: Arena
    windows: Arena | None = None
    lessons: Sequence[Lesson] = ()
    demand: Demand | None = None
    give_up: float = math.inf

    def rival(self) -> "Track":
        """The same for another search, nothing paid yet."""
        return replace(self, whole=replace(self.whole), windows=self.windows and replace(self.windows))

    @property
    def paid_steps(self) -> int:
        """Steps simulated so far in both stages."""
        return self.whole.paid_steps + (self.windows.paid_steps if self.windows else 0)

    def look(self, settings: Sequence[Setting], role: Role) -> list[Evaluation]:
        """First stage."""
        return self._run(self.windows or self.whole, settings, role)

    def lead(self, looks: Sequence[Evaluation], role: Role, most: int) -> list[Evaluation]:
        """Second stage: the ``most`` best looks on all of the traffic, from the twin's own values again."""
        ordered = sorted(looks, key=lambda e: rank(e, self.whole.case.slo))
        settings = list(dict.fromkeys(e.setting for e in ordered))[:most]
        return self._run(self.whole, settings, role)

    def _run(self, arena: Arena, settings: Sequence[Setting], role: Role) -> list[Evaluation]:
        """Evaluates, and raises the bar for the next ones: what cannot come near the best is given up."""
        found = [self.corrected(e) for e in arena.run([(setting, role) for setting in settings])]
        slack = self.give_up + max((abs(one.miss) for one in self.lessons), default=0.0)
        best = max((e.attainment for e in found if e.carries), default=0.0)
        arena.least_share = max(arena.least_share, min(best, self._least) - slack)
        return found

    def corrected(self, raw: Evaluation) -> Evaluation:
        """With what it carries, and the corrections by what ran live."""
        if self.demand is not None:
            carried_rps = estimated_rps(self.whole.case, raw.setting)
            enough = carried_rps >= (1.0 - ESTIMATE_ERROR) * self.demand.required_rps
            raw = replace(raw, sustainable_rps=carried_rps, carries=enough)
        change = correction(raw.setting, self.lessons)
        if change == 0.0:
            return raw
        share = min(max(raw.attainment + change, 0.0), 1.0)
        return replace(raw, attainment=share, feasible=raw.feasible and (change > 0.0 or share >= self._least))

    def constraint(self, corrected: Evaluation) -> dict[str, float]:
        """Beside the targets' own: the load, and what live results say of all targets together.

        Under overload no target is met for long: none binds, so that the sampler maximises the share of good requests.
        """
        if self.demand is not None and self.demand.overload:
            return dict.fromkeys(constraints_of(corrected), -1.0) | self._load(corrected)
        return self._load(corrected) | self._live(corrected)

    def _load(self, corrected: Evaluation) -> dict[str, float]:
        if self.demand is None:
            return {}
        short = 1.0 - corrected.sustainable_rps / self.demand.required_rps
        return {"load": -1.0 if corrected.carries else MARGIN_CAP * min(max(short, 1e-3), 1.0)}

    def _live(self, corrected: Evaluation) -> dict[str, float]:
        if not self.lessons:
            return {}
        contradicted = not corrected.feasible and all(row.margin <= 0.0 for row in corrected.margins if row.samples)
        return {"live": MARGIN_CAP * max(self._least - corrected.attainment, 1e-3) if contradicted else -1.0}

    @property
    def _least(self) -> float:
        """A setting that misses more requests than all targets together allow cannot meet them all."""
        return 1.0 - sum(1.0 - target.quantile for target, _ in self.whole.case.slo.all_targets())


def search(
    study: SettingStudy,
    track: Track,
    trials: int,
    tell: Callable[[int], None],
    enough: Callable[[list[Evaluation], list[int]], bool] = lambda looks, spent: False,
) -> tuple[list[Evaluation], list[int]]:
    """Optuna's looks, and the steps that had been paid after each; ends early when ``enough`` of both says so."""
    looks, spent, begun = list[Evaluation](), list[int](), track.paid_steps
    while len(looks) < trials and not enough(looks, spent):
        tell(len(looks))
        tickets = [study.ask() for _ in range(min(PARALLEL, trials - len(looks)))]
        batch = track.look([ticket.setting for ticket in tickets], Role.SEARCH)
        for ticket, evaluation in zip(tickets, batch, strict=True):
            study.tell(ticket, evaluation, value(evaluation, track.whole.case.slo), track.constraint(evaluation))
        looks += batch
        spent += [track.paid_steps - begun] * len(batch)
    tell(len(looks))
    return looks, spent


def random_search(
    space: SearchSpace, track: Track, seed: int, steps: int, tell: Callable[[int], None], most: float = math.inf
) -> list[Evaluation]:
    """Looks at independent draws until they have paid ``steps``, or at ``most`` of them."""
    looks = list[Evaluation]()
    draws = random_settings(space, seed + 1)
    while not looks or (track.paid_steps < steps and len(looks) < most):
        tell(min(track.paid_steps, steps))
        looks += track.look(list(islice(draws, PARALLEL)), Role.RANDOM)
    tell(min(track.paid_steps, steps))
    return looks


def shares(arena: Arena, tried: Sequence[Evaluation]) -> dict[Setting, float]:
    """Good shares of these settings there."""
    return {e.setting: e.attainment for e in arena.run([(e.setting, e.role) for e in tried])}
