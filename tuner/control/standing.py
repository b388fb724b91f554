"""Where a controller stands when it reads an engine: who holds the lease, and what of ours is in force. Pure.

The engine's state decides, never the memory alone: a push may have been lost on the way, a lease may have ended while
nobody looked, an operator may have reverted, and a controller that was killed comes back to all of that.
"""

from dataclasses import dataclass
from enum import StrEnum

from policies import wire
from policies.request import Setting
from tuner.control.memory import Kept, Memory, Trial, setting_of
from tuner.control.observe_stage import boot_of, setting_in_force


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


def _is(setting: Setting, knobs: dict[str, int | float]) -> bool:
    return setting == setting_of(knobs)
