"""A report of a live run, as Markdown, from its cycle records alone."""

from collections import Counter
from pathlib import Path

from rooftune.policies.errors import InputError
from rooftune.policies.guard import Action
from rooftune.tuner.control.explain.explain import explain, knee, knobs, load, points, share
from rooftune.tuner.control.outcome import CycleRecord, Knobs
from rooftune.tuner.control.ports import Store

NAME = "live.md"
MOST_CYCLES = 20_000


def write_report(folder: Path, store: Store, numbers: tuple[int, int], engine: str) -> Path:
    """``live.md`` in ``folder`` about the cycles between two numbers. Raises InputError when it cannot be written."""
    records = _records(store, *numbers)
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(report_of(records, engine), encoding="utf-8")
    except OSError as error:
        raise InputError(f"report {str(path)!r} cannot be written: {error.strerror}; name another folder") from None
    return path


def _records(store: Store, first: int, last: int) -> list[CycleRecord]:
    """Oldest first; of a long run the latest."""
    found = store.last(min(MOST_CYCLES, last - first + 1), last + 1)
    return [record for record in reversed(found) if record.number >= first]


def report_of(records: list[CycleRecord], engine: str) -> str:
    """The page. records: oldest first."""
    lines = [f"# Live run on {engine}", ""]
    if not records:
        return "\n".join([*lines, "No cycle ran.", ""])
    lines += [*_summary(records), "", "## Pushes", "", *_pushes(records), "", "## Outcomes", "", *_outcomes(records)]
    most = Counter(record.reason for record in records).most_common(1)[0][0]
    usual = [record for record in records if record.reason is most][-1]
    explained = [r for r in records if r.action in (Action.PUSH, Action.REVERT) or _kept(r) or r is usual]
    lines += ["", "## Why", ""]
    for record in explained:
        title = f"### Cycle {record.number}" + (", the latest of the most frequent reason" if record is usual else "")
        lines += [title, "", *(f"- {line}" for line in explain(record)), ""]
    return "\n".join(lines).rstrip() + "\n"


def _summary(records: list[CycleRecord]) -> list[str]:
    last = records[-1]
    lines = [f"{len(records)} cycles, {records[0].number} to {last.number}, mode {last.mode}.", ""]
    seen = [r for r in records if r.observed is not None and r.observed.attainment is not None]
    if seen:
        lines.append(f"- requests within the targets: first {_share(seen[0])}, last {_share(seen[-1])}")
    fits = [r.fit for r in records if r.fit is not None]
    if fits:
        lines.append(f"- the latest step model: {knee(fits[-1])}, by {fits[-1].steps} steps")
    if last.in_force is not None:
        lines.append(f"- in force at the end of the last cycle: {knobs(last.in_force)}")
    said = [words for r in records if r.load is not None and (words := load(r.load))]
    if said:
        lines.append(f"- load: {said[-1]}")
    lines.append(f"- trials cost {last.spent_slo_s:.1f} SLO-seconds on the day of the last cycle")
    return lines


def _share(record: CycleRecord) -> str:
    assert record.observed is not None and record.observed.attainment is not None
    return f"{share(record.observed.attainment)} of {record.observed.requests}"


def _kept(record: CycleRecord) -> bool:
    return record.verify is not None and record.verify.verdict == "better"


def _pushes(records: list[CycleRecord]) -> list[str]:
    verdicts = {r.verify.push_cycle: r.verify for r in records if r.verify is not None}
    pushed = _arrived(records)
    would = [r for r in records if r.would_push is not None]
    if not pushed:
        return [f"None; {len(would)} cycles would have pushed in live mode." if would else "None."]
    lines = ["| cycle | pushed | predicted | observed | verdict |", "|---|---|---|---|---|"]
    by_number = {record.number: record for record in records}
    for number, changes in pushed.items():
        verify, record = verdicts.get(number), by_number.get(number)
        gain = record.predicted_gain if record is not None else None
        observed, verdict = "", "none"
        if verify is not None:
            gain = gain if verify.predicted_gain is None else verify.predicted_gain
            observed = "" if verify.observed_gain is None else points(verify.observed_gain, verify.half_width)
            verdict = f"{verify.verdict} ({verify.reason})"
        predicted = "" if gain is None else points(gain)
        lines.append(f"| {number} | {knobs(changes)} | {predicted} | {observed} | {verdict} |")
    return [*lines, "", "Predicted and observed: percentage points of requests within the targets."]


def _arrived(records: list[CycleRecord]) -> dict[int, Knobs]:
    """What was pushed, by cycle. A push whose answer was lost counts when a later verdict shows that it arrived."""
    found = {record.number: record.pushed for record in records if record.pushed is not None}
    by_number = {record.number: record for record in records}
    for record in records:
        number = record.verify.push_cycle if record.verify is not None else 0
        if number < records[0].number or number in found:
            continue
        before = by_number[number].in_force if number in by_number else None
        after = record.in_force or {}
        found[number] = {} if before is None else {k: v for k, v in after.items() if before.get(k) != v}
    return dict(sorted(found.items()))


def _outcomes(records: list[CycleRecord]) -> list[str]:
    counts = Counter((record.action.value, record.reason.value) for record in records)
    rows = [f"| {action} | {reason} | {count} |" for (action, reason), count in counts.most_common()]
    return ["| action | reason | cycles |", "|---|---|---|", *rows]
