"""Lessons of live trials: settings not worth another trial, and knobs without effect. Pure."""

from collections.abc import Iterable

from rooftune.policies.envelope import RATIO_KNOBS
from rooftune.policies.request import Setting
from rooftune.policies.verify import Verdict
from rooftune.tuner.control.memory import Traffic, Tried, alike, setting_of

# Two settings whose ratio knobs differ by no more than this are one for a trial.
SAME_RATIO = 1.1
# A knob has no effect after this many trials that moved it alone and showed nothing beyond noise.
NO_EFFECT_TRIALS = 2
# An inconclusive trial says little about its setting; after this long the setting may be tried again.
INCONCLUSIVE_S = 86_400.0


def near(one: Setting, other: Setting) -> bool:
    """Whether two settings are too close to distinguish live."""
    for name, a, b in zip(Setting._fields, one, other, strict=True):
        if a == b:
            continue
        if name not in RATIO_KNOBS or min(a, b) <= 0 or max(a, b) > SAME_RATIO * min(a, b):
            return False
    return True


def still_valid(tried: Iterable[Tried], wall_s: float) -> tuple[Tried, ...]:
    """Trials that still count for or against a new one; a clock jump makes an inconclusive one old."""
    old = Verdict.INCONCLUSIVE.value
    return tuple(one for one in tried if one.verdict != old or abs(wall_s - one.wall_s) <= INCONCLUSIVE_S)


def refuted(setting: Setting, tried: Iterable[Tried], traffic: Traffic | None) -> bool:
    """Whether the latest trial of this setting (or one near it) under like traffic was not better."""
    for one in reversed(list(tried)):
        if traffic is not None and alike(one.traffic, traffic) and near(setting_of(one.setting), setting):
            return one.verdict != Verdict.BETTER.value
    return False


def proven(in_force: Setting, tried: Iterable[Tried], traffic: Traffic | None) -> Tried | None:
    """The latest trial that beat ``in_force`` under like traffic; None when a later one refutes it."""
    listed = list(tried)
    for one in reversed(listed):
        fits = traffic is not None and alike(one.traffic, traffic) and setting_of(one.before) == in_force
        if fits and one.verdict == Verdict.BETTER.value:
            return None if refuted(setting_of(one.setting), listed, traffic) else one
    return None


def moved_alone(one: Tried) -> str | None:
    """The only knob that a trial moved; None when it moved several."""
    before, after = setting_of(one.before), setting_of(one.setting)
    moved = [name for name, a, b in zip(Setting._fields, before, after, strict=True) if a != b]
    return moved[0] if len(moved) == 1 else None


def without_effect(tried: Iterable[Tried], traffic: Traffic | None) -> frozenset[str]:
    """Knobs that this engine accepts but does not seem to follow under like traffic.

    A trial counts when it moved that knob alone, its predicted gain lay above its interval, and it showed nothing
    beyond noise. A trial that shows any effect of the knob resets the count.
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
