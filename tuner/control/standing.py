"""Where a controller stands when it reads an engine: who holds the lease, and what of ours is in force. Pure.

The engine's state decides, never the memory alone: a push may have been lost on the way, a lease may have ended while
nobody looked, an operator may have reverted, and a controller that was killed comes back to all of that.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rooftune.policies import wire
from rooftune.policies.request import Setting
from rooftune.tuner.control.memory import Kept, Memory, Trial, setting_of
from rooftune.tuner.control.observe_stage import boot_of, setting_in_force
from rooftune.tuner.control.propose_stage import FOLLOWERS


class Holder(StrEnum):
    NOBODY = "nobody"
    OURS = "ours"
    OTHER = "other"


@dataclass(frozen=True)
class Standing:
    """trial: the push whose verdict is due and whose setting is in force; kept: ours, found good, in force.

    foreign: our lease holds a setting that the memory does not know. dropped: a trial that is over without a verdict.
    """

    holder: Holder
    trial: Trial | None
    kept: Kept | None
    foreign: bool
    dropped: Trial | None

    @property
    def ours_in_force(self) -> bool:
        """Whether what is in force was pushed by us and is not the boot setting."""
        return self.trial is not None or self.kept is not None or self.foreign


def stand(state: wire.State, actor: str, memory: Memory) -> Standing:
    """What the engine says of what the memory holds."""
    setting, trial = setting_in_force(state), memory.trial
    if state.lease is None or state.lease.actor != actor:
        holder = Holder.NOBODY if state.lease is None else Holder.OTHER
        return Standing(holder, None, None, False, trial)
    if trial is not None and trial.boot_id == state.boot_id and _is(setting, trial.after):
        return Standing(Holder.OURS, trial, None, False, None)
    kept = memory.kept
    if kept is not None and kept.boot_id == state.boot_id and _is(setting, kept.setting):
        return Standing(Holder.OURS, None, kept, False, trial)
    return Standing(Holder.OURS, None, None, setting != boot_of(state), trial)


def beyond(setting: Setting, boot: Setting, bounds: Mapping[str, tuple[float, float]]) -> list[str]:
    """Knobs that were moved although the operator does not let them be, or further than his bounds.

    What lies between the boot setting and the bounds is on the way to them. A chunk cap of 0 is none.
    """
    wrong = []
    for name, old, new in zip(Setting._fields, boot, setting, strict=True):
        if old == new or name in FOLLOWERS:
            continue
        low, high = bounds.get(name, (math.inf, -math.inf))
        start, end = (math.inf if name == "chunk_cap_tokens" and value == 0 else value for value in (old, new))
        if name not in bounds or not min(low, start) <= end <= max(high, start):
            wrong.append(name)
    return wrong


def _is(setting: Setting, knobs: dict[str, int | float]) -> bool:
    return setting == setting_of(knobs)
