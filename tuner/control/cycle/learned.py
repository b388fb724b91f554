"""What live trials have taught: which settings need not be tried again, and which knobs move nothing. Pure."""

from collections.abc import Iterable

from rooftune.policies.envelope import RATIO_KNOBS
from rooftune.policies.request import Setting
from rooftune.policies.verify import Verdict
from rooftune.tuner.control.memory import Traffic, Tried, alike, setting_of

# Within this ratio on every knob that counts tokens or requests, two settings are one for a trial.
SAME_RATIO = 1.1
# After so many trials that moved one knob alone and changed nothing beyond noise, it is taken for one without effect.
NO_EFFECT_TRIALS = 2
# A trial that nobody could judge says little of its setting: after so long it may be tried again.
INCONCLUSIVE_S = 86_400.0


def near(one: Setting, other: Setting) -> bool:
    """Whether two settings are too close to be told apart live."""
    for name, a, b in zip(Setting._fields, one, other, strict=True):
        if a == b:
            continue
        if name not in RATIO_KNOBS or min(a, b) <= 0 or max(a, b) > SAME_RATIO * min(a, b):
            return False
    return True


def still_told(tried: Iterable[Tried], wall_s: float) -> tuple[Tried, ...]:
    """Those that still speak for or against a new trial; a clock that jumped makes an inconclusive one old."""
    old = Verdict.INCONCLUSIVE.value
    return tuple(one for one in tried if one.verdict != old or abs(wall_s - one.wall_s) <= INCONCLUSIVE_S)


def refuted(setting: Setting, tried: Iterable[Tried], traffic: Traffic | None) -> bool:
    """Whether this setting (or one like it) ran under traffic like this one and came out worse, or showed nothing.

    The latest trial counts: traffic or engine may have changed what an earlier one said.
    """
    for one in reversed(list(tried)):
        if traffic is not None and alike(one.traffic, traffic) and near(setting_of(one.setting), setting):
            return one.verdict != Verdict.BETTER.value
    return False


def proven(in_force: Setting, tried: Iterable[Tried], traffic: Traffic | None) -> Tried | None:
    """The latest trial found better than ``in_force`` under traffic like this one; None when a later one says no."""
    listed = list(tried)
    for one in reversed(listed):
        fits = traffic is not None and alike(one.traffic, traffic) and setting_of(one.before) == in_force
        if fits and one.verdict == Verdict.BETTER.value:
            return None if refuted(setting_of(one.setting), listed, traffic) else one
    return None


def moved_alone(one: Tried) -> str | None:
    """The one knob in which a trial differed from the setting before it; None when there were several."""
    before, after = setting_of(one.before), setting_of(one.setting)
    moved = [name for name, a, b in zip(Setting._fields, before, after, strict=True) if a != b]
    return moved[0] if len(moved) == 1 else None


def without_effect(tried: Iterable[Tried], traffic: Traffic | None) -> frozenset[str]:
    """Knobs that this engine takes and does not seem to follow, under traffic like this one.

    A trial says so when it moved that knob alone, was predicted to gain more than its interval could hide, and showed
    nothing beyond noise. One that showed an effect of the knob, either way, takes all that back.
    """
    silent: dict[str, int] = {}
    for one in tried:
        knob = moved_alone(one)
        if knob is None or one.observed_gain is None or one.half_width is None:
            continue
        if traffic is None or not alike(one.traffic, traffic):
            continue
        if abs(one.observed_gain) > one.half_width:
            silent[knob] = 0
        elif one.predicted_gain is not None and one.predicted_gain > one.observed_gain + one.half_width:
            silent[knob] = silent.get(knob, 0) + 1
    return frozenset(knob for knob, count in silent.items() if count >= NO_EFFECT_TRIALS)
