"""``rooftune run``: what is refused before anything changes, and one whole cycle without an engine."""

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rooftune.tuner.cli.controller import run as run_command
from rooftune.tuner.clock import ManualClock
from rooftune.tuner.config import Config, json_schema
from rooftune.tuner.control.state.lock import FolderLock
from rooftune.tuner.control.state.store import StateFile
from tests.cli.controller import rooftune

NO_ENGINE = "http://127.0.0.1:9"  # the discard port: nothing listens there


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ROOFTUNE_STATE", "ROOFTUNE_STORAGE", "ROOFTUNE_TOKEN_FILE", "ROOFTUNE_ENGINE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def _refused(capsys: pytest.CaptureFixture[str], *words: object, code: int = 2) -> str:
    assert rooftune("run", *words) == code
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    return output.err


def test_a_bad_configuration_is_one_line_and_code_2_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "rooftune.yaml"
    for text, output in (
        ("engine: {url: 'http://h:1'}\nmode: fast\n", f"rooftune: {config}:2: mode is 'fast', must be one of"),
        ("engine: {url: 'http://h:1'}\ncadence: {lease_s: 20s}\n", "cadence.lease_s is 20.0, must be at least 45"),
        ("engine: {url: 'http://h:1'}\nsped: 1\n", "unknown key sped"),
        ("engine: {url: 'http://h:1', token_file: nowhere}\n", "nowhere"),
        ("engine: {url: 'http://h:1', ca_file: nowhere}\n", "engine.ca_file is"),
        ("engine: {url: 'http://h:1'}\ntoken_file: nowhere\n", "nowhere' cannot be read"),
        ("engine: {url: 'http://h:1'}\nstate: rooftune.yaml\n", "which is a file"),
    ):
        config.write_text(text)
        assert output in _refused(capsys, "--config", config)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rooftune.yaml"]


def test_bad_flags_name_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--engine: engine.url is 'nothing'" in _refused(capsys, "--engine", "nothing")
    assert "--mode: mode is 'fast'" in _refused(capsys, "--engine", NO_ENGINE, "--mode", "fast")
    assert "mode is 'live', must be shadow while there are no targets" in _refused(
        capsys, "--engine", NO_ENGINE, "--mode", "live"
    )
    assert "--cycles" in _refused(capsys, "--engine", NO_ENGINE, "--cycles", "0")
    assert "write the whole path" in _refused(capsys, "--engine", NO_ENGINE, "--state", "~surely-nobody/x")
    assert "not allowed with argument" in _refused(capsys, "--engine", NO_ENGINE, "--cycles", "3", "--once")
    assert "engine is missing; give --engine URL" in _refused(capsys)
    (tmp_path / "file").write_text("")
    assert "--report is 'file', which is a file" in _refused(capsys, "--engine", NO_ENGINE, "--report", "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_check_prints_what_would_run_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune("run", "--engine", NO_ENGINE, "--profile", "chat", "--mode", "live", "--check") == 0
    output = capsys.readouterr().out
    assert output.startswith("the configuration is good\n")
    assert "mode live" in output and "targets: chat" in output
    assert list(tmp_path.iterdir()) == []


def test_print_schema_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune("run", "--print-schema") == 0
    output = capsys.readouterr().out
    assert output == json_schema() and json.loads(output)["title"] == "rooftune.yaml"


def test_flags_reach_the_controller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Config, dict[str, Any]]] = []

    def instead(config: Config, **rest: Any) -> int:
        calls.append((config, rest))
        return 7

    monkeypatch.setattr(run_command, "run_controller", instead)
    (tmp_path / "c.yaml").write_text("engine: {url: 'http://h:1'}\nprofile: chat\nstate: s\n")
    assert (
        rooftune("run", "--config", "c.yaml", "--mode", "live", "--engine", NO_ENGINE, "--cycles", 5, "--report", "r")
        == 7
    )
    ((config, rest),) = calls
    assert (config.mode, config.engine.url, config.state) == ("live", NO_ENGINE, tmp_path / "s")
    assert (rest["cycles"], rest["report"]) == (5, Path("r"))
    assert rooftune("run", "--config", "c.yaml", "--once") == 7 and calls[1][1]["cycles"] == 1
    assert rooftune("run", "--config", "c.yaml") == 7 and calls[2][1]["cycles"] is None


def test_one_cycle_without_an_engine_holds_and_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune("run", "--engine", NO_ENGINE, "--once", "--listen", "127.0.0.1:0", "--state", "s") == 3
    capsys.readouterr()
    assert rooftune("explain", "--state", "s") == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 5 and "the engine did not answer" in output
    assert rooftune("history", "--state", "s", "--json") == 0
    (cycle,) = json.loads(capsys.readouterr().out)["cycles"]
    assert (cycle["number"], cycle["action"], cycle["reason"], cycle["mode"]) == (1, "hold", "unreachable", "shadow")


def test_the_second_controller_on_a_folder_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = FolderLock.take(tmp_path / "s", ManualClock())
    line = _refused(capsys, "--engine", NO_ENGINE, "--once", "--state", "s", "--listen", "127.0.0.1:0", code=1)
    assert "is held by a controller (pid" in line and "--state" in line
    lock.release()


def test_a_controller_outlives_the_reader_of_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal is gone, or the output file is on a full disk: the cycles continue."""
    for error in (BrokenPipeError(), OSError(errno.ENOSPC, "No space left on device")):

        def fails(text: str, error: OSError = error) -> int:
            raise error

        monkeypatch.setattr(sys.stdout, "write", fails)
        folder = f"s-{error.errno}"
        assert rooftune("run", "--engine", NO_ENGINE, "--once", "--listen", "127.0.0.1:0", "--state", folder) == 3
        with StateFile.visit(tmp_path / folder) as state:
            assert [record.number for record in state.last(5)] == [1]
