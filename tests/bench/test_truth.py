"""The page of truth: each placeholder gets its figure, and only figures that a bench prints."""

import json
import re
from pathlib import Path

import pytest

from rooftune.policies.commands import Figure
from rooftune.policies.errors import InputError
from tests.bench.truth import BENCHES, PAGE, main, page, read_figures

DOCS = Path(__file__).resolve().parents[2] / "docs" / "truth.md"
FIGURES = {
    "one-bench": [
        Figure("error", 0.04336, "fraction", baseline=0.05),
        Figure("wrong", 3, "of 55, really"),
        Figure("a_64_ttft_p50", 0.397, "s, out of bounds", baseline=0.211),
        Figure("a_64_good_s2", 60.66, "points, out of bounds", baseline=78.43),
        Figure("b_64_gap_p95", 0.0117, "s", baseline=0.0116),
        Figure("slow_ttft", 1.5, "s", baseline=3.0),
    ]
}


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("error:pct", "4.3 %"),
        ("error:signed", "+4.3 %"),
        ("error:fine", "4.34 %"),
        ("error:basepct", "5.0 %"),
        ("wrong:of", "3 of 55"),
        ("a_64_ttft_p50:time", "397 ms"),
        ("slow_ttft:time", "1.50 s"),
    ],
)
def test_a_place_becomes_its_figure(place: str, shown: str) -> None:
    assert page(FIGURES, f"before [[one-bench:{place}]] after") == f"before {shown} after"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("one-bench:no_such:pct", "prints no figure 'no_such'"),
        ("other:error:pct", "bench 'other'"),
        ("one-bench:error:furlong", "'furlong' is unknown"),
        ("one-bench:wrong:basepct", "has no baseline"),
    ],
)
def test_a_figure_that_no_bench_prints_ends_the_run(place: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        page(FIGURES, f"[[{place}]]")


def test_figures_out_of_bounds_are_listed_beside_the_measured_ones() -> None:
    listed = page(FIGURES, "[[one-bench:out-of-bounds]]").splitlines()[2:]
    assert listed == ["| a_64_ttft_p50 | 397 ms | 211 ms |", "| a_64_good_s2 | 60.7 points | 78.4 points |"]


def test_the_worst_cells_come_first() -> None:
    listed = page(FIGURES, "[[one-bench:worst-cells]]").splitlines()[2:]
    assert listed == ["| slow_ttft | 1.50 s | 3.00 s | -50 % |", "| b_64_gap_p95 | 11.7 ms | 11.6 ms | +1 % |"]


def test_figures_come_from_files_as_the_benches_print_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in BENCHES:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"name": "x", "value": 1.0, "unit": "s"}) + "\n")
    assert read_figures(tmp_path)["rtx4090"] == [Figure("x", 1.0, "s")]
    assert main([str(tmp_path / "out.md"), "--from", str(tmp_path)]) == 2
    assert "prints no figure" in capsys.readouterr().err and not (tmp_path / "out.md").exists()
    (tmp_path / "why.jsonl").unlink()
    with pytest.raises(InputError, match="rooftune bench why --json"):
        read_figures(tmp_path)


def test_the_committed_page_matches_the_template() -> None:
    """After a change of the words, run the benches again: python -m tests.bench.truth docs/truth.md"""
    words = re.split(r"\[\[[^\]]+\]\]", PAGE.read_text())
    committed = DOCS.read_text()
    place = 0
    for part in words:
        found = committed.find(part, place)
        assert found >= 0, f"docs/truth.md lacks {part[:60]!r}"
        place = found + len(part)
    assert "[[" not in committed
