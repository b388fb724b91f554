"""The loop's memory: one JSON value in the store, saved early enough to survive a kill at any instant.

Instants are seconds on the engine's clock, valid only with its boot id, unless a name says otherwise.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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


class Strides(Part):
    """Kept pushes that are not yet shown better than the setting they started from.

    start: that setting; start_cycle: the cycle that pushed it (None: the boot setting). gain, half_width: total gain in
    attainment and half of its interval; the pushes' intervals count as independent.
    """

    start: Knobs
    start_cycle: Count | None = None
    gain: float = 0.0
    half_width: Annotated[float, Field(ge=0)] = 0.0

    def onward(self, gain: float, half_width: float) -> "Strides":
        """The strides with another push."""
        return self.model_copy(update={"gain": self.gain + gain, "half_width": math.hypot(self.half_width, half_width)})

    @property
    def lost(self) -> bool:
        """Whether the total is a loss beyond noise."""
        return self.gain + self.half_width < 0.0

    @property
    def won(self) -> bool:
        """Whether the total is a gain beyond noise, so that new strides begin."""
        return self.gain - self.half_width > 0.0


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


class Trial(Part):
    """A push whose verdict is due. before: the setting to compare with and return to; after: the pushed setting.

    began_s: when it was sent; since_s: when ``before`` came into force. predicted_gain, twin_error: in attainment.
    stride: ``after`` is a limited step towards the proposal, so the prediction does not apply and "not worse" is
    enough. traffic: at the push; None: too little to tell.
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
    """Our setting in force after a good trial. strides: those that led here; None once their gain was shown."""

    boot_id: Words
    setting: Knobs
    push_cycle: Count
    strides: Strides | None = Field(default=None, validation_alias=AliasChoices("strides", "way"))  # 0.1 wrote "way"


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
        memory = Memory.model_validate_json(text)
        for knobs in _settings(memory):
            setting_of(knobs)
        memory.trust  # noqa: B018  # it checks its values
    except (ValidationError, TypeError, InputError):
        return Memory()
    return memory


def _settings(memory: Memory) -> Iterator[Knobs]:
    """Every setting in the memory."""
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
