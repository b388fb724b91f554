"""The report as one HTML page: no script, no external request, same record, same bytes."""

from functools import cache
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from rooftune.tuner.record import RunRecord
from rooftune.tuner.report import tables, words
from rooftune.tuner.report.charts import charts
from rooftune.tuner.report.flags import flag_words, flags_added, vllm_flags, vllm_flags_before
from rooftune.tuner.report.glossary import GLOSSARY, SHORT
from rooftune.tuner.report.headline import after_word, before_word, headline
from rooftune.tuner.report.trust import moves


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
