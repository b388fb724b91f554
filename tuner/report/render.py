"""The report as Markdown: the same sentences and tables as the page, without the plots."""

import re
import textwrap
from functools import cache
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from rooftune.tuner.record import RunRecord
from rooftune.tuner.report import tables, words
from rooftune.tuner.report.charts import charts
from rooftune.tuner.report.flags import flag_words, flags_added, vllm_flags, vllm_flags_before
from rooftune.tuner.report.headline import Headline, after_word, before_word, headline
from rooftune.tuner.report.tables import Table
from rooftune.tuner.report.trust import moves
from rooftune.tuner.report.words import GLOSSARY, SHORT

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
        f"- **Undo:** {first}restart vLLM with these flags: `{vllm_flags_before(record).text}`{without}",
        f"- **Then:** {escaped(head.watch)}",
    ]


def _source(name: str) -> str:
    return (files("rooftune.tuner.report") / "templates" / name).read_text(encoding="utf-8")


def _difference(record: RunRecord) -> str:
    """Of the shares of good requests, in percentage points with their sign."""
    before, after = record.current.attainment, record.best.attainment
    return words.NO_VALUE if before is None or after is None else f"{(after - before) * 100:+.1f}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["tied"] = words.tied
    return environment


def html_page(record: RunRecord) -> str:
    """The whole page. Text from the record is escaped; the plots are ours and are inlined as they are."""
    shown = {
        "outcome": tables.outcome(record),
        "groups": tables.groups(record),
        "baselines": tables.baselines(record),
        "search": tables.search(record),
        "inputs": tables.inputs(record),
        "vllm": tables.vllm(record),
        "elsewhere": tables.elsewhere(record),
    }
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            record=record,
            head=headline(record),
            words=words,
            after_word=after_word(record),
            before_word=before_word(record),
            difference=_difference(record),
            moves=moves(record),
            flags=vllm_flags(record, record.best),
            flag_words=flag_words(record),
            flags_before=vllm_flags_before(record),
            flags_added=flags_added(record),
            tables=shown,
            charts=charts(record),
            short=SHORT,
            glossary=GLOSSARY,
            style=Markup(_source("report.css")),
        )
    )


COLUMNS = 100
_INDENT = 11


def summary(record: RunRecord) -> str:
    """What to set, against what, why, how, how to undo it, how far to trust it. Ends without a newline."""
    head = headline(record)
    flags = vllm_flags(record, record.best)
    targets = "; ".join(words.target(part) for part in record.targets) or "none; the objective is tokens per second"
    lines = [head.title, ""]
    for label, text in (
        *((("first", head.first),) if head.first else ()),
        ("trust", head.trust),
        ("what", head.what),
        *(("new", extra) for extra in head.extras),
        ("why", head.why),
        *((("trade", head.trade),) if head.trade else ()),
        ("limit", head.limit),
        ("targets", targets),
        ("goodput", _goodput(record)),
    ):
        lines += _entry(label, text)
    if moves(record):
        # Not wrapped: it is there to be copied.
        lines.append(f"  {'vLLM':<{_INDENT - 2}}{flags.text}")
        lines += _entry("", " ".join((*flag_words(record), *flags.notes)))
        lines += _entry("undo", f"{head.undo_first} {head.undo}".strip())
        lines += _entry("then", head.watch)
    for index, caveat in enumerate(head.caveats):
        lines += _entry("caveats" if index == 0 else "", caveat)
    lines += _entry("search", _search(record))
    return "\n".join(lines)


def _entry(label: str, text: str) -> list[str]:
    first = f"  {label:<{_INDENT - 2}}"
    lines = textwrap.wrap(
        words.tied(text),
        COLUMNS,
        initial_indent=first,
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    # Only the wrapping needs the tie: what is printed is there to be searched and copied.
    return [line.replace(words.NO_BREAK_SPACE, " ") for line in lines]


def _goodput(record: RunRecord) -> str:
    before, after = (words.per_second(t.goodput_rps, "requests") for t in (record.current, record.best))
    tokens = (words.per_second(t.tokens_per_s, "tokens") for t in (record.current, record.best))
    return f"{before} -> {after}; output {' -> '.join(tokens)}"


def _search(record: RunRecord) -> str:
    s = record.search
    found = words.share(record.random_best.attainment)
    return (
        f"{words.count(s.trials)} trials of {s.sampler}, {words.count(s.simulated_steps)} simulated steps; "
        f"random search with {words.count(s.random_simulated_steps)} steps found {found}"
    )
