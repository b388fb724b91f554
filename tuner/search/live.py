"""The search of a controller: one window of live traffic, around the setting in force, again in every cycle.

The same twin, space, study and order of settings as ``recommend``, with what a controller can do without left out: no
sweep and the burst only for the settings that lead. Trials run on a few windows of the traffic where all of it
would take too long. Random search pays as many simulated steps. Live results correct the twin (``lessons``).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from rooftune.policies.errors import bad_value
from rooftune.policies.request import DEADLINE, Setting
from rooftune.policies.slo import Slo, attainment
from rooftune.policies.step_time import StepCost, StepModel, priced, step_time
from rooftune.tuner.search import baselines
from rooftune.tuner.search.arena import PARALLEL, Arena, Corrected, Track, slices
from rooftune.tuner.search.evaluation import Advice, Evaluation, Role
from rooftune.tuner.search.lessons import LiveResult, distance_octaves, lesson
from rooftune.tuner.search.live_values import LiveProposal, Question
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.search.rank import BATCH_SHARE, SAME_SHARE, alike, binding, complexity, noise, rank, value, verdict
from rooftune.tuner.search.space import EVERYTHING, SearchSpace, search_space
from rooftune.tuner.search.study import SettingStudy, constraints_of
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.traffic.reshape import Burst, add_burst
from rooftune.tuner.traffic.workload import Traffic

Model = StepModel | StepCost
Tell = Callable[[str, int, int], None]

# A search of USUAL_TRIALS pays about this many steps, well under a second on two cores. Where all of the traffic would
# cost more, trials run on its busiest stretch, and only what leads there runs on all of it.
SEARCH_STEPS, USUAL_TRIALS = 700_000, 50
LEAST_SHARE, WHOLE_SHARE = 0.12, 0.7
STRETCHES = 1
# What a search tries takes more steps than large budgets do.
STEPS_OF_TRIAL = 1.5
OVERTIME = 1.25
# Random search pays this share of the steps, and is held against what the search had found for as many.
RANDOM_SHARE = 0.25
# It ends early when so many trials in a row found nothing better, or when it has paid half as much again.
LEAST_TRIALS, PATIENCE = 32, 24
LEADERS, SHORTLIST = 6, 3
MOST_LIVE, MOST_DRAWS = 12, 4
START_BUDGETS = 4
BURST_FACTOR, BURST_START, BURST_LENGTH = 2.0, 0.4, 0.1
BURST_TOLERANCE = 0.01


def research(question: Question, tell: Tell = lambda stage, done, total: None) -> LiveProposal:
    """Search again. Deterministic for equal arguments.

    Raises InputError when ``base`` is outside the boot envelope or no request fits the KV pool.
    """
    q = question
    batch = q.slo.objective == "tokens_per_s"
    formula = priced(q.model).formula
    knobs = frozenset(q.bounds) & EVERYTHING
    space = search_space(q.engine, q.base, q.slo, formula, knobs=knobs, bounds=q.bounds)
    raw_now, now_result = evaluate(q.traffic, q.engine, q.base, q.model, q.slo, Role.CURRENT, q.noise)
    if raw_now.refused == len(q.traffic):
        pool = q.engine.kv_blocks * q.engine.boot.block_tokens
        raise bad_value("KV pool", pool, "large enough for at least one request", "read the engine's pool again")
    stretch = _busiest(q.traffic, STEPS_OF_TRIAL * raw_now.simulated_steps * min(q.trials, USUAL_TRIALS))
    track = _track(q, stretch)
    live = [one for one in q.live if one.setting != q.base and _possible(one.setting, q.engine)][:MOST_LIVE]
    known = _twin_of(live, track.whole)
    lessons = [lesson(one, known.get(one.setting, 0.0), q.now_error) for one in live]
    seen = Corrected(track, lessons, q.slo)
    now = seen.mended(raw_now)
    if not space.knobs:
        return _kept(now, now_result, 0, q.slo)
    paid = track.paid_steps
    study = SettingStudy(space, sampler="tpe", seed=q.seed)
    lived = _tell_live(study, seen, live, q.slo)
    for setting in _starts(q, space, now_result):
        study.enqueue(setting)
    looks, spent = _search(study, seen, q, tell)
    rival = Corrected(_track(q, stretch), lessons, q.slo)
    random_looks = _random(rival, space, q, int(RANDOM_SHARE * spent[-1]), tell)
    equal = [look for look, paid_then in zip(looks, spent, strict=True) if paid_then <= rival.track.paid_steps]
    tell("decide", 0, 1)
    tried = [_plain(e, q.base) for e in seen.lead([*lived, *looks, *random_looks], Role.SEARCH, LEADERS, q.slo)]
    best = _decide([now, *tried], q, q.traffic if stretch is None else stretch)
    best_result = evaluate(q.traffic, q.engine, best.setting, q.model, q.slo, best.role, q.noise)[1]
    uncertainty = noise(now_result, best_result, q.slo, q.seed)
    what = verdict(now, best, uncertainty, q.slo)
    nothing_gained = what is Advice.INFEASIBLE and best.attainment <= now.attainment + max(SAME_SHARE, uncertainty)
    if what is Advice.KEEP or nothing_gained:
        best, best_result = now, now_result
    return LiveProposal(
        verdict=what,
        now=now,
        best=best,
        twin_now=raw_now.attainment,
        twin_best=attainment(best_result.outcomes, q.slo),
        noise=BATCH_SHARE if batch else uncertainty,
        binding=binding(best.margins),
        trials=len(looks),
        simulated_steps=track.paid_steps - paid,
        random_trials=len(random_looks),
        random_steps=rival.track.paid_steps,
        random_best=min(random_looks, key=lambda e: rank(e, q.slo)),
        equal_best=min(equal or looks[:1], key=lambda e: rank(e, q.slo)),
        live_trials=len(lived),
        leaders=tuple(tried),
        now_result=now_result,
        best_result=best_result,
        batch=batch,
    )


def _kept(now: Evaluation, result: RunResult, live: int, slo: Slo) -> LiveProposal:
    """Nothing may be moved."""
    what = Advice.KEEP if now.feasible else Advice.INFEASIBLE
    share = attainment(result.outcomes, slo)
    return LiveProposal(
        verdict=what,
        now=now,
        best=now,
        twin_now=share,
        twin_best=share,
        noise=0.0,
        binding=binding(now.margins),
        trials=0,
        simulated_steps=0,
        random_trials=0,
        random_steps=0,
        random_best=None,
        equal_best=None,
        live_trials=live,
        leaders=(),
        now_result=result,
        best_result=result,
    )


def _busiest(traffic: Traffic, steps: float) -> Traffic | None:
    """The stretch that trials run on; None: all of it."""
    share = max(SEARCH_STEPS / max(steps, 1.0), LEAST_SHARE)
    return slices(traffic, share, STRETCHES) if share < WHOLE_SHARE else None


def _track(q: Question, stretch: Traffic | None) -> Track:
    formula = priced(q.model).formula
    shortest_s = max(step_time(formula, 1.0, 1.0, 0.0, 0.0), 1e-4)

    def enough(traffic: Traffic) -> int:
        """More steps than fit into the time of the traffic and a quarter more: the engine falls ever further behind,
        and who waits till then has missed the targets. Replays under overload are by far the dearest."""
        return int(OVERTIME * traffic.span_s / shortest_s) + 2 * int(traffic.output_tokens.max()) + 1000

    return Track(stretch, q.traffic, q.engine, q.model, q.slo, q.noise, enough)


def _possible(setting: Setting, engine: Engine) -> bool:
    """A live trial from before a restart may lie outside the new envelope."""
    inside = setting.max_running <= engine.sequence_ceiling and setting.max_running <= setting.step_tokens
    return inside and setting.step_tokens <= engine.boot.ceiling_tokens


def _twin_of(live: Sequence[LiveResult], arena: Arena) -> dict[Setting, float]:
    """The twin's share in the present window of settings whose own stretch it was never asked about."""
    unknown = list(dict.fromkeys(one.setting for one in live if one.twin_attainment is None))
    return {e.setting: e.attainment for e in arena.run([(setting, Role.SEARCH) for setting in unknown])}


def _tell_live(study: SettingStudy, seen: Corrected, live: Sequence[LiveResult], slo: Slo) -> list[Evaluation]:
    """Live results as trials of their own, where the sampler's space holds their setting; these are leaders like any.

    Those of one setting are one trial: their corrected share is one number.
    """
    counts: dict[Setting, int] = {}
    for one in live:
        counts[one.setting] = counts.get(one.setting, 0) + one.requests
    looks = seen.look([setting for setting in counts if study.holds(setting)], Role.SEARCH)
    for e in looks:
        study.add_live(e.setting, value(e, slo), {**constraints_of(e), **seen.constraint(e)}, counts[e.setting])
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


def _search(study: SettingStudy, seen: Corrected, q: Question, tell: Tell) -> tuple[list[Evaluation], list[int]]:
    """The looks, and the steps that had been paid after each."""
    looks: list[Evaluation] = []
    spent: list[int] = []
    begun = seen.track.paid_steps
    while len(looks) < q.trials:
        if len(looks) >= LEAST_TRIALS and (spent[-1] > 2 * SEARCH_STEPS or _settled(looks, q.slo)):
            break
        tell("search", len(looks), q.trials)
        tickets = [study.ask() for _ in range(min(PARALLEL, q.trials - len(looks)))]
        batch = seen.look([ticket.setting for ticket in tickets], Role.SEARCH)
        for ticket, evaluation in zip(tickets, batch, strict=True):
            study.tell(ticket, evaluation, value(evaluation, q.slo), seen.constraint(evaluation))
        looks += batch
        spent += [seen.track.paid_steps - begun] * len(batch)
    return looks, spent


def _settled(looks: Sequence[Evaluation], slo: Slo) -> bool:
    """Whether the latest trials found nothing that counts as better."""
    before = min(looks[:-PATIENCE], key=lambda e: rank(e, slo))
    after = min(looks[-PATIENCE:], key=lambda e: rank(e, slo))
    if slo.objective == "tokens_per_s":
        return after.tokens_per_s <= before.tokens_per_s * (1.0 + BATCH_SHARE)
    return after.feasible <= before.feasible and after.attainment <= before.attainment + SAME_SHARE


def _random(rival: Corrected, space: SearchSpace, q: Question, steps: int, tell: Tell) -> list[Evaluation]:
    """Independent draws until they have paid ``steps``."""
    looks: list[Evaluation] = []
    draws = baselines.random_settings(space, q.seed + 1)
    while not looks or (rival.track.paid_steps < steps and len(looks) < 2 * q.trials):
        tell("random search", len(looks), q.trials)
        looks += rival.look(list(islice(draws, PARALLEL)), Role.RANDOM)
    return looks


def _plain(e: Evaluation, base: Setting) -> Evaluation:
    """What only the deadline order reads stays as it is for every other order: no change that changes nothing."""
    if e.setting.order_policy == DEADLINE:
        return e
    same = e.setting._replace(ttft_target_s=base.ttft_target_s, prefill_s_per_token=base.prefill_s_per_token)
    return replace(e, setting=same)


def _decide(tried: Sequence[Evaluation], q: Question, stretch: Traffic) -> Evaluation:
    """Among equals those that hold under every draw of the model and a burst; of these the plain and near one."""
    equals = list({e.setting: e for e in sorted(_equals(tried, q), key=lambda e: _near(e, q))}.values())
    shortlist = equals[:SHORTLIST]
    if len(shortlist) == 1:
        return shortlist[0]
    settings = [(e.setting, e.role) for e in shortlist]
    for model, traffic in (*((draw, stretch) for draw in q.draws[:MOST_DRAWS]), (q.model, _rush(stretch))):
        found = Arena(traffic, q.engine, model, q.slo, noise=q.noise).run(settings)
        shares = {e.setting: e.attainment for e in found}
        least = max(shares[e.setting] for e in shortlist) - BURST_TOLERANCE
        shortlist = [e for e in shortlist if shares[e.setting] >= least]
    return min(shortlist, key=lambda e: _near(e, q))


def _equals(tried: Sequence[Evaluation], q: Question) -> list[Evaluation]:
    """As ``alike``; a request more or less is no difference either."""
    if q.slo.objective == "tokens_per_s":
        return alike(tried, q.slo)
    top = min(tried, key=lambda e: rank(e, q.slo))
    least = top.attainment - max(SAME_SHARE, 1.0 / len(q.traffic))
    return [e for e in tried if e.feasible == top.feasible and e.attainment >= least]


def _near(e: Evaluation, q: Question) -> tuple[float, ...]:
    return (complexity(e, q.base), distance_octaves(e.setting, q.base), *rank(e, q.slo)[2:])


def _rush(traffic: Traffic) -> Traffic:
    if traffic.span_s <= 0.0:
        return traffic
    return add_burst(traffic, Burst(BURST_FACTOR, traffic.span_s * BURST_LENGTH, start_share=BURST_START))
