"""Findings in words: little to gain, knobs that a stock engine lacks, what cannot be had and what could."""

import math
from collections.abc import Iterator
from fractions import Fraction

from rooftune.policies.envelope import KNOB
from rooftune.tuner.record import FeasiblePart, MarginPart, RunRecord, Seconds
from rooftune.tuner.report import words

# Fewer requests at a time than this, each prompt within one step: hardly a step is ever shared, so no budget matters.
FEW_RUNNING = 2.0
SMALL_GAIN = 0.05


def little_to_gain(record: RunRecord) -> bool:
    """Whether tuning can hardly help: every prompt fits one step, hardly any run at once, and nothing was found."""
    gain = (record.best.attainment or 0.0) - (record.current.attainment or 0.0)
    whole = record.traffic.prompt_max_tokens <= record.current.step_tokens
    return whole and record.curve.running_mean < FEW_RUNNING and gain < SMALL_GAIN


def first_words(record: RunRecord) -> str:
    """Why there is little to gain; empty where there is more."""
    if not little_to_gain(record):
        return ""
    return (
        f"Tuning has little to work with here: the longest prompt ({words.tokens(record.traffic.prompt_max_tokens)}) "
        f"fits into one step of {words.tokens(record.current.step_tokens)}, and only "
        f"{words.rate(record.curve.running_mean)} requests are answered at a time on average, so requests "
        "hardly wait for each other. What is slow here is the model or the machine."
    )


_STOCK = "A vLLM without Rooftune's hook does not have this."
_NEWER = "A vLLM from 0.27 on does not have this without Rooftune's hook."
_READ_FIRST = {
    1: "the prompt with the fewest tokens left is read first",
    2: "the shortest of the prompts that can still meet their target is read first, the others last",
}


def extras(record: RunRecord) -> tuple[str, ...]:
    """What each further knob of the setting does, and that a stock vLLM does not have it."""
    s = record.best.setting
    found = []
    if order := int(s.get("order_policy", 0)):
        wait = words.seconds(float(s.get("aging_s", 10.0)))
        share = float(s.get("aged_share", 1.0))
        turn = "goes first" if share == 1.0 else f"goes first in {words.knob_value('aged_share', share)} of the steps"
        behind = (
            "" if share == 1.0 else " and behind all others in the rest, so that under overload others stay in time"
        )
        found.append(
            f"Order policy {KNOB['order_policy'].choices[order].words}: {_READ_FIRST[order]}; a request that has "
            f"waited {wait} {turn} whatever its length{behind}. {_STOCK}"
        )
    if s.get("budget_policy") == 1:
        target = words.seconds(float(s.get("budget_target_s", 0.0)))
        found.append(
            f"Budget policy step-time target: each step takes as many tokens as should fit into {target}, never more "
            f"than the budget. {_STOCK}"
        )
    if s.get("budget_policy") == 2:
        found.append(
            f"Budget policy pressure: while {s.get('pressure_prefills', 2):g} or more prompts are read and an answer "
            f"is being written, a step takes at most {words.tokens(s.get('pressure_tokens', 0))}. {_STOCK}"
        )
    if most := s.get("max_partial_prefills"):
        found.append(f"Partial-prefill cap: at most {most:g} prompts are half-read at a time. {_NEWER}")
    if most := s.get("max_long_partial_prefills"):
        length = words.tokens(s.get("long_prompt_tokens", 0))
        found.append(
            f"Long partial-prefill cap: of the prompts from {length} on at most {most:g} are half-read at a time. "
            f"{_NEWER}"
        )
    return tuple(found)


def target_floor_s(record: RunRecord, index: int) -> float | None:
    """The best value of that target's metric that any setting reached on the whole traffic; None when none did."""
    tried = [record.current, record.best, record.random_best, *(t for t in record.trials if t.whole_traffic)]
    reached = [trial.margins[index].measured_s for trial in tried]
    return min((value for value in reached if isinstance(value, float)), default=None)


def missed(row: MarginPart) -> bool:
    """Whether that target is missed."""
    return row.margin == "inf" or (isinstance(row.margin, float) and row.margin > 0)


def unreachable_words(record: RunRecord, index: int) -> str:
    """What cannot be had and what could: the binding target, its floor, and the rate that would do."""
    part, row = record.targets[index], record.best.margins[index]
    floor = target_floor_s(record, index)
    found = [f"The target that breaks: {words.target(part)}; this setting comes to {words.seconds(row.measured_s)}."]
    if floor is None:
        found.append("No setting tried ever gave a value for it.")
    elif floor > part.bound_s:
        found.append(f"Of all settings tried the best for this target alone comes to {words.seconds(floor)}.")
    else:
        found.append(f"Alone it could be met (best seen {words.seconds(floor)}), but not together with the others.")
    others = [
        f"{words.target(other)} ({words.seconds(margin.measured_s)})"
        for at, (other, margin) in enumerate(zip(record.targets, record.best.margins, strict=True))
        if at != index and missed(margin)
    ]
    if others:
        found.append(f"Missed as well: {'; '.join(others)}.")
    if "order_policy" not in record.search.knobs:
        found.append("Rooftune's hook gives vLLM more knobs: rooftune recommend --engine rooftune searches them too.")
    return " ".join([*found, _rate_words(record.feasible)]).strip()


def _rate_words(rate: FeasiblePart | None) -> str:
    if rate is None:
        return ""
    if rate.scale is None or rate.rate_rps is None:
        lowest = Fraction(rate.lowest_scale).limit_denominator(1000)  # 1/64
        return f"Even at {lowest} of this rate a target would be missed: for this traffic the targets are too tight."
    within = "" if rate.width is None else f", at {words.share(rate.width)} more it would not"
    return (
        f"Offered {words.per_second(rate.rate_rps / rate.scale, 'requests')}, with this setting the server carries "
        f"{words.per_second(rate.rate_rps, 'requests')} within every target: add a replica or move a target "
        f"(at {rate.scale:.3g} times this rate every target is met{within}; simulated, {words.count(rate.replays)} "
        "replays)."
    )


# Below this a figure counts as unchanged. Shares of groups: percentage points, and groups large enough to mean it.
SAME = 0.01
GROUP_REQUESTS = 100


def cause(record: RunRecord) -> str:
    """What a step does today and what it will do; empty where the change is not one of budget or chunk cap.

    How much a step may compute follows from the setting; what comes of it for answers and first tokens stands
    here only where the replays show it.
    """
    if record.traffic.output_max_tokens == 1:
        return ""  # no answer is ever running, so none waits for a step
    now, then = record.current, record.best
    old, new, old_cap, new_cap = now.step_tokens, then.step_tokens, now.chunk_cap_tokens, then.chunk_cap_tokens
    first = _change(now.ttft_p99_s, then.ttft_p99_s)
    gaps = _change(now.gap_p99_s, then.gap_p99_s), _change(now.longest_gap_p99_s, then.longest_gap_p99_s)
    most = words.tokens(new) + (f" (at most {new_cap:,} of any one prompt)" if new_cap and new_cap != old_cap else "")
    if new < old:
        # Answers flow more evenly when gaps shrink by one measure and grow by neither.
        effect = f"With steps of at most {most} prompts"
        if min(gaps) <= -SAME and max(gaps) < SAME:
            effect = f"Steps of at most {most} end sooner and keep the answers flowing; prompts then"
        later = ", and first tokens come later" if first >= SAME else ""
        return (
            f"Today one step may compute up to {words.tokens(old)}, and every answer under way waits "
            f"until it ends. {effect} need more steps to be read{later}."
        )
    if new > old:
        sooner = ", and first tokens come sooner" if first <= -SAME else ""
        longer = "; every running answer waits for the longer steps" if max(gaps) >= SAME else ""
        return (
            f"Today a step computes at most {words.tokens(old)}, so a long prompt needs many steps to be read. With up "
            f"to {most} it needs fewer{sooner}{longer}."
        )
    return _cap_cause(old_cap, new_cap)


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
    if not record.moves:
        return ""
    figures = list(_figures(record))
    nothing = "nothing of the whole run by 1 % or more"
    better = "; ".join(text for text, change in figures if change <= -SAME) or nothing
    worse = "; ".join(text for text, change in figures if change >= SAME) or nothing
    return f"Better: {better}. Worse: {worse}. {_paying_group(record)}".strip()


def _figures(record: RunRecord) -> Iterator[tuple[str, float]]:
    """(figure before and after, relative change, above 0 for worse): targets, then what has no target."""
    before, after = record.current, record.best
    rows = [
        (words.figure(part), old.measured_s, new.measured_s, f" (target {words.seconds(part.bound_s)})")
        for part, old, new in zip(record.targets, before.margins, after.margins, strict=True)
    ]
    judged = {name for name, *_ in rows}
    for name, old, new in (
        ("time to first token p99", before.ttft_p99_s, after.ttft_p99_s),
        ("gap between tokens p99", before.gap_p99_s, after.gap_p99_s),
    ):
        if name not in judged:
            rows.append((name, old, new, ""))
    for name, old, new, target in rows:
        yield f"{name} {words.seconds(old)} → {words.seconds(new)}{target}", _change(old, new)
    if before.tokens_per_s is not None and after.tokens_per_s is not None:
        fewer = -_change(before.tokens_per_s, after.tokens_per_s)
        yield f"output {words.output(before)} → {words.output(after)}", fewer


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
