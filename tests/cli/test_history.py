"""``rooftune history``, ``status`` and ``explain`` read a controller's records, even while it runs."""

import json
from pathlib import Path

import pytest

from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.state import operator
from rooftune.tuner.control.state.store import StateFile
from tests.cli.controller import filled, rooftune
from tests.control.cycle_records import hold

HISTORY = """\
cycle  at                    action         reason         in targets  good/s  setting
  1-3  2025-11-30 00:00:15Z  hold           searching            90 %     6.3
    4  2025-11-30 00:01:00Z  push           step_limited         90 %     6.3  budget 1024, chunk cap 256
  5-6  2025-11-30 00:01:15Z  hold           verifying            90 %     6.3
    7  2025-11-30 00:01:45Z  hold (better)  dwell              96.4 %     6.3
    8  2025-11-30 00:02:00Z  push           ok                   90 %     6.3  chunk cap none
    9  2025-11-30 00:02:15Z  revert (worse) verdict_worse        90 %     6.3

pushes, gains in points of the share within the targets:
push  at                    predicted  observed  +/-  verdict             setting
   4  2025-11-30 00:00:30Z       +7.0      +6.4  2.1  better in 7         budget 1024, chunk cap 256
   8  2025-11-30 00:00:30Z       +7.0      -3.1  2.1  worse in 9          chunk cap none
  10  2025-11-30 00:00:30Z                            never written down  budget 256
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path / "s")


def test_the_history_golden(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune("history", "--state", folder) == 0
    output = capsys.readouterr().out
    assert [line.split() for line in output.splitlines()] == [line.split() for line in HISTORY.splitlines()]


def test_the_history_as_json_holds_whole_records(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune("history", "--state", folder, "--json", "--last", "3") == 0
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    found = json.loads(line)
    records = [CycleRecord.model_validate_json(json.dumps(cycle)) for cycle in found["cycles"]]
    assert [record.number for record in records] == [7, 8, 9]
    assert [push["number"] for push in found["pushes"]] == [8, 10]
    assert found["pushes"][0]["observed_gain"] == -0.031


def test_the_folder_is_readable_while_a_controller_holds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StateFile.own(tmp_path / "s") as state:
        assert rooftune("history", "--state", tmp_path / "s") == 0
        assert "no cycle has been written down yet" in capsys.readouterr().out
        state.put(hold(1))
        assert rooftune("history", "--state", tmp_path / "s") == 0
        assert "searching" in capsys.readouterr().out
        assert rooftune("status", "--state", tmp_path / "s") == 0
        assert "runs (pid" in capsys.readouterr().out


def test_the_status_in_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StateFile.visit(folder) as state:
        operator.pause(state, "ann", "deploy", 1.0)
        state.put(hold(10, lease_left_s=None))
    assert rooftune("status", "--state", folder) == 0
    rows = {line.split("  ", 1)[0]: line.split("  ", 1)[1].strip() for line in capsys.readouterr().out.splitlines()}
    assert rows["controller"].endswith("does not run")
    assert rows["paused"] == "by ann: deploy"
    assert rows["engine"] == "chat-eu-1, live mode"
    assert rows["cycle"].startswith("10, ") and rows["cycle"].endswith("ago: hold, searching")
    assert rows["was in force"] == "token budget 2048 tokens, chunk cap none"
    assert rows["in targets"] == "90 % of 420 requests"
    assert "lease" not in rows and "knee" not in rows


def test_the_status_counts_no_lease_of_a_controller_that_does_not_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StateFile.visit(folder) as state:
        state.put(hold(10, lease_left_s=90.0))
    assert rooftune("status", "--state", folder) == 0
    output = capsys.readouterr().out
    assert "s left" not in output and "rooftune doctor" in output


def test_the_status_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune("status", "--state", folder, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "rooftune.status" and found["pid"] is None and found["last"]["number"] == 9


def test_explain_a_cycle(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune("explain", "9", "--state", folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "the push of cycle 8 was worse: gain -3.1 +/- 2.1 points, predicted +7.0" in lines[3]


@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        (("explain", "99"), 2, "there is no cycle 99 in"),
        (
            ("explain", "10"),
            1,
            "cycle 10 was never written down: the controller ended after it had noted a push of token",
        ),
        (("explain", "x"), 2, "N is 'x', must be a whole number"),
        (("history", "--last", "0"), 2, "--last is '0'"),
    ],
)
def test_a_missing_folder_or_cycle_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, output: str
) -> None:
    assert rooftune(*words, "--state", folder) == code
    found = capsys.readouterr()
    assert found.out == "" and output in found.err and found.err.count("\n") == 1


def test_the_folder_comes_from_flag_configuration_environment_or_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROOFTUNE_STATE", raising=False)
    filled(tmp_path / "a")
    (tmp_path / "c.yaml").write_text("engine: {url: 'http://h:1'}\nstate: a\n")
    assert rooftune("status") == 2
    assert "no state in 'rooftune-state'" in capsys.readouterr().err
    assert rooftune("status", "--config", "c.yaml") == 0
    monkeypatch.setenv("ROOFTUNE_STATE", str(tmp_path / "a"))
    assert rooftune("status") == 0
    assert rooftune("status", "--state", "b") == 2
    assert rooftune("status", "--state", "") == 2
