"""What may be moved, and how far: the bounds an engine fixed at its start.

Knobs are the fields of ``rooftune.policies.request.Setting``. A policy is moved like any knob: ``budget_policy``,
``order_policy`` and their parameters each have a bound, and one that an engine lacks is absent.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal

from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.request import DEADLINE, FCFS, FIXED_BUDGET, PRESSURE, STEP_TIME_TARGET, Setting


class Role(StrEnum):
    """How a search treats a knob: tries its values, sets it along with a searched knob, or leaves it alone."""

    SEARCHED = "searched"
    FOLLOWER = "follower"
    KEPT = "kept"


@dataclass(frozen=True)
class Knob:
    """One field of ``Setting``. label: its name in reports. policy: which of the two policies it belongs to.

    ratio: its effect grows with its ratio, so it moves in limited steps; the others are switches.
    """

    name: str
    label: str
    role: Role
    policy: Literal["budget", "order"] | None = None
    ratio: bool = False


# In the order in which reports list them. A new field of Setting needs a row here.
KNOBS = (
    Knob("step_tokens", "token budget", Role.SEARCHED, ratio=True),
    Knob("chunk_cap_tokens", "chunk cap", Role.SEARCHED, ratio=True),
    Knob("max_running", "sequence cap", Role.SEARCHED, ratio=True),
    Knob("max_partial_prefills", "partial-prefill cap", Role.SEARCHED),
    Knob("max_long_partial_prefills", "long partial-prefill cap", Role.SEARCHED),
    Knob("long_prompt_tokens", "a prompt is long from", Role.FOLLOWER),
    Knob("budget_policy", "budget policy", Role.SEARCHED, "budget"),
    Knob("order_policy", "order policy", Role.SEARCHED, "order"),
    Knob("aging_s", "aging bound", Role.FOLLOWER, "order"),
    Knob("ttft_target_s", "deadline for the first token", Role.FOLLOWER, "order"),
    Knob("prefill_s_per_token", "time a prompt token is taken to need", Role.FOLLOWER, "order"),
    Knob("budget_target_s", "step-time target", Role.FOLLOWER, "budget"),
    Knob("budget_floor_tokens", "prompt tokens a step has at least", Role.FOLLOWER, "budget"),
    Knob("pressure_tokens", "budget under pressure", Role.FOLLOWER, "budget"),
    Knob("pressure_prefills", "prompts that count as pressure", Role.FOLLOWER, "budget"),
    Knob("pass_over_max_s", "longest passing-over", Role.KEPT),
    Knob("adaptive_chunk_cap", "adaptive chunk cap", Role.KEPT),
)
KNOB_NAMES: tuple[str, ...] = Setting._fields  # the order of the protocol
KNOB_LABELS: Mapping[str, str] = {knob.name: knob.label for knob in KNOBS}
RATIO_KNOBS = tuple(knob.name for knob in KNOBS if knob.ratio)
SEARCHED = frozenset(knob.name for knob in KNOBS if knob.role is Role.SEARCHED)
FOLLOWERS = frozenset(knob.name for knob in KNOBS if knob.role is Role.FOLLOWER)
BUDGET_KNOBS = frozenset(knob.name for knob in KNOBS if knob.policy == "budget")
ORDER_KNOBS = frozenset(knob.name for knob in KNOBS if knob.policy == "order")
MOST_PROMPT_TOKENS = 10_000_000

Number = int | float


class Mode(StrEnum):
    """Whether a knob moves between two steps, only by a restart, or does not exist in this engine."""

    LIVE = "live"
    RESTART = "restart"
    ABSENT = "absent"


class Broken(StrEnum):
    """Which rule a value breaks."""

    MINIMUM = "minimum"
    MAXIMUM = "maximum"
    NEEDS_RESTART = "needs_restart"
    ABSENT = "absent"
    UNKNOWN = "unknown"
    KIND = "kind"


def is_count(knob: str) -> bool:
    """Whether a knob holds whole numbers; the others hold seconds or seconds per token."""
    return not knob.endswith(("_s", "_s_per_token"))


@dataclass(frozen=True)
class KnobBound:
    """Least and greatest value of one knob, inclusive, in the knob's own unit; both ignored when it is absent."""

    name: str
    minimum: Number
    maximum: Number
    mode: Mode = Mode.LIVE

    def __post_init__(self) -> None:
        if self.name not in KNOB_NAMES:
            raise bad_value("knob", self.name, "one of " + ", ".join(KNOB_NAMES), "correct the name")
        if not (math.isfinite(self.minimum) and math.isfinite(self.maximum) and 0 <= self.minimum <= self.maximum):
            raise bad_value(f"bounds of {self.name}", (self.minimum, self.maximum), "0 <= min <= max", "correct them")


@dataclass(frozen=True)
class Violation:
    """One value that cannot be pushed. limit: the bound it breaks; None when the rule is not a number."""

    knob: str
    value: Number
    broken: Broken
    limit: Number | None = None


@dataclass(frozen=True)
class Envelope:
    """The bounds of every knob that an engine knows; a knob without a bound is absent."""

    bounds: tuple[KnobBound, ...]

    def __post_init__(self) -> None:
        names = [bound.name for bound in self.bounds]
        if len(set(names)) != len(names):
            raise InputError("a knob has two bounds in one envelope; state each knob once")

    @cached_property
    def by_name(self) -> Mapping[str, KnobBound]:
        return {bound.name: bound for bound in self.bounds if bound.mode is not Mode.ABSENT}

    def _check_one(self, name: str, value: Number, in_force: Setting) -> Violation | None:
        if name not in KNOB_NAMES:
            return Violation(name, value, Broken.UNKNOWN)
        bound = self.by_name.get(name)
        if bound is None:
            return Violation(name, value, Broken.ABSENT)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (isinstance(value, float) and not is_count(name) and math.isfinite(value))):
            return Violation(name, value, Broken.KIND)
        if value < bound.minimum:
            return Violation(name, value, Broken.MINIMUM, bound.minimum)
        if value > bound.maximum:
            return Violation(name, value, Broken.MAXIMUM, bound.maximum)
        if bound.mode is Mode.RESTART and value != getattr(in_force, name):
            return Violation(name, value, Broken.NEEDS_RESTART)
        return None

    def violations(self, changes: Mapping[str, Number], in_force: Setting) -> tuple[Violation, ...]:
        """Everything that forbids ``changes`` to the setting in force, in the order of the changes; () = allowed.

        A knob that needs a restart, or is absent, may be named only by the value it has (absent: not at all).
        """
        found = (self._check_one(name, value, in_force) for name, value in changes.items())
        return tuple(violation for violation in found if violation is not None)

    def clamp(self, setting: Setting) -> Setting:
        """The setting with every known knob inside its bounds: the last fence before a scheduler."""
        inside = {
            name: min(max(getattr(setting, name), bound.minimum), bound.maximum) for name, bound in self.by_name.items()
        }
        return setting._replace(**inside)

    def holds(self, setting: Setting) -> bool:
        """Whether every known knob of the setting lies within its bounds."""
        return all(bound.minimum <= getattr(setting, name) <= bound.maximum for name, bound in self.by_name.items())


def full_bounds(ceiling_tokens: int, max_running: int) -> tuple[KnobBound, ...]:
    """Bounds of an engine that moves every knob, from its boot budget and its boot sequence cap."""
    most_s = 3600.0
    return (
        KnobBound("step_tokens", 1, ceiling_tokens),
        KnobBound("chunk_cap_tokens", 0, ceiling_tokens),
        KnobBound("adaptive_chunk_cap", 0, 1),
        KnobBound("max_partial_prefills", 0, max_running),
        KnobBound("max_long_partial_prefills", 0, max_running),
        KnobBound("long_prompt_tokens", 0, MOST_PROMPT_TOKENS),
        KnobBound("pass_over_max_s", 0.0, most_s),
        KnobBound("max_running", 1, max_running),
        KnobBound("budget_policy", FIXED_BUDGET, PRESSURE),
        KnobBound("budget_target_s", 0.0, most_s),
        KnobBound("budget_floor_tokens", 0, ceiling_tokens),
        KnobBound("pressure_tokens", 0, ceiling_tokens),
        KnobBound("pressure_prefills", 1, max(max_running, 2)),
        KnobBound("order_policy", FCFS, DEADLINE),
        KnobBound("aging_s", 0.0, most_s),
        KnobBound("ttft_target_s", 0.0, most_s),
        KnobBound("prefill_s_per_token", 0.0, 1.0),
    )


_DEFAULTS = Setting(step_tokens=1)


_TARGET = ("budget_target_s", "budget_floor_tokens")


_PRESSURE = ("pressure_tokens", "pressure_prefills")


_DEADLINE = ("ttft_target_s", "prefill_s_per_token")


def canonical(setting: Setting) -> Setting:
    """One value for settings that do the same: the numbers of policies that are not in force are at their defaults.

    The protocol moves a policy as a whole, so an engine may keep the numbers of one that is no longer in force.
    """
    idle: list[str] = []
    if setting.budget_policy != STEP_TIME_TARGET:
        idle += _TARGET
    if setting.budget_policy != PRESSURE:
        idle += _PRESSURE
    if setting.order_policy != DEADLINE:
        idle += _DEADLINE
    if setting.order_policy == FCFS:
        idle.append("aging_s")
    return setting._replace(**{name: getattr(_DEFAULTS, name) for name in idle})
