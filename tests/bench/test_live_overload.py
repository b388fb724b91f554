"""A server at and above what it carries, without one: what is sent, what counts as good, ratios and their intervals."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from rooftune.policies.errors import RefusedError, UnreachableError
from rooftune.tuner.bench import live_gain, vllm_overload
from rooftune.tuner.bench.children import Children
from rooftune.tuner.bench.live_gain import Size, bed_of, config_of, overloaded
from rooftune.tuner.bench.live_gain_rounds import Sizes, bounds_between, listed
from rooftune.tuner.bench.live_overload import PARTS, Pair, by_part, figures, goodput_ratio, pair
from rooftune.tuner.bench.vllm_overload import good_of, trace_lines
from rooftune.tuner.config import load_config
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.state.store import StateFile
from rooftune.tuner.observe.rows import BoolArray
from rooftune.tuner.sim.twin import warm
from rooftune.tuner.traffic.workload import Traffic
from tests.control.cycle_records import hold, push

LIST = listed(Sizes((10, 50), (100, 200), (5, 9)), 10.0, 20.0, seed=1)
N = len(LIST)


def compared(default: int, tuned: int, records: Sequence[CycleRecord] = ()) -> Pair:
    """Good are the first requests of the list, up to this number."""
    return Pair(1.2, LIST, np.arange(N) < default, np.arange(N) < tuned, records)


def answered(**changed: Any) -> dict[str, Any]:
    """The load generator's file after the list: TTFT 0.1, 0.2, 0.3 ... s, all gaps 20 ms."""
    lens = {"input_lens": LIST.prompt_tokens.tolist(), "output_lens": LIST.output_tokens.tolist()}
    times = {"ttfts": [0.1 * (at + 1) for at in range(N)], "itls": [[0.02, 0.02]] * N}
    return {"completed": N, "errors": [""] * N, **lens, **times, **changed}


def test_the_trace_has_every_length_and_no_two_requests_share_a_prefix() -> None:
    rows = [json.loads(line) for line in trace_lines(LIST).splitlines()]
    assert [row["timestamp"] for row in rows] == LIST.arrival_s.tolist()
    assert [row["input_length"] for row in rows] == LIST.prompt_tokens.tolist()
    assert [row["output_length"] for row in rows] == LIST.output_tokens.tolist()
    assert len({tuple(row["hash_ids"]) for row in rows}) == N


def test_a_request_is_good_within_both_targets() -> None:
    assert good_of(answered(), LIST, 1.05, 0.03).tolist() == [at < 10 for at in range(N)]
    stalled = answered(itls=[[0.02, 0.5], [], *[[0.02]] * (N - 2)])
    assert good_of(stalled, LIST, 1.05, 0.03).tolist() == [0 < at < 10 for at in range(N)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"completed": N - 1, "errors": ["Traceback\nConnection refused", *[""] * (N - 1)]},
            "answered: Connection ref",
        ),
        ({"completed": N - 1}, "does not say why"),
        ({"output_lens": [1] * N}, "other tokens"),
    ],
)
def test_a_missing_answer_fails_the_bench(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        good_of(answered(**changed), LIST, 1.0, 1.0)


def test_every_request_falls_into_one_part() -> None:
    counts = by_part(np.ones(N, dtype=np.bool_), LIST.arrival_s)
    assert len(counts) == PARTS and counts.sum() == N and counts.min() > 0


def test_the_ratio_is_that_of_counts_and_finite_where_the_default_serves_nobody() -> None:
    ratio, low, high = goodput_ratio(compared(N // 4, N))
    assert ratio == pytest.approx((N + 1) / (N // 4 + 1)) and low < ratio < high
    assert goodput_ratio(compared(50, 50)) == pytest.approx((1.0, 1.0, 1.0))
    assert goodput_ratio(compared(0, 99))[0] == pytest.approx(100.0)


def test_the_lowest_ratio_comes_first_and_each_load_has_its_own() -> None:
    better = compared(50, 100, [push(1), hold(2)])
    found = {figure.name: figure for figure in figures([Pair(0.9, LIST, better.default, better.default, []), better])}
    assert next(iter(found)) == "goodput_ratio_to_default" and found["goodput_ratio_to_default"].value == 1.0
    assert found["goodput_ratio_to_default_at_120"].value == pytest.approx(101 / 51)
    assert found["below_default_beyond_noise"].value == 0.0
    worse = {figure.name: figure.value for figure in figures([compared(N, N // 4), better])}
    assert worse["below_default_beyond_noise"] == 1.0 and worse["goodput_ratio_to_default"] < 0.3
    assert (found["pushes_at_090"].value, found["pushes_at_120"].value) == (0.0, 1.0)
    assert found["attainment_at_120"].value == 100 / N and found["attainment_at_120"].baseline == 50 / N


def test_a_stream_may_stall_halfway_between_the_spared_and_the_stalled() -> None:
    gap_s = np.array([0.01] * 50 + [1.0] * 50)
    assert bounds_between(np.full(100, 0.3), gap_s) == pytest.approx((0.6, 0.1))


@pytest.mark.parametrize("size", [live_gain.SHORT, live_gain.FULL, vllm_overload.SHORT, vllm_overload.FULL])
def test_the_controllers_configuration_is_valid(size: Size, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    file = tmp_path / "rooftune.yaml"
    file.write_text(yaml.safe_dump(config_of("http://127.0.0.1:8000", size, 0.123, 0.045)))
    config = load_config(str(file), [])
    assert config.mode == "live" and config.cadence.lease_s >= 3 * config.cadence.cycle_s


class Started:
    """Children that start nothing; a started controller leaves these records behind, or ends by itself."""

    def __init__(self, work: Path, records: Sequence[CycleRecord], ended: bool) -> None:
        self.work, self.records, self.ended = work, records, ended
        self.words: list[str] = []

    def start(self, name: str, words: list[str]) -> Any:
        self.words = words
        with StateFile.own(self.work / "state-120") as state:
            for record in self.records:
                state.put(record)
        return SimpleNamespace(ended=self.ended, stop=lambda: None, last_words=lambda: "its last words")


def paired(work: Path, records: Sequence[CycleRecord], ended: bool = False) -> tuple[Pair, list[str]]:
    sent: list[str] = []

    def send(name: str, requests: Traffic) -> BoolArray:
        sent.append(name)
        return np.full(len(requests), len(sent) == 2)

    bed: Any = SimpleNamespace(work=work, children=Started(work, records, ended))
    return pair(bed, {"mode": "live", "state": "elsewhere"}, 1.2, LIST, send), sent


def test_a_pair_sends_the_list_at_the_default_and_then_beside_the_controller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, sent = paired(tmp_path, [hold(1), push(2)])
    assert sent == ["default-120", "tuned-120"]
    assert not found.default.any() and found.tuned.all() and [record.number for record in found.records] == [1, 2]
    assert yaml.safe_load((tmp_path / "rooftune-120.yaml").read_text())["state"] == "state-120"
    told = capsys.readouterr().err
    assert f"load 1.2, default: 0 of {N} good" in told and f"load 1.2, controller: {N} of {N} good" in told


def test_a_controller_that_did_not_run_fails_the_bench(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(UnreachableError, match="no record"):
        paired(tmp_path, [])
    with pytest.raises(UnreachableError, match="ended early: its last words"):
        paired(tmp_path / "other", [hold(1)], ended=True)


def test_a_load_generator_that_fails_or_hangs_fails_the_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_overload, "TELL_EVERY_S", 0.05)
    with Children(tmp_path) as children:
        fails = children.run("fails", [sys.executable, "-c", "raise SystemExit('no such model')"], os.environ)
        with pytest.raises(UnreachableError, match="ended with 1: no such model"):
            vllm_overload.follow(fails, "list", 30.0)
        hangs = children.run("hangs", [sys.executable, "-c", "import time; time.sleep(60)"], os.environ)
        with pytest.raises(UnreachableError, match="list has not ended after 0 s"):
            vllm_overload.follow(hangs, "list", 0.2)
    assert "list: sending for" in capsys.readouterr().err


@pytest.mark.slow
def test_a_controller_does_an_overloaded_engine_no_harm(tmp_path: Path) -> None:
    """Live, on our engine without a model: every answer comes, and goodput is not below the default's beyond noise."""
    size = replace(live_gain.SHORT, overload_s=40.0)
    warm()
    with Children(tmp_path / "logs") as children:
        bed = bed_of(children, tmp_path, "fake:8b-2tbs")
        found = overloaded(bed, size, bed.greatest_rps(size.sizes, 4.0, times=1))
        bed.close()
    ratio, low, high = goodput_ratio(found)
    assert len(found.default) == len(found.tuned) == len(found.requests)
    loads = [record.load for record in found.records if record.load is not None]
    assert any(load.overload for load in loads), "nobody said that more arrives than the engine carries"
    assert high >= 1.0, f"{ratio:.2f} of the default's goodput, at most {high:.2f} (at least {low:.2f})"
