"""Tables as data, one meaning for HTML, Markdown and the terminal. Every number with unit, count and source."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rooftune.policies.envelope import KNOB_LABELS
from rooftune.tuner.record import GroupFigures, MarginPart, RunRecord, TrialPart
from rooftune.tuner.report import flags, words
from rooftune.tuner.report.findings import missed
from rooftune.tuner.report.headline import after_word


@dataclass(frozen=True)
class Table:
    """``numeric``: columns of numbers, aligned to the right. note: what the reader must know."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    numeric: tuple[int, ...] = ()

    def text(self) -> str:
        """For a terminal, without title and note."""
        lines = aligned((self.header, *self.rows), frozenset(range(len(self.header))) - set(self.numeric))
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def aligned(rows: Sequence[Sequence[str]], left: frozenset[int] = frozenset()) -> list[str]:
    """Lines of a table with columns as wide as they need; columns in ``left`` start at the left, others end right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(w) if i in left else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def every(record: RunRecord) -> list[Table]:
    """All that a report has, in order."""
    put_in_force = (vllm(record), elsewhere(record)) if record.moves else ()
    first = (outcome(record), groups(record), baselines(record), search(record))
    return [*first, *put_in_force, inputs(record)]


def outcome(record: RunRecord) -> Table:
    """Before and after, for the run as a whole."""
    before, after = record.current, record.best

    def row(figure: str, show: Callable[[TrialPart], str]) -> tuple[str, ...]:
        return figure, show(before), show(after), words.count(record.traffic.requests)

    judged = zip(record.targets, before.margins, after.margins, strict=True)
    rows = (
        row("requests that meet every target", lambda trial: words.share(trial.attainment)),
        row("goodput (requests that meet every target)", words.goodput),
        row("output tokens of finished requests", words.output),
        *((words.target(part), _measured(old), _measured(new), _samples(old, new)) for part, old, new in judged),
        row("longest wait for a first token", lambda trial: words.seconds(trial.longest_wait_s)),
    )
    return Table(
        "Before and after",
        ("figure", "in force", after_word(record), "samples"),
        rows,
        "Simulated. A target is judged twice: for the run by the quantile shown here, and for each request "
        "(goodput) by whether that request met it.",
        (1, 2, 3),
    )


def _samples(old: MarginPart, new: MarginPart) -> str:
    return " / ".join(dict.fromkeys((words.count(old.samples), words.count(new.samples))))


def _measured(row: MarginPart) -> str:
    if row.measured_s is None:
        return words.judged(row)
    return f"{words.seconds(row.measured_s)} ({'missed' if missed(row) else 'met'})"


def baselines(record: RunRecord) -> Table:
    """The recommendation beside what is simpler: defaults, formula, knee, a sweep, random search."""
    simple = {role: [trial for trial in record.trials if trial.role == role] for role in words.ROLE_WORDS}
    ways = (
        ("in force", record.current),
        *((words.ROLE_WORDS[role], next(iter(simple[role]), None)) for role in ("engine_default", "formula", "knee")),
        ("best budget alone (sweep)", best_of(simple["sweep"], record.objective)),
        (f"random search, {words.count(record.search.random_trials)} trials", record.random_best),
        (after_word(record), record.best),
    )
    rows = tuple(
        (
            way,
            *budget_and_cap(trial),
            words.share(trial.attainment),
            words.goodput(trial),
            "all met" if trial.feasible else "missed",
            words.seconds(trial.ttft_p99_s),
            words.seconds(trial.gap_p99_s),
        )
        for way, trial in ways
        if trial is not None
    )
    return Table(
        "What simpler ways would have found",
        ("way", "budget", "chunk cap", "good requests", "goodput", "targets", "TTFT p99", "gap p99"),
        rows,
        f"Simulated, {words.count(record.traffic.requests)} requests each.",
        (1, 2, 3, 4, 6, 7),
    )


def budget_and_cap(trial: TrialPart) -> tuple[str, str]:
    """Budget and chunk cap as two cells, in tokens."""
    cap = trial.chunk_cap_tokens
    return words.count(trial.step_tokens), words.count(cap) if cap else "none"


def best_of(trials: Sequence[TrialPart], objective: str) -> TrialPart | None:
    """A feasible trial before others, then the larger objective, then the first. None without trials."""

    def rank(trial: TrialPart) -> tuple[bool, float]:
        return trial.feasible, (trial.goodput_rps if objective == "goodput" else trial.tokens_per_s) or 0.0

    return max(trials, key=rank, default=None)


def groups(record: RunRecord) -> Table:
    """Who gains and who pays."""
    figures: tuple[tuple[str, Callable[[GroupFigures], str]], ...] = (
        ("good requests", lambda group: words.share(group.attainment)),
        ("TTFT p50", lambda group: words.seconds(group.ttft_p50_s)),
        ("TTFT p99", lambda group: words.seconds(group.ttft_p99_s)),
        ("longest wait", lambda group: words.seconds(group.longest_wait_s)),
        ("unfinished", lambda group: "unknown" if group.unfinished is None else words.count(group.unfinished)),
        ("longest gap p99", lambda group: words.seconds(group.longest_gap_p99_s)),
    )
    return Table(
        "Who gains and who pays",
        ("by", "group", "requests", *(name for name, _ in figures)),
        tuple(
            (
                part.dimension,
                part.group,
                words.count(part.requests),
                *(f"{show(part.current)} → {show(part.best)}" for _, show in figures),
            )
            for part in record.groups
        ),
        f"Simulated; in force → {after_word(record)}. A quantile of a group with few requests rests on few "
        "samples. The longest wait is for a first token.",
        (2, 3, 4, 5, 6, 7, 8),
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
    ways = (
        (f"search ({s.sampler}, seed {s.seed})", s.trials, s.simulated_steps, record.best),
        ("random search beside it", s.random_trials, s.random_simulated_steps, record.random_best),
    )
    return Table(
        "How it was found",
        ("way", "trials", "simulated steps", "best good share", "best goodput"),
        tuple(
            (way, words.count(trials), words.count(steps), words.share(best.attainment), words.goodput(best))
            for way, trials, steps, best in ways
        ),
        note,
        (1, 2, 3, 4),
    )


def inputs(record: RunRecord) -> Table:
    """Everything that went in, and where it came from."""
    t, m, e = record.traffic, record.step_model, record.engine
    traffic, model = words.SOURCE_WORDS[t.source], words.SOURCE_WORDS[m.source]

    engine = {
        "ceiling_tokens": words.tokens(e.ceiling_tokens),
        "kv_tokens": words.tokens(e.kv_tokens),
        "block_tokens": words.tokens(e.block_tokens),
        "max_seqs": words.knob_value("max_running", e.max_seqs),
        "prefix_caching": "on" if e.prefix_caching else "off",
        "decodes_kept_moving": "yes (Rooftune's rule)" if e.decodes_kept_moving else "no (as vLLM)",
    }
    rows = [
        (f"traffic {words.named(t)}", words.requests_in(t.requests, t.span_s), traffic),
        (
            "prompt length p50 / p99 / longest",
            f"{t.prompt_p50_tokens:,} / {t.prompt_p99_tokens:,} / {words.tokens(t.prompt_max_tokens)}",
            traffic,
        ),
        (
            "output length p50 / p99 / longest",
            f"{t.output_p50_tokens:,} / {t.output_p99_tokens:,} / {words.tokens(t.output_max_tokens)}",
            traffic,
        ),
    ]
    if t.prompt_share_cached is not None:
        rows.append(("prompt tokens found in the prefix cache", words.share(t.prompt_share_cached), traffic))
    tables = "; measured tables price steps, the formula stands beside them" if m.tables else ""
    knobs = [label for name, label in KNOB_LABELS.items() if name in record.search.knobs]
    rows += [
        *((words.target(part), "target", "given by you") for part in record.targets),
        (f"step-time model {m.name}", m.origin + tables, model),
        ("floor of a step", words.seconds(m.coefficients["floor_s"]), model),
        ("slope per computed token", words.seconds(m.coefficients["slope_s_per_token"]), model),
        ("overhead per step", words.seconds(m.coefficients["overhead_s"]), model),
        ("knee (at zero context)", "none" if m.knee_tokens == "inf" else words.tokens(m.knee_tokens), model),
        *(
            (words.ENGINE_WORDS[name], value, words.SOURCE_WORDS[e.sources.get(name, "assumed")])
            for name, value in engine.items()
        ),
        ("setting in force", words.setting(record.current.setting), words.SOURCE_WORDS[record.current_source]),
        ("knobs that were searched", ", ".join(knobs), "those that --engine has"),
    ]
    return Table("What went in, and where it came from", ("quantity", "value", "source"), tuple(rows))


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
