"""Findings in words: little to gain, knobs that a stock engine lacks, what cannot be had and what could."""

from rooftune.tuner.record import MarginPart, RunRecord
from rooftune.tuner.report import words

# Fewer requests at a time than this, each prompt within one step: hardly a step is ever shared, so no budget matters.
FEW_RUNNING = 2.0
SMALL_GAIN = 0.05


def little_to_gain(record: RunRecord) -> bool:
    """Whether tuning can hardly help: every prompt fits one step, hardly any run at once, and nothing was found."""
    gain = (record.best.attainment or 0.0) - (record.current.attainment or 0.0)
    whole = record.traffic.prompt_max_tokens <= record.current.setting["step_tokens"]
    return whole and record.curve.running_mean < FEW_RUNNING and gain < SMALL_GAIN


def first_words(record: RunRecord) -> str:
    if not little_to_gain(record):
        return ""
    return (
        f"Tuning has little to work with here: the longest prompt ({words.tokens(record.traffic.prompt_max_tokens)}) "
        f"fits into one step of {words.tokens(record.current.setting['step_tokens'])}, and only "
        f"{words.decimal(record.curve.running_mean)} requests are answered at a time on average, so hardly anybody "
        "waits for anybody else. What is slow here is the model or the machine."
    )


_STOCK = "A vLLM without Rooftune's hook does not have this."
_NEWER = "A vLLM from 0.27 on does not have this without Rooftune's hook."


def extras(record: RunRecord) -> tuple[str, ...]:
    """What each further knob of the setting does, and that a stock vLLM does not have it."""
    s = record.best.setting
    found = []
    if s.get("order_policy"):
        name = words.ORDER_POLICY_WORDS[int(s["order_policy"])]
        how = {
            1: "the prompt with the fewest tokens left is read first",
            2: "the shortest of the prompts that can still meet their target is read first, the others last",
        }[int(s["order_policy"])]
        wait = words.seconds(float(s.get("aging_s", 10.0)))
        found.append(f"Order policy {name}: {how}; who has waited {wait} goes first whatever its length. {_STOCK}")
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
    if s.get("max_partial_prefills"):
        found.append(
            f"Partial-prefill cap: at most {s['max_partial_prefills']:g} prompts are half-read at a time. {_NEWER}"
        )
    if s.get("max_long_partial_prefills"):
        length = words.tokens(s.get("long_prompt_tokens", 0))
        found.append(
            f"Long partial-prefill cap: of the prompts from {length} on at most {s['max_long_partial_prefills']:g} are "
            f"half-read at a time. {_NEWER}"
        )
    return tuple(found)


def target_floor_s(record: RunRecord, index: int) -> float | None:
    """The best value of that target's metric that any setting reached on the whole traffic; None for none."""
    tried = [record.current, record.best, record.random_best, *(t for t in record.trials if t.whole_traffic)]
    reached = [trial.margins[index].measured_s for trial in tried]
    return min((value for value in reached if isinstance(value, float)), default=None)


def missed(row: MarginPart) -> bool:
    """Whether that target is missed."""
    return row.margin == "inf" or (isinstance(row.margin, float) and row.margin > 0)


def _part_of(scale: float) -> str:
    """A rate's small multiple as people say it: ``1/64``; others as they are."""
    whole = round(1.0 / scale)
    return f"1/{whole}" if whole > 1 and abs(1.0 / whole - scale) < 0.01 * scale else f"{scale:.3g}"


def unreachable_words(record: RunRecord, index: int) -> str:
    """What cannot be had and what could: the binding target, its floor, and the rate that would do."""
    part, row = record.targets[index], record.best.margins[index]
    floor = target_floor_s(record, index)
    said = f"The target that breaks: {words.target(part)}; this setting comes to {words.seconds(row.measured_s)}."
    if floor is None:
        said += " No setting tried ever gave a value for it."
    elif floor > part.bound_s:
        said += f" Of all settings tried the best for this target alone comes to {words.seconds(floor)}."
    else:
        said += f" Alone it could be met (best seen {words.seconds(floor)}), but not together with the others."
    others = [
        f"{words.target(other)} ({words.seconds(found.measured_s)})"
        for at, (other, found) in enumerate(zip(record.targets, record.best.margins, strict=True))
        if at != index and missed(found)
    ]
    if others:
        said += f" Missed as well: {'; '.join(others)}."
    if "order_policy" not in record.search.knobs:
        said += " Rooftune's hook gives vLLM more knobs: rooftune recommend with --engine rooftune searches these, too."
    rate = record.feasible
    if rate is None:
        return said
    if rate.scale is None:
        return (
            f"{said} Even at {_part_of(rate.lowest_scale)} of this rate a target would be missed: for this traffic the "
            "targets are too tight."
        )
    within = "" if rate.width is None else f", at {words.share(rate.width)} more it would not"
    return (
        f"{said} At {rate.scale:.3g} times this rate ({words.per_second(rate.rate_rps, 'requests')}) this setting "
        f"would meet every target{within} (simulated, {words.count(rate.replays)} replays)."
    )
