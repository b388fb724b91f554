"""The first screen in words: what to set, against what, why, how sure, how to undo it."""

from dataclasses import dataclass

from rooftune.policies.envelope import KNOB, KNOB_LABELS, SEARCHED
from rooftune.tuner.record import RunRecord, TrialPart
from rooftune.tuner.report import findings as reason
from rooftune.tuner.report import trust, words
from rooftune.tuner.report.findings import extras, first_words, little_to_gain, missed, unreachable_words
from rooftune.tuner.report.flags import flags_added, vllm_flags_before
from rooftune.tuner.report.trust import moves


@dataclass(frozen=True)
class Headline:
    """Sentences for the top of every rendering. first: what comes before all else, empty when nothing does.

    extras: one sentence for every knob that is set and that a stock vLLM lacks. why: what goes wrong today, what the
    change does, and the share of good requests. trade: what gets better and what gets worse, empty when nothing is set.
    trust: the verdict on how far to trust it; caveats: what that rests on. watch: what to look at after the change.
    undo_first: what to do before anything, empty when nothing is needed.
    """

    title: str
    first: str
    what: str
    extras: tuple[str, ...]
    why: str
    trade: str
    limit: str
    trust: str
    caveats: tuple[str, ...]
    watch: str
    undo_first: str
    undo: str


def headline(record: RunRecord) -> Headline:
    """The first screen of a record."""
    return Headline(
        title=_title(record),
        first=first_words(record),
        what=_what(record),
        extras=extras(record),
        why=f"{reason.cause(record)} {_why(record)}".strip(),
        trade=reason.trade(record),
        limit=_limit(record),
        trust=trust.verdict(record),
        caveats=trust.caveats(record),
        watch=trust.watch(record),
        undo_first=_undo_first(record),
        undo=_undo(record),
    )


def after_word(record: RunRecord) -> str:
    """What to call the setting beside the one in force: what misses a target is not recommended."""
    return "best found" if record.verdict == "infeasible" else "recommended"


def before_word(record: RunRecord) -> str:
    """What to call the setting to change from: no server was asked when it is assumed."""
    return "defaults (assumed)" if record.current_source == "assumed" else "in force"


def good_share(trial: TrialPart) -> str:
    """``98.2 % of requests``."""
    return f"{words.share(trial.attainment)} of requests"


def changes(record: RunRecord) -> tuple[tuple[str, str, str], ...]:
    """(knob, before, after) for every knob that the recommendation moves; empty when it moves none."""
    before, after = record.current.setting, record.best.setting
    rows = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, 0), after.get(name, 0)
        if old != new and name not in _DERIVED:
            rows.append((KNOB_LABELS.get(name, name), knob_value(name, old), knob_value(name, new)))
    return tuple(rows)


# Not shown as changes: the setting carries them, but no operator chooses them.
_DERIVED = ("prefill_s_per_token",)


def knob_value(name: str, value: float) -> str:
    """A knob's value with its unit."""
    if name in KNOB and KNOB[name].choices:
        return KNOB[name].choices[int(value)].words
    if name == "chunk_cap_tokens":
        return words.cap(value)
    if value == 0 and name not in ("step_tokens", "max_running"):
        return "none"
    if name.endswith("_tokens"):
        return words.tokens(value)
    if name.endswith("_s"):
        return words.seconds(value)
    return "none" if value == 0 else f"{value:g}"


def _title(record: RunRecord) -> str:
    title = _plain_title(record)
    return f"Little to gain here. {title}" if little_to_gain(record) else title


def _plain_title(record: RunRecord) -> str:
    if record.verdict == "keep":
        return "Change nothing: the setting in force is within noise of the best"
    # The title names what is set; what only belongs to a policy stands in the sentences below it.
    moved = [f"{knob}{_TO[record.verdict]}{new}" for knob, _, new in changes(record) if knob in _IN_TITLE]
    if len(moved) > MOST_IN_TITLE:
        moved = [*moved[: MOST_IN_TITLE - 1], f"{len(moved) - MOST_IN_TITLE + 1} more knobs"]
    listed = " and ".join([", ".join(moved[:-1]), *moved[-1:]]) if len(moved) > 1 else "".join(moved)
    if record.verdict == "infeasible":
        return f"No setting meets every target here; best found: {listed or 'the setting in force'}"
    return f"Set {listed}" if moved else "Change nothing"


MOST_IN_TITLE = 3
_TO = {"change": " to ", "keep": " ", "infeasible": " "}
_IN_TITLE = frozenset(KNOB_LABELS[name] for name in SEARCHED)


def _what(record: RunRecord) -> str:
    moved = "; ".join(f"{knob} {old} → {new}" for knob, old, new in changes(record))
    if not moved:
        return f"Keep {words.setting(record.current)}."
    if record.verdict == "infeasible":
        most = "with most tokens per second" if record.objective == "tokens_per_s" else "with most good requests"
        return (
            f"No setting meets every target over the whole run. The one {most}: {moved}. "
            "Take it if its trade suits you."
        )
    return f"Change {moved}."


def _why(record: RunRecord) -> str:
    before, after = record.current, record.best
    noise = "" if record.noise is None else f" (difference ± {words.points(record.noise)}, 90 % interval)"
    if record.objective == "tokens_per_s":
        was, now = (words.per_second(trial.tokens_per_s, "output tokens") for trial in (before, after))
        return f"Throughput goes from {was} to {now}. The objective is tokens per second."
    if record.verdict == "keep" or before == after:
        return f"{good_share(before)} meet every target{noise}."
    return (
        f"{good_share(after)} meet every target, against {words.share(before.attainment)} "
        f"with the setting in force{noise}."
    )


def _limit(record: RunRecord) -> str:
    # What can never run misses every target under every setting: that comes before any target.
    return f"{_too_large(record)} {_binding(record)}".strip()


def _too_large(record: RunRecord) -> str:
    count = record.best.refused
    if not count:
        return ""
    some = "1 request needs" if count == 1 else f"{words.count(count)} requests need"
    return (
        f"{some} more KV memory than the pool holds ({words.tokens(record.engine.kv_tokens)}) and can never run, "
        "whatever is set: raise --kv-tokens if the pool is larger, or leave such requests out."
    )


def _binding(record: RunRecord) -> str:
    if record.binding is None:
        return "No target limits the outcome."
    if record.verdict == "infeasible":
        return unreachable_words(record, record.binding)
    part, row = record.targets[record.binding], record.best.margins[record.binding]
    measured = "" if row.measured_s is None else f": simulated {words.seconds(row.measured_s)}"
    which = "that is missed by the most" if missed(row) else "with the least room"
    return f"The target {which} is {words.target(part)}{measured} ({words.judged(row)})."


def _undo_first(record: RunRecord) -> str:
    if not moves(record) or record.current_source != "assumed":
        return ""
    return (
        "Save your present command line first: the flags shown here are vLLM's defaults, which Rooftune assumed and "
        "did not read from your server."
    )


def _undo(record: RunRecord) -> str:
    if not moves(record):
        return "Nothing to undo."
    hook = " and without the hook's policies" if extras(record) else ""
    return f"Restart vLLM with these flags{hook}: {vllm_flags_before(record).text}{_without(record)}"


def _without(record: RunRecord) -> str:
    added = flags_added(record)
    return f", without {' and '.join(added)}" if added else ""
