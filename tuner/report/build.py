"""From what the search returns to a ``RunRecord``: the only place where its values become plain ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rooftune.policies.envelope import KNOB
from rooftune.policies.outcomes import BoolArray, IntArray, Outcomes
from rooftune.policies.quantiles import quantile
from rooftune.policies.request import Setting
from rooftune.policies.slo import Condition, MarginRow, Slo, good
from rooftune.policies.step_time import StepModel, knee_tokens
from rooftune.tuner.record import (
    EnginePart,
    GroupFigures,
    GroupPart,
    MarginPart,
    RunRecord,
    SearchPart,
    Source,
    StepModelPart,
    TargetPart,
    TrafficPart,
    TrialPart,
    digits,
    finite,
    plain,
)
from rooftune.tuner.report.details import curve_part, feasible_part, timeline_part
from rooftune.tuner.report.flags import MAIN_KNOBS
from rooftune.tuner.search.evaluation import Case, Evaluation, Recommendation, Role
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.traffic.workload import Traffic


@dataclass(frozen=True, kw_only=True)
class DescribedCase(Case):
    """A case with three of its parts as a record has them."""

    traffic_part: TrafficPart
    model_part: StepModelPart
    engine_part: EnginePart


def setting_values(setting: Setting) -> dict[str, int | float]:
    """Budget, chunk cap and sequence cap, then every knob that is not at its default and acts in this setting."""
    standard = Setting._field_defaults
    return {
        name: value
        for name, value in setting._asdict().items()
        if name in MAIN_KNOBS or (value != standard.get(name) and KNOB[name].acts(setting))
    }


def traffic_part(traffic: Traffic, changes: Sequence[str]) -> TrafficPart:
    """The shape of the traffic as it was replayed; ``changes``: what was done to the file's times."""
    prompt, output = (
        np.quantile(tokens, [0.5, 0.99, 1.0], method="inverted_cdf").astype(int).tolist()
        for tokens in (traffic.prompt_tokens, traffic.output_tokens)
    )
    stated = not len(traffic.prefix_offsets)  # otherwise the replay finds out what is cached
    return TrafficPart(
        name=traffic.name,
        changes=tuple(changes),
        requests=len(traffic),
        span_s=digits(traffic.span_s),
        prompt_p50_tokens=prompt[0],
        prompt_p99_tokens=prompt[1],
        prompt_max_tokens=prompt[2],
        output_p50_tokens=output[0],
        output_p99_tokens=output[1],
        output_max_tokens=output[2],
        prompt_share_cached=digits(traffic.cached_tokens.sum() / traffic.prompt_tokens.sum()) if stated else None,
        tenants=len(traffic.tenant_names),
        source="given",
    )


def twin_error(step_model: StepModelPart) -> dict[str, float]:
    """What a model file says of the twin's quantiles, such as twin_ttft_p99; step-time errors are another matter."""
    errors = step_model.errors.items()
    return {name.removeprefix("twin_"): value for name, value in errors if name.startswith("twin_")}


def step_model_part(
    name: str,
    model: StepModel,
    source: Source,
    origin: str,
    codes: Sequence[str] = (),
    errors: dict[str, float] | None = None,
    *,
    tables: bool = False,
) -> StepModelPart:
    """source: assumed for a named constant set, measured for a fitted file; origin: where from, in words."""
    return StepModelPart(
        name=name,
        source=source,
        origin=origin,
        coefficients=dict(model._asdict()),
        knee_tokens=plain(knee_tokens(model)),
        tables=tables,
        codes=tuple(codes),
        errors=errors or {},
    )


def engine_part(engine: Engine, prefix_caching: bool, sources: dict[str, Source]) -> EnginePart:
    """What the twin takes the engine to be; ``sources`` by the names of the fields."""
    return EnginePart(
        ceiling_tokens=engine.boot.ceiling_tokens,
        kv_tokens=engine.kv_blocks * engine.boot.block_tokens,
        block_tokens=engine.boot.block_tokens,
        max_seqs=engine.sequence_ceiling,
        prefix_caching=prefix_caching,
        decodes_kept_moving=engine.boot.keep_decodes_moving == 1,
        sources=sources,
    )


def condition_words(when: Condition) -> str:
    """``prompts of at least 8,000 tokens, tenant gold``."""
    words = []
    for low, high, what in (
        (when.min_prompt_tokens, when.max_prompt_tokens, "prompts"),
        (when.min_output_tokens, when.max_output_tokens, "outputs"),
    ):
        if low is not None and high is not None:
            words.append(f"{what} of {low:,} to {high:,} tokens")
        elif low is not None:
            words.append(f"{what} of at least {low:,} tokens")
        elif high is not None:
            words.append(f"{what} of at most {high:,} tokens")
    if when.tenant is not None:
        words.append(f"tenant {when.tenant}")
    if when.cached is not None:
        words.append("prefix found in the cache" if when.cached else "no prefix in the cache")
    return ", ".join(words)


def target_parts(slo: Slo) -> tuple[TargetPart, ...]:
    """Every target, in the order of the margins."""
    return tuple(
        TargetPart(
            metric=target.metric,
            quantile=target.quantile,
            bound_s=target.bound_s,
            applies_to="all requests" if index is None else condition_words(slo.overrides[index].when),
        )
        for target, index in slo.all_targets()
    )


def target_index(slo: Slo, row: MarginRow) -> int:
    """Where the row's target stands among all targets."""
    return slo.all_targets().index((row.target, row.override_index))


def margin_parts(rows: Sequence[MarginRow]) -> tuple[MarginPart, ...]:
    """Margins as plain values."""
    return tuple(
        MarginPart(measured_s=plain(row.measured_s), margin=plain(row.margin), samples=row.samples) for row in rows
    )


def trial_part(evaluation: Evaluation) -> TrialPart:
    """One replayed setting as plain values."""
    e = evaluation
    return TrialPart(
        role=e.role.value,
        setting=setting_values(e.setting),
        margins=margin_parts(e.margins),
        feasible=e.feasible,
        attainment=finite(e.attainment),
        goodput_rps=finite(e.goodput_rps) if e.whole_traffic else None,
        tokens_per_s=finite(e.tokens_per_s) if e.whole_traffic else None,
        violation=plain(e.violation),
        ttft_p50_s=plain(e.ttft_p50_s),
        ttft_p95_s=plain(e.ttft_p95_s),
        ttft_p99_s=plain(e.ttft_p99_s),
        gap_p50_s=plain(e.gap_p50_s),
        gap_p99_s=plain(e.gap_p99_s),
        longest_gap_p99_s=plain(e.longest_gap_p99_s),
        tpot_p95_s=plain(e.tpot_p95_s),
        longest_wait_s=plain(e.longest_wait_s),
        simulated_steps=e.simulated_steps,
        preempted=e.preempted,
        refused=e.refused,
        whole_traffic=e.whole_traffic,
    )


def _search_part(found: Recommendation, knobs: frozenset[str]) -> SearchPart:
    # A repeat cost nothing; a setting that led after a look at windows was paid for twice.
    random = {(e.setting, e.whole_traffic): e.simulated_steps for e in found.evaluations if e.role is Role.RANDOM}
    return SearchPart(
        sampler=found.sampler,
        knobs=tuple(sorted(knobs)),
        window_trials=sum(not e.whole_traffic for e in found.evaluations),
        seed=found.seed,
        trials=found.trials,
        simulated_steps=found.simulated_steps,
        random_trials=len(random),
        random_simulated_steps=sum(random.values()),
    )


def run_record(
    found: Recommendation,
    case: DescribedCase,
    knobs: frozenset[str],
    *,
    current_source: Source,
    profile: str | None,
    made_at: str,
    made_by: str,
) -> RunRecord:
    """The record of one recommendation. made_at: UTC, ISO 8601, from the caller's clock."""
    slo = case.slo
    return RunRecord(
        schema="rooftune.run-record",
        version=2,
        made_at=made_at,
        made_by=made_by,
        verdict=found.verdict.value,
        objective=slo.objective,
        profile=profile,
        targets=target_parts(slo),
        traffic=case.traffic_part,
        step_model=case.model_part,
        engine=case.engine_part,
        current=trial_part(found.current),
        current_source=current_source,
        best=trial_part(found.best),
        random_best=trial_part(found.random_best),
        noise=finite(found.noise),
        # What comes all at once is a burst already: twice as fast is the same.
        burst_attainment=finite(found.burst_attainment) if slo.all_targets() and case.traffic.span_s > 0.0 else None,
        binding=None if found.binding_target is None else target_index(slo, found.binding_target),
        feasible=feasible_part(found, case),
        curve=curve_part(found, case.model),
        timeline=timeline_part(found, case),
        search=_search_part(found, knobs),
        trials=tuple(trial_part(evaluation) for evaluation in found.evaluations),
        groups=group_parts(found.current_result.outcomes, found.best_result.outcomes, slo),
        twin_error=twin_error(case.model_part),
    )


PROMPT_EDGES_TOKENS = (500, 2_000, 8_000, 32_000)
OUTPUT_EDGES_TOKENS = (50, 200, 1_000)
MOST_TENANTS = 12
Group = tuple[str, str, BoolArray]  # dimension, name, members (n,)


def _bands(dimension: str, tokens: IntArray, edges: tuple[int, ...]) -> Iterator[Group]:
    low = 0
    for high in edges:
        name = f"{low + 1:,} to {high:,} tokens" if low else f"up to {high:,} tokens"
        yield dimension, name, (tokens > low) & (tokens <= high)
        low = high
    yield dimension, f"above {low:,} tokens", tokens > low


def groups_of(outcomes: Outcomes) -> list[Group]:
    """All requests, then by prompt length, output length, tenant and cache hit; empty groups are left out."""
    found: list[Group] = [("all", "all requests", np.ones(len(outcomes), dtype=np.bool_))]
    found += _bands("prompt length", outcomes.prompt_tokens, PROMPT_EDGES_TOKENS)
    found += _bands("output length", outcomes.output_tokens, OUTPUT_EDGES_TOKENS)
    if len(outcomes.tenant) and len(outcomes.tenant_names) > 1:
        counts = np.bincount(outcomes.tenant, minlength=len(outcomes.tenant_names))
        for code in np.argsort(-counts, kind="stable")[:MOST_TENANTS].tolist():
            found.append(("tenant", outcomes.tenant_names[code], outcomes.tenant == code))
    if len(outcomes.cached_tokens) and outcomes.cached_tokens.any():
        hit = outcomes.cached_tokens > 0
        found += [("prefix cache", "prefix found", hit), ("prefix cache", "nothing found", ~hit)]
    return [group for group in found if group[2].any()]


def _figures(outcomes: Outcomes, is_good: BoolArray, members: BoolArray) -> GroupFigures:
    """Failed requests count as endless, as they do for a target."""
    finished = outcomes.finished
    ttft_s = np.where(finished, outcomes.first_token_s - outcomes.arrival_s, np.inf)[members]
    longest_s = np.where(finished, outcomes.longest_gap_s, np.inf)[members & ((outcomes.gap_count > 0) | ~finished)]
    return GroupFigures(
        attainment=digits(is_good[members].mean()),
        ttft_p50_s=plain(quantile(ttft_s, 0.5)),
        ttft_p99_s=plain(quantile(ttft_s, 0.99)),
        longest_gap_p99_s=plain(quantile(longest_s, 0.99)),
        longest_wait_s=plain(float(np.max(ttft_s))),
        unfinished=int((~finished[members]).sum()),
    )


def group_parts(current: Outcomes, best: Outcomes, slo: Slo) -> tuple[GroupPart, ...]:
    """One row a group. Both runs must be of the same traffic."""
    good_current, good_best = good(current, slo), good(best, slo)
    return tuple(
        GroupPart(
            dimension=dimension,
            group=name,
            requests=int(members.sum()),
            current=_figures(current, good_current, members),
            best=_figures(best, good_best, members),
        )
        for dimension, name, members in groups_of(current)
    )
