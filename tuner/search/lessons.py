"""What live trials say against the twin: a correction of its shares near the settings that ran live. Pure.

See docs/decisions/016-live-trials.md for the rule and why.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rooftune.policies.envelope import RATIO_KNOBS
from rooftune.policies.request import Setting

# How far a live result speaks: at half an octave (budget, cap or sequences 1.41 times as large) about a third.
REACH_OCTAVES = 0.5
# A switch thrown the other way (a policy, a partial-prefill cap) is as far as one octave.
SWITCH_OCTAVES = 1.0
# A miss counts by what it exceeds the sampling error of the live share with, at 90 % confidence.
CONFIDENCE = 1.645


@dataclass(frozen=True)
class LiveResult:
    """A setting that ran live. attainment: share of good requests among ``requests``.

    twin_attainment: the twin's share for that same stretch; None when not known.
    """

    setting: Setting
    attainment: float
    requests: int
    twin_attainment: float | None = None


@dataclass(frozen=True)
class Lesson:
    """miss: live minus twin, less what the twin misses by in any case, beyond sampling error (-1..1)."""

    setting: Setting
    miss: float
    requests: int


def lesson(live: LiveResult, twin_attainment: float, now_error: float) -> Lesson:
    """twin_attainment: of the stretch that ran live, or of the present window where that is not known.

    now_error: observed minus predicted share of the setting in force in the present window. An error that every setting
    has alike changes no gain, so it is no lesson about this one.
    """
    miss = live.attainment - (live.twin_attainment if live.twin_attainment is not None else twin_attainment) - now_error
    return Lesson(live.setting, math.copysign(max(abs(miss) - _sampling(live), 0.0), miss), live.requests)


def _sampling(live: LiveResult) -> float:
    """Sampling error of a share; one good and one bad request more, so that 0 and 1 are not taken for certain."""
    p = (live.attainment * live.requests + 1.0) / (live.requests + 2.0)
    return CONFIDENCE * math.sqrt(p * (1.0 - p) / (live.requests + 2.0))


def distance_octaves(a: Setting, b: Setting) -> float:
    """How far apart two settings are; a chunk cap of 0 stands for the budget."""
    total = 0.0
    for name in Setting._fields:
        x, y = getattr(a, name), getattr(b, name)
        if name == "chunk_cap_tokens":
            x, y = x or a.step_tokens, y or b.step_tokens
        if x == y:
            continue
        ratio = name in RATIO_KNOBS and x > 0 and y > 0
        total += (math.log2(x / y) if ratio else SWITCH_OCTAVES) ** 2
    return math.sqrt(total)


def correction(setting: Setting, lessons: Sequence[Lesson]) -> float:
    """What to add to the twin's share at ``setting``: at a setting that ran live its miss, far from all of them 0.

    Between, the mean of the misses by requests and nearness, times the nearness of the nearest.
    """
    weights = [
        (math.exp(-((distance_octaves(setting, one.setting) / REACH_OCTAVES) ** 2)), one)
        for one in lessons
        if one.requests > 0
    ]
    total = sum(near * one.requests for near, one in weights)
    if total <= 0.0:
        return 0.0
    mean = sum(near * one.requests * one.miss for near, one in weights) / total
    return mean * max(near for near, _ in weights)
