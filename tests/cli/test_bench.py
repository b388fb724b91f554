"""``rooftune bench``: figures, their rendering, and the choice of benchmarks."""

import json
import math
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rooftune.policies.commands import BENCH_GROUP, Figure
from rooftune.policies.errors import InputError
from rooftune.tuner.cli import bench
from rooftune.tuner.cli.bench import figures_text, json_line
from rooftune.tuner.cli.main import main
from tests.bench.shared_data import need_shared_data


def quick(short: bool) -> Iterator[Figure]:
    yield Figure("quick_s", 0.5 if short else 4.0, "s", baseline=2.0)
    yield Figure("quick_steps", 12345.0, "steps/s")


def lame(short: bool) -> Iterator[Figure]:
    yield Figure("lame_s", math.nan, "s")


def far(short: bool) -> Iterator[Figure]:
    need_shared_data(Path("/nowhere/shared/data"))
    yield Figure("far_s", 1.0, "s")


@pytest.fixture
def two_benches(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {name: EntryPoint(name, f"{__name__}:{name}", BENCH_GROUP) for name in ("quick", "lame")}
    monkeypatch.setattr(bench, "_benches", lambda: points)


def test_figure_computes_its_ratio() -> None:
    assert Figure("a", 3.0, "s", 2.0).ratio == 1.5
    assert Figure("a", 3.0, "s", 2.0, 0.25).ratio == 0.25
    assert Figure("a", 3.0, "s").ratio is None
    assert Figure("a", 3.0, "s", 0.0).ratio is None


def test_figure_is_finite() -> None:
    with pytest.raises(ValueError, match="must be finite"):
        Figure("a", math.inf, "s")
    with pytest.raises(ValueError, match="baseline is nan"):
        Figure("a", 1.0, "s", math.nan)


def test_json_line_has_exactly_the_five_fields() -> None:
    assert json.loads(json_line(Figure("a", 3.0, "s", 2.0))) == {
        "name": "a",
        "value": 3.0,
        "unit": "s",
        "baseline": 2.0,
        "ratio": 1.5,
    }


def test_table_is_aligned() -> None:
    lines = figures_text([Figure("long_name_s", 0.5, "s", 2.0), Figure("b", 12345.0, "steps/s")]).splitlines()
    assert len(lines) == 3
    assert lines[0].index("unit") == lines[1].index(" s ") + 1 == lines[2].index("steps/s")
    assert "12,345" in lines[2]


@pytest.mark.usefixtures("two_benches")
def test_json_prints_one_line_per_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quick", "--json", "--short"]) == 0
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(figure["name"], figure["value"]) for figure in figures] == [("quick_s", 0.5), ("quick_steps", 12345.0)]


@pytest.mark.usefixtures("two_benches")
def test_full_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["value"] == 4.0


@pytest.mark.usefixtures("two_benches")
def test_list_prints_names_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    captured = capsys.readouterr()
    assert captured.out.split() == ["quick", "lame"]
    assert captured.err == ""


@pytest.mark.usefixtures("two_benches")
def test_an_unknown_name_is_refused_before_the_first_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quick", "nonsense", "--json"]) == InputError.exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "unknown benchmark 'nonsense'; known: quick, lame" in captured.err


@pytest.mark.usefixtures("two_benches")
def test_bench_without_a_number_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "lame", "--json"]) == 70
    assert capsys.readouterr().out == ""


def test_a_bench_without_its_data_is_skipped_with_a_message_unless_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {name: EntryPoint(name, f"{__name__}:{name}", BENCH_GROUP) for name in ("far", "quick")}
    monkeypatch.setattr(bench, "_benches", lambda: points)
    assert main(["bench", "--json"]) == 0
    output = capsys.readouterr()
    assert [json.loads(line)["name"] for line in output.out.splitlines()] == ["quick_s", "quick_steps"]
    assert "bench far: passed over" in output.err
    assert main(["bench", "far"]) == 2


def test_a_bench_without_its_extra_is_skipped_with_a_message_unless_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {"quick": EntryPoint("quick", f"{__name__}:quick", BENCH_GROUP)}
    points["gone"] = EntryPoint("gone", "no_such_library.bench:bench", BENCH_GROUP)
    monkeypatch.setattr(bench, "_benches", lambda: points)
    assert main(["bench", "--json"]) == 0
    assert "bench gone: passed over" in capsys.readouterr().err
    assert main(["bench", "gone"]) == 2
