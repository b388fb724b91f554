"""A record as a page, as Markdown and as the summary on a terminal: the same sentences, and the same tables."""

import re
from functools import cache
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from rooftune.tuner.record import RunRecord
from rooftune.tuner.report import charts, flags, headline, tables, trust, words

_SPECIAL = re.compile(r"([\\`*_|\[\]])")


def markdown_text(text: object) -> str:
    """Text that Markdown shows as it is, on one line, flags as code."""
    plain = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return words.FLAGS.sub(r"`\g<0>`", _SPECIAL.sub(r"\\\1", plain))


def html_text(text: str) -> Markup:
    """Escaped, numbers tied to their units, flags as code."""
    return Markup(words.FLAG.sub(r"<code>\g<0></code>", str(escape(words.tied(text)))))


def _source(name: str) -> str:
    return (files("rooftune.tuner.report") / "templates" / name).read_text(encoding="utf-8")


@cache
def _environment(*, html: bool) -> Environment:
    made = Environment(
        loader=FunctionLoader(_source),
        autoescape=html,
        finalize=None if html else markdown_text,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["text"] = html_text
    made.globals |= {
        "charts": charts.charts,
        "flags": flags,
        "glossary": [line.split(": ", 1) for line in _source("glossary.txt").splitlines()],
        "headline": headline,
        "style": Markup(_source("report.css")),
        "tables": tables,
        "trust": trust,
        "words": words,
    }
    return made


def markdown_page(record: RunRecord) -> str:
    """The sentences and tables of the page, without the plots."""
    return _environment(html=False).get_template("report.md.j2").render(record=record)


def html_page(record: RunRecord) -> str:
    """The whole page. Text from the record is escaped; the plots are ours and are inlined as they are."""
    return _environment(html=True).get_template("report.html.j2").render(record=record)


def summary(record: RunRecord) -> str:
    """The first screen for a terminal, and how far to trust it. Ends without a newline."""
    before, after, s = record.current, record.best, record.search
    goodput = f"{words.goodput(before)} -> {words.goodput(after)}"
    search = f"{words.count(s.trials)} trials of {s.sampler}, {words.count(s.simulated_steps)} simulated steps"
    random = f"{words.count(s.random_simulated_steps)} steps found {words.share(record.random_best.attainment)}"
    rows = [
        *headline.answers(record),
        ("Goodput", [f"{goodput}; output {words.output(before)} -> {words.output(after)}"]),
        ("Caveats", list(trust.caveats(record))),
        ("Search", [f"{search}; random search with {random}"]),
    ]
    lines = [headline.title(record), ""]
    for label, sentences in rows:
        for index, sentence in enumerate(sentences):
            lines += words.entry(label.lower() if index == 0 else "", sentence)
    return "\n".join(lines)
