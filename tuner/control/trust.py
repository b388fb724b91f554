"""How far from the setting in force a search may look: wider after predictions that held, narrower after others. Pure.

The region is a ratio: with 2.0 a knob may become half to double of what it is. It starts wide, because a step-time
model that the window confirmed is worth more than small steps across a plateau; every failed prediction takes half of
it back. What a push moves at once is limited besides by ``GuardLimits.largest_ratio``.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rooftune.policies.envelope import Envelope, Mode, is_count
from rooftune.policies.errors import bad_value
from rooftune.policies.guard import RATIO_KNOBS
from rooftune.policies.request import Setting

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
        found[name] = (float(math.ceil(low)), float(math.floor(high))) if is_count(name) else (low, high)
    return found
