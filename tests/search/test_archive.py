"""The archive of searches: bounded, readable after every change of knobs, waits once for a lock."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from rooftune.policies.errors import UnreachableError
from rooftune.policies.request import DEADLINE, Setting
from rooftune.tuner.search import archive as module
from rooftune.tuner.search.archive import Archive, TwinResult
from rooftune.tuner.search.lessons import LiveResult

ROOT = Path(__file__).resolve().parents[2]
STOCK = frozenset({"step_tokens", "chunk_cap_tokens"})
HERE = Setting(1024, 256, max_running=64)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'studies.db'}"


def end(budget: int) -> TwinResult:
    return TwinResult(HERE._replace(step_tokens=budget), 0.9, 300)


def test_live_and_twin_trials_are_kept_apart_and_each_live_one_once(url: str) -> None:
    kept = Archive(url, "live")
    first, second = LiveResult(HERE, 0.7, 200, 0.8), LiveResult(HERE, 0.72, 210, None)
    kept.keep(STOCK, end(512), [first])
    kept.keep(STOCK, end(512), [first, second])
    kept.keep(STOCK, end(768), [])
    again = Archive(url, "live")
    assert again.live() == [first, second]
    assert [setting.step_tokens for setting in again.remembered(5)] == [768, 512]
    assert again.remembered(1) == [end(768).setting]
    assert Archive(url, "other").live() == []


@pytest.mark.slow
def test_wider_grids_and_other_knobs_read_the_old_trials_and_add_their_own(url: str) -> None:
    Archive(url, "live").keep(STOCK, end(64), [LiveResult(HERE, 0.7, 200)])
    wide = HERE._replace(step_tokens=1 << 20, order_policy=DEADLINE, aging_s=7.5)
    later = Archive(url, "live")
    later.keep(STOCK | {"order_policy", "aging_s", "max_running"}, TwinResult(wide, 1.0, 10), [])
    later.keep(frozenset(), end(72), [])
    assert [s.step_tokens for s in later.remembered(9)] == [72, 1 << 20, 64]
    assert later.remembered(9)[1] == wide and later.live() == [LiveResult(HERE, 0.7, 200)]


@pytest.mark.slow
def test_old_studies_are_deleted_to_bound_the_file(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STUDY_TRIALS", 5)
    kept = Archive(url, "live")
    sizes = []
    for number in range(40):
        kept.keep(STOCK, end(8 * (number + 1)), [LiveResult(HERE, number / 100, 100)] if number < 3 else [])
        sizes.append((tmp_path / "studies.db").stat().st_size)
    assert len(kept._names()) == module.STUDIES and 5 < len(kept._trials()) <= 10
    assert kept.remembered(2) == [end(320).setting, end(312).setting]
    assert kept.live() == []  # of studies that are gone
    assert sizes[-1] == sizes[15]


@pytest.mark.slow
def test_a_short_lock_is_waited_for_and_a_long_one_is_named(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0.1)
    kept = Archive(url, "live")
    kept.keep(STOCK, end(512), [])
    holder = sqlite3.connect(tmp_path / "studies.db", isolation_level=None)
    holder.execute("begin exclusive")
    with pytest.raises(UnreachableError, match="locked"):
        kept.keep(STOCK, end(768), [])
    real, freed = module.again, []

    def free_after_the_first(call, tries):  # type: ignore[no-untyped-def]  # stands in for again
        def once():  # type: ignore[no-untyped-def]
            try:
                return call()
            finally:
                if not freed:
                    freed.append(holder.execute("rollback"))

        return real(once, tries)

    monkeypatch.setattr(module, "again", free_after_the_first)
    kept.keep(STOCK, end(768), [])
    assert freed and kept.remembered(1) == [end(768).setting]


@pytest.mark.slow
def test_two_controllers_on_one_file_both_store_their_trials(url: str) -> None:
    script = (
        "import sys\nfrom tests.search.test_archive import STOCK, end\n"
        "from rooftune.tuner.search.archive import Archive\n"
        "kept = Archive(sys.argv[1], 'live')\n"
        "for k in range(10): kept.keep(STOCK, end(int(sys.argv[2]) + 8 * k), [])\n"
    )
    runs = [subprocess.Popen([sys.executable, "-c", script, url, base], cwd=ROOT) for base in ("1000", "2000")]
    assert [run.wait(timeout=120) for run in runs] == [0, 0]
    found = {s.step_tokens for s in Archive(url, "live").remembered(50)}
    assert found == {base + 8 * k for base in (1000, 2000) for k in range(10)}


def test_an_invalid_storage_is_named() -> None:
    with pytest.raises(UnreachableError, match="unable to open"):
        Archive("sqlite:////nowhere/at/all.db", "live")
