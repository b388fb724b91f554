"""Which processes keep the machine busy, from a fake /proc."""

from pathlib import Path

import pytest

from tests.bench.vllm_prediction import Busy, busy, others_cpus


def proc(folder: Path, everybody: int, ticks: dict[int, tuple[int, int]]) -> Path:
    """everybody: ticks of all; ticks: process -> parent, ticks."""
    folder.mkdir()
    (folder / "stat").write_text(f"cpu  {everybody} 0 0 5000 70 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    for pid, (parent, spent) in ticks.items():
        (folder / str(pid)).mkdir()
        words = ["S", str(parent), *["0"] * 9, str(spent), "1", *["0"] * 20]
        (folder / str(pid) / "stat").write_text(f"{pid} (a (b) c) {' '.join(words)}\n")
        (folder / str(pid) / "statm").write_text("100 50 0 0 0 0 0\n")
    (folder / "999").mkdir()  # ended before it could be read
    return folder


def test_only_children_and_their_descendants_are_ours(tmp_path: Path) -> None:
    found = busy(proc(tmp_path / "proc", 1000, {1: (0, 300), 7: (1, 50), 8: (7, 40), 9: (8, 30), 12: (1, 500)}), 7)
    assert found is not None
    tick_s = found.all_s / 1000
    assert found.ours_s == pytest.approx((51 + 41 + 31) * tick_s)


def test_other_processes_are_the_remainder() -> None:
    assert others_cpus(Busy(10.0, 100.0, 50.0), Busy(20.0, 118.0, 60.0)) == pytest.approx(0.8)
    assert others_cpus(Busy(10.0, 100.0, 50.0), Busy(20.0, 108.0, 60.0)) == 0.0, "counted in ticks, never below 0"
    assert others_cpus(None, Busy(20.0, 118.0, 60.0)) is None


def test_without_proc_the_load_is_unknown(tmp_path: Path) -> None:
    assert busy(tmp_path / "none") is None
