"""What ``replay`` prints: the figures of client and engine side by side, and what to know about them."""

from collections.abc import Callable

from rooftune.tuner.record import MarginPart, Seconds
from rooftune.tuner.replay.result_file import ReplayResult, VerdictPart
from rooftune.tuner.report import words
from rooftune.tuner.report.replays import table_text
from rooftune.tuner.report.tables import Table

_SIDES = {"client": "client saw", "engine": "engine says"}


def replay_text(result: ReplayResult) -> str:
    """All of it, ending in a line break."""
    traffic = result.traffic
    changes = f" ({', '.join(traffic.changes)})" if traffic.changes else ""
    head = (
        f"{traffic.name}{changes}: {words.count(traffic.requests)} requests in {words.seconds(traffic.span_s)}, "
        f"to {result.model} at {result.url}"
    )
    return "\n".join([head, "", table_text(_table(result)), *(f"\n{note}" for note in _notes(result))]) + "\n"


def _table(result: ReplayResult) -> Table:
    rows: list[tuple[str, Callable[[VerdictPart], str]]] = [
        ("requests counted", lambda side: words.count(side.judged)),
        ("failed", lambda side: words.count(side.failed)),
    ]
    if result.targets:
        rows += [
            ("requests that meet every target", lambda side: words.share(side.attainment)),
            ("goodput", lambda side: words.per_second(side.goodput_rps, "requests")),
        ]
    rows += [
        ("output tokens of finished requests", lambda side: words.per_second(side.tokens_per_s, "tokens")),
        ("TTFT p50", lambda side: words.seconds(side.ttft_p50_s)),
        ("TTFT p95", lambda side: words.seconds(side.ttft_p95_s)),
        ("TTFT p99", lambda side: words.seconds(side.ttft_p99_s)),
        ("gap p50", lambda side: _gap(side, side.gap_p50_s)),
        ("gap p99", lambda side: _gap(side, side.gap_p99_s)),
        ("longest gap p99", lambda side: words.seconds(side.longest_gap_p99_s)),
        ("TPOT p95", lambda side: words.seconds(side.tpot_p95_s)),
    ]
    cells = [(name, *(of(side) for side in result.verdicts)) for name, of in rows]
    for index, target in enumerate(result.targets):
        cells.append((words.target(target), *(_margin(side, index) for side in result.verdicts)))
    header = ("", *(_SIDES[side.side] for side in result.verdicts))
    return Table("replay", header, tuple(cells), numeric=tuple(range(1, len(header))))


def _gap(side: VerdictPart, value: Seconds) -> str:
    """The engine counts gaps above bounds and keeps no distribution."""
    return "not told" if side.side == "engine" else words.seconds(value)


def _margin(side: VerdictPart, index: int) -> str:
    part: MarginPart | None = side.margins[index] if index < len(side.margins) else None
    return "not judged" if part is None else words.judged(part)


def _notes(result: ReplayResult) -> list[str]:
    """What a reader must know before believing the table, the gravest first."""
    client, notes = result.client, []
    if result.interrupted:
        notes.append(
            f"interrupted: {words.count(result.unsent)} requests were not sent, "
            f"{words.count(result.failures.get('interrupted', 0))} cut off; neither is counted"
        )
    failed = {name: count for name, count in result.failures.items() if name != "interrupted"}
    if failed:
        notes.append("failed: " + ", ".join(f"{name} x {count:,}" for name, count in failed.items()))
    if client.bottleneck:
        engine = "believe the engine's times" if result.engine else "ask the engine (--tuning-url), or use more cores"
        notes.append(f"this client was the bottleneck: {'; '.join(client.bottleneck)}; {engine}")
    notes.append(f"sent late by p50 {words.seconds(client.late_p50_s)}, p99 {words.seconds(client.late_p99_s)}")
    if client.short_answers:
        notes.append(f"{client.short_answers:,} answers were shorter than asked for: the server ignores ignore_eos")
    if client.events_of_many:
        notes.append(f"{client.events_of_many:,} answers held several tokens in one event: gaps are between events")
    if result.engine is not None and result.engine.missing:
        notes.append(f"the engine told nothing of {result.engine.missing:,} finished requests: not counted on its side")
    if result.engine_error is not None:
        notes.append(f"no times from the engine: {result.engine_error}")
    notes += [f"targets not judged for the {one.side}: {one.not_judged}" for one in result.verdicts if one.not_judged]
    return notes
