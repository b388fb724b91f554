"""The search of a controller: one window of live traffic, around the setting in force, again in every cycle.

The same twin, space, study and order of settings as ``recommend``, with what a controller can do without left out: no
sweep and the burst only for the settings that lead. Trials run on a few windows of the traffic where all of it
would take too long. Random search pays as many simulated steps. Live results correct the twin (``lessons``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np

from rooftune.policies.guard import limit_step
from rooftune.policies.request import DEADLINE, Setting
from rooftune.policies.slo import MarginRow, Slo
from rooftune.policies.step_time import priced, step_time
from rooftune.tuner.search import baselines
from rooftune.tuner.search.arena import APART_S, PARALLEL, Arena
from rooftune.tuner.search.baselines import random_settings
from rooftune.tuner.search.evaluation import Advice, Case, Evaluation, Model, Role
from rooftune.tuner.search.lessons import LiveResult, distance_octaves, lesson
from rooftune.tuner.search.load import (
    Carried,
    Demand,
    Load,
    estimated_rps,
    grows,
    horizon,
    offered_rps,
    sustainable_rps,
)
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.search.rank import (
    BATCH_SHARE,
    SAME_SHARE,
    alike,
    binding,
    complexity,
    noise,
    rank,
    stays,
    value,
    verdict,
)
from rooftune.tuner.search.space import EVERYTHING, SearchSpace, search_space
from rooftune.tuner.search.stages import (
    BURST_TOLERANCE,
    Track,
    excerpt,
    random_search,
    replay_in_force,
    search,
    shares,
    under,
    with_burst,
)
from rooftune.tuner.search.study import SettingStudy, constraints_of
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.traffic.workload import Traffic

Tell = Callable[[str, int, int], None]

# A search of USUAL_TRIALS pays about this many steps, well under a second on two cores. Where all of the traffic would
# cost more, trials run on its busiest stretch, and only what leads there runs on all of it.
SEARCH_STEPS, USUAL_TRIALS = 700_000, 50
LEAST_SHARE, WHOLE_SHARE = 0.12, 0.7
# What a search tries takes more steps than large budgets do.
STEPS_OF_TRIAL = 1.5
OVERTIME = 1.25
# Random search pays this share of the steps, and is held against what the search had found for as many.
RANDOM_SHARE = 0.25
# After LEAST_TRIALS it ends early when PATIENCE trials in a row found nothing better, or it has paid twice as much.
LEAST_TRIALS, PATIENCE = 32, 24
LEADERS, SHORTLIST = 6, 3
MOST_LIVE, MOST_DRAWS = 12, 4
# A trial that must stay this far below the best share is not replayed to its end.
GIVE_UP = 0.1
MOST_PATH = 8
# Settings by whose estimates the search knows whether anything carries the load; and the estimates, as ratios to what
# is required, within which a replay decides.
DRAWN, NEAR_RATE = 64, (0.7, 1.4)
START_BUDGETS = 4


@dataclass(frozen=True, kw_only=True)
class Question(Case):
    """One window to search on.

    base: the setting in force, from which the search goes out. bounds: knob -> (least, greatest); a knob that is not
    named is not searched. draws: other step models that the measurements allow. live: settings that ran live,
    newest first. now_error: observed minus predicted share of the setting in force. warm: settings worth a try, such as
    what was best for earlier windows. boot: what the engine returns to when a lease ends (None: not known); headroom:
    by how much a setting must carry more than what is offered; horizon_s: how far a growing queue is looked at.
    largest_ratio: of one push, see ``rooftune.policies.guard.limit_step``.
    """

    base: Setting
    bounds: Mapping[str, tuple[float, float]]
    trials: int
    seed: int = 0
    draws: Sequence[Model] = ()
    live: Sequence[LiveResult] = ()
    now_error: float = 0.0
    warm: Sequence[Setting] = ()
    boot: Setting | None = None
    headroom: float = 0.15
    horizon_s: float = 600.0
    largest_ratio: float = math.inf


@dataclass(frozen=True, kw_only=True)
class LiveProposal:
    """What the search came to. Shares of ``now``, ``best`` and ``leaders`` are the twin's with live corrections.

    twin_now, twin_best: the twin's alone. noise: half-width of the 90 % interval of best - now. trials,
    simulated_steps: of the Optuna search alone, the replays of its leaders included; live_trials: those that stood
    beside them in its study. random_best, equal_best: the best that random search found for random_steps, and Optuna
    for as many, both where the trials ran. batch: no targets. load: what arrives and what is carried; None when all of
    the window arrived at once. path: the limited steps towards ``best`` with the twin's shares; one of them can be
    worse than both ends.
    """

    verdict: Advice
    now: Evaluation
    best: Evaluation
    twin_now: float
    twin_best: float
    noise: float = 0.0
    trials: int = 0
    simulated_steps: int = 0
    random_trials: int = 0
    random_steps: int = 0
    random_best: Evaluation | None = None
    equal_best: Evaluation | None = None
    live_trials: int = 0
    leaders: tuple[Evaluation, ...] = ()
    batch: bool = False
    load: Load | None = None
    path: tuple[tuple[Setting, float], ...] = ()

    @property
    def binding(self) -> MarginRow | None:
        """The target that limits ``best``."""
        return binding(self.best.margins)

    @property
    def gain(self) -> float:
        """Share of good requests, best minus now; without targets the relative gain in tokens per second."""
        if self.batch:
            return self.best.tokens_per_s / max(self.now.tokens_per_s, 1e-9) - 1.0
        return self.best.attainment - self.now.attainment


def research(question: Question, tell: Tell = lambda stage, done, total: None) -> LiveProposal:
    """Search again. Deterministic for equal arguments.

    Raises InputError when ``base`` is outside the boot envelope or no request fits the KV pool.
    """
    space = search_space(
        question.engine,
        question.base,
        question.slo,
        priced(question.model).formula,
        knobs=frozenset(question.bounds) & EVERYTHING,
        bounds=question.bounds,
    )
    demand = _demand(question, space)
    short, goodput = demand is not None and demand.short, question.slo.objective == "goodput"
    q = horizon(question, demand.horizon_s(question.horizon_s)) if demand is not None and short else question
    whole = Arena(q, _enough(q, q.traffic), short and goodput)
    raw_now, now_result = replay_in_force(q, q.base, "read the engine's pool again", whole.ends)
    all_steps = STEPS_OF_TRIAL * raw_now.simulated_steps * min(q.trials, USUAL_TRIALS)
    windows = excerpt(whole, all_steps, SEARCH_STEPS, LEAST_SHARE, WHOLE_SHARE)
    if windows is not None and short:  # as much from the beginning: a later window would begin with an empty queue
        windows = replace(windows, case=horizon(q, windows.case.traffic.span_s))
    windows = windows and replace(windows, max_steps=_enough(q, windows.case.traffic))
    live = [one for one in q.live if one.setting != q.base and _possible(one.setting, q.engine)][:MOST_LIVE]
    twin = _twin_of(live, whole)
    lessons = [lesson(one, twin.get(one.setting, 0.0), q.now_error) for one in live]
    track = Track(whole, windows, lessons, demand, GIVE_UP if goodput else math.inf)
    now = track.corrected(raw_now)
    if not space.knobs:
        what, same = Advice.KEEP if now.feasible else Advice.INFEASIBLE, raw_now.attainment
        load = _load_of(demand, q, raw_now, raw_now)
        return LiveProposal(verdict=what, now=now, best=now, twin_now=same, twin_best=same, load=load)
    paid = track.paid_steps
    study = SettingStudy(space, sampler="tpe", seed=q.seed)
    lived = _tell_live(study, track, live, q.slo)
    for setting in _starts(q, space, now_result):
        study.enqueue(setting)
    looks, spent = search(study, track, q.trials, lambda done: tell("search", done, q.trials), partial(_settled, q.slo))
    rival = track.rival()
    steps = int(RANDOM_SHARE * spent[-1])
    random_looks = random_search(
        space, rival, q.seed, steps, lambda done: tell("random search", done, steps), 2 * q.trials
    )
    equal = [look for look, paid_then in zip(looks, spent, strict=True) if paid_then <= rival.paid_steps]
    tell("decide", 0, 1)
    tried = [_plain(e, q.base) for e in track.lead([*lived, *looks, *random_looks], Role.SEARCH, LEADERS)]
    now, *tried = _carried([now, *tried], question, demand)
    best = _decide([now, *tried], q, windows or whole)
    raw_best, best_result = evaluate(q, best.setting, best.role, replace(whole).ends)
    uncertainty = noise(now_result, best_result, q.slo, q.seed)
    what = verdict(now, best, uncertainty, q.slo)
    if stays(what, now, best, max(SAME_SHARE, uncertainty)):
        best, raw_best = now, raw_now
    batch = q.slo.objective == "tokens_per_s"
    return LiveProposal(
        verdict=what,
        now=now,
        best=best,
        twin_now=raw_now.attainment,
        twin_best=raw_best.attainment,
        noise=BATCH_SHARE if batch else uncertainty,
        trials=len(looks),
        simulated_steps=track.paid_steps - paid,
        random_trials=len(random_looks),
        random_steps=rival.paid_steps,
        random_best=min(random_looks, key=lambda e: rank(e, q.slo)),
        equal_best=min(equal or looks[:1], key=lambda e: rank(e, q.slo)),
        live_trials=len(lived),
        leaders=tuple(tried),
        batch=batch,
        load=_load_of(demand, q, raw_now, raw_best),
        path=_path(q, whole, best.setting),
    )


def _load_of(demand: Demand | None, q: Question, now: Evaluation, best: Evaluation) -> Load | None:
    """With the search's end. The proposal's rate is an estimate; the other two were replayed."""
    if demand is None:
        return None
    in_force = Carried(demand.in_force_rps, now.busy_share)
    proposed, boot = in_force, None
    if best.setting != q.base:
        proposed = Carried(estimated_rps(q, best.setting), best.busy_share)
    if q.boot is not None:
        share = now.busy_share if q.boot == q.base else evaluate(q, q.boot, Role.DEFAULT)[0].busy_share
        boot = Carried(demand.boot_rps, share)
    nothing = demand.overload and demand.boot_rps < demand.wanted_rps
    return Load(demand.offered_rps, in_force, boot, proposed, nothing)


def _demand(q: Question, space: SearchSpace) -> Demand | None:
    """None when all of the window arrived at once: it has no rate."""
    if len(q.traffic) < 2 or q.traffic.span_s <= 0.0:
        return None
    offered = offered_rps(q)
    asked = list(dict.fromkeys([q.base, q.boot or q.base]))
    with ThreadPoolExecutor(PARALLEL) as pool:
        rates = dict(zip(asked, pool.map(lambda one: sustainable_rps(q, one, q.horizon_s)[0], asked), strict=True))
    draws = islice(random_settings(space, q.seed + 2), DRAWN) if space.knobs else ()
    most = max(estimated_rps(q, one) for one in (q.base, space.fullest, *draws))
    return Demand(offered, (1.0 + q.headroom) * offered, most, rates[q.base], rates[q.boot or q.base])


def _carried(tried: Sequence[Evaluation], q: Question, demand: Demand | None) -> list[Evaluation]:
    """The same, each replayed at the rate that it must carry where the estimate is not far from it. Under overload
    estimates are enough."""
    if demand is None or demand.overload:
        return list(tried)
    scale = demand.wanted_rps / demand.offered_rps

    def look(e: Evaluation) -> Evaluation:
        if e.setting == q.base:
            return replace(e, carries=demand.in_force_rps >= demand.wanted_rps)
        if not NEAR_RATE[0] <= e.sustainable_rps / demand.wanted_rps <= NEAR_RATE[1]:
            return e
        return replace(e, carries=not grows(q.at_rate(scale), e.setting, q.horizon_s))

    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(look, tried))


def _path(q: Question, whole: Arena, goal: Setting) -> tuple[tuple[Setting, float], ...]:
    """Steps that the engine does not allow end the path."""
    steps, at = list[Setting](), q.base
    while len(steps) < MOST_PATH and math.isfinite(q.largest_ratio):
        at = limit_step(at, goal, q.largest_ratio)
        if at == goal or at.step_tokens < at.max_running:
            break
        steps.append(at)
    return tuple((e.setting, e.attainment) for e in replace(whole).run([(step, Role.SEARCH) for step in steps]))


def _enough(q: Question, traffic: Traffic) -> int:
    """More steps than fit into the time of the traffic and a quarter more: the engine falls ever further behind, and
    what waits till then has missed the targets. Replays under overload are by far the dearest."""
    shortest_s = max(step_time(priced(q.model).formula, 1.0, 1.0, 0.0, 0.0), 1e-4)
    gaps_s = np.diff(traffic.arrival_s)
    span_s = float(gaps_s[gaps_s < APART_S / 2.0].sum())  # windows are far apart, and nothing runs between them
    return int(OVERTIME * span_s / shortest_s) + 2 * int(traffic.output_tokens.max()) + 1000


def _possible(setting: Setting, engine: Engine) -> bool:
    """A live trial from before a restart may lie outside the new envelope."""
    inside = setting.max_running <= engine.sequence_ceiling and setting.max_running <= setting.step_tokens
    return inside and setting.step_tokens <= engine.boot.ceiling_tokens


def _twin_of(live: Sequence[LiveResult], arena: Arena) -> dict[Setting, float]:
    """The twin's share in the present window of settings for whose own stretch it is not known."""
    unknown = list(dict.fromkeys(one.setting for one in live if one.twin_attainment is None))
    return {e.setting: e.attainment for e in arena.run([(setting, Role.SEARCH) for setting in unknown])}


def _tell_live(study: SettingStudy, track: Track, live: Sequence[LiveResult], slo: Slo) -> list[Evaluation]:
    """Live results as trials of their own, where the sampler's space holds their setting; these are leaders like any.

    Those of one setting are one trial: their corrected share is one number.
    """
    counts: dict[Setting, int] = {}
    for one in live:
        counts[one.setting] = counts.get(one.setting, 0) + one.requests
    looks = track.look([setting for setting in counts if study.holds(setting)], Role.SEARCH)
    for e in looks:
        study.add_live(e.setting, value(e, slo), {**constraints_of(e), **track.constraint(e)}, counts[e.setting])
    return looks


def _starts(q: Question, space: SearchSpace, now_result: RunResult) -> list[Setting]:
    """Where the search begins: what is in force, what was good before, the formula, the knee, and a few budgets."""
    named = [q.base, *q.warm]
    points = baselines.starting_points(space, q.slo, priced(q.model).formula, now_result)
    named += [setting for setting, role in points if role is not Role.SWEEP]
    if "step_tokens" in space.knobs:
        ratio = (space.high_tokens / space.low_tokens) ** (1.0 / (START_BUDGETS - 1))
        named += [
            space.base._replace(step_tokens=round(space.low_tokens * ratio**k)) for k in reversed(range(START_BUDGETS))
        ]
    return named


def _settled(slo: Slo, looks: list[Evaluation], spent: list[int]) -> bool:
    """Whether the search has paid enough, or the latest trials found nothing that counts as better."""
    if len(looks) < LEAST_TRIALS:
        return False
    if spent[-1] > 2 * SEARCH_STEPS:
        return True
    before = min(looks[:-PATIENCE], key=lambda e: rank(e, slo))
    after = min(looks[-PATIENCE:], key=lambda e: rank(e, slo))
    if slo.objective == "tokens_per_s":
        return after.tokens_per_s <= before.tokens_per_s * (1.0 + BATCH_SHARE)
    return after.feasible <= before.feasible and after.attainment <= before.attainment + SAME_SHARE


def _plain(e: Evaluation, base: Setting) -> Evaluation:
    """What only the deadline order reads stays as it is for every other order: no change that changes nothing."""
    if e.setting.order_policy == DEADLINE:
        return e
    same = e.setting._replace(ttft_target_s=base.ttft_target_s, prefill_s_per_token=base.prefill_s_per_token)
    return replace(e, setting=same)


def _decide(tried: Sequence[Evaluation], q: Question, seen: Arena) -> Evaluation:
    """Among equals those that hold under every draw of the model and a burst; of these the plain and near one.

    seen: where the trials ran.
    """
    equals = list({e.setting: e for e in sorted(_equals(tried, q), key=lambda e: _near(e, q))}.values())
    shortlist = equals[:SHORTLIST]
    if len(shortlist) == 1:
        return shortlist[0]
    rivals, seen = shortlist, replace(seen, max_steps=math.inf)
    for arena in (*(under(seen, draw) for draw in q.draws[:MOST_DRAWS]), with_burst(seen)):
        found = shares(arena, rivals)
        least = max(found[e.setting] for e in shortlist) - BURST_TOLERANCE
        shortlist = [e for e in shortlist if found[e.setting] >= least]
    return min(shortlist, key=lambda e: _near(e, q))


def _equals(tried: Sequence[Evaluation], q: Question) -> list[Evaluation]:
    """As ``alike``; a request more or less is no difference either."""
    if q.slo.objective == "tokens_per_s":
        return alike(tried, q.slo)
    top = min(tried, key=lambda e: rank(e, q.slo))
    least = top.attainment - max(SAME_SHARE, 1.0 / len(q.traffic))
    return [e for e in tried if (e.feasible, e.carries) == (top.feasible, top.carries) and e.attainment >= least]


def _near(e: Evaluation, q: Question) -> tuple[float, ...]:
    return (complexity(e, q.base), distance_octaves(e.setting, q.base), *rank(e, q.slo)[2:])
