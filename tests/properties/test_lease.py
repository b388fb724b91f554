"""Any sequence of pushes, waits, clock jumps and reverts keeps the invariants of a lease."""

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rooftune.policies.envelope import Envelope, KnobBound, Mode
from rooftune.policies.lease import BACKWARD_SLACK_S, LeaseReason, Push, boot_book, expire, push, resume, revert
from rooftune.policies.request import Setting

BOOT = Setting(step_tokens=512, chunk_cap_tokens=0, max_running=64)
ENVELOPE = Envelope(
    (
        KnobBound("step_tokens", 64, 4096),
        KnobBound("chunk_cap_tokens", 0, 4096),
        KnobBound("pass_over_max_s", 0.0, 60.0),
        KnobBound("max_running", 1, 64, Mode.RESTART),
    )
)
VALID = st.fixed_dictionaries(
    {"step_tokens": st.sampled_from([64, 65, 1000, 4095, 4096])},
    optional={
        "chunk_cap_tokens": st.integers(0, 4096),
        "pass_over_max_s": st.floats(0, 60),
        "max_running": st.just(64),
    },
)
INVALID = st.sampled_from(
    [
        {"step_tokens": 63}, {"step_tokens": 4097}, {"step_tokens": 100.0}, {"step_tokens": True},
        {"chunk_cap_tokens": -1}, {"chunk_cap_tokens": 4097}, {"max_running": 63}, {"order_policy": 1},
        {"pass_over_max_s": math.nan}, {"pass_over_max_s": 60.001}, {"max_partial_prefills": 0}, {"unheard_of": 1},
    ]
)  # fmt: skip
CHANGES = st.one_of(VALID, VALID, st.builds(lambda good, bad: good | bad, VALID, INVALID))


class LeaseMachine(RuleBasedStateMachine):
    """Keeps its own true time; the clock that the book sees may jump against it."""

    def __init__(self):
        super().__init__()
        self.true_s = 1000.0
        self.offset_s = 0.0
        self.book = boot_book(ENVELOPE, BOOT, self.now_s)
        self.granted_true_s = 0.0
        self.length_s = 0.0
        self.stepped_back_s = 0.0
        self.expected = BOOT

    @property
    def now_s(self):
        return self.true_s + self.offset_s

    def take(self, transition):
        before = self.book
        self.book, outcome = transition
        assert outcome.revision == self.book.revision
        changed = (before.setting, before.lease, before.blocked) != (
            self.book.setting, self.book.lease, self.book.blocked,
        )  # fmt: skip
        assert (self.book.revision > before.revision) == changed
        if before.lease is not None and self.book.lease == before.lease:
            assert self.book.seen_s >= before.seen_s
        if self.book.lease is None:
            self.expected = BOOT
        return outcome

    @rule(
        changes=CHANGES,
        lease_s=st.sampled_from([60.0, 60.0, 5.0, 0.0, 1e9]),
        stale=st.sampled_from([False, False, True]),
        actor=st.sampled_from("ab"),
    )
    def push(self, changes, lease_s, stale, actor):
        held_by = self.book.lease.actor if self.book.lease else None
        revision = self.book.revision - 1 if stale else self.book.revision
        before = self.book
        outcome = self.take(push(self.book, Push(changes, lease_s, revision, actor, "property"), self.now_s))
        if outcome.reason is LeaseReason.OK:
            assert not stale
            assert not before.blocked
            assert not ENVELOPE.violations(changes, before.setting)
            assert held_by in (None, actor) or not before.lease.holds(self.now_s)
            self.expected = Setting(**(before.setting._asdict() | changes))
            self.granted_true_s, self.length_s, self.stepped_back_s = self.true_s, lease_s, 0.0
        else:
            assert outcome.refused
            assert self.book.setting in (before.setting, BOOT)

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.9, 5.0, 59.0, 61.0]))
    def wait(self, seconds):
        self.true_s += seconds
        self.take(expire(self.book, self.now_s))

    @rule(jump_s=st.sampled_from([-1e6, -61.0, -2.0, -0.5, 0.5, 30.0, 1e6]))
    def clock_jumps(self, jump_s):
        self.offset_s += jump_s
        self.stepped_back_s += max(0.0, -jump_s)
        self.take(expire(self.book, self.now_s))
        if jump_s < -BACKWARD_SLACK_S:
            assert self.book.lease is None or self.book.seen_s == self.now_s

    @rule(now_s=st.sampled_from([math.nan, math.inf, -math.inf]))
    def clock_breaks(self, now_s):
        self.take(expire(self.book, now_s))
        assert self.book.setting == BOOT

    @rule(block=st.booleans())
    def revert(self, block):
        self.take(revert(self.book, self.now_s, block=block))
        assert self.book.setting == BOOT
        assert self.book.lease is None
        if block:
            assert self.book.blocked

    @rule()
    def resume(self):
        self.take(resume(self.book, self.now_s))
        assert not self.book.blocked

    @invariant()
    def the_last_valid_state_is_in_force(self):
        assert self.book.setting == self.expected

    @invariant()
    def never_outside_the_envelope(self):
        assert ENVELOPE.holds(self.book.setting)
        assert self.book.setting.max_running == BOOT.max_running
        assert self.book.setting.order_policy == BOOT.order_policy

    @invariant()
    def boot_values_after_the_end(self):
        if self.book.lease is None:
            assert self.book.setting == BOOT
        else:
            assert self.book.lease.left_s(self.book.seen_s) > 0.0

    @invariant()
    def a_lease_never_outlives_its_length_by_more_than_the_small_steps_back(self):
        if self.book.lease is not None:
            assert self.book.seen_s - self.now_s <= BACKWARD_SLACK_S
            assert self.true_s - self.granted_true_s < self.length_s + self.stepped_back_s + BACKWARD_SLACK_S


LeaseMachine.TestCase.settings = settings(max_examples=70, stateful_step_count=50, deadline=None)
TestLease = LeaseMachine.TestCase
