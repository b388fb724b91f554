"""The result file reads back as it was, refuses what it cannot be, and its rows are judged as the targets say."""

import json
from pathlib import Path

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.policies.slo import Slo, Target, good, margins
from rooftune.tuner.replay.outcomes import client_outcomes, engine_outcomes, verdict
from rooftune.tuner.replay.result_file import summary_line, write_result
from rooftune.tuner.replay.session import client_part
from tests.replay.rows import engine_part, engine_row, read_result, result, row

SLO = Slo((Target("ttft", 0.45, 1.0), Target("longest_gap", 0.2, 1.0)))
ROWS = [
    row(0, sent_s=0.0, ttft_s=0.4),
    row(1, sent_s=1.0, ttft_s=0.5),
    row(2, sent_s=2.0, ttft_s=0.3, gaps_s=(0.1, 0.3)),
    row(3, sent_s=3.0, failure="http_429"),
    row(4, sent_s=4.0, failure="interrupted"),
    row(5, sent_s=5.0, ttft_s=0.4, gaps_s=()),
]


def test_round_trip(tmp_path: Path) -> None:
    sides = [verdict(client_outcomes(ROWS), SLO, "client")]
    made = result(ROWS, sides, engine_part([engine_row(0, 100.0), engine_row(1, 101.0)]))
    write_result(tmp_path / "r.json", made)
    assert read_result(tmp_path / "r.json") == made
    summary = json.loads(summary_line(made))
    assert "requests" not in summary and "requests" not in summary["engine"] and summary["schema"] == "rooftune.replay"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 2),
        (("schema",), "rooftune.run-record"),
        (("extra",), 1),
        (("requests", 0, "ttft_s"), -1.0),
        (("requests", 0, "ttft_s"), None),
        (("requests", 0, "gaps_s"), [0.1] * 3),
        (("requests", 0, "index"), 1),
        (("engine", "requests", 0, "index"), 77),
        (("engine", "requests", 0, "gap_over"), [1, 2]),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, path: tuple[str | int, ...], value: object) -> None:
    values = result(ROWS, [], engine_part([engine_row(0, 100.0)])).model_dump(mode="json", by_alias=True)
    inner = values
    for step in path[:-1]:
        inner = inner[step]  # type: ignore[index]  # a path into JSON values
    inner[path[-1]] = value  # type: ignore[index]  # likewise
    (tmp_path / "r.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"r\.json: .*rooftune replay") as caught:
        read_result(tmp_path / "r.json")
    assert "\n" not in str(caught.value)


def test_the_client_is_judged_on_what_it_saw() -> None:
    outcomes = client_outcomes(ROWS, gap_bounds_s=(0.1, 0.25))
    # The interrupted one is in no count; the one with 429 failed; request 1 misses the TTFT, request 2 the gap.
    assert good(outcomes, SLO).tolist() == [True, False, False, False, True]
    assert outcomes.gap_over.tolist() == [[1, 0], [1, 0], [1, 1], [0, 0], [0, 0]]
    assert outcomes.gap_values_s.tolist() == [0.1, 0.2, 0.3] and outcomes.gap_weights.tolist() == [3.0, 2.0, 1.0]
    side = verdict(outcomes, SLO, "client")
    assert (side.judged, side.failed, side.attainment) == (5, 1, 0.4)
    assert side.span_s == pytest.approx(5.4) and side.goodput_rps == pytest.approx(2 / 5.4)
    assert side.tokens_per_s == pytest.approx(10 / 5.4)
    assert side.ttft_p50_s == pytest.approx(0.4) and side.ttft_p99_s == "inf"
    assert side.gap_p50_s == 0.1 and side.gap_p99_s == 0.3


def test_the_engine_is_judged_on_its_own_times() -> None:
    """It saw the first token of request 1 in time; it has no record of request 2, so its side does not count it."""
    engine = engine_part([engine_row(0, 100.0), engine_row(1, 101.0), engine_row(5, 105.0)], missing=1)
    outcomes = engine_outcomes(engine, ROWS)
    assert np.allclose(outcomes.arrival_s, [0.0, 1.0, 3.0, 5.0])
    assert good(outcomes, SLO).tolist() == [True, True, False, True]
    side = verdict(outcomes, SLO, "engine")
    assert (side.judged, side.failed, side.attainment) == (4, 1, 0.75)
    assert side.gap_p99_s is None
    by_share = verdict(outcomes, Slo((Target("gap", 0.15, 0.3),)), "engine")
    assert by_share.margins[0].measured_s is None and by_share.margins[0].samples == 7  # 6 gaps and one without end
    assert by_share.margins[0].margin == pytest.approx(4 / 7 / 0.7 - 1)
    other = verdict(outcomes, Slo((Target("gap", 0.16, 0.9),)), "engine")
    assert other.attainment is None and "0.15" in str(other.not_judged)


def test_no_targets_or_no_requests_do_not_become_zero() -> None:
    free = verdict(client_outcomes(ROWS), Slo((), objective="tokens_per_s"), "client")
    assert free.attainment is None and free.goodput_rps is None and free.tokens_per_s > 0
    none = verdict(client_outcomes([]), SLO, "client")
    assert none.attainment is None and none.ttft_p50_s is None and none.judged == 0


def test_outcomes_of_the_client_reach_the_exact_quantiles_of_a_gap_target() -> None:
    slo = Slo((Target("gap", 0.25, 0.9),))
    rows = [one for one in ROWS if one.failure is None]
    (margin,) = margins(client_outcomes(rows, slo.gap_bounds()), slo)
    assert margin.measured_s == 0.3 and margin.samples == 6


def test_a_late_or_starved_client_is_reported() -> None:
    calm = client_part(tuple(ROWS))
    assert calm.bottleneck == () and calm.shared_reads == 0.0
    late = client_part(tuple(one.model_copy(update={"sent_s": one.planned_s + 0.1}) for one in ROWS))
    assert late.late_p50_s == pytest.approx(0.1) and len(late.bottleneck) == 1
    starved = client_part((row(0, gaps_s=(0.3, 0.0, 0.0)),))
    assert starved.shared_reads == pytest.approx(2 / 3) and len(starved.bottleneck) == 1


def test_rounding_of_two_clocks_does_not_put_the_last_token_before_the_first() -> None:
    rounded = engine_row(0, 101.3, ttft_s=0.1).model_copy(update={"finish_s": 101.3 + 0.1})
    engine = engine_part([rounded]).model_copy(update={"clock_offset_s": 37.402})
    assert (101.3 + 0.1) - 37.402 < (101.3 - 37.402) + 0.1  # what floats make of one instant on two clocks
    outcomes = engine_outcomes(engine, ROWS[:1])
    assert outcomes.finish_s[0] == outcomes.first_token_s[0]


def test_rounding_of_a_sum_does_not_put_the_last_token_before_the_first() -> None:
    sent_s, ttft_s, finish_s = 0.495435087, 0.449491065, 0.944926152
    assert sent_s + ttft_s > finish_s  # the same instant to the nanosecond
    row = ROWS[0].model_copy(update={"sent_s": sent_s, "ttft_s": ttft_s, "finish_s": finish_s})
    outcomes = client_outcomes([row])
    assert outcomes.finish_s[0] == outcomes.first_token_s[0]
