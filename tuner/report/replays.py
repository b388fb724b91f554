"""What ``simulate`` and ``sweep`` print."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from rooftune.tuner.record import (
    EnginePart,
    Part,
    Seconds,
    StepModelPart,
    TargetPart,
    TrafficPart,
    TrialPart,
)
from rooftune.tuner.report import words
from rooftune.tuner.report.build import DescribedCase, target_parts, trial_part
from rooftune.tuner.report.tables import Table, best_of, budget_and_cap
from rooftune.tuner.search.evaluation import Evaluation


class ReplayRecord(Part):
    """What ``simulate`` (one row) and ``sweep`` print with ``--json``: the same traffic under each setting."""

    schema_name: Literal["rooftune.replays"] = Field(alias="schema")
    version: Literal[2]
    objective: Literal["goodput", "tokens_per_s"]
    targets: tuple[TargetPart, ...]
    traffic: TrafficPart
    step_model: StepModelPart
    engine: EnginePart
    rows: tuple[TrialPart, ...]


def replay_record(rows: Sequence[Evaluation], case: DescribedCase) -> ReplayRecord:
    """The replays of one traffic as plain values."""
    return ReplayRecord(
        schema="rooftune.replays",
        version=2,
        objective=case.slo.objective,
        targets=target_parts(case.slo),
        traffic=case.traffic_part,
        step_model=case.model_part,
        engine=case.engine_part,
        rows=tuple(trial_part(row) for row in rows),
    )


def what_was_replayed(record: ReplayRecord) -> str:
    """One line above a table."""
    t, model = record.traffic, record.step_model
    replayed = f"{words.named(t)}: {words.requests_in(t.requests, t.span_s)}"
    return f"{replayed}, step model {model.name} ({words.SOURCE_WORDS[model.source]})"


def one_setting(record: ReplayRecord) -> Table:
    """Everything about the first row, a line a figure."""
    row = record.rows[0]
    n = words.count(record.traffic.requests)
    lines = [
        ("TTFT p50 / p95 / p99", _joined(row.ttft_p50_s, row.ttft_p95_s, row.ttft_p99_s), n),
        ("gap p50 / p99", _joined(row.gap_p50_s, row.gap_p99_s), ""),
        ("longest gap p99", words.seconds(row.longest_gap_p99_s), ""),
        ("TPOT p95", words.seconds(row.tpot_p95_s), ""),
        ("longest wait for a first token", words.seconds(row.longest_wait_s), n),
        ("output tokens", words.output(row), n),
    ]
    if record.targets:
        lines.append(("requests that meet every target", words.share(row.attainment), n))
        lines.append(("goodput", words.goodput(row), n))
    for part, margin in zip(record.targets, row.margins, strict=True):
        lines.append((words.target(part), words.judged(margin), words.count(margin.samples)))
    lines += [
        ("steps", words.count(row.simulated_steps), ""),
        ("preemptions", words.count(row.preempted), n),
        ("requests that never fit the KV pool", words.count(row.refused), n),
    ]
    return Table(words.setting(row.setting), ("simulated", "value", "samples"), tuple(lines), numeric=(1, 2))


def _joined(*values: Seconds) -> str:
    return " / ".join(words.seconds(value) for value in values)


def many_settings(record: ReplayRecord) -> Table:
    """A line a setting; the best one is marked."""
    best = best_of(record.rows, record.objective)
    lines = tuple(
        (
            "*" if row is best else "",
            *budget_and_cap(row),
            words.share(row.attainment),
            words.rate(row.goodput_rps),
            "yes" if row.feasible else "no",
            words.seconds(row.ttft_p50_s),
            words.seconds(row.ttft_p99_s),
            words.seconds(row.gap_p99_s),
            words.count(row.simulated_steps),
        )
        for row in record.rows
    )
    return Table(
        "Sweep",
        ("", "budget", "chunk cap", "good", "req/s good", "targets", "TTFT p50", "TTFT p99", "gap p99", "steps"),
        lines,
        "Simulated. Budget and chunk cap in tokens; * is the best: targets met first, then goodput.",
        tuple(range(1, 10)),
    )
