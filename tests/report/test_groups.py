"""Groups of requests, counted by hand."""

import numpy as np

from rooftune.policies.outcomes import Outcomes
from rooftune.policies.request import Setting
from rooftune.policies.slo import Condition, Override, Slo, Target
from rooftune.tuner.report.build import condition_words, group_parts, groups_of, setting_values, target_parts

SLO = Slo((Target("ttft", 1.0, 0.99),))


def _outcomes(ttft_s: list[float]) -> Outcomes:
    """Four requests from second 10 on: two short of gold, a long one and a failed long one of basic."""
    arrival_s = np.array([10.0, 11.0, 12.0, 13.0])
    first_s = arrival_s + np.array(ttft_s)
    return Outcomes(
        arrival_s=arrival_s,
        first_token_s=first_s,
        finish_s=first_s + np.array([1.0, 1.0, 1.0, np.nan]),
        prompt_tokens=np.array([100, 500, 501, 9000]),
        output_tokens=np.array([10, 1, 300, 300]),
        longest_gap_s=np.array([0.02, 0.0, 0.04, 0.03]),
        gap_count=np.array([9, 0, 299, 0]),
        cached_tokens=np.array([0, 64, 0, 0]),
        tenant=np.array([0, 0, 1, 1]),
        tenant_names=("gold", "basic", "unused"),
        failed=np.array([False, False, False, True]),
    )


def test_groups_hold_the_requests_they_name() -> None:
    members = {group[:2]: group[2].tolist() for group in groups_of(_outcomes([0.5] * 4))}
    assert members["all", "all requests"] == [True] * 4
    assert members["prompt length", "up to 500 tokens"] == [True, True, False, False]
    assert members["prompt length", "501 to 2,000 tokens"] == [False, False, True, False]
    assert members["prompt length", "8,001 to 32,000 tokens"] == [False, False, False, True]
    assert members["output length", "up to 50 tokens"] == [True, True, False, False]
    assert members["tenant", "basic"] == [False, False, True, True]
    assert members["prefix cache", "prefix found"] == [False, True, False, False]
    # An empty group has no row.
    assert ("tenant", "unused") not in members
    assert ("prompt length", "above 32,000 tokens") not in members


def test_figures_before_and_after() -> None:
    rows = group_parts(_outcomes([0.5, 2.0, 2.0, 0.5]), _outcomes([0.25, 0.5, 2.0, 0.5]), SLO)
    found = {part.group: part for part in rows}
    short = found["up to 500 tokens"]
    assert (short.requests, short.current.attainment, short.best.attainment) == (2, 0.5, 1.0)
    assert (short.current.ttft_p50_s, short.current.ttft_p99_s) == (0.5, 2.0)
    assert (short.best.ttft_p50_s, short.best.ttft_p99_s) == (0.25, 0.5)
    # A request of one token has no gap, so the only gap counts.
    assert short.best.longest_gap_p99_s == 0.02
    # A failed request is never good and its wait is infinite, although its first token arrived.
    failed = found["8,001 to 32,000 tokens"].best
    assert (failed.attainment, failed.ttft_p50_s, failed.longest_gap_p99_s) == (0.0, "inf", "inf")
    assert (failed.longest_wait_s, failed.unfinished) == ("inf", 1)
    assert (short.current.longest_wait_s, short.best.longest_wait_s, short.best.unfinished) == (2.0, 0.5, 0)


def test_a_group_without_gaps_has_no_samples() -> None:
    rows = {part.group: part for part in group_parts(_outcomes([0.5] * 4), _outcomes([0.5] * 4), SLO)}
    assert rows["prefix found"].current.longest_gap_p99_s is None


def test_only_non_default_knobs_of_a_setting_are_kept() -> None:
    assert setting_values(Setting(512)) == {"step_tokens": 512, "chunk_cap_tokens": 0, "max_running": 256}
    assert setting_values(Setting(512, order_policy=1))["order_policy"] == 1
    shortest = Setting(512, 64, order_policy=1, aging_s=5.0)
    assert Setting(**setting_values(shortest)) == shortest  # type: ignore[arg-type]
    # A knob without effect under the present policy is not shown as a change.
    assert setting_values(Setting(512, aging_s=5.0, ttft_target_s=2.0, pressure_tokens=64)) == setting_values(
        Setting(512)
    )


def test_overrides_name_the_requests_they_apply_to() -> None:
    gold = Override(Condition(tenant="gold", min_prompt_tokens=8000, cached=False), SLO.targets)
    words = [part.applies_to for part in target_parts(Slo(SLO.targets, (gold,)))]
    assert words == ["all requests", "prompts of at least 8,000 tokens, tenant gold, no prefix in the cache"]
    assert condition_words(Condition(max_output_tokens=50)) == "outputs of at most 50 tokens"
