"""The report as Markdown: the same sentences and tables as the page, without the plots."""

import re

from rooftune.tuner.record import RunRecord
from rooftune.tuner.report import tables, words
from rooftune.tuner.report.flags import flag_words, flags_added, vllm_flags, vllm_flags_before
from rooftune.tuner.report.glossary import GLOSSARY, SHORT
from rooftune.tuner.report.headline import Headline, headline
from rooftune.tuner.report.tables import Table
from rooftune.tuner.report.trust import moves

_SPECIAL = re.compile(r"([\\`*_|\[\]])")


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;"))


def table_lines(table: Table) -> list[str]:
    """A heading, a pipe table and its note."""
    sides = ["---:" if index in table.numeric else "---" for index in range(len(table.header))]
    rows = [table.header, *table.rows]
    lines = ["| " + " | ".join(escaped(cell) for cell in row) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join(sides) + " |")
    return ["", f"## {table.title}", "", *lines, *(["", escaped(table.note)] if table.note else [])]


def markdown_page(record: RunRecord) -> str:
    """The whole page, ending in one newline."""
    head = headline(record)
    targets = "; ".join(words.target(part) for part in record.targets) or "none; the objective is tokens per second"
    lines = [
        f"# {escaped(head.title)}",
        "",
        f"Rooftune report on {escaped(record.traffic.name)}, made {record.made_at} by rooftune {record.made_by}.",
        "",
        f"**{escaped(head.trust)}**",
        "",
        *([f"- **First:** {escaped(head.first)}"] if head.first else []),
        f"- **What:** {escaped(head.what)}",
        *(f"- **New:** {escaped(extra)}" for extra in head.extras),
        f"- **Why:** {escaped(head.why)}",
        *([f"- **Trade:** {escaped(head.trade)}"] if head.trade else []),
        f"- **Limit:** {escaped(head.limit)}",
        f"- **Targets:** {escaped(targets)}.",
        *_how(record, head),
        "",
        "In a few words: " + "; ".join(f"**{word}**: {escaped(meaning)}" for word, meaning in SHORT) + ".",
        "",
        "How far to trust this:",
        "",
        *(f"- {escaped(caveat)}" for caveat in head.caveats),
    ]
    for table in (
        tables.outcome(record),
        tables.groups(record),
        tables.baselines(record),
        tables.search(record),
        *((tables.vllm(record), tables.elsewhere(record)) if moves(record) else ()),
        tables.inputs(record),
    ):
        lines += table_lines(table)
    lines += ["", "## Words", "", *(f"- **{word}**: {escaped(meaning)}" for word, meaning in GLOSSARY)]
    return "\n".join(lines) + "\n"


def _how(record: RunRecord, head: Headline) -> list[str]:
    if not moves(record):
        return ["- **How:** leave the engine as it is."]
    flags = vllm_flags(record, record.best)
    first = f"{escaped(head.undo_first)} To go back, " if head.undo_first else ""
    added = flags_added(record)
    without = f", without {' and '.join(f'`{name}`' for name in added)}" if added else ""
    without += ", without the hook's policies" if head.extras else ""
    return [
        f"- **How:** start vLLM with `{flags.text}`",
        *(f"  - {escaped(note)}" for note in (*flag_words(record), *flags.notes)),
        f"- **Undo:** {first}restart it with the flags it had: `{vllm_flags_before(record).text}`{without}",
        f"- **Then:** {escaped(head.watch)}",
    ]
