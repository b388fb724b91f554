"""The guard's action and reason for each situation, and the three verdicts."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftune.policies.envelope import Broken, Envelope, KnobBound, Mode
from rooftune.policies.errors import InputError
from rooftune.policies.guard import Action, GuardLimits, Reason, Situation, WeekSpan, changes, decide, limit_step, ramp
from rooftune.policies.request import Setting
from rooftune.policies.verify import (
    Comparison,
    Observed,
    RollbackThresholds,
    Verdict,
    VerdictReason,
    crossed,
    judge,
)

BOOT = Setting(step_tokens=2048, max_running=256)
ENVELOPE = Envelope(
    (
        KnobBound("step_tokens", 64, 8192),
        KnobBound("chunk_cap_tokens", 0, 8192),
        KnobBound("max_running", 1, 256, Mode.RESTART),
    )
)
LIMITS = GuardLimits()
CALM = Situation(
    live=True,
    envelope=ENVELOPE,
    in_force=BOOT,
    proposal=BOOT._replace(step_tokens=1500),
    predicted_gain=0.2,
    twin_error=0.05,
    twin_trusted=True,
    metrics_age_s=1.0,
    since_push_s=math.inf,
    shadow_s=1e6,
    minute_of_week=600,
    kv_used=0.5,
)
PUSHED = replace(CALM, push_in_force=True, verified=False, since_push_s=400.0)


def test_a_worthwhile_proposal_is_pushed():
    decision = decide(CALM, LIMITS)
    assert (decision.action, decision.reason) == (Action.PUSH, Reason.OK)
    assert decision.setting == CALM.proposal


HOLDS = [
    ({"metrics_age_s": 31.0}, Reason.METRICS_STALE),
    ({"metrics_age_s": math.nan}, Reason.METRICS_STALE),
    ({"metrics_age_s": math.inf}, Reason.METRICS_STALE),
    ({"engine_restarted": True}, Reason.ENGINE_RESTARTED),
    ({"thresholds_crossed": ("gap_p99_s",)}, Reason.OPERATOR_THRESHOLD),
    ({"errors_rising": True}, Reason.ERRORS_RISING),
    ({"blocked": True}, Reason.BLOCKED_AFTER_REVERT),
    ({"paused": True}, Reason.PAUSED),
    ({"deploying": True}, Reason.DEPLOY),
    ({"preempting": True, "kv_used": 1.0}, Reason.KV_BOUND),
    ({"preempting": True, "kv_used": math.nan}, Reason.KV_BOUND),
    ({"proposal": None}, Reason.NO_PROPOSAL),
    ({"proposal": BOOT}, Reason.ALREADY_IN_FORCE),
    ({"twin_trusted": False}, Reason.TWIN_NOT_TRUSTED),
    ({"predicted_gain": math.nan}, Reason.GAIN_UNKNOWN),
    ({"twin_error": math.nan}, Reason.GAIN_UNKNOWN),
    ({"predicted_gain": 0.05}, Reason.WITHIN_NOISE),
    ({"predicted_gain": 0.01, "twin_error": 0.0}, Reason.WITHIN_NOISE),
    ({"predicted_gain": -0.5}, Reason.WITHIN_NOISE),
    ({"proposal": BOOT._replace(step_tokens=9000)}, Reason.OUTSIDE_ENVELOPE),
    ({"proposal": BOOT._replace(max_running=128)}, Reason.NEEDS_RESTART),
    ({"proposal": BOOT._replace(order_policy=1)}, Reason.KNOB_ABSENT),
    ({"pause_left_s": 1.0}, Reason.AFTER_LOSS),
    ({"pause_left_s": math.nan}, Reason.AFTER_LOSS),
    ({"since_push_s": 299.0}, Reason.DWELL),
    ({"since_push_s": math.nan}, Reason.DWELL),
    ({"exploration_spent_slo_s": 599.0, "exploration_cost_slo_s": 2.0}, Reason.EXPLORATION_BUDGET),
    ({"exploration_cost_slo_s": math.nan}, Reason.EXPLORATION_BUDGET),
    ({"shadow_s": 86_399.0}, Reason.SHADOW_TOO_SHORT),
    ({"live": False}, Reason.SHADOW),
]


@pytest.mark.parametrize(("change", "reason"), HOLDS)
def test_holds(change, reason):
    decision = decide(replace(CALM, **change), LIMITS)
    assert (decision.action, decision.reason) == (Action.HOLD, reason)


def test_kv_full_or_preempting_alone_does_not_freeze():
    assert decide(replace(CALM, kv_used=1.0), LIMITS).action is Action.PUSH
    assert decide(replace(CALM, preempting=True), LIMITS).action is Action.PUSH


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"thresholds_crossed": ("failed_share",)}, Reason.OPERATOR_THRESHOLD),
        ({"thresholds_crossed": ("failed_share",), "verdict": Verdict.BETTER}, Reason.OPERATOR_THRESHOLD),
        ({"errors_rising": True}, Reason.ERRORS_RISING),
        ({"verdict": Verdict.WORSE}, Reason.VERDICT_WORSE),
        ({"verdict": Verdict.WORSE, "paused": True, "deploying": True}, Reason.VERDICT_WORSE),
        ({"verdict": Verdict.INCONCLUSIVE, "since_push_s": 4501.0}, Reason.INCONCLUSIVE_TOO_LONG),
        ({"verdict": None, "since_push_s": 4501.0}, Reason.INCONCLUSIVE_TOO_LONG),
        ({"verdict": None, "since_push_s": math.nan}, Reason.INCONCLUSIVE_TOO_LONG),
    ],
)
def test_a_push_that_hurts_is_reverted(change, reason):
    decision = decide(replace(PUSHED, **change), LIMITS)
    assert (decision.action, decision.reason, decision.setting) == (Action.REVERT, reason, None)


def test_a_kept_setting_that_is_lost_goes_back_even_while_paused():
    lost = replace(PUSHED, verified=True, kept_lost=True, paused=True, deploying=True, pause_left_s=300.0)
    decision = decide(lost, LIMITS)
    assert (decision.action, decision.reason, decision.setting) == (Action.REVERT, Reason.KEPT_LOST, None)
    assert decide(replace(lost, verified=False), LIMITS).reason is Reason.PAUSED, "on trial its verdict decides"
    assert decide(replace(lost, push_in_force=False), LIMITS).action is Action.HOLD, "nothing of ours is in force"


def test_a_blind_controller_reverts_nothing_and_leaves_it_to_the_lease():
    blind = replace(PUSHED, metrics_age_s=math.inf, verdict=Verdict.WORSE)
    assert decide(blind, LIMITS).reason is Reason.METRICS_STALE
    assert decide(blind, LIMITS).action is Action.HOLD


def test_a_push_is_verified_before_the_next_one():
    assert decide(replace(PUSHED, verdict=Verdict.INCONCLUSIVE), LIMITS).reason is Reason.VERIFYING
    assert decide(PUSHED, LIMITS).reason is Reason.VERIFYING
    assert decide(replace(PUSHED, verified=True), LIMITS).action is Action.PUSH
    assert decide(replace(PUSHED, verified=True), LIMITS).action is Action.PUSH


def test_shadow_shows_what_it_would_push():
    decision = decide(replace(CALM, live=False, shadow_s=0.0), LIMITS)
    assert (decision.action, decision.setting) == (Action.HOLD, CALM.proposal)


def test_a_refused_proposal_names_its_violations():
    decision = decide(replace(CALM, proposal=BOOT._replace(step_tokens=9000, max_running=128)), LIMITS)
    assert decision.reason is Reason.OUTSIDE_ENVELOPE
    assert {v.broken for v in decision.violations} == {Broken.MAXIMUM, Broken.NEEDS_RESTART}


def test_windows():
    saturday_night = WeekSpan(6 * 1440 + 1380, 60)  # over the end of the week
    assert [saturday_night.holds(m) for m in (6 * 1440 + 1380, 0, 59, 60, 5000)] == [True, True, True, False, False]
    closed = replace(LIMITS, no_push=(WeekSpan(590, 610),))
    assert decide(CALM, closed).reason is Reason.MAINTENANCE_WINDOW
    only = replace(LIMITS, push_only=(WeekSpan(0, 500), WeekSpan(600, 601)))
    assert decide(CALM, only).action is Action.PUSH
    assert decide(replace(CALM, minute_of_week=601), only).reason is Reason.MAINTENANCE_WINDOW
    assert decide(replace(PUSHED, verdict=Verdict.WORSE), closed).action is Action.REVERT


@pytest.mark.parametrize(
    ("before", "wanted", "after"),
    [
        ((2048, 0), (100, 0), (1024, 0)),
        ((2048, 0), (1024, 0), (1024, 0)),
        ((512, 0), (8192, 0), (1024, 0)),
        ((2048, 0), (2048, 256), (2048, 1024)),  # from "none", a cap starts at the budget
        ((2048, 1024), (2048, 256), (2048, 512)),
        ((2048, 256), (2048, 0), (2048, 512)),
        ((2048, 1024), (2048, 0), (2048, 0)),
        ((65, 0), (32, 0), (33, 0)),
        ((1, 0), (100, 0), (2, 0)),
    ],
)
def test_largest_step(before, wanted, after):
    limited = limit_step(Setting(*before), Setting(*wanted), 2.0)
    assert (limited.step_tokens, limited.chunk_cap_tokens) == after


def test_a_distant_proposal_is_pushed_in_limited_steps():
    decision = decide(replace(CALM, proposal=BOOT._replace(step_tokens=100)), LIMITS)
    assert (decision.action, decision.reason, decision.setting.step_tokens) == (Action.PUSH, Reason.STEP_LIMITED, 1024)


@given(
    before=st.tuples(st.integers(64, 8192), st.integers(0, 8192)),
    wanted=st.tuples(st.integers(64, 8192), st.integers(0, 8192)),
    ratio=st.floats(1.01, 4.0),
)
def test_limited_steps_stay_inside_and_arrive(before, wanted, ratio):
    setting, goal = Setting(*before), Setting(*wanted)
    for _ in range(2000):
        if setting == goal:
            break
        after = limit_step(setting, goal, ratio)
        low, high = sorted((setting.step_tokens, after.step_tokens))
        assert high <= max(low * ratio, low + 1)
        assert ENVELOPE.holds(after)
        assert after != setting
        setting = after
    assert setting == goal


@given(
    change=st.fixed_dictionaries(
        {},
        optional={
            "metrics_age_s": st.sampled_from([0.0, 31.0, math.nan]),
            "predicted_gain": st.sampled_from([-1.0, 0.0, 0.06, 1.0, math.nan, math.inf]),
            "twin_error": st.sampled_from([0.0, 0.5, math.nan]),
            "live": st.booleans(),
            "paused": st.booleans(),
            "blocked": st.booleans(),
            "push_in_force": st.booleans(),
            "verified": st.booleans(),
            "verdict": st.sampled_from([None, *Verdict]),
            "thresholds_crossed": st.sampled_from([(), ("gap_p99_s",)]),
            "step": st.integers(1, 10_000),
        },
    )
)
def test_the_guard_keeps_its_invariants_in_any_situation(change):
    step = change.pop("step", 1500)
    now = replace(CALM, proposal=BOOT._replace(step_tokens=step), **change)
    decision = decide(now, LIMITS)
    if decision.action is Action.REVERT:
        assert now.push_in_force
    if decision.action is Action.PUSH:
        assert now.live
        assert not now.paused
        assert not now.blocked
        assert now.predicted_gain > now.twin_error
        assert not ENVELOPE.violations(changes(BOOT, decision.setting), BOOT)
        assert decision.setting != BOOT


@pytest.mark.parametrize(
    "make",
    [
        lambda: GuardLimits(largest_ratio=1.0),
        lambda: GuardLimits(largest_ratio=math.nan),
        lambda: GuardLimits(dwell_s=-1.0),
        lambda: GuardLimits(kv_full=1.1),
        lambda: GuardLimits(min_gain=math.nan),
        lambda: WeekSpan(-1, 5),
        lambda: WeekSpan(0, 10_080),
        lambda: RollbackThresholds(gap_p99_s=-0.1),
        lambda: RollbackThresholds(gap_p99_s=math.nan),
    ],
)
def test_bad_limits_are_refused(make):
    with pytest.raises(InputError):
        make()


OPEN = Verdict.INCONCLUSIVE
SEEN = Comparison(
    predicted_gain=0.2, twin_error=0.05, observed_gain=0.18, half_width=0.03, verdict=Verdict.BETTER, requests=500
)


@pytest.mark.parametrize(
    ("change", "verdict", "reason", "held"),
    [
        ({}, Verdict.BETTER, VerdictReason.GAIN_SHOWN, True),
        ({"observed_gain": 0.05}, Verdict.BETTER, VerdictReason.GAIN_SHOWN, False),
        ({"observed_gain": -0.1, "verdict": Verdict.WORSE}, Verdict.WORSE, VerdictReason.LOSS_SHOWN, False),
        (
            {"observed_gain": 0.01, "verdict": Verdict.INCONCLUSIVE},
            Verdict.INCONCLUSIVE,
            VerdictReason.WITHIN_NOISE,
            False,
        ),
        ({"crossed": ("gap_p99_s",)}, Verdict.WORSE, VerdictReason.OPERATOR_THRESHOLD, True),
        ({"half_width": math.inf, "crossed": ("x",)}, Verdict.WORSE, VerdictReason.OPERATOR_THRESHOLD, False),
        ({"requests": 99}, Verdict.INCONCLUSIVE, VerdictReason.TOO_FEW_REQUESTS, False),
        ({"observed_gain": math.nan}, Verdict.INCONCLUSIVE, VerdictReason.NOT_MEASURED, False),
        ({"half_width": math.nan}, Verdict.INCONCLUSIVE, VerdictReason.NOT_MEASURED, False),
        ({"twin_error": math.nan}, Verdict.BETTER, VerdictReason.GAIN_SHOWN, True),
    ],
)
def test_verdicts(change, verdict, reason, held):
    judged = judge(replace(SEEN, **change), min_requests=100)
    assert (judged.verdict, judged.reason, judged.prediction_held) == (verdict, reason, held)


HALF, SOME = BOOT._replace(step_tokens=1024), WeekSpan(0, 10_079)
ON_TRIAL = {"push_in_force": True, "verified": False, "verdict": Verdict.INCONCLUSIVE, "since_push_s": 1.0}


@pytest.mark.parametrize(
    ("facts", "action", "reason"),
    [
        ({}, Action.HOLD, Reason.VERIFYING),
        ({"switch": HALF}, Action.SWITCH, Reason.VERIFYING),
        ({"switch": HALF, "verdict": Verdict.BETTER}, Action.SWITCH, Reason.VERIFYING),
        ({"switch": HALF, "paused": True}, Action.HOLD, Reason.PAUSED),
        ({"switch": HALF, "deploying": True}, Action.HOLD, Reason.DEPLOY),
        ({"switch": HALF, "exploration_spent_slo_s": 1e6}, Action.REVERT, Reason.EXPLORATION_BUDGET),
        ({"switch": HALF, "harmful": True, "paused": True}, Action.REVERT, Reason.HARMFUL),
        ({"undecided": True, "deploying": True}, Action.REVERT, Reason.INCONCLUSIVE),
        ({"switch": HALF, "thresholds_crossed": ("gap_p99_s",)}, Action.REVERT, Reason.OPERATOR_THRESHOLD),
    ],
)
def test_a_trial_goes_on_by_turns_which_dwell_and_ratio_do_not_limit(facts, action, reason):
    found = decide(replace(PUSHED, **(ON_TRIAL | facts)), replace(LIMITS, dwell_s=1e6))
    assert (found.action, found.reason) == (action, reason)


def test_a_trial_is_given_up_when_its_maintenance_window_ends():
    found = decide(replace(PUSHED, **ON_TRIAL, switch=HALF), replace(LIMITS, no_push=(SOME,)))
    assert (found.action, found.reason) == (Action.REVERT, Reason.MAINTENANCE_WINDOW)


def test_the_ramp_reaches_the_proposal_by_limited_steps():
    steps = ramp(BOOT, BOOT._replace(step_tokens=BOOT.step_tokens // 8, chunk_cap_tokens=64), 2.0)
    assert steps[-1] == BOOT._replace(step_tokens=BOOT.step_tokens // 8, chunk_cap_tokens=64)
    before = BOOT
    for step in steps:
        assert limit_step(before, step, 2.0) == step
        before = step
    assert ramp(BOOT, HALF, 1e6) == (HALF,)


def test_an_unknown_value_crosses_no_threshold_and_an_infinite_one_does():
    limits = RollbackThresholds(gap_p99_s=0.05, failed_share=0.0)
    assert crossed(limits, Observed()) == ()
    assert crossed(limits, Observed(gap_p99_s=0.05, failed_share=0.0)) == ()
    assert crossed(limits, Observed(gap_p99_s=math.inf, failed_share=0.001)) == ("gap_p99_s", "failed_share")
