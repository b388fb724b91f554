"""The bench of policies: each family tunes the knobs of its name, and the page shows the results."""

import numpy as np
import pytest

from rooftune.policies.request import DEADLINE, FCFS, FIXED_BUDGET, PRESSURE, SHORTEST_FIRST, STEP_TIME_TARGET, Setting
from rooftune.tuner.search.baselines import random_settings
from tests.bench.policies import DAY, SHOP, Case, bench, day, headline
from tests.bench.policies_families import (
    BUDGET,
    CHUNK_CAP,
    JOINT,
    PARTIAL,
    STEP_TIME,
    UNDER_PRESSURE,
    Row,
    Waits,
    families,
    order_family,
)
from tests.bench.policies_page import page


def drawn(name: str, count: int = 60) -> list[Setting]:
    family = next(family for family in families(10) if family.name == name)
    source = random_settings(family.space(), 1)
    return [next(source) for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "kinds", "orders"),
    [
        (CHUNK_CAP, {FIXED_BUDGET}, {FCFS}),
        (PARTIAL, {FIXED_BUDGET}, {FCFS}),
        (STEP_TIME, {STEP_TIME_TARGET}, {FCFS}),
        (UNDER_PRESSURE, {PRESSURE}, {FCFS}),
        (order_family(SHORTEST_FIRST, 5), {FIXED_BUDGET}, {SHORTEST_FIRST}),
        (order_family(DEADLINE, 30), {FIXED_BUDGET}, {DEADLINE}),
        (JOINT, {FIXED_BUDGET, PRESSURE, STEP_TIME_TARGET}, {FCFS, SHORTEST_FIRST, DEADLINE}),
    ],
)
def test_a_family_tunes_exactly_the_knobs_of_its_name(name: str, kinds: set[int], orders: set[int]) -> None:
    settings = drawn(name)
    assert {s.budget_policy for s in settings} == kinds and {s.order_policy for s in settings} == orders
    assert any(s.max_partial_prefills for s in settings) == (name in (PARTIAL, JOINT))
    assert all(s.ttft_target_s == 2.0 and s.prefill_s_per_token == 4e-5 for s in settings)
    assert len({s.chunk_cap_tokens for s in settings}) > 10
    if "aging" in name:
        assert {f"aging {s.aging_s:g} s" for s in settings} == {name.partition(", ")[2]}


def test_the_day_has_every_hour_and_a_peak() -> None:
    traffic = day()
    hour = np.floor(traffic.arrival_s / 50_000.0).astype(int)
    counts = np.bincount(hour, minlength=24)
    assert traffic.name == DAY and len(counts) == 24 and counts.min() > 0
    assert counts[12:17].mean() > 2.5 * counts[[0, 1, 2, 3, 4]].mean()
    assert (traffic.prompt_tokens > 10_000).mean() == pytest.approx(1 / 8, abs=0.02)


def row(family: str, share: float, setting: Setting, gain: float = 0.0, noise: float = 0.0) -> Row:
    waits = Waits(100, 0.25, 3.5)
    return Row(family, setting, share, waits, waits, Waits(10, 1.5, 9.0), 12.5, gain, noise, gain / 2, noise)


def test_the_page_says_who_won_who_lost_and_who_waits() -> None:
    rows = (
        row(BUDGET, 0.8, Setting(512)),
        row(CHUNK_CAP, 0.88, Setting(512, 128), 0.08, 0.05),
        row(UNDER_PRESSURE, 0.7, Setting(512, budget_policy=PRESSURE, pressure_tokens=64), -0.1, 0.04),
        row(order_family(DEADLINE, 10), 0.96, Setting(512, order_policy=DEADLINE), 0.16, 0.05),
        row(JOINT, 0.97, Setting(640, 0, max_running=64, max_partial_prefills=2), 0.17, 0.05),
    )
    case = Case(SHOP, 110, 2000, rows)
    text = page([case])
    assert "| budget alone | 80.0 % | - | - | 0.25 / 3.5 | 0.25 / 3.5 | 1.50 / 9.0 | 12.5 s | budget 512 |" in text
    assert "+8.0 ± 5.0, won" in text and "-10.0 ± 4.0, lost" in text
    assert "most budget 512, 64 from 2 prefills on" in text and "budget 512, deadline, aging 10 s" in text
    assert "budget 640, 64 sequences, 2 partial" in text
    assert "+20% good requests over the best budget alone and +9% over" in text
    figures = {figure.name: figure for figure in headline([case])}
    assert figures["order_gain_mixes"].value == pytest.approx(1.2) and figures["order_gain_mixes"].baseline == 1.26
    assert (figures["order_families_won"].value, figures["order_families_lost"].value) == (1, 0)


@pytest.mark.slow
def test_the_short_form_finds_that_order_matters() -> None:
    figures = {figure.name: figure.value for figure in bench(True)}
    assert figures["order_gain_mixes"] > 1.02 and figures["order_families_lost"] == 0
    assert figures[f"joint_good_share: {SHOP}"] >= figures[f"good_share: {SHOP}: {CHUNK_CAP}"]
    assert len([name for name in figures if name.startswith("good_share")]) == 12
