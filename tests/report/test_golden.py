"""The same record gives the same bytes. After a wanted change: ROOFTUNE_UPDATE_GOLDEN=1 pytest tests/report."""

import json
import os
from pathlib import Path

import pytest

from rooftune.tuner.record import json_text
from rooftune.tuner.report.folder import report_files
from rooftune.tuner.report.render import summary
from tests.report.records import record_from_json, record_values

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
RECORD = GOLDEN / "record.json"


def _renderings() -> dict[str, str]:
    record = record_from_json(RECORD.read_text(encoding="utf-8"), str(RECORD))
    files = report_files(record)
    return {"index.html": files["index.html"], "report.md": files["report.md"], "summary.txt": summary(record) + "\n"}


if os.environ.get("ROOFTUNE_UPDATE_GOLDEN"):
    RECORD.write_text(json_text(record_from_json(json.dumps(record_values()), "golden"), indent=1), encoding="utf-8")
    for name, text in _renderings().items():
        (GOLDEN / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", ["index.html", "report.md", "summary.txt"])
def test_rendering_is_the_stored_one(name: str) -> None:
    assert _renderings()[name] == (GOLDEN / name).read_text(encoding="utf-8")


def test_record_survives_a_round_trip() -> None:
    text = RECORD.read_text(encoding="utf-8")
    assert json_text(record_from_json(text, "golden"), indent=1) == text


def test_rendering_twice_is_the_same() -> None:
    assert _renderings() == _renderings()
