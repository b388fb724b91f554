"""What the loop must still know after a kill at any instant: one JSON value in the store, written before it is needed.

Instants without another word are seconds on the engine's clock, which only mean something together with its boot id.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, ValidationError
from rooftune.policies.errors import InputError
from rooftune.policies.request import Setting
from rooftune.tuner.control.exploration import Account
from rooftune.tuner.control.outcome import Amount, Knobs
from rooftune.tuner.control.parts import Store
from rooftune.tuner.control.trust import Trust
from rooftune.tuner.control.way import Way
from rooftune.tuner.record import Count, Part, Share, Words

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

    way: the strides that led here, None when it was found better than where they began.
    """

    boot_id: Words
    setting: Knobs
    push_cycle: Count
    way: Way | None = None


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

    def but(self, **changes: object) -> "Memory":
        """The same with some parts exchanged; ``trust`` and ``account`` by their own names."""
        trust, account = changes.pop("trust", None), changes.pop("account", None)
        if isinstance(trust, Trust):
            changes |= {"trust_ratio": trust.ratio, "trust_held": trust.held, "trust_failed": trust.failed}
        if isinstance(account, Account):
            changes["days"] = account.days
        return self.model_copy(update=changes)


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
        if memory.kept.way is not None:
            yield memory.kept.way.start


def remember(store: Store, memory: Memory) -> None:
    store.keep(KEY, memory.model_dump_json())
