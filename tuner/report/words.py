"""Numbers as people read them, always with their unit. The only place where seconds become milliseconds."""

import re
import textwrap
from collections.abc import Mapping

from rooftune.policies.envelope import KNOB, KNOB_LABELS
from rooftune.tuner.record import MarginPart, Number, Seconds, TargetPart, TrafficPart, TrialPart

NO_BREAK_SPACE = "\u00a0"
_UNIT = re.compile(r"(?<=[0-9]) (?=(?:%|µs|ms|s|tokens|requests?/s|tokens?/s|percentage|times|x)(?![a-z]))|(?<=±) ")

_FLAG = "--[a-z][a-z-]*(?: [0-9]+)?"
FLAG = re.compile(_FLAG)
FLAGS = re.compile(f"{_FLAG}(?: {_FLAG})*")  # several in a row, as an operator copies them
COLUMNS = 100  # as wide as a terminal's text gets
_INDENT = 11

_HUGE = 10_000.0  # times the bound; more digits say nothing and tear the table
NO_VALUE = "no samples"
NEVER = "never"

METRIC_WORDS = {
    "ttft": "time to first token",
    "gap": "gap between tokens",
    "tpot": "time per output token",
    "longest_gap": "longest gap of a request",
    "e2e": "whole answer",
    "queue": "wait in the queue",
}
ROLE_WORDS = {
    "current": "in force",
    "engine_default": "engine's default",
    "formula": "formula: largest step within the target",
    "knee": "knee of the roofline",
    "sweep": "budget sweep, no chunk cap",
    "random": "random search",
    "search": "search",
}
NOT_SHOWN = ("prefill_s_per_token",)  # a setting carries it, but no operator chooses it
SOURCE_WORDS = {"measured": "measured", "simulated": "simulated", "assumed": "assumed", "given": "given by you"}
ENGINE_WORDS = {
    "ceiling_tokens": "budget ceiling (fixed at start)",
    "kv_tokens": "KV pool",
    "block_tokens": "KV block",
    "max_seqs": "sequence cap (fixed at start)",
    "prefix_caching": "prefix caching",
    "decodes_kept_moving": "decodes kept moving past a partial prefill",
}


def seconds(value: Seconds) -> str:
    """``812 ms``, ``2.31 s``, ``never`` (infinite) or ``no samples``."""
    if value is None:
        return NO_VALUE
    if value == "inf":
        return NEVER
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:,.3g} s" if value < 999.5 else f"{value:,.0f} s"


def named(traffic: TrafficPart) -> str:
    """The file's name, and what was done to its times."""
    return f"{traffic.name} ({', '.join(traffic.changes)})" if traffic.changes else traffic.name


def requests_in(requests: int, span_s: float) -> str:
    """``19,366 requests in 3,600 s``; what has no span came at once."""
    if span_s > 0.0:
        return f"{count(requests)} requests in {seconds(span_s)}"
    return f"{count(requests)} requests at once" if requests > 1 else "1 request"


def tied(text: str) -> str:
    """Numbers held together with their units by spaces that do not break."""
    return _UNIT.sub(NO_BREAK_SPACE, text)


def entry(label: str, text: str) -> list[str]:
    """Lines for a terminal: the label, then the text beside it. Flags in a row stay on one line, to be copied."""
    lines = textwrap.wrap(
        FLAGS.sub(lambda found: found[0].replace(" ", NO_BREAK_SPACE), tied(text)),
        COLUMNS,
        initial_indent=f"  {label:<{_INDENT - 2}}",
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    # Only the wrapping needs the tie: what is printed must be found and copied.
    return [line.replace(NO_BREAK_SPACE, " ") for line in lines]


def share(value: float | None, digits: int = 1) -> str:
    """``98.2 %``."""
    return NO_VALUE if value is None else f"{value * 100:.{digits}f} %"


def count(value: float) -> str:
    """``19,366``."""
    return f"{value:,.0f}"


def tokens(value: Number) -> str:
    """``2,048 tokens``."""
    if value is None:
        return NO_VALUE
    return "no bound" if value == "inf" else f"{value:,.0f} tokens"


def points(value: float) -> str:
    """``1.23 percentage points``: a difference of two shares, which no reader may take for a share of one of them."""
    return f"{value * 100:.2f} percentage points"


def rate(value: float | None) -> str:
    """``9.71``, ``1,234``: for a column or a sentence that names its unit."""
    if value is None:
        return NO_VALUE
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def per_second(value: float | None, what: str) -> str:
    """``9.71 requests/s``, ``1 request/s``."""
    shown = rate(value)
    if value is None:
        return shown
    return f"{shown} {what.removesuffix('s') if shown == '1' else what}/s"


def goodput(trial: TrialPart) -> str:
    """``9.71 requests/s``, those that meet every target."""
    return per_second(trial.goodput_rps, "requests")


def output(trial: TrialPart) -> str:
    """``2,000 tokens/s`` of finished requests."""
    return per_second(trial.tokens_per_s, "tokens")


def quantile_name(quantile: float) -> str:
    """``p99``, ``p99.9``; ``max`` for 1."""
    return "max" if quantile == 1.0 else f"p{quantile * 100:.10g}"


def figure(part: TargetPart, bound: str = "") -> str:
    """``time to first token p99``; with the requests it is for, when not all."""
    name = f"{METRIC_WORDS.get(part.metric, part.metric)} {quantile_name(part.quantile)}{bound}"
    return name if part.applies_to == "all requests" else f"{name} ({part.applies_to})"


def target(part: TargetPart) -> str:
    """``time to first token p99 within 2 s``."""
    return figure(part, f" within {seconds(part.bound_s)}")


def margin(value: Number) -> str:
    """``met, 12 % to spare``; what rounds to nothing is still met or missed."""
    if value is None:
        return NO_VALUE
    if value == "inf":
        return "missed without bound"
    if value > _HUGE:
        return f"missed by more than {_HUGE * 100:,.0f} %"
    size = f"{abs(value) * 100:,.0f} %" if abs(value) >= 0.005 else "less than 1 %"
    if value == 0:
        return "met, nothing to spare"
    return f"met, {size} to spare" if value < 0 else f"missed by {size}"


def judged(part: MarginPart) -> str:
    """The same for one target of a run. Where the run only counted what lies above the bound, that against what may:
    ``missed, 11 times as many above it as allowed``."""
    if part.measured_s is not None or not isinstance(part.margin, float):
        return margin(part.margin)
    times = 1.0 + part.margin
    if part.margin <= 0.0:
        return f"met, {times * 100:,.0f} % of what may lie above it does"
    if times < 1.05:
        return "missed, slightly more above it than allowed"
    shown = f"{times:.1f}" if times < 9.95 else f"{times:,.0f}"
    return f"missed, {shown} times as many above it as allowed"


def knob_value(name: str, value: float) -> str:
    """A knob's value with its unit."""
    if name in KNOB and KNOB[name].choices:
        return KNOB[name].choices[int(value)].words
    if value == 0:
        return "none"
    if name.endswith("_tokens"):
        return tokens(value)
    if name.endswith("_tokens_per_s"):
        return f"{tokens(value)}/s"
    if name.endswith("_share"):
        return f"{100 * value:g} %"
    return seconds(value) if name.endswith("_s") else f"{value:g}"


def setting(values: Mapping[str, float]) -> str:
    """One setting in words: budget, caps, and whatever else is not at its default."""
    shown = {name: value for name, value in values.items() if name not in NOT_SHOWN}
    return ", ".join(f"{KNOB_LABELS.get(name, name)} {knob_value(name, value)}" for name, value in shown.items())


# For the first screen, where a sentence would be too long. What each means in full stands in templates/glossary.txt.
SHORT: tuple[tuple[str, str], ...] = (
    ("token budget", "most tokens that one step, one pass through the model, may compute"),
    ("chunk cap", "most prompt tokens of one request in a step"),
    ("TTFT", "time to first token, from arrival"),
    ("p99", "99 in 100 are at most this"),
    ("goodput", "requests per second that meet every target"),
    ("KV block", "unit of the memory that holds what the model has read"),
    ("twin", "program that replays your traffic with the engine's scheduling decisions"),
)
