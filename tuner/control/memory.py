"""The loop's memory: one JSON value in the store, saved early enough to survive a kill at any instant.

Instants are seconds on the engine's clock, valid only with its boot id, unless a name says otherwise.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, TypedDict, Unpack

from pydantic import ConfigDict, Field, ValidationError

from rooftune.policies.envelope import KNOB, RATIO_KNOBS, Envelope, Mode
from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.proof.probation import Probation, pause_s
from rooftune.policies.quantiles import quantile
from rooftune.policies.request import Setting
from rooftune.tuner.control.outcome import Amount, Knobs
from rooftune.tuner.control.ports import Store
from rooftune.tuner.observe.rows import RequestRows
from rooftune.tuner.record import Count, Part, Share, Words

DAYS_KEPT = 4

Bounds = dict[str, tuple[float, float]]
GROWTH, SHRINK = 1.5, 0.5
LEAST_RATIO, MOST_RATIO = 1.25, 64.0


@dataclass(frozen=True)
class Trust:
    """The trust region. ratio: within LEAST_RATIO..MOST_RATIO; held, failed: predictions in a row, for people."""

    ratio: float = 32.0
    held: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        if not LEAST_RATIO <= self.ratio <= MOST_RATIO:
            raise bad_value("trust ratio", self.ratio, f"within {LEAST_RATIO:g}..{MOST_RATIO:g}", "correct it")

    def after(self, prediction_held: bool) -> "Trust":
        """The region after another verdict."""
        if prediction_held:
            return Trust(min(self.ratio * GROWTH, MOST_RATIO), self.held + 1, 0)
        return Trust(max(self.ratio * SHRINK, LEAST_RATIO), 0, self.failed + 1)


def region(
    in_force: Setting,
    envelope: Envelope,
    operator: Mapping[str, tuple[float, float]],
    trust: Trust,
    without: Iterable[str] = (),
) -> Bounds:
    """Knob -> (least, greatest) that a search may try, within envelope, operator's bounds and trust region.

    operator: the knobs that may be searched, with the operator's bounds. Leaves out knobs that the engine lacks, that
    need a restart, that ``without`` names or whose bounds leave no choice. A chunk cap of 0 (none) counts as the
    budget; a region that reaches the greatest budget includes "none".
    """
    dropped = frozenset(without)
    found: Bounds = {}
    for name, (operator_low, operator_high) in operator.items():
        bound = envelope.by_name.get(name)
        if bound is None or bound.mode is not Mode.LIVE or name in dropped:
            continue
        low, high = max(bound.minimum, operator_low), min(bound.maximum, operator_high)
        if name in RATIO_KNOBS:
            centre = getattr(in_force, name) or in_force.step_tokens
            low, high = max(low, math.floor(centre / trust.ratio)), min(high, math.ceil(centre * trust.ratio))
        if low > high or (low == high and low == getattr(in_force, name)):
            continue
        found[name] = (float(math.ceil(low)), float(math.floor(high))) if KNOB[name].whole else (low, high)
    return found


Row = tuple[bool, float, float]
# Of a block: so that a cycle that comes a little early does not make every turn a cycle longer.
LEAST_TURN = 0.95

KEY = "loop"
MOST_TRIED = 50


class Traffic(Part):
    """The figures that make two windows of traffic alike, and the number of requests behind them.

    prompt_mean_tokens reflects the share of long prompts; prompt_spread (deviation over mean) how certain that is.
    """

    requests: Count
    rate_rps: Annotated[float, Field(ge=0)]
    prompt_p50_tokens: Annotated[float, Field(ge=0)]
    prompt_mean_tokens: Annotated[float, Field(ge=0)]
    prompt_spread: Annotated[float, Field(ge=0)]
    output_p50_tokens: Annotated[float, Field(ge=0)]


class Turn(Part):
    """A setting's turn in a trial. at_s: when it came into force. pair: its pair from 0 on, null in the ramp."""

    at_s: float
    setting: Knobs
    pair: Count | None = None


class Trial(Part):
    """A push whose verdict is due: a ramp, then pairs of blocks in which ``before`` and ``after`` take turns.

    before: the setting to compare with and return to; after: the proposal. began_s: when the push was sent; since_s:
    when ``before`` came into force. predicted_gain, twin_error: in attainment. traffic: at the push; None: too little
    to tell. ramp: the limited steps up to ``after``, the last one; arms: whether each block is under ``after``.
    block_s: length of a turn. turns: those that began, the last one in force (or on its way: the next reading tells).
    history, blocks: (new, good, judged) of blocks before the push, and of those of the pairs that are counted.
    foretold: the twin's good share of each of them in this order, as far as it has answered. aided: it is still asked,
    and a block counts when it is foretold. won: the verdict is "better" and ``after`` only has to come back into force.
    """

    push_cycle: Count
    boot_id: Words
    began_s: float
    since_s: float
    before: Knobs
    after: Knobs
    predicted_gain: float
    twin_error: float
    predicted_attainment: Share | None
    traffic: Traffic | None = None
    ramp: tuple[Knobs, ...]
    arms: tuple[bool, ...]
    block_s: Annotated[float, Field(gt=0)]
    turns: Annotated[tuple[Turn, ...], Field(min_length=1)]
    history: tuple[Row, ...] = ()
    blocks: tuple[Row, ...] = ()
    foretold: tuple[Share | None, ...] = ()
    aided: bool = False
    won: bool = False

    @property
    def turn(self) -> Turn:
        """The turn in force."""
        return self.turns[-1]

    @property
    def is_new(self) -> bool:
        """Whether the setting in force is not the one before the trial."""
        return self.turn.setting != self.before

    @property
    def in_force_from_s(self) -> float:
        """When the setting of the turn came into force: it may have had several turns in a row."""
        at_s = self.turn.at_s
        for one in reversed(self.turns):
            if one.setting != self.turn.setting:
                break
            at_s = one.at_s
        return at_s

    def new_s(self, now_s: float) -> float:
        """Seconds under another setting than ``before`` so far."""
        ends_s = (*(one.at_s for one in self.turns[1:]), now_s)
        return sum(end_s - t.at_s for t, end_s in zip(self.turns, ends_s, strict=True) if t.setting != self.before)

    def end_s(self, number: int) -> float:
        """When what counts of a turn ends: a fault or a pause may have lengthened the turn itself."""
        end_s = self.turns[number].at_s + self.block_s
        return end_s if number + 1 >= len(self.turns) else min(end_s, self.turns[number + 1].at_s)

    def following(self, now_s: float) -> Turn | None:
        """The next turn, when it is due; None after the last one too."""
        if self.won:
            return Turn(at_s=now_s, setting=self.after) if self.turn.setting != self.after else None
        number = len(self.turns)
        if now_s < self.turn.at_s + LEAST_TURN * self.block_s or number >= len(self.ramp) + len(self.arms):
            return None
        if number < len(self.ramp):
            return Turn(at_s=now_s, setting=self.ramp[number])
        block = number - len(self.ramp)
        setting = self.after if self.arms[block] else self.before
        return Turn(at_s=now_s, setting=setting, pair=block // 2)

    @property
    def foretold_blocks(self) -> int:
        """Blocks of the pairs that the twin has foretold; below 0: not even all of the time before."""
        return len(self.foretold) - len(self.history)

    def but(self, **changes: object) -> "Trial":
        return self.model_copy(update=changes)


class Kept(Part):
    """Our setting in force after a good trial. A state of an earlier release may hold the strides that led to it.

    share, traffic: of the trial's own requests, None unknown. probation: what the cycles since then showed.
    """

    model_config = ConfigDict(extra="ignore")

    boot_id: Words
    setting: Knobs
    push_cycle: Count
    share: Share | None = None
    traffic: Traffic | None = None
    probation: Probation = Probation()


class Pause(Part):
    """No pushes for ``length_s`` after ``lost_s`` (wall clock), when the setting kept since cycle ``push_cycle`` was
    lost."""

    push_cycle: Count
    lost_s: float
    length_s: Annotated[float, Field(ge=0)]

    def left_s(self, wall_s: float) -> float:
        """Seconds that are left; a wall clock set back never makes it longer."""
        return max(0.0, self.length_s - max(0.0, wall_s - self.lost_s))


class Moved(Part):
    """When we last changed the setting."""

    boot_id: Words
    at_s: float


class Tried(Part):
    """A trial's setting and its result against ``before``."""

    before: Knobs
    setting: Knobs
    traffic: Traffic
    verdict: Words
    predicted_gain: Amount
    observed_gain: Amount
    half_width: Amount
    attainment: Share | None
    goodput_rps: Annotated[float, Field(ge=0)] | None
    requests: Count
    predicted_attainment: Share | None
    wall_s: float


class MemoryChanges(TypedDict, total=False):
    """The replaceable parts of ``Memory``; trust replaces the fields that hold it."""

    trial: "Trial | None"
    kept: "Kept | None"
    pause: "Pause | None"
    moved: "Moved | None"
    trust: "Trust"
    running_slo_s: float
    shadow_s: float
    tried: "tuple[Tried, ...]"
    model: str


class Memory(Part):
    """One value, so that it is never half written. shadow_s: time spent in shadow so far.

    days: (date, SLO-seconds spent), each date once; the latest DAYS_KEPT with an entry. running_slo_s: cost of the
    trial in force so far, or its risk while unmeasured; joins ``days`` when the trial ends.
    model: the model behind ``tried`` and the trust ratio, "" while unknown.
    """

    trial: Trial | None = None
    kept: Kept | None = None
    pause: Pause | None = None
    moved: Moved | None = None
    trust_ratio: float = Trust().ratio
    trust_held: Count = 0
    trust_failed: Count = 0
    days: tuple[tuple[str, Annotated[float, Field(ge=0)]], ...] = ()
    running_slo_s: Annotated[float, Field(ge=0)] = 0.0
    shadow_s: Annotated[float, Field(ge=0)] = 0.0
    tried: tuple[Tried, ...] = ()
    model: Words = ""

    @property
    def trust(self) -> Trust:
        return Trust(self.trust_ratio, self.trust_held, self.trust_failed)

    def spent_slo_s(self, day: str) -> float:
        """SLO-seconds spent on ``day``, the running trial's included."""
        return dict(self.days).get(day, 0.0) + self.running_slo_s

    def with_spent(self, day: str, slo_s: float) -> "Memory":
        """The memory with ``slo_s`` more on ``day``."""
        days = dict(self.days)
        days[day] = days.pop(day, 0.0) + max(slo_s, 0.0)
        return self.model_copy(update={"days": tuple(days.items())[-DAYS_KEPT:]})

    def paused_for(self, kept: Kept, wall_s: float, least_s: float) -> "Memory":
        """The memory with a pause because ``kept`` was lost; once for each kept setting. least_s: the first pause."""
        last = self.pause
        if last is not None and last.push_cycle == kept.push_cycle:
            return self
        length_s = (
            pause_s(last.length_s, wall_s - last.lost_s, least_s) if last is not None else pause_s(0.0, 0.0, least_s)
        )
        return self.model_copy(update={"pause": Pause(push_cycle=kept.push_cycle, lost_s=wall_s, length_s=length_s)})

    def but(self, **changes: Unpack[MemoryChanges]) -> "Memory":
        """A copy with some parts replaced."""
        values: dict[str, object] = {**changes}
        trust = changes.get("trust")
        if trust is not None:
            values |= {"trust_ratio": trust.ratio, "trust_held": trust.held, "trust_failed": trust.failed}
        return self.model_copy(update={name: value for name, value in values.items() if name in Memory.model_fields})


def knobs_of(setting: Setting) -> Knobs:
    return dict(setting._asdict())


def setting_of(knobs: Knobs) -> Setting:
    """Raises TypeError for a name that is no knob: a record of another version."""
    return Setting(**knobs)  # type: ignore[arg-type]  # whole numbers stay whole in JSON


def recall(store: Store) -> Memory:
    """The stored memory; an empty one when there is none that this version understands."""
    text = store.value(KEY)
    if text is None:
        return Memory()
    try:
        memory = Memory.model_validate_json(_without_old_trial(text))
        for knobs in _settings(memory):
            setting_of(knobs)
        memory.trust  # noqa: B018  # it checks its values
    except (ValidationError, TypeError, InputError, ValueError):
        return Memory()
    return memory


def _without_old_trial(text: str) -> str:
    """A trial of an earlier release had one window before the push and one after: its setting is taken back like any
    that nobody knows."""
    values = json.loads(text)
    if isinstance(values, dict) and isinstance(values.get("trial"), dict) and "turns" not in values["trial"]:
        return json.dumps(values | {"trial": None})
    return text


def _settings(memory: Memory) -> Iterator[Knobs]:
    """Every setting in the memory."""
    for pair in (memory.trial, *memory.tried):
        if isinstance(pair, Trial):
            yield from (pair.before, pair.after, *pair.ramp, *(turn.setting for turn in pair.turns))
        elif pair is not None:
            yield from (pair.before, pair.setting)
    if memory.kept is not None:
        yield memory.kept.setting


def remember(store: Store, memory: Memory) -> None:
    store.keep(KEY, memory.model_dump_json())


def traffic_of(requests: RequestRows, span_s: float) -> Traffic | None:
    """Rate and lengths; None for fewer than ten requests."""
    if len(requests) < 10 or span_s <= 0.0:
        return None
    prompts, outputs = requests.prompt_tokens, requests.output_tokens
    mean = float(prompts.mean())
    return Traffic(
        requests=len(requests),
        rate_rps=len(requests) / span_s,
        prompt_p50_tokens=quantile(prompts, 0.5),
        prompt_mean_tokens=mean,
        prompt_spread=float(prompts.std()) / max(mean, 1.0),
        output_p50_tokens=quantile(outputs, 0.5),
    )


def alike(one: Traffic, other: Traffic, ratio: float = 1.5) -> bool:
    """Whether two windows carried about the same traffic: every figure within ``ratio`` and counting noise."""
    counting = math.sqrt(1.0 / max(one.requests, 1) + 1.0 / max(other.requests, 1))
    spread = max(one.prompt_spread, other.prompt_spread)
    pairs = (
        (one.rate_rps, other.rate_rps, counting),
        (one.prompt_p50_tokens, other.prompt_p50_tokens, counting),
        (one.prompt_mean_tokens, other.prompt_mean_tokens, spread * counting),
        (one.output_p50_tokens, other.output_p50_tokens, counting),
    )
    far = [abs(math.log(max(a, 1e-9) / max(b, 1e-9))) > math.log(ratio) + 2.0 * noise for a, b, noise in pairs]
    return not any(far)
