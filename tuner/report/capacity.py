"""What ``rooftune capacity`` says: its record, and that record in words."""

from typing import Annotated, Literal

from pydantic import Field

from rooftune.tuner.record import (
    Count,
    EnginePart,
    MarginPart,
    Part,
    Some,
    StepModelPart,
    TargetPart,
    TrafficPart,
    TrialPart,
    Words,
    digits,
    finite,
)
from rooftune.tuner.report import words
from rooftune.tuner.report.build import (
    DescribedCase,
    margin_parts,
    setting_values,
    target_index,
    target_parts,
    trial_part,
)
from rooftune.tuner.search.capacity import Capacity, Shares
from rooftune.tuner.search.feasible_rate import HIGHEST_SCALE, LOWEST_SCALE

RESOURCE_WORDS = {
    "prefill": "prefill compute: there is nearly always a prompt waiting to be read",
    "decode": "decode: writing the answers takes the steps' time",
    "kv": "the KV pool: requests wait although the steps have room",
    "sequences": "the sequence cap: requests wait for one of its places",
    "budget": "not the engine but the steps: those that are too long carry prompt tokens",
    "nothing": "nothing is full: single requests or steps miss a target by themselves",
}
LEVER_WORDS = {
    "smaller_budget": "a smaller token budget or a chunk cap (rooftune recommend finds it)",
    "prefix_caching": "turn prefix caching on",
    "prefill_pool": "a pool of its own for prefill",
    "split_pools": "separate pools for short and for long prompts",
    "admission": "refuse or defer requests beyond this rate",
    "more_kv": "a larger KV pool (more memory for it, or a smaller KV data type)",
    "more_sequences": "a larger sequence cap (--max-num-seqs)",
    "more_replicas": "another replica",
    "targets": "other targets: at any rate these are missed, if only by the longest requests or steps",
}


# At a rate near 0 a request runs alone: what only shares the load cannot shorten its steps.
_SHARES_LOAD = frozenset({"more_replicas", "admission"})


def _levers(found: Capacity) -> tuple[str, ...]:
    names = [lever.value for lever in found.levers]
    if found.rate.at is None:
        names = ["targets", *(name for name in names if name not in _SHARES_LOAD and name != "targets")]
    return tuple(names)


class CapacityRecord(Part):
    """What one engine carries. scale, rate_rps: highest rate tried that meets every target, null when no rate does.

    above_scale: lowest rate tried that does not, null when all did. breaks: index into ``targets`` of the one that
    fails first, with its margins just above. at: the replay at ``scale``. Everything is simulated.
    """

    schema_name: Literal["rooftune.capacity"] = Field(alias="schema")
    version: Literal[1]
    targets: tuple[TargetPart, ...]
    traffic: TrafficPart
    step_model: StepModelPart
    engine: EnginePart
    setting: dict[str, Annotated[int | float, Field(ge=0)]]
    searched: bool
    scale: Annotated[float, Field(gt=0)] | None
    rate_rps: Annotated[float, Field(gt=0)] | None
    above_scale: Annotated[float, Field(gt=0)] | None
    at: TrialPart | None
    breaks: Count | None
    above_margins: tuple[MarginPart, ...]
    resource: Words
    shares: Shares | None
    levers: tuple[Words, ...]
    replays: Some


def capacity_record(found: Capacity, case: DescribedCase) -> CapacityRecord:
    """One capacity as plain values."""
    rate, breaks, shares = found.rate, found.breaks, found.shares
    return CapacityRecord(
        schema="rooftune.capacity",
        version=1,
        targets=target_parts(case.slo),
        traffic=case.traffic_part,
        step_model=case.model_part,
        engine=case.engine_part,
        setting=setting_values(found.setting),
        searched=found.searched,
        scale=finite(rate.scale),
        rate_rps=finite(rate.rate_rps),
        above_scale=finite(rate.above_scale),
        at=None if rate.at is None else trial_part(rate.at),
        breaks=None if breaks is None else target_index(case.slo, breaks),
        above_margins=() if rate.above is None else margin_parts(rate.above.margins),
        resource=found.resource.value,
        shares=None if shares is None else Shares(**{name: digits(of, 6) for name, of in vars(shares).items()}),
        levers=_levers(found),
        replays=found.replays,
    )


def capacity_text(record: CapacityRecord) -> str:
    """One screen. Ends without a newline."""
    rows = [
        ("setting", f"{words.setting(record.setting)} ({'found by search' if record.searched else 'given'})"),
        ("targets", "; ".join(words.target(part) for part in record.targets)),
        ("rate", _rate(record)),
    ]
    if record.breaks is not None:
        target, margin = words.target(record.targets[record.breaks]), record.above_margins[record.breaks]
        rows += [
            ("breaks", f"{target}: {words.seconds(margin.measured_s)} just above ({words.judged(margin)})"),
            ("full", _full(record)),
            ("next", "; ".join(LEVER_WORDS[lever] for lever in record.levers)),
        ]
    trust = (
        f"Simulated, {words.count(record.replays)} replays of {words.count(record.traffic.requests)} requests at other "
        f"speeds, step model {record.step_model.name} ({words.SOURCE_WORDS[record.step_model.source]}). A short file "
        "at a high speed ends before a queue has built up."
    )
    rows.append(("trust", trust))
    lines = [_title(record), ""]
    for label, text in rows:
        lines += words.entry(label, text)
    return "\n".join(lines)


def _title(record: CapacityRecord) -> str:
    if record.rate_rps is None:
        return f"No rate meets every target, down to {LOWEST_SCALE:.3g} times the traffic's own"
    at_least = "at least " if record.above_scale is None else ""
    return f"Carries {at_least}{words.per_second(record.rate_rps, 'requests')} within every target"


def _rate(record: CapacityRecord) -> str:
    if record.scale is None:
        return f"a target is missed at every speed tried, {LOWEST_SCALE:.3g} to 1 times the traffic's own rate"
    if record.above_scale is None:
        return f"every target is met up to {HIGHEST_SCALE:g} times the traffic's own rate; it was not tried further"
    return (
        f"{record.scale:.3g} times the traffic's own rate; at {record.above_scale:.3g} times a target is missed "
        f"({words.share(record.above_scale / record.scale - 1.0)} more)"
    )


def _full(record: CapacityRecord) -> str:
    full = RESOURCE_WORDS[record.resource]
    s = record.shares
    if s is None:
        return full
    return (
        f"{full}. In the worst minute just above: a prompt to read {words.share(s.prefill, 0)} of the time, steps at "
        f"the budget {words.share(s.at_budget, 0)}, sequence cap reached {words.share(s.sequences_full, 0)}, held up "
        f"by the KV pool {words.share(s.kv_blocked, 0)} (at most {words.share(s.kv_peak, 0)} of it wanted)"
    )
