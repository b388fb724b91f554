"""The first screen in words: what to set, against what, why, how sure, how to undo it."""

from collections.abc import Mapping

from rooftune.policies.envelope import KNOB, KNOB_LABELS, SEARCHED
from rooftune.policies.request import Setting
from rooftune.tuner.record import RunRecord
from rooftune.tuner.report import trust, words
from rooftune.tuner.report.findings import (
    cause,
    extras,
    first_words,
    little_to_gain,
    missed,
    trade,
    unreachable_words,
)
from rooftune.tuner.report.flags import flag_notes, flag_words, flags_added, vllm_flags, vllm_flags_before


def answers(record: RunRecord) -> list[tuple[str, list[str]]]:
    """The first screen of every rendering: (label, sentences), without those that have nothing to say."""
    targets = "; ".join(map(words.target, record.targets)) or "none; the objective is tokens per second"
    rows: list[tuple[str, tuple[str, ...]]] = [
        ("First", (first_words(record),)),
        ("Trust", (trust.verdict(record),)),
        ("What", (what(record),)),
        ("New", extras(record)),
        ("Why", (why(record),)),
        ("Trade", (trade(record),)),
        ("Limit", limit(record)),
        ("Targets", (f"{targets}.",)),
        ("How", how(record)),
        ("Undo", undo(record)),
        ("Then", (trust.watch(record),)),
    ]
    kept = [(label, [sentence for sentence in sentences if sentence]) for label, sentences in rows]
    return [(label, sentences) for label, sentences in kept if sentences]


def after_word(record: RunRecord) -> str:
    """What to call the setting beside the one in force: what misses a target is not recommended."""
    return "best found" if record.verdict == "infeasible" else "recommended"


def before_word(record: RunRecord) -> str:
    """What to call the setting to change from: no server was asked when it is assumed."""
    return "defaults (assumed)" if record.current_source == "assumed" else "in force"


_IN_TITLE = frozenset(KNOB_LABELS[name] for name in SEARCHED)
MOST_IN_TITLE = 3


def changes(record: RunRecord) -> tuple[tuple[str, str, str], ...]:
    """(knob, before, after) for every knob that the recommendation moves; empty when it moves none."""
    before, after = record.current.setting, record.best.setting
    moved = [(name, _value(before, name), _value(after, name)) for name in dict.fromkeys([*before, *after])]
    return tuple(
        (KNOB_LABELS.get(name, name), words.knob_value(name, old), words.knob_value(name, new))
        for name, old, new in moved
        if old != new and name not in words.NOT_SHOWN
    )


def _value(setting: Mapping[str, float], name: str) -> float:
    """A record leaves out what is at its default (and what does nothing, which reads as none)."""
    whole = Setting(**setting)  # type: ignore[arg-type]  # a record's knobs are fields of Setting
    return float(getattr(whole, name)) if KNOB[name].acts(whole) else 0.0


def title(record: RunRecord) -> str:
    """What to set, at most MOST_IN_TITLE knobs; what only belongs to a policy stands in the sentences below."""
    little = "Little to gain here. " if little_to_gain(record) else ""
    if record.verdict == "keep":
        return f"{little}Change nothing: the setting in force is within noise of the best"
    to = " " if record.verdict == "infeasible" else " to "
    moved = [f"{knob}{to}{new}" for knob, _, new in changes(record) if knob in _IN_TITLE]
    if len(moved) > MOST_IN_TITLE:
        moved = [*moved[: MOST_IN_TITLE - 1], f"{len(moved) - MOST_IN_TITLE + 1} more knobs"]
    listed = " and ".join([", ".join(moved[:-1]), *moved[-1:]]) if len(moved) > 1 else "".join(moved)
    if record.verdict == "infeasible":
        return f"{little}No setting meets every target here; best found: {listed or 'the setting in force'}"
    return f"{little}Set {listed}" if moved else f"{little}Change nothing"


def what(record: RunRecord) -> str:
    """Every knob that moves."""
    moved = "; ".join(f"{knob} {old} → {new}" for knob, old, new in changes(record))
    if not moved:
        return f"Keep {words.setting(record.current.setting)}."
    if record.verdict != "infeasible":
        return f"Change {moved}."
    most = "with most tokens per second" if record.objective == "tokens_per_s" else "with most good requests"
    return f"No setting meets every target over the whole run. The one {most}: {moved}. Take it if its trade suits you."


def why(record: RunRecord) -> str:
    """What goes wrong today, what the change does, and the share of good requests."""
    return f"{cause(record)} {_shares(record)}".strip()


def _shares(record: RunRecord) -> str:
    before, after = record.current, record.best
    if record.objective == "tokens_per_s":
        was, now = (words.per_second(trial.tokens_per_s, "output tokens") for trial in (before, after))
        return f"Throughput goes from {was} to {now}. The objective is tokens per second."
    share = f"{words.share(after.attainment)} of requests meet every target"
    if record.verdict != "keep" and before != after:
        share += f", against {words.share(before.attainment)} with the setting in force"
    noise = "" if record.noise is None else f" (difference ± {words.points(record.noise)}, 90 % interval)"
    return f"{share}{noise}."


def limit(record: RunRecord) -> tuple[str, ...]:
    """What keeps more requests from being good."""
    count = record.best.refused
    if not count:
        return (_binding(record),)
    # What can never run misses every target under every setting: that comes before any target.
    some = "1 request needs" if count == 1 else f"{words.count(count)} requests need"
    too_large = (
        f"{some} more KV memory than the pool holds ({words.tokens(record.engine.kv_tokens)}) and can never run, "
        "whatever is set: raise --kv-tokens if the pool is larger, or leave such requests out."
    )
    return too_large, _binding(record)


def _binding(record: RunRecord) -> str:
    if record.binding is None:
        return "No target limits the outcome."
    if record.verdict == "infeasible":
        return unreachable_words(record, record.binding)
    part, row = record.targets[record.binding], record.best.margins[record.binding]
    measured = "" if row.measured_s is None else f": simulated {words.seconds(row.measured_s)}"
    which = "that is missed by the most" if missed(row) else "with the least room"
    return f"The target {which} is {words.target(part)}{measured} ({words.judged(row)})."


def how(record: RunRecord) -> tuple[str, ...]:
    """The flags, and what they mean."""
    if not record.moves:
        return ("Leave the engine as it is.",)
    return (f"Start vLLM with {' '.join(vllm_flags(record))}", *flag_words(record), *flag_notes(record.best))


def undo(record: RunRecord) -> tuple[str, ...]:
    """What to save before anything, and the flags that go back; empty when nothing is set."""
    if not record.moves:
        return ()
    first = (
        "Save your present command line first: the flags shown here are vLLM's defaults, which Rooftune assumed and "
        "did not read from your server."
    )
    added = flags_added(record)
    without = f", without {' and '.join(added)}" if added else ""
    hook = ", without the hook's policies" if extras(record) else ""
    back = f"Restart vLLM with {' '.join(vllm_flags_before(record))}{without}{hook}"
    return (first, back) if record.current_source == "assumed" else (back,)


def difference(record: RunRecord) -> str:
    """The change in the share of good requests, in percentage points with a sign."""
    before, after = record.current.attainment, record.best.attainment
    return words.NO_VALUE if before is None or after is None else f"{(after - before) * 100:+.1f}"
