"""The input file of ``simulate``: strict, and the same replay as by flags."""

import json
from pathlib import Path
from typing import Any

import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.sim.simulate_input import read_simulate_input
from tests.cli.commands import rooftune, write_mix

GAP = {"metric": "gap", "quantile": 0.99, "bound_s": 0.03}


def _values(**changed: Any) -> dict[str, Any]:
    return {
        "schema": "rooftune.simulate-input",
        "version": 1,
        "traffic": {"file": "mix.csv"},
        "step_model": "8b-2tbs",
        "setting": {"step_tokens": 512},
        "targets": [GAP],
    } | changed


def _write(folder: Path, **changed: Any) -> Path:
    path = folder / "input.json"
    path.write_text(json.dumps(_values(**changed)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("input")
    write_mix(made / "mix.csv", requests=120)
    return made


def _row(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert rooftune("simulate", *words, "--json", "--quiet") == 0
    row: dict[str, Any] = json.loads(capsys.readouterr().out)["rows"][0]
    return row


def test_file_and_flags_replay_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setting = {"step_tokens": 640, "chunk_cap_tokens": 128}
    traffic = {"file": "mix.csv", "rate_scale": 1.5, "window_s": [0.0, 20.0]}
    by_file = _row(capsys, "--input", _write(folder, setting=setting, traffic=traffic))
    flags = ("--rate-scale", "1.5", "--window", "0s:20s", "--step-tokens", "640", "--chunk-cap", "128")
    by_flags = _row(capsys, "--traffic", folder / "mix.csv", "--step-model", "8b-2tbs", "--gap-p99", "30ms", *flags)
    assert by_file == by_flags


def test_a_mid_run_change_lies_between_both_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = [{"at_s": 15.0, "setting": {"step_tokens": 4096}}]
    small = _row(capsys, "--input", _write(folder))
    both = _row(capsys, "--input", _write(folder, changes=changes))
    large = _row(capsys, "--input", _write(folder, setting={"step_tokens": 4096}))
    assert large["simulated_steps"] < both["simulated_steps"] < small["simulated_steps"]


def test_an_override_changes_which_requests_are_good(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lax = [{"when": {"min_prompt_tokens": 1}, "targets": [GAP | {"bound_s": 60.0}]}]
    plain = _row(capsys, "--input", _write(folder, setting={"step_tokens": 4096}))
    eased = _row(capsys, "--input", _write(folder, setting={"step_tokens": 4096}, overrides=lax))
    assert plain["attainment"] < eased["attainment"] == 1.0


@pytest.mark.parametrize(
    ("changed", "output"),
    [
        ({"version": 2}, "version"),
        ({"colour": 1}, "colour"),
        ({"setting": {}}, "lacks step_tokens"),
        ({"setting": {"step_tokens": 512.5}}, "step_tokens is 512.5"),
        ({"setting": {"step_tokens": -1}}, "step_tokens is -1"),
        ({"setting": {"step_tokens": 512, "speed": 1}}, "'speed'"),
        ({"setting": {"step_tokens": 100}}, "sequence cap (256)"),
        ({"setting": {"step_tokens": 512, "pressure_tokens": 9000}}, "pressure_tokens is 9000, must be at most"),
        ({"setting": {"step_tokens": 512, "budget_floor_tokens": 8193}}, "budget_floor_tokens is 8193, must be at"),
        ({"engine": {"kv_tokens": 0}}, "engine.kv_tokens"),
        ({"targets": [GAP | {"bound_s": 0}]}, "bound_s"),
        ({"traffic": {"file": "none.csv"}}, "none.csv"),
        ({"traffic": {"file": "mix.csv", "rate_scale": 0.0}}, "rate scale"),
        ({"step_model": "9b"}, "step model"),
        (
            {"changes": [{"at_s": at, "setting": {"step_tokens": 512}} for at in (5.0, 1.0)]},
            "changes must stand in order",
        ),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, changed: dict[str, Any], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rooftune("simulate", "--input", _write(folder, **changed), "--quiet") == 2
    shown = capsys.readouterr()
    assert output in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\x01"])
def test_unreadable_input_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "i.json").write_text(text)
    with pytest.raises(InputError, match=r"i\.json"):
        read_simulate_input(tmp_path / "i.json")


def test_file_and_flags_exclude_each_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune("simulate", "--input", _write(folder), "--step-tokens", "600") == 2
    assert "--step-tokens" in capsys.readouterr().err
    assert rooftune("simulate", "--step-model", "8b-2tbs") == 2
    assert "--traffic is missing" in capsys.readouterr().err


def test_a_quantile_that_is_no_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune("simulate", "--traffic", "x.csv", "--step-model", "8b-2tbs", "--gap-p101", "30ms") == 2
    assert "any of p1 to p99, p99.5, p99.9, ... p100, not p101" in capsys.readouterr().err
