"""Progress: one rewritten line on a terminal, few lines elsewhere, nothing when quiet."""

import io
from pathlib import Path

import pytest

from rooftune.tuner.cli import output as progress
from rooftune.tuner.cli.output import COMPILING, Progress, twin_is_compiled, warm_twin


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _run(stream: io.StringIO, quiet: bool = False) -> str:
    progress = Progress(stream, quiet)
    for done in range(1, 201):
        progress("search", done, 200)
    progress.say("done")
    progress.close()
    return stream.getvalue()


def test_terminal_rewrites_one_line_and_leaves_it_clean() -> None:
    shown = _run(_Terminal())
    assert shown.count("\n") == 1
    assert "\rsearch 200/200" in shown
    wiped, _, last = shown.rpartition("\r")
    assert last == "done\n"
    assert wiped.endswith(" ")


def test_without_a_terminal_only_a_few_lines_including_first_and_last() -> None:
    lines = _run(io.StringIO()).splitlines()
    assert 3 <= len(lines) <= 7
    assert lines[0] == "search 1/200"
    assert lines[-2:] == ["search 200/200", "done"]


def test_quiet_prints_nothing() -> None:
    assert _run(io.StringIO(), quiet=True) == ""
    assert _run(_Terminal(), quiet=True) == ""


def test_an_empty_cache_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTUNE_CACHE_DIR", str(tmp_path))
    assert not twin_is_compiled()


@pytest.mark.parametrize(
    ("place", "printed"), [("new/fresh", COMPILING), ("file/x", "every time: {}/file cannot be written")]
)
def test_code_compiled_every_time_is_not_reported_as_cached(
    place: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(progress, "twin_is_compiled", lambda: False)
    monkeypatch.setattr(progress, "code_folder", lambda function: tmp_path / place)
    monkeypatch.setattr(progress, "warm", lambda: None)
    stream = io.StringIO()
    warm_twin(Progress(stream, quiet=False))
    assert printed.format(tmp_path) in stream.getvalue()
