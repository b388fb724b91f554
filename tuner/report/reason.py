"""Why a change helps and what it costs, in words: what goes wrong today, what gets better, what gets worse."""

import math
from collections.abc import Iterator

from rooftune.tuner.record import RunRecord, Seconds
from rooftune.tuner.report import words

# Below this a figure counts as unchanged. Shares of groups: percentage points, and groups large enough to mean it.
SAME = 0.01
GROUP_REQUESTS = 100


def cause(record: RunRecord) -> str:
    """What a step does today and what it will do; empty where the change is not one of budget or chunk cap.

    How much a step may compute follows from the setting; what comes of it for answers and first tokens is only said
    where the replays show it.
    """
    if record.traffic.output_max_tokens == 1:
        return ""  # nobody is ever writing, so nobody's answer waits for a step
    before, after = record.current.setting, record.best.setting
    old, new = before["step_tokens"], after["step_tokens"]
    old_cap, new_cap = int(before.get("chunk_cap_tokens", 0)), int(after.get("chunk_cap_tokens", 0))
    most = words.tokens(new) + (f" (at most {new_cap:,} of any one prompt)" if new_cap and new_cap != old_cap else "")
    if new < old:
        then = f"With steps of at most {most} prompts"
        if _evener(record):
            then = f"Steps of at most {most} end sooner and keep the answers flowing; prompts then"
        later = ", and first tokens come later" if _first_tokens(record) > 0 else ""
        return (
            f"Today one step may compute up to {words.tokens(old)}, and every answer under way waits "
            f"until it ends. {then} need more steps to be read{later}."
        )
    if new > old:
        sooner = ", and first tokens come sooner" if _first_tokens(record) < 0 else ""
        longer = "; everybody whose answer is being written waits for the longer steps" if _unevener(record) else ""
        return (
            f"Today a step computes at most {words.tokens(old)}, so a long prompt needs many steps to be read. With up "
            f"to {most} it needs fewer{sooner}{longer}."
        )
    return _cap_cause(old_cap, new_cap)


def _gap_changes(record: RunRecord) -> tuple[float, float]:
    before, after = record.current, record.best
    return (
        _change(before.gap_p99_s, after.gap_p99_s),
        _change(before.longest_gap_p99_s, after.longest_gap_p99_s),
    )


def _evener(record: RunRecord) -> bool:
    """Whether gaps shrank by either measure and grew by neither."""
    return min(_gap_changes(record)) <= -SAME and max(_gap_changes(record)) < SAME


def _unevener(record: RunRecord) -> bool:
    return max(_gap_changes(record)) >= SAME


def _first_tokens(record: RunRecord) -> float:
    """Relative change of TTFT p99; 0 for less than SAME."""
    change = _change(record.current.ttft_p99_s, record.best.ttft_p99_s)
    return change if abs(change) >= SAME else 0.0


def _cap_cause(old: int, new: int) -> str:
    if old == new:
        return ""
    today = f"at most {words.tokens(old)} of one prompt are read in a step" if old else "one prompt may fill a step"
    if new and (new < old or not old):
        return (
            f"Today {today}. With at most {words.tokens(new)} of any one prompt a step has room for others; a long "
            "prompt then needs more steps to be read."
        )
    most = f"up to {words.tokens(new)} of it" if new else "as much of it as fits"
    return f"Today {today}. With {most} a long prompt needs fewer steps; others may wait for it."


def trade(record: RunRecord) -> str:
    """``Better: ... Worse: ...`` over the whole run; empty when nothing is set."""
    if record.best.setting == record.current.setting:
        return ""
    better: list[str] = []
    worse: list[str] = []
    for text, change in _figures(record):
        if abs(change) >= SAME:
            (worse if change > 0 else better).append(text)
    said = f"Better: {'; '.join(better) or 'nothing of the whole run by 1 % or more'}. "
    said += f"Worse: {'; '.join(worse) or 'nothing of the whole run by 1 % or more'}."
    return f"{said} {_paying_group(record)}".strip()


def _figures(record: RunRecord) -> Iterator[tuple[str, float]]:
    """(figure before and after, relative change, above 0 for worse): targets, then what has no target."""
    before, after = record.current, record.best
    named = set()
    for part, old, new in zip(record.targets, before.margins, after.margins, strict=True):
        name = f"{words.METRIC_WORDS.get(part.metric, part.metric)} {words.quantile_name(part.quantile)}"
        if part.applies_to == "all requests":
            named.add(name)
        else:
            name += f" ({part.applies_to})"
        yield _shown(name, old.measured_s, new.measured_s, f" (target {words.seconds(part.bound_s)})")
    for name, was, now in (
        ("time to first token p99", before.ttft_p99_s, after.ttft_p99_s),
        ("gap between tokens p99", before.gap_p99_s, after.gap_p99_s),
    ):
        if name not in named:
            yield _shown(name, was, now, "")
    rates = before.tokens_per_s, after.tokens_per_s
    if rates[0] is not None and rates[1] is not None:
        told = " → ".join(words.per_second(value, "tokens") for value in rates)
        yield f"output {told}", -_change(*rates)


def _shown(name: str, old: Seconds, new: Seconds, bound: str) -> tuple[str, float]:
    return f"{name} {words.seconds(old)} → {words.seconds(new)}{bound}", _change(old, new)


def _change(old: Seconds, new: Seconds) -> float:
    """Relative change; 0 where either has no samples or both never came."""
    if old is None or new is None or old == new:
        return 0.0
    was, now = float(old), float(new)
    if math.isinf(was):
        return -1.0
    return now / was - 1.0 if was > 0 else math.inf


def _paying_group(record: RunRecord) -> str:
    """The group that loses most good requests, when one loses any to speak of: a better whole may hide it."""
    large = [group for group in record.groups if group.requests >= GROUP_REQUESTS]
    worst = min(large, key=lambda g: g.best.attainment - g.current.attainment, default=None)
    if worst is None or worst.current.attainment - worst.best.attainment < SAME:
        return ""
    name = worst.group if worst.dimension == "all" else f"{worst.dimension} {worst.group}"
    return (
        f"Who pays: {name}, {words.share(worst.current.attainment)} → {words.share(worst.best.attainment)} good of "
        f"{words.count(worst.requests)} requests."
    )
