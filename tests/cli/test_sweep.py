"""``sweep``: every setting of a grid, each exactly as ``simulate`` replays it."""

import json
from pathlib import Path

import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.cli.sweep import parse_counts
from tests.cli.commands import rooftune, write_mix

BASE = ("--step-model", "8b-2tbs", "--ttft-p99", "4s", "--gap-p99", "50ms")


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mix(tmp_path_factory.mktemp("traffic") / "mix.csv", requests=200)


def test_rows_are_those_of_simulate(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ("--budgets", "512:1024:512,2048", "--caps", "0,128")
    assert rooftune("sweep", "--traffic", mix, *BASE, *grid, "--json", "--quiet") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    placed = [(row["setting"]["step_tokens"], row["setting"]["chunk_cap_tokens"]) for row in rows]
    assert placed == [(512, 0), (1024, 0), (2048, 0), (512, 128), (1024, 128), (2048, 128)]
    one = ("--step-tokens", "1024", "--chunk-cap", "128")
    assert rooftune("simulate", "--traffic", mix, *BASE, *one, "--json", "--quiet") == 0
    alone = json.loads(capsys.readouterr().out)["rows"][0]
    assert alone | {"role": "sweep"} == rows[4]


def test_table_marks_the_best(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune("sweep", "--traffic", mix, *BASE, "--budgets", "512,8192", "--quiet") == 0
    marked = [line for line in capsys.readouterr().out.splitlines() if line.startswith("* ")]
    assert len([line for line in marked if " 512 " in line]) == 1


def test_default_budgets_fit_the_engine(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune("sweep", "--traffic", mix, *BASE, "--ceiling", "600", "--max-seqs", "300", "--json", "--quiet") == 0
    budgets = [row["setting"]["step_tokens"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert budgets == [384, 512]


@pytest.mark.parametrize(
    ("grid", "needed"),
    [
        (("--budgets", "128"), "sequence cap (256)"),
        (("--budgets", "512:256:8"), "must ascend"),
        (("--budgets", "512:1024"), "FIRST:LAST:STEP"),
        (("--budgets", ""), "--budgets"),
        (("--caps", "a"), "--caps"),
        (("--budgets", "1:100000000:1"), "must ascend in at most"),
    ],
)
def test_bad_grid_is_one_line(
    mix: Path, grid: tuple[str, str], needed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rooftune("sweep", "--traffic", mix, *BASE, *grid, "--quiet") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert needed in output.err
    assert output.err.count("\n") == 1


def test_lists_come_out_ascending_without_repeats() -> None:
    assert parse_counts("512,256:1024:256", "--budgets", low=1) == [256, 512, 768, 1024]
    with pytest.raises(InputError):
        parse_counts("256:512:0", "--budgets", low=1)
