"""The recommendation for a terminal: one screen, plain text."""

import textwrap

from rooftune.tuner.record import RunRecord
from rooftune.tuner.report import words
from rooftune.tuner.report.flags import flag_words, vllm_flags
from rooftune.tuner.report.headline import headline
from rooftune.tuner.report.trust import moves

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
