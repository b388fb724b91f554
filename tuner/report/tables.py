"""Tables as data, one meaning for HTML, Markdown and the terminal. Every number with unit, count and source."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rooftune.policies.envelope import KNOB_LABELS
from rooftune.policies.outcomes import BoolArray, IntArray, Outcomes
from rooftune.policies.quantiles import quantile
from rooftune.policies.slo import Slo, good
from rooftune.tuner.record import GroupFigures, GroupPart, RunRecord, Seconds, TrialPart, plain
from rooftune.tuner.report import flags, words
from rooftune.tuner.report.headline import after_word
from rooftune.tuner.report.trust import moves


@dataclass(frozen=True)
class Table:
    """``numeric``: columns whose cells are numbers (aligned to the right). note: what the reader must know."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    numeric: tuple[int, ...] = ()


def every(record: RunRecord) -> list[Table]:
    """All that a report has, in order."""
    put_in_force = (vllm(record), elsewhere(record)) if moves(record) else ()
    first = (outcome(record), groups(record), baselines(record), search(record))
    return [*first, *put_in_force, inputs(record)]


def outcome(record: RunRecord) -> Table:
    """Before and after, for the run as a whole."""
    before, after = record.current, record.best
    n = words.count(record.traffic.requests)
    rows = [
        ("requests that meet every target", words.share(before.attainment), words.share(after.attainment), n),
        (
            "goodput (requests that meet every target)",
            words.per_second(before.goodput_rps, "requests"),
            words.per_second(after.goodput_rps, "requests"),
            n,
        ),
        (
            "output tokens of finished requests",
            words.per_second(before.tokens_per_s, "tokens"),
            words.per_second(after.tokens_per_s, "tokens"),
            n,
        ),
    ]
    for index, part in enumerate(record.targets):
        old, new = before.margins[index], after.margins[index]
        rows.append(
            (words.target(part), _measured(before, index), _measured(after, index), _samples(old.samples, new.samples))
        )
    rows.append(
        ("longest wait for a first token", words.seconds(before.longest_wait_s), words.seconds(after.longest_wait_s), n)
    )
    return Table(
        "Before and after",
        ("figure", "in force", after_word(record), "samples"),
        tuple(rows),
        "Simulated. A target is judged twice: for the run by the quantile shown here, and for each request "
        "(goodput) by whether that request met it.",
        (1, 2, 3),
    )


def _samples(old: int, new: int) -> str:
    return words.count(old) if old == new else f"{words.count(old)} / {words.count(new)}"


def _measured(trial: TrialPart, index: int) -> str:
    row = trial.margins[index]
    if row.measured_s is None:
        return words.judged(row)
    return f"{words.seconds(row.measured_s)} ({'met' if _met(row.margin) else 'missed'})"


def _met(margin: object) -> bool:
    return isinstance(margin, float) and margin <= 0


BASELINE_ROLES = ("current", "engine_default", "formula", "knee")


def baselines(record: RunRecord) -> Table:
    """The recommendation beside what is simpler: defaults, formula, knee, a sweep, random search."""
    rows = []
    for role in BASELINE_ROLES:
        found = [trial for trial in record.trials if trial.role == role]
        if role == "current" and not found:
            found = [record.current]
        rows += [_baseline_row(words.ROLE_WORDS[role], trial) for trial in found[:1]]
    best_sweep = best_of([trial for trial in record.trials if trial.role == "sweep"], record.objective)
    if best_sweep is not None:
        rows.append(_baseline_row("best budget alone (sweep)", best_sweep))
    rows.append(_baseline_row(f"random search, {words.count(record.search.random_trials)} trials", record.random_best))
    rows.append(_baseline_row(after_word(record), record.best))
    return Table(
        "What simpler ways would have found",
        ("way", "budget", "chunk cap", "good requests", "goodput", "targets", "TTFT p99", "gap p99"),
        tuple(rows),
        f"Simulated, {words.count(record.traffic.requests)} requests each.",
        (1, 2, 3, 4, 6, 7),
    )


def _baseline_row(name: str, trial: TrialPart) -> tuple[str, ...]:
    return (
        name,
        words.count(trial.setting["step_tokens"]),
        "none" if not trial.setting.get("chunk_cap_tokens") else words.count(trial.setting["chunk_cap_tokens"]),
        words.share(trial.attainment),
        words.per_second(trial.goodput_rps, "requests"),
        "all met" if trial.feasible else "missed",
        words.seconds(trial.ttft_p99_s),
        words.seconds(trial.gap_p99_s),
    )


def best_of(trials: Sequence[TrialPart], objective: str) -> TrialPart | None:
    """Feasible first, then what is maximised; the first of equals. None for none."""

    def rank(trial: TrialPart) -> tuple[bool, float]:
        return trial.feasible, (trial.goodput_rps if objective == "goodput" else trial.tokens_per_s) or 0.0

    return max(trials, key=rank, default=None)


def groups(record: RunRecord) -> Table:
    """Who gains and who pays."""
    rows = tuple(
        (
            part.dimension,
            part.group,
            words.count(part.requests),
            f"{words.share(part.current.attainment)} → {words.share(part.best.attainment)}",
            f"{words.seconds(part.current.ttft_p50_s)} → {words.seconds(part.best.ttft_p50_s)}",
            f"{words.seconds(part.current.ttft_p99_s)} → {words.seconds(part.best.ttft_p99_s)}",
            f"{words.seconds(part.current.longest_gap_p99_s)} → {words.seconds(part.best.longest_gap_p99_s)}",
        )
        for part in record.groups
    )
    return Table(
        "Who gains and who pays",
        ("by", "group", "requests", "good requests", "TTFT p50", "TTFT p99", "longest gap p99"),
        rows,
        f"Simulated; in force → {after_word(record)}. A quantile of a group with few requests rests on few samples.",
        (2, 3, 4, 5, 6),
    )


def search(record: RunRecord) -> Table:
    """What finding it cost."""
    s = record.search
    note = "Both ways replay the same requests"
    if s.random_simulated_steps >= s.simulated_steps:
        note += "; random search gets at least as many simulated steps to spend"
    note += "."
    if s.window_trials:
        note += (
            f" {words.count(s.window_trials)} trials of both were first looks at a few windows of the traffic; "
            "the settings that led in them were then replayed on all of it, and the figures here come "
            "from those replays."
        )
    return Table(
        "How it was found",
        ("way", "trials", "simulated steps", "best good share", "best goodput"),
        (
            _search_row(f"search ({s.sampler}, seed {s.seed})", s.trials, s.simulated_steps, record.best),
            _search_row("random search beside it", s.random_trials, s.random_simulated_steps, record.random_best),
        ),
        note,
        (1, 2, 3, 4),
    )


def _search_row(name: str, trials: int, steps: int, best: TrialPart) -> tuple[str, ...]:
    return (
        name,
        words.count(trials),
        words.count(steps),
        words.share(best.attainment),
        words.per_second(best.goodput_rps, "requests"),
    )


def inputs(record: RunRecord) -> Table:
    """Everything that went in, and where it came from."""
    t, m, e = record.traffic, record.step_model, record.engine
    given = words.SOURCE_WORDS
    changes = f" ({', '.join(t.changes)})" if t.changes else ""
    rows = [
        (
            f"traffic {t.name}{changes}",
            words.requests_in(t.requests, t.span_s),
            given[t.source],
        ),
        (
            "prompt length p50 / p99 / longest",
            _three(t.prompt_p50_tokens, t.prompt_p99_tokens, t.prompt_max_tokens),
            given[t.source],
        ),
        (
            "output length p50 / p99 / longest",
            _three(t.output_p50_tokens, t.output_p99_tokens, t.output_max_tokens),
            given[t.source],
        ),
    ]
    if t.prompt_share_cached is not None:
        rows.append(("prompt tokens found in the prefix cache", words.share(t.prompt_share_cached), given[t.source]))
    rows += [(words.target(part), "target", "given by you") for part in record.targets]
    source = given[m.source]
    knee = "none" if m.knee_tokens == "inf" else words.tokens(m.knee_tokens)
    tables = "; measured tables price steps, the formula stands beside them" if m.tables else ""
    rows += [
        (f"step-time model {m.name}", m.origin + tables, source),
        ("floor of a step", words.seconds(m.coefficients["floor_s"]), source),
        ("slope per computed token", words.seconds(m.coefficients["slope_s_per_token"]), source),
        ("overhead per step", words.seconds(m.coefficients["overhead_s"]), source),
        ("knee (at zero context)", knee, source),
        ("budget ceiling, fixed at start", words.tokens(e.ceiling_tokens), _source(record, "ceiling_tokens")),
        ("KV pool", words.tokens(e.kv_tokens), _source(record, "kv_tokens")),
        ("KV block", words.tokens(e.block_tokens), _source(record, "block_tokens")),
        ("sequence cap, fixed at start", words.knob_value("max_running", e.max_seqs), _source(record, "max_seqs")),
        ("prefix caching", "on" if e.prefix_caching else "off", _source(record, "prefix_caching")),
        (
            "decodes kept moving past a partial prefill",
            "yes (Rooftune's rule)" if e.decodes_kept_moving else "no (as vLLM)",
            _source(record, "decodes_kept_moving"),
        ),
        ("setting in force", words.setting(record.current), given[record.current_source]),
        ("knobs that were searched", ", ".join(_knob_words(record)), "those that --engine has"),
    ]
    return Table("What went in, and where it came from", ("quantity", "value", "source"), tuple(rows))


def _knob_words(record: RunRecord) -> list[str]:
    return [word for name, word in KNOB_LABELS.items() if name in record.search.knobs]


def _three(*values: int) -> str:
    return " / ".join(words.count(value) for value in values) + " tokens"


def _source(record: RunRecord, name: str) -> str:
    return words.SOURCE_WORDS[record.engine.sources.get(name, "assumed")]


def vllm(record: RunRecord) -> Table:
    """The flag of every knob, by version of vLLM."""
    return Table(
        "Each knob in vLLM, by version",
        ("knob", *flags.VLLM_VERSIONS),
        flags.vllm_versions(record.best),
        "The hook moves the budget live within what --max-num-batched-tokens was at start; it never goes above that.",
    )


def elsewhere(record: RunRecord) -> Table:
    """The same setting in other engines."""
    return Table(
        "The same setting in other engines",
        ("engine", "knob", "setting", "how it takes effect"),
        flags.elsewhere(record, record.best),
        "The twin follows vLLM's scheduler; on another engine these figures are only a start.",
    )


PROMPT_EDGES_TOKENS = (500, 2_000, 8_000, 32_000)
OUTPUT_EDGES_TOKENS = (50, 200, 1_000)
MOST_TENANTS = 12


@dataclass(frozen=True)
class Group:
    """Some requests of the traffic, by one property; members: shape (n,)."""

    dimension: str
    name: str
    members: BoolArray


def _bands(dimension: str, tokens: IntArray, edges: tuple[int, ...]) -> Iterator[Group]:
    low = 0
    for high in (*edges, None):
        members = tokens > low if high is None else (tokens > low) & (tokens <= high)
        if high is None:
            name = f"above {low:,} tokens"
        else:
            name = f"up to {high:,} tokens" if low == 0 else f"{low + 1:,} to {high:,} tokens"
        yield Group(dimension, name, members)
        low = high or low


def groups_of(outcomes: Outcomes) -> tuple[Group, ...]:
    """All requests, then by prompt length, output length, tenant and cache hit; empty groups are left out."""
    found = [Group("all", "all requests", np.ones(len(outcomes), dtype=np.bool_))]
    found += _bands("prompt length", outcomes.prompt_tokens, PROMPT_EDGES_TOKENS)
    found += _bands("output length", outcomes.output_tokens, OUTPUT_EDGES_TOKENS)
    if len(outcomes.tenant) and len(outcomes.tenant_names) > 1:
        counts = np.bincount(outcomes.tenant, minlength=len(outcomes.tenant_names))
        for code in np.argsort(-counts, kind="stable")[:MOST_TENANTS].tolist():
            found.append(Group("tenant", outcomes.tenant_names[code], outcomes.tenant == code))
    if len(outcomes.cached_tokens) and outcomes.cached_tokens.any():
        hit = outcomes.cached_tokens > 0
        found += [Group("prefix cache", "prefix found", hit), Group("prefix cache", "nothing found", ~hit)]
    return tuple(group for group in found if group.members.any())


def _seconds(values: np.ndarray[tuple[int], np.dtype[np.float64]], q: float) -> Seconds:
    return plain(quantile(values, q))


def _figures(outcomes: Outcomes, is_good: BoolArray, members: BoolArray) -> GroupFigures:
    """Failed requests count as endless, as they do for a target."""
    finished = outcomes.finished
    ttft_s = np.where(finished, outcomes.first_token_s - outcomes.arrival_s, np.inf)
    longest_s = np.where(finished, outcomes.longest_gap_s, np.inf)
    with_gaps = members & ((outcomes.gap_count > 0) | ~finished)
    return GroupFigures(
        attainment=float(f"{is_good[members].mean():.9g}"),
        ttft_p50_s=_seconds(ttft_s[members], 0.5),
        ttft_p99_s=_seconds(ttft_s[members], 0.99),
        longest_gap_p99_s=_seconds(longest_s[with_gaps], 0.99),
    )


def group_parts(current: Outcomes, best: Outcomes, slo: Slo) -> tuple[GroupPart, ...]:
    """One row a group. Both runs must be of the same traffic."""
    good_current, good_best = good(current, slo), good(best, slo)
    return tuple(
        GroupPart(
            dimension=group.dimension,
            group=group.name,
            requests=int(group.members.sum()),
            current=_figures(current, good_current, group.members),
            best=_figures(best, good_best, group.members),
        )
        for group in groups_of(current)
    )
