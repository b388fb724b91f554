"""Envelope and lease transitions, case by case."""

import math

import pytest

from rooftune.policies.envelope import Broken, Envelope, KnobBound, Mode, full_bounds
from rooftune.policies.errors import InputError
from rooftune.policies.lease import (
    BACKWARD_SLACK_S,
    Lease,
    LeaseBook,
    LeaseReason,
    Push,
    boot_book,
    expire,
    push,
    resume,
    revert,
)
from rooftune.policies.request import STEP_TIME_TARGET, Setting
from rooftune.policies.step_time import NAMED_MODELS

BOOT = Setting(step_tokens=512, max_running=256)
ENVELOPE = Envelope(
    (
        KnobBound("step_tokens", 16, 8192),
        KnobBound("chunk_cap_tokens", 0, 8192),
        KnobBound("pass_over_max_s", 0.0, 600.0),
        KnobBound("max_running", 1, 256, Mode.RESTART),
        KnobBound("max_partial_prefills", 0, 0, Mode.ABSENT),
    )
)


def request(changes=None, *, revision=0, actor="tuner", lease_s=60.0):
    return Push({"step_tokens": 1024} if changes is None else changes, lease_s, revision, actor, "a test")


@pytest.fixture
def book():
    return boot_book(ENVELOPE, BOOT, now_s=100.0)


@pytest.fixture
def held(book):
    after, outcome = push(book, request(), 100.0)
    assert outcome.reason is LeaseReason.OK
    return after


def test_push_merges_into_the_setting_in_force(held):
    assert held.setting == BOOT._replace(step_tokens=1024)
    after, outcome = push(held, request({"chunk_cap_tokens": 256}, revision=1), 110.0)
    assert outcome.reason is LeaseReason.OK
    assert after.setting == BOOT._replace(step_tokens=1024, chunk_cap_tokens=256)
    assert (after.revision, outcome.revision) == (2, 2)
    assert after.lease.left_s(110.0) == 60.0


def test_an_empty_push_renews_the_lease(held):
    after, _ = push(held, request({}, revision=1), 150.0)
    assert after.setting == held.setting
    assert expire(after, 205.0)[0].setting == held.setting


@pytest.mark.parametrize(
    ("changes", "broken", "limit"),
    [
        ({"step_tokens": 8193}, Broken.MAXIMUM, 8192),
        ({"step_tokens": 15}, Broken.MINIMUM, 16),
        ({"step_tokens": 100.0}, Broken.KIND, None),
        ({"step_tokens": True}, Broken.KIND, None),
        ({"step_tokens": "100"}, Broken.KIND, None),
        ({"pass_over_max_s": math.nan}, Broken.KIND, None),
        ({"pass_over_max_s": math.inf}, Broken.KIND, None),
        ({"max_running": 128}, Broken.NEEDS_RESTART, None),
        ({"max_partial_prefills": 2}, Broken.ABSENT, None),
        ({"order_policy": 1}, Broken.ABSENT, None),
        ({"budget": 1}, Broken.UNKNOWN, None),
    ],
)
def test_one_bad_value_refuses_the_whole_push(held, changes, broken, limit):
    after, outcome = push(held, request({"chunk_cap_tokens": 64} | changes, revision=1), 110.0)
    assert after.setting == held.setting
    assert after.lease == held.lease
    assert outcome.reason is LeaseReason.OUTSIDE_ENVELOPE
    assert outcome.refused
    assert [(v.broken, v.limit) for v in outcome.violations] == [(broken, limit)]


def test_a_restart_knob_may_be_named_by_its_own_value(book):
    assert push(book, request({"max_running": 256}), 100.0)[1].reason is LeaseReason.OK
    assert push(book, request({"pass_over_max_s": 5}), 100.0)[1].reason is LeaseReason.OK


@pytest.mark.parametrize("lease_s", [0.0, -1.0, math.nan, math.inf, 86_401.0])
def test_lease_length_is_bounded(book, lease_s):
    assert push(book, request(lease_s=lease_s), 100.0)[1].reason is LeaseReason.LEASE_LENGTH


def test_an_old_revision_conflicts(held):
    for revision in (0, 2):
        after, outcome = push(held, request(revision=revision), 110.0)
        assert (after.setting, outcome.reason) == (held.setting, LeaseReason.CONFLICT_REVISION)


def test_a_step_time_target_is_set_and_cleared_with_its_constants():
    book = boot_book(Envelope(full_bounds(8192, 256)), BOOT, 100.0)
    changes = {"budget_policy": STEP_TIME_TARGET, "budget_target_s": 0.03}
    assert push(book, request(changes), 100.0)[1].reason is LeaseReason.NEEDS_STEP_MODEL
    model = NAMED_MODELS["8b-2tbs"]
    held, outcome = push(book, Push(changes, 60.0, 0, "tuner", "a test", model), 100.0)
    assert (outcome.reason, held.step_model) == (LeaseReason.OK, model)
    assert push(held, request({}, revision=1), 110.0)[0].step_model == model
    assert expire(held, 160.0)[0].step_model is None
    assert revert(held, 110.0, block=False)[0].step_model is None


def test_full_bounds_name_every_knob_once_and_include_the_defaults():
    bounds = full_bounds(8192, 256)
    assert {bound.name for bound in bounds} == set(Setting._fields)
    assert Envelope(bounds).holds(BOOT)
    assert not Envelope(bounds).violations(BOOT._asdict(), BOOT)


def test_only_the_holder_pushes_while_the_lease_lives(held):
    assert push(held, request(revision=1, actor="other"), 110.0)[1].reason is LeaseReason.HELD_BY_OTHER
    ended, outcome = push(held, request(revision=1, actor="other"), 161.0)
    assert outcome.reason is LeaseReason.CONFLICT_REVISION  # the lease ended, so the revision moved on
    assert ended.setting == BOOT
    assert push(ended, request(revision=ended.revision, actor="other"), 161.0)[1].reason is LeaseReason.OK


def test_a_lease_end_restores_boot_values_once(held):
    assert expire(held, 159.9)[1].reason is LeaseReason.NOTHING_TO_DO
    ended, outcome = expire(held, 160.0)
    assert outcome.reason is LeaseReason.EXPIRED
    assert (ended.setting, ended.lease, ended.revision) == (BOOT, None, 2)
    assert expire(ended, 170.0)[1].reason is LeaseReason.NOTHING_TO_DO


def test_a_clock_jump_back_ends_the_lease_but_a_small_step_does_not(held):
    seen, _ = expire(held, 130.0)
    late, outcome = expire(seen, 130.0 - BACKWARD_SLACK_S)
    assert outcome.reason is LeaseReason.NOTHING_TO_DO
    assert late.seen_s == 130.0
    ended, outcome = expire(seen, 130.0 - BACKWARD_SLACK_S - 0.01)
    assert outcome.reason is LeaseReason.CLOCK_WENT_BACK
    assert (ended.setting, ended.lease) == (BOOT, None)
    after, outcome = push(ended, request(revision=ended.revision), ended.seen_s)
    assert outcome.reason is LeaseReason.OK
    assert after.lease.left_s(ended.seen_s) == 60.0


def test_a_clock_jump_ahead_ends_the_lease(held):
    assert expire(held, 1e12)[1].reason is LeaseReason.EXPIRED


@pytest.mark.parametrize("now_s", [math.nan, math.inf, -math.inf])
def test_an_unreadable_clock_ends_a_lease_and_grants_none(book, held, now_s):
    assert expire(held, now_s)[1].reason is LeaseReason.CLOCK_UNREADABLE
    assert expire(held, now_s)[0].setting == BOOT
    refused, outcome = push(book, request(), now_s)
    assert (outcome.reason, refused) == (LeaseReason.CLOCK_UNREADABLE, book)
    assert revert(held, now_s, block=True)[0].setting == BOOT


def test_revert_blocks_until_resume_and_a_plain_revert_does_not(held):
    free, outcome = revert(held, 110.0, block=False)
    assert (outcome.reason, free.setting, free.blocked) == (LeaseReason.REVERTED, BOOT, False)
    blocked, _ = revert(held, 110.0, block=True)
    assert blocked.setting == BOOT
    assert push(blocked, request(revision=2), 111.0)[1].reason is LeaseReason.BLOCKED_BY_REVERT
    assert revert(blocked, 112.0, block=False)[0].blocked
    open_again, outcome = resume(blocked, 113.0)
    assert outcome.reason is LeaseReason.RESUMED
    assert push(open_again, request(revision=3), 113.0)[1].reason is LeaseReason.OK
    assert resume(open_again, 114.0)[1].reason is LeaseReason.NOTHING_TO_DO


def test_revert_at_boot_still_blocks(book):
    assert revert(book, 100.0, block=False)[1].reason is LeaseReason.NOTHING_TO_DO
    blocked, outcome = revert(book, 100.0, block=True)
    assert (outcome.reason, blocked.blocked, blocked.revision) == (LeaseReason.REVERTED, True, 1)
    assert revert(blocked, 100.0, block=True)[1].reason is LeaseReason.NOTHING_TO_DO


def test_time_left_is_between_zero_and_the_lease():
    lease = Lease("a", "b", 1, 100.0, 60.0)
    assert [lease.left_s(now) for now in (99.0, 100.0, 130.0, 160.0, 200.0, math.nan)] == [
        0.0,
        60.0,
        30.0,
        0.0,
        0.0,
        0.0,
    ]


def test_the_envelope_holds_its_bounds_and_nothing_beyond():
    fenced = BOOT._replace(step_tokens=8192, chunk_cap_tokens=8192, pass_over_max_s=600.0, max_running=1)
    assert ENVELOPE.holds(fenced)
    beyond = {"step_tokens": 8193, "chunk_cap_tokens": 8193, "pass_over_max_s": 601.0, "max_running": 0}
    for name, value in beyond.items():
        assert not ENVELOPE.holds(fenced._replace(**{name: value})), name


@pytest.mark.parametrize(
    "make",
    [
        lambda: KnobBound("budget", 1, 2),
        lambda: KnobBound("step_tokens", 2, 1),
        lambda: KnobBound("step_tokens", -1, 1),
        lambda: KnobBound("step_tokens", 0, math.inf),
        lambda: Envelope((KnobBound("step_tokens", 1, 2), KnobBound("step_tokens", 1, 3))),
        lambda: boot_book(ENVELOPE, BOOT._replace(step_tokens=9000), 0.0),
        lambda: boot_book(ENVELOPE, BOOT, math.nan),
        lambda: boot_book(ENVELOPE, BOOT, 0.0, max_lease_s=0.0),
        lambda: LeaseBook(ENVELOPE, BOOT, BOOT._replace(step_tokens=600), 0, None, False, 0.0),
        lambda: Lease("", "why", 1, 0.0, 1.0),
        lambda: Lease("who", "", 1, 0.0, 1.0),
        lambda: Lease("who", "why", 1, 0.0, 0.0),
        lambda: Push({}, 1.0, 0, "", "why"),
    ],
)
def test_bad_values_are_refused_when_made(make):
    with pytest.raises(InputError):
        make()
