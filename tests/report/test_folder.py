"""A report is written whole or not at all, into a folder that was checked first."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from rooftune.policies.errors import InputError, UnreachableError
from rooftune.tuner.report.folder import report_folder, write_report
from tests.report.records import record, record_values

NAMES = {"index.html", "report.md", "report.json"}


def test_writes_three_files_and_nothing_else(tmp_path: Path) -> None:
    with report_folder(tmp_path / "a" / "b") as folder:
        written = write_report(record(), folder)
    assert {path.name for path in written} == NAMES == set(os.listdir(tmp_path / "a" / "b"))


def test_a_failed_run_removes_the_folders_it_made(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), report_folder(tmp_path / "a" / "b"):
        raise ZeroDivisionError
    assert not (tmp_path / "a").exists()


def test_a_failed_run_leaves_older_reports_alone(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("old")
    with pytest.raises(ZeroDivisionError), report_folder(tmp_path):
        raise ZeroDivisionError
    assert (tmp_path / "index.html").read_text() == "old"


@pytest.mark.parametrize("place", ["file", "file/below", "a\0b", "x" * 300])
def test_unusable_folder_is_refused_before_the_work(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="--out") as error, report_folder(tmp_path / place):
        pytest.fail("the work must not begin")
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_where_a_file_belongs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.md").mkdir()
    with pytest.raises(InputError, match=r"report\.md"), report_folder(tmp_path):
        pytest.fail("the work must not begin")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="cannot be written"), report_folder(tmp_path):
        pytest.fail("the work must not begin")


@pytest.mark.parametrize(("number", "kind"), [(errno.EACCES, InputError), (errno.ENOSPC, UnreachableError)])
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    write, left = Path.write_text, list[Path]()

    def failing(self: Path, *args: Any, **named: Any) -> int:
        left.append(self)
        if len(left) == len(NAMES):
            raise OSError(number, os.strerror(number))
        return write(self, *args, **named)

    monkeypatch.setattr(Path, "write_text", failing)
    with pytest.raises(kind, match="--out"), report_folder(tmp_path / "out") as folder:
        write_report(record(), folder)
    assert not (tmp_path / "out").exists()


def test_two_runs_into_one_folder_leave_one_complete_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (record(traffic=record_values()["traffic"] | {"name": name}) for name in ("ours.csv", "theirs.csv"))
    other = threading.Thread(target=write_report, args=(theirs, tmp_path))
    rename = os.replace
    renamed: list[object] = []

    def renaming(source: Path, target: Path) -> None:
        renamed.append(target)
        if len(renamed) == 2:  # the other run ends between our first file and our second
            other.start()
            other.join(0.5)
        rename(source, target)

    monkeypatch.setattr(os, "replace", renaming)
    write_report(ours, tmp_path)
    other.join()
    assert set(os.listdir(tmp_path)) == NAMES
    for name in ("ours.csv", "theirs.csv"):
        assert len({name in (tmp_path / file).read_text() for file in NAMES}) == 1, name


def test_a_folder_removed_by_a_failed_run_is_created_again(tmp_path: Path) -> None:
    with report_folder(tmp_path / "out") as folder:
        folder.rmdir()  # as the run does that had made it
        write_report(record(), folder)
    assert set(os.listdir(tmp_path / "out")) == NAMES
