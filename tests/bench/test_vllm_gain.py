"""Bench vllm-gain without a server: cells, targets, the controller's file, the kill, the figures and their refusals."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from rooftune.policies import wire
from rooftune.policies.errors import RefusedError
from rooftune.tuner.bench import vllm_gain
from rooftune.tuner.bench.live_gain import Size, Swept, Tuned, config_of, targets
from rooftune.tuner.bench.live_gain_rounds import Round
from rooftune.tuner.bench.vllm_bed import BOOT_TOKENS, DEFAULT
from rooftune.tuner.bench.vllm_gain import (
    FULL,
    MOST_PUSHES,
    SHORT,
    Killed,
    figures,
    kill,
)
from rooftune.tuner.config import load_config
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.traffic.workload import Traffic
from tests.control.cycle_records import hold, push
from tests.ports.samples import state

N = 8
KILLED = Killed(DEFAULT._replace(step_tokens=128), 12.0, 12.4)


def swept(attainment: tuple[tuple[float, ...], ...] = ((0.5, 0.9), (0.5, 0.7))) -> Swept:
    requests = Traffic(np.arange(N) / 2.0, np.full(N, 100), np.full(N, 10), *np.zeros((2, N), dtype=np.int64))
    settings = (DEFAULT, DEFAULT._replace(step_tokens=128))
    return Swept(requests, 0.2, 0.05, settings, attainment, 0.7)


def tuned(good: list[list[int]], records: tuple[CycleRecord, ...] = ()) -> Tuned:
    """good: of each round, requests that were good; the default had the first half of them, twice."""
    rounds = [np.isin(np.arange(N), each) for each in good]
    default = [np.arange(N) < N // 2] * 2
    return Tuned(rounds, default, (), records)


def pushed(count: int) -> tuple[CycleRecord, ...]:
    return tuple(push(number) for number in range(1, count + 1))


def test_the_sweep_has_no_duplicate_cell() -> None:
    found = FULL.settings
    names = [(one.step_tokens, one.chunk_cap_tokens) for one in found]
    assert len(set(names)) == len(names) == 13 and (2048, 256) in names and (64, 0) in names
    assert (128, 128) not in names, "a cap that the budget already is"
    assert DEFAULT in found and all(one.max_running <= one.step_tokens for one in found)


def test_targets_are_met_by_seven_in_ten_at_the_default() -> None:
    ttft_s, gap_s = np.arange(1, 11) / 10.0, np.arange(10, 0, -1) / 100.0
    rounds = [Round(np.zeros(10), np.ones(10), ttft_s, gap_s)] * 2
    assert targets(rounds) == (0.7, 0.07)
    assert np.mean(rounds[0].ttft_s <= targets(rounds)[0]) == 0.7


@pytest.mark.parametrize("size", [SHORT, FULL])
def test_the_controllers_configuration_is_valid(size: Size, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    file = tmp_path / "rooftune.yaml"
    file.write_text(yaml.safe_dump(config_of("http://127.0.0.1:8000", size, 0.123, 0.045)))
    config = load_config(str(file), [])
    assert [one.target().bound_s for one in config.targets] == [0.123, 0.045]
    assert config.guard.dwell_s * MOST_PUSHES >= size.tuned_rounds * size.span_s * 0.999
    assert config.cadence.lease_s >= 3 * config.cadence.cycle_s


class FakeBed:
    """An engine whose lease ends after this many reads, if ever."""

    def __init__(self, looks: int | None) -> None:
        self._looks, self._left = looks, 0.0
        self.port = self

    def state(self) -> wire.State:
        held = self._looks is None or self._looks > 0
        if self._looks is not None:
            self._looks -= 1
        now = 128 if held else BOOT_TOKENS
        envelope = state().envelope.model_dump() | {"ceiling_tokens": BOOT_TOKENS, "max_running": DEFAULT.max_running}
        knobs = (
            {"name": "step_tokens", "mode": "live", "value": now, "boot": BOOT_TOKENS, "min": 1, "max": BOOT_TOKENS},
            {"name": "chunk_cap_tokens", "mode": "live", "value": 0, "boot": 0, "min": 0, "max": BOOT_TOKENS},
            {"name": "max_running", "mode": "live", "value": 64, "boot": 64, "min": 1, "max": 64},
        )
        lease = {"actor": "a", "reason": "r", "left_s": 0.1, "length_s": 20.0} if held else None
        return state(envelope=envelope, knobs=knobs, lease=lease)


def test_a_killed_controller_leaves_its_setting_to_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[int] = []
    controller: Any = SimpleNamespace(stop=stopped.append)
    monkeypatch.setattr(vllm_gain, "POLL_S", 0.0)
    monkeypatch.setattr(vllm_gain, "RETURN_SLACK_S", 0.05)
    bed: Any = FakeBed(4)
    killed = kill(controller, bed)
    assert stopped == [9] and killed.setting.step_tokens == 128 and killed.lease_left_s == 0.1
    stuck: Any = FakeBed(None)
    with pytest.raises(RefusedError, match="after the kill"):
        kill(controller, stuck)


def test_the_second_half_counts_and_the_best_is_chosen_in_the_other_repeat() -> None:
    good = [[0], [0], list(range(6)), list(range(8))]
    found = {figure.name: figure for figure in figures(swept(), tuned(good), KILLED)}
    assert found["attainment_tuned"].value == pytest.approx(7 / 8)
    # The better of each repeat is the second cell, worth 0.7 and 0.9 in the other.
    assert found["share_of_best_sweep"].value == pytest.approx(7 / 8 / 0.8)
    assert found["share_of_luckiest_cell"].value == pytest.approx(7 / 8 / 0.8)
    lucky = {figure.name: figure.value for figure in figures(swept(((0.9, 0.5), (0.4, 0.8))), tuned(good), KILLED)}
    # Chosen in one repeat and valued in the other: 0.4 and 0.5; by their means 0.65 is the better cell.
    assert lucky["share_of_best_sweep"] == pytest.approx(7 / 8 / 0.45)
    assert lucky["share_of_luckiest_cell"] == pytest.approx(7 / 8 / 0.65)
    assert found["ratio_to_default"].value == pytest.approx(7 / 4)
    assert found["ratio_to_default_low"].value <= 7 / 4 <= found["ratio_to_default_high"].value
    assert found["killed_with_budget"].value == 128 and found["boot_setting_returned_s"].baseline == 12.0


def test_more_pushes_than_allowed_fail_the_bench() -> None:
    good = [list(range(4))] * 4
    most = tuned(good, pushed(MOST_PUSHES))
    assert {f.name: f.value for f in figures(swept(), most, KILLED)}["pushes"] == MOST_PUSHES
    with pytest.raises(RefusedError, match="11 times"):
        list(figures(swept(), tuned(good, pushed(MOST_PUSHES + 1)), KILLED))
    none = tuned(good, (hold(1), hold(2)))
    assert {f.name: f.value for f in figures(swept(), none, KILLED)}["pushes"] == 0
