"""The table of knobs, and the bounds that an engine fixed at its start.

Knobs are the fields of ``rooftune.policies.request.Setting``. Policies are knobs too: ``budget_policy``,
``order_policy`` and their parameters each have a bound; those that an engine lacks are absent. Flags, wire, canonical
form, reports and the hook's probe come from the table.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal

from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.request import DEADLINE, PRESSURE, SHORTEST_FIRST, STEP_TIME_TARGET, Setting

MOST_PROMPT_TOKENS = 10_000_000
MOST_S = 3600.0

Number = int | float


class Role(StrEnum):
    """How a search treats a knob: tries its values, sets it with a searched knob, or leaves it alone."""

    SEARCHED = "searched"
    FOLLOWER = "follower"
    KEPT = "kept"


class Unit(StrEnum):
    """A knob's unit. The first three are whole numbers."""

    COUNT = "count"
    SWITCH = "switch"
    CHOICE = "choice"
    SECONDS = "seconds"
    SECONDS_PER_TOKEN = "seconds per token"
    SHARE = "share"
    TOKENS_PER_SECOND = "tokens per second"


@dataclass(frozen=True)
class Policy:
    """A value of a policy knob. kind: on the wire and, with hyphens, as a flag; words: in reports."""

    kind: str
    words: str


BUDGET_POLICIES = (
    Policy("fixed", "fixed"),
    Policy("step_time_target", "step-time target"),
    Policy("pressure", "pressure"),
)
ORDER_POLICIES = (
    Policy("fcfs", "first come, first served"),
    Policy("shortest_first", "shortest first"),
    Policy("deadline", "deadline"),
)


@dataclass(frozen=True)
class Knob:
    """One field of ``Setting``.

    label: its name in reports. least, most: bounds of an engine that moves every knob; ``most`` takes the boot budget
    and the boot sequence cap. flag: on a command line, without the dashes; help: the flag's. ratio: its effect grows
    with its ratio, so it moves in limited steps.

    policy: the policy it belongs to; choices: of a policy knob, by value; under: the policy values that read it; part:
    its name in the policy's wire message. beside: acts only while one of these knobs is not 0. needed: without a useful
    default, so it must be stated where it acts.
    """

    name: str
    label: str
    role: Role
    unit: Unit
    least: Number
    most: Callable[[int, int], Number]
    flag: str = ""
    help: str = ""
    ratio: bool = False
    policy: Literal["budget_policy", "order_policy"] | None = None
    choices: tuple[Policy, ...] = ()
    under: tuple[int, ...] = ()
    part: str = ""
    beside: tuple[str, ...] = ()
    needed: bool = False

    @property
    def whole(self) -> bool:
        return self.unit in (Unit.COUNT, Unit.SWITCH, Unit.CHOICE)

    def acts(self, setting: Setting) -> bool:
        """Whether this knob has an effect in ``setting``."""
        if self.under:
            return getattr(setting, self.policy or "") in self.under
        return not self.beside or any(getattr(setting, name) for name in self.beside)


def _ceiling(ceiling_tokens: int, max_running: int) -> int:
    return ceiling_tokens


def _sequences(ceiling_tokens: int, max_running: int) -> int:
    return max_running


def _constant(most: Number) -> Callable[[int, int], Number]:
    return lambda ceiling_tokens, max_running: most


_CAPS = ("max_partial_prefills", "max_long_partial_prefills")
_SEARCHED, _FOLLOWER, _KEPT = Role.SEARCHED, Role.FOLLOWER, Role.KEPT
_HOUR = _constant(MOST_S)

# In the order of reports. A new field of Setting needs a row here.
KNOBS = (
    Knob(
        "step_tokens", "token budget", _SEARCHED, Unit.COUNT, 1, _ceiling,
        "step-tokens", "token budget", ratio=True,
    ),
    Knob(
        "chunk_cap_tokens", "chunk cap", _SEARCHED, Unit.COUNT, 0, _ceiling,
        "chunk-cap", "most prompt tokens of one request per step", ratio=True,
    ),
    Knob(
        "max_running", "sequence cap", _SEARCHED, Unit.COUNT, 1, _sequences,
        "max-running", "most requests in a step", ratio=True,
    ),
    Knob(
        "max_partial_prefills", "partial-prefill cap", _SEARCHED, Unit.COUNT, 0, _sequences,
        "max-partial-prefills", "most prompts half-read at once",
    ),
    Knob(
        "max_long_partial_prefills", "long partial-prefill cap", _SEARCHED, Unit.COUNT, 0, _sequences,
        "max-long-partial-prefills", "the same, counting long prompts",
    ),
    Knob(
        "long_prompt_tokens", "a prompt is long from", _FOLLOWER, Unit.COUNT, 0, _constant(MOST_PROMPT_TOKENS),
        "long-prompt-tokens", "least tokens of a long prompt", beside=_CAPS[1:], needed=True,
    ),
    Knob(
        "budget_policy", "budget policy", _SEARCHED, Unit.CHOICE, 0, _constant(len(BUDGET_POLICIES) - 1),
        "budget-policy", policy="budget_policy", choices=BUDGET_POLICIES,
    ),
    Knob(
        "order_policy", "order policy", _SEARCHED, Unit.CHOICE, 0, _constant(len(ORDER_POLICIES) - 1),
        "order", policy="order_policy", choices=ORDER_POLICIES,
    ),
    Knob(
        "aging_s", "aging bound", _FOLLOWER, Unit.SECONDS, 0.0, _HOUR,
        "aging", "a request that waited this long has aged",
        policy="order_policy", under=(SHORTEST_FIRST, DEADLINE), part="aging_s",
    ),
    Knob(
        "aged_share", "steps in which the aged go first", _FOLLOWER, Unit.SHARE, 0.01, _constant(1.0),
        "aged-share", "share of the steps in which aged requests go first; in the others they go last",
        policy="order_policy", under=(SHORTEST_FIRST, DEADLINE), part="aged_share",
    ),
    Knob(
        "wait_tokens_per_s", "weight of waiting", _FOLLOWER, Unit.TOKENS_PER_SECOND, 0.0, _constant(1e6),
        "wait-weight", "prompt tokens per second of waiting that count as already read",
        policy="order_policy", under=(SHORTEST_FIRST, DEADLINE), part="wait_tokens_per_s",
    ),
    Knob(
        "ttft_target_s", "deadline for the first token", _FOLLOWER, Unit.SECONDS, 0.0, _HOUR,
        "ttft-target", "deadline: first token within it",
        policy="order_policy", under=(DEADLINE,), part="ttft_target_s", needed=True,
    ),
    Knob(
        "prefill_s_per_token", "time a prompt token is taken to need", _FOLLOWER, Unit.SECONDS_PER_TOKEN, 0.0,
        _constant(1.0), policy="order_policy", under=(DEADLINE,), part="prefill_s_per_token",
    ),
    Knob(
        "budget_target_s", "step-time target", _FOLLOWER, Unit.SECONDS, 0.0, _HOUR,
        "budget-target", "step-time-target: predicted step time stays under it",
        policy="budget_policy", under=(STEP_TIME_TARGET,), part="target_s", needed=True,
    ),
    Knob(
        "budget_floor_tokens", "prompt tokens a step has at least", _FOLLOWER, Unit.COUNT, 0, _ceiling,
        "budget-floor", "step-time-target: least prompt tokens of a step",
        policy="budget_policy", under=(STEP_TIME_TARGET,), part="floor_tokens",
    ),
    Knob(
        "pressure_tokens", "budget under pressure", _FOLLOWER, Unit.COUNT, 0, _ceiling,
        "pressure-tokens", "pressure: budget under pressure",
        policy="budget_policy", under=(PRESSURE,), part="tokens", needed=True,
    ),
    Knob(
        "pressure_prefills", "prompts that count as pressure", _FOLLOWER, Unit.COUNT, 1, lambda _, most: max(most, 2),
        "pressure-prefills", "pressure: least prefills in flight that count as pressure",
        policy="budget_policy", under=(PRESSURE,), part="prefills",
    ),
    Knob(
        "pass_over_max_s", "longest passing-over", _KEPT, Unit.SECONDS, 0.0, _HOUR,
        "pass-over-max", "longest time that later prompts may pass a held one", beside=_CAPS,
    ),
    Knob(
        "adaptive_chunk_cap", "adaptive chunk cap", _KEPT, Unit.SWITCH, 0, _constant(1),
        "adaptive-chunk-cap", "raise it to budget // eligible requests", beside=("chunk_cap_tokens",),
    ),
)  # fmt: skip
KNOB_NAMES: tuple[str, ...] = Setting._fields  # the order of the protocol
KNOB: Mapping[str, Knob] = {knob.name: knob for knob in sorted(KNOBS, key=lambda knob: KNOB_NAMES.index(knob.name))}
KNOB_LABELS: Mapping[str, str] = {knob.name: knob.label for knob in KNOBS}
RATIO_KNOBS = tuple(knob.name for knob in KNOBS if knob.ratio)
SEARCHED = frozenset(knob.name for knob in KNOBS if knob.role is Role.SEARCHED)
FOLLOWERS = frozenset(knob.name for knob in KNOBS if knob.role is Role.FOLLOWER)


def canonical(setting: Setting) -> Setting:
    """The same value for settings with the same effect: numbers of inactive policies take their defaults.

    The protocol moves a policy as a whole, so an engine may keep the numbers of one no longer in force.
    """
    idle = [knob.name for knob in KNOBS if knob.under and not knob.acts(setting)]
    return setting._replace(**{name: Setting._field_defaults[name] for name in idle})


class Mode(StrEnum):
    """Whether a knob moves between two steps, needs a restart, or does not exist in this engine."""

    LIVE = "live"
    RESTART = "restart"
    ABSENT = "absent"


class Broken(StrEnum):
    """The rule that a value breaks."""

    MINIMUM = "minimum"
    MAXIMUM = "maximum"
    NEEDS_RESTART = "needs_restart"
    ABSENT = "absent"
    UNKNOWN = "unknown"
    KIND = "kind"


@dataclass(frozen=True)
class KnobBound:
    """Least and greatest value of a knob, inclusive, in its unit; ignored when it is absent."""

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
    """A value that cannot be pushed. limit: the broken bound; None when the rule has none."""

    knob: str
    value: Number
    broken: Broken
    limit: Number | None = None


@dataclass(frozen=True)
class Envelope:
    """An engine's bounds; a knob without one is absent."""

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
        if not (whole or (isinstance(value, float) and not KNOB[name].whole and math.isfinite(value))):
            return Violation(name, value, Broken.KIND)
        if value < bound.minimum:
            return Violation(name, value, Broken.MINIMUM, bound.minimum)
        if value > bound.maximum:
            return Violation(name, value, Broken.MAXIMUM, bound.maximum)
        if bound.mode is Mode.RESTART and value != getattr(in_force, name):
            return Violation(name, value, Broken.NEEDS_RESTART)
        return None

    def violations(self, changes: Mapping[str, Number], in_force: Setting) -> tuple[Violation, ...]:
        """Why ``changes`` to the setting in force are forbidden, in their order; () = allowed.

        Naming a knob that needs a restart is allowed with its current value; naming an absent one never is.
        """
        found = (self._check_one(name, value, in_force) for name, value in changes.items())
        return tuple(violation for violation in found if violation is not None)

    def holds(self, setting: Setting) -> bool:
        """Whether every knob lies within its bounds."""
        return all(bound.minimum <= getattr(setting, name) <= bound.maximum for name, bound in self.by_name.items())


def full_bounds(ceiling_tokens: int, max_running: int) -> tuple[KnobBound, ...]:
    """Bounds of an engine that moves every knob."""
    return tuple(KnobBound(knob.name, knob.least, knob.most(ceiling_tokens, max_running)) for knob in KNOB.values())
