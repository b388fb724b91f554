"""The main job on a twin: from traffic, a step model and targets to one setting and what it was held against.

Racing: where the whole traffic is long, every trial runs on a few windows of it first, and only the leaders run on all
of it, then on all of it with a burst and under other draws of the step model. What is reported always comes from the
whole traffic. Random search pays the same number of simulated steps in the same two stages.
"""

from collections.abc import Callable, Sequence

from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo
from rooftune.policies.step_time import priced
from rooftune.tuner.search import baselines
from rooftune.tuner.search.archive import study_key
from rooftune.tuner.search.arena import Arena
from rooftune.tuner.search.evaluation import Advice, Case, Evaluation, Model, Recommendation, Role
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.search.rank import SAME_SHARE, alike, binding, known, noise, rank, stays, to_set, verdict
from rooftune.tuner.search.space import STOCK_VLLM, search_space
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
from rooftune.tuner.search.study import SettingStudy

Progress = Callable[[str, int, int], None]

# A search pays about this many steps on windows; traffic that costs less is replayed whole in every trial.
SEARCH_STEPS = 3_000_000
LEAST_SHARE, WHOLE_SHARE = 0.08, 0.6
# A window begins with an idle engine, so a short one shows little of what queues do: rather fewer of them.
LEAST_WINDOW_S = 60.0
SHARED_TRIALS = 200
LEADERS = 8
SHORTLIST = 6


def recommend(
    case: Case,
    *,
    current: Setting,
    trials: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
    knobs: frozenset[str] = STOCK_VLLM,
    draws: Sequence[Model] = (),
    storage: str | None = None,
    study: str | None = None,
    sampler: str = "tpe",
    against_random: bool = True,
) -> Recommendation:
    """Search ``knobs`` for the targets of ``case`` on the twin.

    draws: other step models that the measurements allow; leaders count by their worst. storage: an Optuna storage
    URL, None for memory. study: name under which trials are shared with other runs of the same traffic, engine, model,
    targets and knobs, now or earlier; None: not shared. against_random: False leaves the random search out, half of
    the work, where its result is not used. progress(stage, done, total) is called as trials come in.
    Deterministic for equal arguments and no study shared. When no trial gave a number the verdict is KEEP.
    Raises InputError when ``current`` is outside the boot envelope, the range is empty or no request fits the KV pool.
    """
    tell = progress or (lambda stage, done, total: None)
    slo, formula = case.slo, priced(case.model).formula
    space = search_space(case.engine, current, slo, formula, knobs=knobs)
    arena = Arena(case)
    tell("current", 0, 1)
    now, now_result = replay_in_force(case, current, "raise --kv-tokens")
    tell("current", 1, 1)

    # Workers of one study look at the same windows, however many trials each of them makes.
    all_steps = now.simulated_steps * (trials if study is None else SHARED_TRIALS)
    track = Track(arena, excerpt(arena, all_steps, SEARCH_STEPS, LEAST_SHARE, WHOLE_SHARE, LEAST_WINDOW_S))
    starts = baselines.starting_points(space, slo, formula, now_result)
    fixed = arena.run(starts, lambda done: tell("baselines", done, len(starts)))
    paid = track.paid_steps

    name = study and study_key(study, (track.windows or arena).case, space)
    kept = SettingStudy(space, sampler=sampler, seed=seed, storage=storage, name=name)
    for setting in (current, *_warm(fixed, slo)):
        kept.enqueue(setting)
    looks, _ = search(kept, track, trials, lambda done: tell("search", done, trials))
    if name:  # the best that other runs found counts too
        looks += track.look([trial.setting for trial in kept.finished()[:LEADERS]], Role.SEARCH)
    leaders = _leaders(track, looks, Role.SEARCH)
    steps = track.paid_steps - paid

    random_looks, random_leaders = list[Evaluation](), list[Evaluation]()
    if against_random:
        left = steps - (LEADERS * now.simulated_steps if track.windows else 0)
        rival = track.rival()
        random_looks = random_search(space, rival, seed, left, lambda done: tell("random search", done, left))
        random_leaders = _leaders(rival, random_looks, Role.RANDOM)

    nothing_known = not any(known(e) for e in looks)
    tried = [now] if nothing_known else [now, *fixed, *leaders, *random_leaders]
    best, burst_share = _decide(tried, track, draws)
    best_result = evaluate(case, best.setting, best.role)[1]
    uncertainty = noise(now_result, best_result, slo, seed)
    what = Advice.KEEP if nothing_known else verdict(now, best, uncertainty, slo)
    if stays(what, now, best, SAME_SHARE):
        best, best_result = now, now_result
    on_windows = [e for e in (*looks, *random_looks) if not e.whole_traffic]
    return Recommendation(
        verdict=what,
        current=now,
        best=best,
        evaluations=(now, *fixed, *leaders, *random_leaders, *on_windows),
        random_best=min(random_leaders or [now], key=lambda e: rank(e, slo)),
        noise=uncertainty,
        current_result=now_result,
        best_result=best_result,
        sampler=sampler,
        seed=seed,
        trials=trials,
        simulated_steps=steps,
        burst_attainment=burst_share,
        binding_target=binding(best.margins),
    )


def _warm(fixed: Sequence[Evaluation], slo: Slo) -> list[Setting]:
    """Where the search starts: formula and knee, and the best of the budget sweep."""
    named = [e.setting for e in fixed if e.role is not Role.SWEEP]
    swept = sorted((e for e in fixed if e.role is Role.SWEEP), key=lambda e: rank(e, slo))
    return named + [e.setting for e in swept[:3]]


def _leaders(track: Track, looks: list[Evaluation], role: Role) -> list[Evaluation]:
    """What leads, on all of the traffic; every look, if it ran on that."""
    return track.lead(looks, role, LEADERS) if track.windows else looks


def _decide(tried: Sequence[Evaluation], track: Track, draws: Sequence[Model]) -> tuple[Evaluation, float]:
    """The one to set among equals, and its good share under a burst. tried: what is set today comes first.

    Equals are told apart by their worst share over the draws of the step model, then by their share under a burst,
    then by what is plain and has most to spare.
    """
    base, arena, slo = tried[0].setting, track.whole, track.whole.case.slo
    equals = sorted(dict.fromkeys(alike(tried, slo)), key=lambda e: rank(e, slo))
    shortlist = list({e.setting: e for e in [to_set(equals, slo, base), *equals]}.values())[:SHORTLIST]
    in_burst = shares(with_burst(arena), shortlist)
    if slo.objective == "tokens_per_s" or len(shortlist) == 1:
        return shortlist[0], in_burst[shortlist[0].setting]
    for draw in draws:
        worst = shares(under(track.windows or arena, draw), shortlist)
        shortlist = [e for e in shortlist if worst[e.setting] >= max(worst.values()) - SAME_SHARE]
    calm = max(in_burst[e.setting] for e in shortlist)
    best = to_set([e for e in shortlist if in_burst[e.setting] >= calm - BURST_TOLERANCE], slo, base)
    return best, in_burst[best.setting]
