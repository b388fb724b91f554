"""Benches in virtual time: their arithmetic by hand, the twin as stand-in for the engine, and the short forms."""

import numpy as np
import pytest

from rooftune.tuner.bench.mixes import AZURE_CONV
from tests.bench import overload, soak
from tests.bench.overload import Compared, figures, loads_below
from tests.bench.virtual import (
    CONVERSATIONS,
    DOCUMENTS,
    MILD,
    Collector,
    Served,
    below,
    capacity_rps,
    engine_for,
    fixed,
    mix_at,
    targets,
    windows,
)
from tests.control.cycle_records import hold, push


def served(*good: int) -> Served:
    """One request a second."""
    return Served(np.arange(len(good), dtype=float), np.array(good, dtype=np.bool_))


def test_windows_count_what_is_lost_and_what_differs() -> None:
    found = windows(served(1, 1, 0, 1, 0, 0), served(0, 1, 1, 0, 0, 0), length_s=2.0, step_s=2.0, span_s=6.0)
    assert found.end_s.tolist() == [2.0, 4.0, 6.0] and found.requests.tolist() == [2.0, 2.0, 2.0]
    assert found.lost.tolist() == [1.0, 0.0, 0.0] and found.differ.tolist() == [1.0, 2.0, 0.0]


def test_a_window_is_below_only_beyond_chance_and_beyond_two_runs_of_the_default() -> None:
    default = served(*[1] * 40)
    lost_half = served(*[1] * 20, *[0, 1] * 10)
    lost_few = served(*[1] * 35, *[0] * 5)
    quiet = windows(default, default, 20.0, 20.0, 40.0)
    assert below(windows(default, lost_half, 20.0, 20.0, 40.0), quiet).tolist() == [False, True]
    assert below(windows(default, lost_few, 20.0, 20.0, 40.0), quiet).tolist() == [False, False]
    restless = windows(default, lost_half, 20.0, 20.0, 40.0)
    assert below(windows(default, lost_half, 20.0, 20.0, 40.0), restless).tolist() == [False, False]
    assert not below(windows(lost_half, default, 20.0, 20.0, 40.0), quiet).any(), "more good is never below"


def test_figures_take_the_least_ratio_of_the_mixes_and_the_worst_run() -> None:
    runs = [
        Compared("a", 0.7, 0, 100, 50, 60, 0.0, 1), Compared("a", 0.7, 1, 100, 50, 60, 0.0, 1),
        Compared("b", 0.7, 0, 100, 80, 60, 3.0, 1), Compared("b", 0.7, 1, 100, 80, 58, 1.0, 1),
    ]  # fmt: skip
    found = {one.name: one.value for one in figures(runs)}
    assert found["goodput_ratio_to_default_at_070"] == pytest.approx(118 / 160)
    assert found["worst_share_lost_points"] == 22.0
    assert found["minutes_below_default"] == 4.0 and found["minutes_below_default_most"] == 3.0
    assert loads_below(runs) == 1 == found["loads_below_default"]


def test_dips_are_joined_windows_and_a_record_near_them_explains_them() -> None:
    low, end_s = np.array([0, 1, 1, 0, 1], dtype=np.bool_), np.array([60.0, 70.0, 80.0, 90.0, 100.0])
    assert soak.dips(low, end_s, 60.0) == [(10.0, 80.0), (40.0, 100.0)]
    held, pushed, dip = hold(1), push(2), (100.0, 200.0)
    assert soak.explained(dip, [(90.0, pushed)], 20.0)
    assert not soak.explained(dip, [(70.0, pushed), (150.0, held), (201.0, pushed)], 20.0)


def test_the_day_keeps_its_loads_its_burst_and_its_slow_hour() -> None:
    assert sum(hours for hours, _ in soak.DAY) == 24
    traffic, span_s = soak.day(1.0 / 24.0, seed=3)
    assert span_s == 3600.0 and traffic.arrival_s[-1] <= span_s
    hour_s = span_s / 24.0
    for hour, load in ((1.0, 0.5), (4.0, 1.0)):
        rate = np.sum((traffic.arrival_s >= hour * hour_s) & (traffic.arrival_s < (hour + 1) * hour_s)) / hour_s
        assert rate == pytest.approx(load * capacity_rps(MILD), rel=0.15)
    at_s = soak.BURST_HOUR * hour_s
    burst = np.sum((traffic.arrival_s >= at_s) & (traffic.arrival_s < at_s + 10.0)) / 10.0
    assert burst == pytest.approx(soak.BURST * soak.load_at(soak.BURST_HOUR) * capacity_rps(MILD), rel=0.15)
    assert [soak.pace(1.0, hour * 3600.0) for hour in (11.9, 12.5, 13.0)] == [1.0, soak.SLOW, 1.0]


def test_the_twin_serves_the_default_as_the_engine_does() -> None:
    traffic, slo = mix_at(MILD, 0.9 * capacity_rps(MILD), 120.0, 1), targets(MILD)
    engine = engine_for(traffic)
    seen = Collector(engine)
    engine.advance(120.0)
    live = seen.served(traffic, slo, ())
    assert 0.1 < live.share < 0.98
    assert live.share == pytest.approx(fixed(traffic, 120.0, slo).share, abs=0.03)


@pytest.mark.skipif(not AZURE_CONV.is_file(), reason="needs shared/data beside the project")
def test_conversations_lend_their_lengths_to_even_arrivals() -> None:
    traffic = mix_at(CONVERSATIONS, 5.0, 400.0, 1)
    assert len(traffic) == pytest.approx(2000, rel=0.1)
    assert np.median(traffic.prompt_tokens) < np.median(mix_at(DOCUMENTS, 5.0, 400.0, 1).prompt_tokens) * 4


@pytest.mark.slow
def test_short_overload() -> None:
    found = {one.name: one for one in overload.bench(short=True)}
    assert found["goodput_ratio_to_default_at_070"].value > 1.0
    assert found["minutes_below_default"].value >= 0.0 and found["capacity_rps: document mix, mild"].value > 1.0


@pytest.mark.slow
def test_short_soak() -> None:
    found = {one.name: one.value for one in soak.bench(short=True)}
    assert 0.0 < found["good_share"] <= 1.0
    assert found["dips_explained"] <= found["dips"] and found["pushes"] >= 1
