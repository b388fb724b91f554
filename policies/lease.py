"""Leases: every push holds for a limited time, then the engine returns to its boot setting by itself.

Pure transitions over a frozen ``LeaseBook``; the caller passes the engine's monotonic time. No clock is trusted: a
lease may end early, never late.

- A jump ahead past the end of a lease ends it.
- A jump back: the book keeps the latest time seen, which counts up to ``BACKWARD_SLACK_S`` behind it (threads may read
  the clock and then queue). Further back the elapsed time is unknown, and the lease ends.
- A time that is not finite ends the lease and grants none.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from rooftune.policies.envelope import Envelope, Number, Violation
from rooftune.policies.errors import InputError, bad_value
from rooftune.policies.request import STEP_TIME_TARGET, Setting
from rooftune.policies.step_time import StepModel

BACKWARD_SLACK_S = 1.0
MAX_LEASE_S = 86_400.0


class LeaseReason(StrEnum):
    """What a transition did, or why it did nothing."""

    OK = "ok"
    EXPIRED = "expired"
    CLOCK_WENT_BACK = "clock_went_back"
    CLOCK_UNREADABLE = "clock_unreadable"
    REVERTED = "reverted"
    RESUMED = "resumed"
    NOTHING_TO_DO = "nothing_to_do"
    CONFLICT_REVISION = "conflict_revision"
    BLOCKED_BY_REVERT = "blocked_by_revert"
    HELD_BY_OTHER = "held_by_other"
    LEASE_LENGTH = "lease_length"
    OUTSIDE_ENVELOPE = "outside_envelope"
    NEEDS_STEP_MODEL = "needs_step_model"


# The reasons of a refusal, each with its words for the client.
REFUSALS = {
    LeaseReason.CONFLICT_REVISION: "another revision is in force; read the state and decide again",
    LeaseReason.BLOCKED_BY_REVERT: "an operator reverted; pushes are blocked until a resume",
    LeaseReason.HELD_BY_OTHER: "another actor holds the lease; wait for its end or revert it",
    LeaseReason.LEASE_LENGTH: "the lease is longer than this engine grants; ask for less",
    LeaseReason.OUTSIDE_ENVELOPE: "outside the boot envelope, see breaches; nothing was changed",
    LeaseReason.NEEDS_STEP_MODEL: "step_time_target needs the constants of the step model; send them along",
    LeaseReason.CLOCK_UNREADABLE: "the engine's clock gives no finite time; nothing can be leased on it",
}


@dataclass(frozen=True)
class Lease:
    """A push in force. granted_s and every ``now_s``: seconds on one clock; length_s: above 0, finite."""

    actor: str
    reason: str
    revision: int
    granted_s: float
    length_s: float

    def __post_init__(self) -> None:
        if not self.actor or not self.reason:
            raise InputError("a lease needs an actor and a reason; say who pushes and why")
        if not (math.isfinite(self.granted_s) and math.isfinite(self.length_s) and self.length_s > 0.0):
            raise bad_value("lease length_s", self.length_s, "above 0 and finite", "give seconds on a readable clock")

    def left_s(self, now_s: float) -> float:
        """Seconds left, 0..length_s; 0 for a time before the grant or one that is not finite."""
        elapsed_s = now_s - self.granted_s
        if not math.isfinite(elapsed_s) or elapsed_s < 0.0:
            return 0.0
        return max(0.0, self.length_s - elapsed_s)

    def holds(self, now_s: float) -> bool:
        """Whether it has not expired, in one comparison: every step calls it."""
        return 0.0 <= now_s - self.granted_s < self.length_s


@dataclass(frozen=True)
class Push:
    """A request for ``changes`` (knob -> value) to the setting in force; other knobs stay as they are.

    step_model: constants for the budget policy STEP_TIME_TARGET; None keeps those in force.
    """

    changes: Mapping[str, Number]
    lease_s: float
    expected_revision: int
    actor: str
    reason: str
    step_model: StepModel | None = None

    def __post_init__(self) -> None:
        if not self.actor or not self.reason:
            raise InputError("a push needs an actor and a reason; say who pushes and why")
        object.__setattr__(self, "changes", MappingProxyType(dict(self.changes)))


@dataclass(frozen=True)
class LeaseBook:
    """What an engine holds about its knobs. setting: in force; without a lease it is ``boot``.

    revision grows by one with every change of the setting, the lease or the block, and never shrinks.
    blocked: an operator reverted; no push until resume. seen_s: latest time seen.
    step_model: constants for STEP_TIME_TARGET; they come with a push and go with its lease.
    """

    envelope: Envelope
    boot: Setting
    setting: Setting
    revision: int
    lease: Lease | None
    blocked: bool
    seen_s: float
    max_lease_s: float = MAX_LEASE_S
    step_model: StepModel | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_lease_s) and self.max_lease_s > 0.0):
            raise bad_value("max_lease_s", self.max_lease_s, "above 0 and finite", "give the longest lease in seconds")
        for what, setting in (("the boot setting", self.boot), ("the setting in force", self.setting)):
            if not self.envelope.holds(setting):
                raise InputError(f"{what} {setting} lies outside the envelope; derive the bounds from the boot values")
        if self.lease is None and self.setting != self.boot:
            raise InputError("a setting other than boot needs a lease; push it")
        if self.boot.budget_policy == STEP_TIME_TARGET:
            raise InputError("an engine boots with a budget policy that needs no constants; push step_time_target")


@dataclass(frozen=True)
class LeaseOutcome:
    """A transition's result. revision: in force afterwards; violations: only for outside_envelope."""

    reason: LeaseReason
    revision: int
    violations: tuple[Violation, ...] = ()

    @property
    def refused(self) -> bool:
        return self.reason in REFUSALS


def boot_book(envelope: Envelope, boot: Setting, now_s: float, max_lease_s: float = MAX_LEASE_S) -> LeaseBook:
    """The book of a freshly started engine. Raises InputError when boot lies outside the envelope."""
    if not math.isfinite(now_s):
        raise bad_value("now_s", now_s, "finite", "start on a readable clock")
    return LeaseBook(envelope, boot, boot, 0, None, False, now_s, max_lease_s)


def _boot(book: LeaseBook, blocked: bool) -> LeaseBook:
    return replace(book, revision=book.revision + 1, setting=book.boot, lease=None, blocked=blocked, step_model=None)


def _seen(book: LeaseBook, seen_s: float) -> LeaseBook:
    """The book at another time, without the checks: every read calls it while the loop may wait for the lock."""
    later = object.__new__(LeaseBook)
    later.__dict__.update(book.__dict__, seen_s=seen_s)
    return later


def _settle(book: LeaseBook, now_s: float) -> tuple[LeaseBook, float, LeaseReason | None]:
    """The book at ``now_s``, the time that counts, and why a lease ended, if one did."""
    if not math.isfinite(now_s):
        ended: LeaseReason | None = LeaseReason.CLOCK_UNREADABLE
        counts_s = book.seen_s
    elif now_s < book.seen_s - BACKWARD_SLACK_S:
        ended, counts_s = LeaseReason.CLOCK_WENT_BACK, now_s
    else:
        counts_s = max(now_s, book.seen_s)
        ended = LeaseReason.EXPIRED if book.lease is not None and not book.lease.holds(counts_s) else None
    if counts_s != book.seen_s:
        book = _seen(book, counts_s)
    if ended is None or book.lease is None:
        return book, counts_s, None
    return _boot(book, book.blocked), counts_s, ended


def expire(book: LeaseBook, now_s: float) -> tuple[LeaseBook, LeaseOutcome]:
    """Ends the lease when it has expired or the clock cannot be trusted. Call between steps."""
    settled, _, ended = _settle(book, now_s)
    return settled, LeaseOutcome(ended or LeaseReason.NOTHING_TO_DO, settled.revision)


def push(book: LeaseBook, request: Push, now_s: float) -> tuple[LeaseBook, LeaseOutcome]:
    """Grants the whole request under a new lease, or refuses all of it.

    An expired lease ends first, so a refusal can come with a new revision. The holder of a lease may renew or change
    it; another actor is refused until it ends or is reverted.
    """
    book, counts_s, _ = _settle(book, now_s)

    def refuse(reason: LeaseReason, violations: tuple[Violation, ...] = ()) -> tuple[LeaseBook, LeaseOutcome]:
        return book, LeaseOutcome(reason, book.revision, violations)

    if not math.isfinite(now_s):
        return refuse(LeaseReason.CLOCK_UNREADABLE)
    if book.blocked:
        return refuse(LeaseReason.BLOCKED_BY_REVERT)
    if request.expected_revision != book.revision:
        return refuse(LeaseReason.CONFLICT_REVISION)
    if book.lease is not None and book.lease.actor != request.actor:
        return refuse(LeaseReason.HELD_BY_OTHER)
    if not 0.0 < request.lease_s <= book.max_lease_s:
        return refuse(LeaseReason.LEASE_LENGTH)
    violations = book.envelope.violations(request.changes, book.setting)
    if violations:
        return refuse(LeaseReason.OUTSIDE_ENVELOPE, violations)
    setting = Setting(**(book.setting._asdict() | dict(request.changes)))
    step_model = request.step_model or book.step_model
    if setting.budget_policy == STEP_TIME_TARGET and step_model is None:
        return refuse(LeaseReason.NEEDS_STEP_MODEL)
    lease = Lease(request.actor, request.reason, book.revision + 1, counts_s, request.lease_s)
    after = replace(book, revision=lease.revision, setting=setting, lease=lease, step_model=step_model)
    return after, LeaseOutcome(LeaseReason.OK, after.revision)


def revert(book: LeaseBook, now_s: float, *, block: bool) -> tuple[LeaseBook, LeaseOutcome]:
    """Boot setting now, whatever the clock says. block: refuse pushes until ``resume``."""
    book, _, _ = _settle(book, now_s)
    if book.lease is None and book.blocked >= block:
        return book, LeaseOutcome(LeaseReason.NOTHING_TO_DO, book.revision)
    after = _boot(book, book.blocked or block)
    return after, LeaseOutcome(LeaseReason.REVERTED, after.revision)


def resume(book: LeaseBook, now_s: float) -> tuple[LeaseBook, LeaseOutcome]:
    """Allows pushes again after a blocking revert."""
    book, _, _ = _settle(book, now_s)
    if not book.blocked:
        return book, LeaseOutcome(LeaseReason.NOTHING_TO_DO, book.revision)
    after = replace(book, revision=book.revision + 1, blocked=False)
    return after, LeaseOutcome(LeaseReason.RESUMED, after.revision)
