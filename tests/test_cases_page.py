"""``docs/cases.md`` names a test for every case, and every test that it names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) \|(.*)\|$", PAGE, re.MULTILINE)
EXPECTED = [1, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 17, 18, 20, 21, 23, 25, 47, 48, 49, 51, 53]


def test_every_case_of_the_controller_has_one_row() -> None:
    numbers = [int(number) for number, _ in ROWS]
    assert set(EXPECTED) <= set(numbers) and numbers == sorted(set(numbers))
    for number, text in ROWS:
        assert "::" in text or "*open*" in text or "cannot" in text, f"case {number} says nothing"


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) >= 15
    for file, test in named:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {test}", source, re.MULTILINE), f"{file}::{test}"
