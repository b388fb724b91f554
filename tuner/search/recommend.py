"""The main job on a twin: from traffic, a step model and targets to one setting and what it was held against.

Racing: where the whole traffic is long, every trial runs on a few windows of it first, and only the leaders run on all
of it, then on all of it with a burst and under other draws of the step model. What is reported always comes from the
whole traffic. Random search pays the same number of simulated steps in the same two stages.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from rooftune.policies.errors import bad_value
from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo
from rooftune.policies.step_time import StepCost, StepModel, priced
from rooftune.tuner.search import baselines
from rooftune.tuner.search.archive import study_key
from rooftune.tuner.search.arena import PARALLEL, WINDOWS, Arena, Track, slices
from rooftune.tuner.search.evaluation import Advice, Evaluation, Recommendation, Role
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.search.rank import SAME_SHARE, alike, binding, known, noise, rank, to_set, value, verdict
from rooftune.tuner.search.space import STOCK_VLLM, SearchSpace, search_space
from rooftune.tuner.search.study import SettingStudy
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.traffic.reshape import Burst, add_burst
from rooftune.tuner.traffic.workload import Traffic

Progress = Callable[[str, int, int], None]
Model = StepModel | StepCost

# A search pays about this many steps on windows; traffic that costs less is replayed whole in every trial.
SEARCH_STEPS = 3_000_000
LEAST_SHARE, WHOLE_SHARE = 0.08, 0.6
# A window begins with an idle engine, so a short one shows little of what queues do: rather fewer of them.
LEAST_WINDOW_S = 60.0
SHARED_TRIALS = 200
LEADERS = 8
SHORTLIST = 6
# The burst: twice the rate, for a tenth of the time, from 40 % on. A share this much lower under it is no difference.
BURST_FACTOR, BURST_START, BURST_LENGTH = 2.0, 0.4, 0.1
BURST_TOLERANCE = 0.01


def recommend(
    traffic: Traffic,
    engine: Engine,
    model: Model,
    slo: Slo,
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
    """Search ``knobs`` for ``slo`` on the twin.

    draws: other step models that the measurements allow; leaders count by their worst. storage: an Optuna storage
    URL, None for memory. study: name under which trials are shared with other runs of the same traffic, engine, model,
    targets and knobs, now or earlier; None: not shared. against_random: False leaves the random search out, half of
    the work, where its result is not used. progress(stage, done, total) is called as trials come in.
    Deterministic for equal arguments and no study shared. When no trial gave a number the verdict is KEEP.
    Raises InputError when ``current`` is outside the boot envelope, the range is empty or no request fits the KV pool.
    """
    tell = progress or (lambda stage, done, total: None)
    space = search_space(engine, current, slo, priced(model).formula, knobs=knobs)
    tell("current", 0, 1)
    now, now_result = evaluate(traffic, engine, current, model, slo, Role.CURRENT)
    tell("current", 1, 1)
    if now.refused == len(traffic):
        pool = engine.kv_blocks * engine.boot.block_tokens
        raise bad_value("KV pool", pool, "large enough for at least one request", "raise --kv-tokens")

    # Workers of one study look at the same windows, however many trials each of them makes.
    windows = _windows(traffic, now.simulated_steps * (trials if study is None else SHARED_TRIALS))
    track = Track(windows, traffic, engine, model, slo)
    starts = baselines.starting_points(space, slo, priced(model).formula, now_result)
    fixed = track.whole.run(starts, lambda done: tell("baselines", done, len(starts)))
    paid = track.paid_steps

    name = study and study_key(study, traffic if windows is None else windows, space, engine, model, slo)
    kept = SettingStudy(space, sampler=sampler, seed=seed, storage=storage, name=name)
    for setting in (current, *_warm(fixed, slo)):
        kept.enqueue(setting)
    looks = _search(kept, track, slo, trials, lambda done: tell("search", done, trials))
    if name:  # the best that other runs found counts too
        looks += track.look([told.setting for told in kept.told()[:LEADERS]], Role.SEARCH)
    leaders = track.lead(looks, Role.SEARCH, LEADERS, lambda e: rank(e, slo))
    steps = track.paid_steps - paid

    random_looks, random_leaders = list[Evaluation](), list[Evaluation]()
    if against_random:
        rival = Track(windows, traffic, engine, model, slo)
        left = steps - (LEADERS * now.simulated_steps if windows is not None else 0)
        random_looks = _random(space, rival, seed, left, lambda done: tell("random search", done, left))
        random_leaders = rival.lead(random_looks, Role.RANDOM, LEADERS, lambda e: rank(e, slo))

    nothing_known = not any(known(e) for e in looks)
    tried = [now] if nothing_known else [now, *fixed, *leaders, *random_leaders]
    best, burst_share = _decide(tried, traffic, windows, engine, model, draws, slo)
    best_result = evaluate(traffic, engine, best.setting, model, slo, best.role)[1]
    uncertainty = noise(now_result, best_result, slo, seed)
    what = Advice.KEEP if nothing_known else verdict(now, best, uncertainty, slo)
    nothing_gained = what is Advice.INFEASIBLE and best.attainment <= now.attainment + SAME_SHARE
    if what is Advice.KEEP or nothing_gained:
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


def _windows(traffic: Traffic, steps: int) -> Traffic | None:
    """A few windows of the traffic, when replaying all of it in every trial (``steps`` in all) would cost too much."""
    share = max(SEARCH_STEPS / max(steps, 1), LEAST_SHARE)
    count = min(max(int(traffic.span_s * share / LEAST_WINDOW_S), 1), WINDOWS)
    return slices(traffic, share, count) if share < WHOLE_SHARE else None


def _warm(fixed: Sequence[Evaluation], slo: Slo) -> list[Setting]:
    """Where the search starts: formula and knee, and the best of the budget sweep."""
    named = [e.setting for e in fixed if e.role is not Role.SWEEP]
    swept = sorted((e for e in fixed if e.role is Role.SWEEP), key=lambda e: rank(e, slo))
    return named + [e.setting for e in swept[:3]]


def _search(study: SettingStudy, track: Track, slo: Slo, trials: int, tell: Callable[[int], None]) -> list[Evaluation]:
    looks: list[Evaluation] = []
    while len(looks) < trials:
        tickets = [study.ask() for _ in range(min(PARALLEL, trials - len(looks)))]
        batch = track.look([ticket.setting for ticket in tickets], Role.SEARCH)
        for ticket, evaluation in zip(tickets, batch, strict=True):
            study.tell(ticket, evaluation, value(evaluation, slo))
            looks.append(evaluation)
        tell(len(looks))
    return looks


def _batched(settings: Iterable[Setting], size: int) -> Iterator[list[Setting]]:
    source = iter(settings)
    while batch := list(islice(source, size)):
        yield batch


def _random(space: SearchSpace, track: Track, seed: int, steps: int, tell: Callable[[int], None]) -> list[Evaluation]:
    """Independent draws until they have paid ``steps``."""
    looks: list[Evaluation] = []
    for batch in _batched(baselines.random_settings(space, seed + 1), PARALLEL):
        looks += track.look(batch, Role.RANDOM)
        tell(min(track.paid_steps, steps))
        if track.paid_steps >= steps:
            break
    return looks


def _decide(
    tried: Sequence[Evaluation],
    traffic: Traffic,
    windows: Traffic | None,
    engine: Engine,
    model: Model,
    draws: Sequence[Model],
    slo: Slo,
) -> tuple[Evaluation, float]:
    """The one to set among equals, and its good share under a burst. tried: what is set today comes first.

    Equals are told apart by their worst share over the draws of the step model, then by their share under a burst,
    then by what is plain and has most to spare.
    """
    base = tried[0].setting
    equals = sorted(dict.fromkeys(alike(tried, slo)), key=lambda e: rank(e, slo))
    shortlist = list({e.setting: e for e in [to_set(equals, slo, base), *equals]}.values())[:SHORTLIST]
    burst = Burst(BURST_FACTOR, traffic.span_s * BURST_LENGTH, start_share=BURST_START) if traffic.span_s > 0 else None
    rush = add_burst(traffic, burst) if burst else traffic  # what comes all at once is a burst already
    shares = _shares(shortlist, rush, engine, model, slo)
    if slo.objective == "tokens_per_s" or len(shortlist) == 1:
        return shortlist[0], shares[shortlist[0].setting]
    for draw in draws:
        worst = _shares(shortlist, traffic if windows is None else windows, engine, draw, slo)
        shortlist = [e for e in shortlist if worst[e.setting] >= max(worst.values()) - SAME_SHARE]
    calm = max(shares[e.setting] for e in shortlist)
    best = to_set([e for e in shortlist if shares[e.setting] >= calm - BURST_TOLERANCE], slo, base)
    return best, shares[best.setting]


def _shares(
    tried: Sequence[Evaluation], traffic: Traffic, engine: Engine, model: Model, slo: Slo
) -> dict[Setting, float]:
    """Good shares on other traffic or under another model."""
    found = Arena(traffic, engine, model, slo).run([(e.setting, e.role) for e in tried])
    return {e.setting: e.attainment for e in found}
