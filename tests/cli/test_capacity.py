"""``rooftune capacity`` through the real command."""

import json
from pathlib import Path

import pytest

from rooftune.tuner.report.capacity import CapacityRecord
from tests.cli.commands import rooftune, write_mix

TARGETS = ("--ttft-p99", "4s", "--gap-p99", "50ms")


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mix(tmp_path_factory.mktemp("traffic") / "mix.csv", 200)


def _words(traffic: Path, *more: object) -> tuple[object, ...]:
    return ("capacity", "--traffic", traffic, "--step-model", "8b-2tbs", *more)


def test_names_the_rate_the_broken_target_the_bottleneck_and_the_remedy(
    mix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rooftune(*_words(mix, *TARGETS, "--step-tokens", "768", "--quiet")) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out.startswith("Carries ")
    assert "token budget 768 tokens" in output.out and "(given)" in output.out
    for label in ("rate", "breaks", "full", "next", "trust"):
        assert f"\n  {label} " in output.out
    assert all(len(line) <= 101 for line in output.out.splitlines())


def test_json_is_one_record_and_capacity_does_not_depend_on_the_files_rate(
    mix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = []
    for scale in ("1", "2"):
        words = _words(mix, *TARGETS, "--step-tokens", "768", "--json", "--quiet", "--rate-scale", scale)
        assert rooftune(*words) == 0
        line = capsys.readouterr().out
        assert line.count("\n") == 1
        record = CapacityRecord.model_validate_json(line)
        assert record.scale is not None and record.above_scale is not None and record.rate_rps is not None
        assert record.above_scale / record.scale <= 1.02
        assert record.breaks is not None and record.above_margins[record.breaks].margin not in (None, "inf")
        rates.append(record.rate_rps)
    assert rates[0] == pytest.approx(rates[1], rel=0.021)


@pytest.mark.slow
def test_searches_when_no_setting_is_given(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune(*_words(mix, *TARGETS, "--trials", "8", "--json")) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["searched"] is True
    assert "capacity" in output.err


def test_no_feasible_rate_is_exit_1(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune(*_words(mix, "--ttft-p50", "1ms", "--step-tokens", "512", "--quiet")) == 1
    assert capsys.readouterr().out.startswith("No rate meets every target")


def test_a_target_below_one_step_asks_for_no_replica(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune(*_words(mix, "--gap-p99", "1ms", "--step-tokens", "512", "--quiet")) == 1
    found = capsys.readouterr().out
    assert "replica" not in found and "other targets: at any rate these are missed" in found


@pytest.mark.parametrize(
    ("more", "needed"),
    [
        ((), "no target given"),
        (("--profile", "batch"), "needs a target"),
        ((*TARGETS, "--step-tokens", "100"), "sequence cap (256)"),
        ((*TARGETS, "--storage", "sqlite:///x.db"), "--storage"),
        ((*TARGETS, "--order", "deadline"), "--ttft-target"),
        ((*TARGETS, "--step-tokens", "512", "--trials", "50"), "--trials does nothing with a setting of your own"),
        ((*TARGETS, "--step-tokens", "512", "--seed", "5"), "--seed does nothing with a setting of your own"),
        ((*TARGETS, "--step-tokens", "512", "--current-cap", "64"), "--current-cap does nothing with a setting of"),
    ],
)
def test_bad_flag_is_one_line(
    mix: Path, more: tuple[str, ...], needed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rooftune(*_words(mix, *more), "--quiet") == 2
    output = capsys.readouterr()
    assert output.out == "" and needed in output.err and output.err.count("\n") == 1
