"""A file is written whole or not at all, by every writer: a reader and a crash never leave half of one."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rooftune.policies.errors import InputError, UnreachableError
from rooftune.policies.step_time import StepModel
from rooftune.tuner.files import at_home, write_text, write_whole
from rooftune.tuner.model.model_file import ModelFile, write_model_file
from rooftune.tuner.model.sample_file import write_steps
from rooftune.tuner.model.samples import COLUMNS, StepSamples
from rooftune.tuner.report.plots import step_time_plot

MODEL = StepModel(0.001, 1e-5, 0.008, 6e-8, 4e-5, 2e-10, 8.0)
STEPS = StepSamples(*(np.full(8, 1.0 + place) for place in range(len(COLUMNS))))
WRITERS: dict[str, Callable[[Path], None]] = {
    "bytes": lambda path: write_whole(path, b"new"),
    "text": lambda path: write_text(path, "new"),
    "model.json": lambda path: write_model_file(path, ModelFile(MODEL)),
    "steps.csv": lambda path: write_steps(path, STEPS),
    "steps.csv.gz": lambda path: write_steps(path, STEPS),
    "plot.svg": lambda path: step_time_plot(path, STEPS, MODEL),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, InputError), (errno.ENOSPC, UnreachableError)])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    name: str, number: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_bytes(b"old")

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(kind, match=os.strerror(number)) as error:
        WRITERS[name](path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", WRITERS)
def test_a_reader_that_has_the_old_file_open_keeps_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        WRITERS[name](path)
        assert reader.read() == b"old"
    assert path.read_bytes() != b"old" and os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", WRITERS)
def test_a_target_that_is_not_a_file_is_refused_and_kept(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="not a regular file"):
        WRITERS[name](tmp_path / name)
    with pytest.raises(InputError, match="is a folder"):
        WRITERS[name](tmp_path)
    assert (tmp_path / name).is_fifo()


def test_a_leftover_of_a_process_with_the_same_pid_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / f".x.{os.getpid()}.tmp").write_text("left by a crash")
    write_whole(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
    long = tmp_path / ("n" * 255)  # as long as a name may be
    write_whole(long, b"new")
    assert long.read_bytes() == b"new"


def test_a_new_file_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "x", b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_an_unknown_home_folder_is_one_line() -> None:
    assert at_home("~/x") == Path.home() / "x" and at_home("y/~") == Path("y/~")
    with pytest.raises(InputError, match="write the whole path") as error:
        at_home("~surely-nobody/x")
    assert "\n" not in str(error.value)
