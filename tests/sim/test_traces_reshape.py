"""Another rate, a burst, a window: the same requests at other times."""

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.traffic.reshape import Burst, add_burst, scale_rate, window
from rooftune.tuner.traffic.workload import Traffic


def steady(n: int = 101, gap_s: float = 1.0) -> Traffic:
    ones = np.ones(n, dtype=np.int64)
    zeros = np.zeros(n, dtype=np.int64)
    return Traffic(np.arange(n) * gap_s, np.arange(1, n + 1), ones, zeros, zeros)


def test_scale_rate_divides_the_times() -> None:
    traffic = scale_rate(steady(), 2.0)
    assert traffic.arrival_s[:4].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert "2x" in traffic.name


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_scale_rate_bounds(factor: float) -> None:
    with pytest.raises(InputError, match="rate scale"):
        scale_rate(steady(), factor)


def test_a_burst_doubles_the_rate_inside_and_only_inside() -> None:
    before = steady()
    after = add_burst(before, Burst(2.0, 10.0, start_share=0.5))

    def arrivals(start_s: float, length_s: float) -> int:
        return int(np.sum((after.arrival_s >= start_s) & (after.arrival_s < start_s + length_s)))

    assert [arrivals(40, 10), arrivals(50, 10), arrivals(60, 10)] == [10, 20, 10]
    assert len(after) == len(before)
    assert np.array_equal(after.prompt_tokens, before.prompt_tokens)
    assert after.arrival_s[-1] == before.arrival_s[-1] - 10.0


def test_a_burst_at_a_time_and_past_the_end() -> None:
    after = add_burst(steady(), Burst(4.0, 1000.0, start_s=80.0))
    assert after.arrival_s[80] == 80.0
    assert after.arrival_s[-1] == 85.0
    with pytest.raises(InputError, match="changes nothing"):
        add_burst(steady(), Burst(4.0, 10.0, start_s=100.0))


@pytest.mark.parametrize(
    "bad",
    [
        {"factor": 1.0, "length_s": 1.0, "start_share": 0.5},
        {"factor": float("nan"), "length_s": 1.0, "start_share": 0.5},
        {"factor": 2.0, "length_s": 0.0, "start_share": 0.5},
        {"factor": 2.0, "length_s": 1.0, "start_share": 1.0},
        {"factor": 2.0, "length_s": 1.0, "start_s": -1.0},
        {"factor": 2.0, "length_s": 1.0},
    ],
)
def test_burst_bounds(bad: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Burst(**bad)


def test_window_is_half_open_and_counts_from_its_start() -> None:
    part = window(steady(), 10.0, 5.0)
    assert part.arrival_s.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert part.prompt_tokens.tolist() == [11, 12, 13, 14, 15]
    with pytest.raises(InputError, match="choose another window"):
        window(steady(), 500.0, 5.0)
    with pytest.raises(InputError, match="length_s"):
        window(steady(), 0.0, 0.0)


def test_window_cuts_prefix_content() -> None:
    zeros = np.zeros(3, dtype=np.int64)
    traffic = Traffic(
        np.arange(3.0),
        np.array([8, 4, 8]),
        zeros + 1,
        zeros,
        zeros,
        prefix_offsets=np.array([0, 2, 3, 5]),
        prefix_keys=np.array([0, 1, 0, 0, 2]),
        prefix_span_tokens=4,
    )
    part = window(traffic, 1.0, 10.0)
    assert part.prefix_offsets.tolist() == [0, 1, 3]
    assert part.prefix_keys.tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    ("offsets", "keys"),
    [([0, 1], [0]), ([0, 2, 1, 1], [0]), ([0, 1, 1, 1], [-1]), ([0, 3, 3, 3], [0, 1, 2]), ([1, 1, 1, 1], [0])],
)
def test_prefix_content_is_checked(offsets: list[int], keys: list[int]) -> None:
    zeros = np.zeros(3, dtype=np.int64)
    with pytest.raises(InputError, match="prefix"):
        Traffic(
            np.arange(3.0),
            np.array([8, 4, 8]),
            zeros + 1,
            zeros,
            zeros,
            prefix_offsets=np.array(offsets),
            prefix_keys=np.array(keys),
            prefix_span_tokens=4,
        )
