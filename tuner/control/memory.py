"""What the loop must still know after a kill at any instant: one JSON value in the store, written before it is needed.

Instants without another word are seconds on the engine's clock, which only mean something together with its boot id.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, TypedDict, Unpack

from pydantic import AliasChoices, Field, ValidationError

from rooftune.policies.envelope import KNOB, RATIO_KNOBS, Envelope, Mode
from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.quantiles import quantile
from rooftune.policies.request import Setting
from rooftune.tuner.control.outcome import Amount, Knobs
from rooftune.tuner.control.ports import Store
from rooftune.tuner.observe.rows import RequestRows
from rooftune.tuner.record import Count, Part, Share, Words

DAYS_KEPT = 4


@dataclass(frozen=True)
class Account:
    """days: (date, SLO-seconds spent), each date once; the latest DAYS_KEPT that something was written to."""

    days: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for day, spent in self.days:
            if not (math.isfinite(spent) and spent >= 0.0):
                raise bad_value(f"SLO-seconds of {day}", spent, "at least 0 and finite", "start a new account")

    def spent(self, day: str) -> float:
        return dict(self.days).get(day, 0.0)

    def with_spent(self, day: str, slo_s: float) -> "Account":
        """The account after ``slo_s`` more on that day."""
        days = dict(self.days)
        days[day] = days.pop(day, 0.0) + max(slo_s, 0.0)
        return replace(self, days=tuple(days.items())[-DAYS_KEPT:])


Bounds = dict[str, tuple[float, float]]


GROWTH, SHRINK = 1.5, 0.5


LEAST_RATIO, MOST_RATIO = 1.25, 64.0


@dataclass(frozen=True)
class Trust:
    """ratio: within LEAST_RATIO..MOST_RATIO; held, failed: predictions in a row, for people."""

    ratio: float = 32.0
    held: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        if not LEAST_RATIO <= self.ratio <= MOST_RATIO:
            raise bad_value("trust ratio", self.ratio, f"within {LEAST_RATIO:g}..{MOST_RATIO:g}", "correct it")

    def after(self, prediction_held: bool) -> "Trust":
        """The region after one more verdict."""
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
    """Knob -> (least, greatest) that a search may try: envelope, operator's bounds and trust region together.

    operator: the knobs that may be searched at all, with his bounds. Knobs that the engine lacks, that need a restart,
    that stand in ``without`` or whose bounds leave nothing are left out. A chunk cap of 0 (none) stands for the
    budget; where the region reaches the greatest budget, "none" is inside it. What is in force is always inside.
    """
    dropped = frozenset(without)
    found: Bounds = {}
    for name, (wished_low, wished_high) in operator.items():
        bound = envelope.by_name.get(name)
        if bound is None or bound.mode is not Mode.LIVE or name in dropped:
            continue
        low, high = max(bound.minimum, wished_low), min(bound.maximum, wished_high)
        if name in RATIO_KNOBS:
            centre = getattr(in_force, name) or in_force.step_tokens
            low, high = max(low, math.floor(centre / trust.ratio)), min(high, math.ceil(centre * trust.ratio))
        if low > high or (low == high and low == getattr(in_force, name)):
            continue
        found[name] = (float(math.ceil(low)), float(math.floor(high))) if KNOB[name].whole else (low, high)
    return found


class Strides(Part):
    """Pushes that were kept though none was shown better than where they began.

    start: that setting, and the cycle that pushed it (None: the engine's boot setting). gain, half_width: attainment
    won in all, and half of its interval: the pushes' own, taken as independent of each other.
    """

    start: Knobs
    start_cycle: Count | None = None
    gain: float = 0.0
    half_width: Annotated[float, Field(ge=0)] = 0.0

    def onward(self, gain: float, half_width: float) -> "Strides":
        """After one more push."""
        return self.model_copy(update={"gain": self.gain + gain, "half_width": math.hypot(self.half_width, half_width)})

    @property
    def lost(self) -> bool:
        """Whether it was shown to be worse here than where the way began."""
        return self.gain + self.half_width < 0.0

    @property
    def won(self) -> bool:
        """Whether it was shown to be better here, so that another way begins."""
        return self.gain - self.half_width > 0.0


KEY = "loop"
MOST_TRIED = 50


class Traffic(Part):
    """What makes two windows of traffic alike, and from how many requests it is known.

    prompt_mean_tokens tells how many long prompts there are, prompt_spread (deviation over mean) how surely it does.
    """

    requests: Count
    rate_rps: Annotated[float, Field(ge=0)]
    prompt_p50_tokens: Annotated[float, Field(ge=0)]
    prompt_mean_tokens: Annotated[float, Field(ge=0)]
    prompt_spread: Annotated[float, Field(ge=0)]
    output_p50_tokens: Annotated[float, Field(ge=0)]


class Trial(Part):
    """A push whose verdict is due. before: the setting it is held against and goes back to; after: what was pushed.

    began_s: when it was sent; since_s: since when ``before`` had been in force. predicted_gain, twin_error: in
    attainment. stride: ``after`` is a limited step on the way to the proposal, so the prediction is not about it and
    "not worse" is enough. traffic: what it was like at the push; None: too little to say.
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
    stride: bool
    traffic: Traffic | None = None


class Kept(Part):
    """A setting of ours that was found better, or on its way there not worse, and holds under our lease.

    strides: those that led here, None when it was found better than where they began.
    """

    boot_id: Words
    setting: Knobs
    push_cycle: Count
    strides: Strides | None = Field(default=None, validation_alias=AliasChoices("strides", "way"))  # 0.1 wrote "way"


class Moved(Part):
    """When the setting last changed by our doing."""

    boot_id: Words
    at_s: float


class Tried(Part):
    """A setting that ran live as a trial, and how it came out against ``before``."""

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
    """The parts of ``Memory`` that can be exchanged; trust and account stand for the fields that hold them."""

    trial: "Trial | None"
    kept: "Kept | None"
    moved: "Moved | None"
    trust: "Trust"
    account: "Account"
    running_slo_s: float
    shadow_s: float
    tried: "tuple[Tried, ...]"
    model: str


class Memory(Part):
    """Everything in one value, so that it is never half written. shadow_s: time spent in shadow so far.

    running_slo_s: what the trial in force has cost so far, or may have while nobody can tell; it joins ``days`` when
    the trial ends. model: the one that ``tried`` and the trust ratio are about, "" while none is known.
    """

    trial: Trial | None = None
    kept: Kept | None = None
    moved: Moved | None = None
    trust_ratio: float = Trust().ratio
    trust_held: Count = 0
    trust_failed: Count = 0
    days: tuple[tuple[str, float], ...] = ()
    running_slo_s: Annotated[float, Field(ge=0)] = 0.0
    shadow_s: Annotated[float, Field(ge=0)] = 0.0
    tried: tuple[Tried, ...] = ()
    model: Words = ""

    @property
    def trust(self) -> Trust:
        return Trust(self.trust_ratio, self.trust_held, self.trust_failed)

    @property
    def account(self) -> Account:
        return Account(self.days)

    def but(self, **changes: Unpack[MemoryChanges]) -> "Memory":
        """The same with some parts exchanged."""
        values: dict[str, object] = {**changes}
        trust, account = changes.get("trust"), changes.get("account")
        if trust is not None:
            values |= {"trust_ratio": trust.ratio, "trust_held": trust.held, "trust_failed": trust.failed}
        if account is not None:
            values["days"] = account.days
        return self.model_copy(update={name: value for name, value in values.items() if name in Memory.model_fields})


def knobs_of(setting: Setting) -> Knobs:
    return dict(setting._asdict())


def setting_of(knobs: Knobs) -> Setting:
    """Raises TypeError for a name that is no knob: a record of another version."""
    return Setting(**knobs)  # type: ignore[arg-type]  # whole numbers stay whole in JSON


def recall(store: Store) -> Memory:
    """What was kept; nothing when there is nothing, or nothing that this version understands."""
    text = store.value(KEY)
    if text is None:
        return Memory()
    try:
        memory = Memory.model_validate_json(text)
        for knobs in _settings(memory):
            setting_of(knobs)
        memory.trust, memory.account  # noqa: B018  # each checks what it holds
    except (ValidationError, TypeError, InputError):
        return Memory()
    return memory


def _settings(memory: Memory) -> Iterator[Knobs]:
    """Every setting that the loop will want to read again."""
    for pair in (memory.trial, *memory.tried):
        if isinstance(pair, Trial):
            yield from (pair.before, pair.after)
        elif pair is not None:
            yield from (pair.before, pair.setting)
    if memory.kept is not None:
        yield memory.kept.setting
        if memory.kept.strides is not None:
            yield memory.kept.strides.start


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
    """Whether two windows carried about the same traffic: every figure within ``ratio``, and beyond that what chance
    does to windows of so few requests."""
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
