"""axe-core in Chromium finds nothing on the stored page. What it needs stands in docs/report-accessibility.md."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "golden" / "index.html"
MODULES = os.environ.get("ROOFTUNE_AXE", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("node") is None or not Path(MODULES, "node_modules", "axe-core").is_dir(),
        reason="needs node, and ROOFTUNE_AXE naming a folder with axe-core and playwright-core (.ci/browser FOLDER)",
    ),
]


def checked(page: Path) -> list[dict[str, Any]]:
    env = os.environ | {"NODE_PATH": f"{MODULES}/node_modules"}
    command = ["node", str(HERE / "axe.cjs"), str(page)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: list[dict[str, Any]] = json.loads(done.stdout)
    return answer


def test_no_violation_no_external_request_and_nothing_scrolls_sideways() -> None:
    results = checked(PAGE)
    assert [result["width"] for result in results] == [1280, 390]
    for result in results:
        assert result["violations"] == []
        assert set(result["undecided"]) <= {"color-contrast"}
        assert result["external_requests"] == 0 and result["sideways_px"] == 0


def test_the_check_detects_violations(tmp_path: Path) -> None:
    broken = tmp_path / "index.html"
    text = PAGE.read_text(encoding="utf-8")
    assert '<html lang="en">' in text
    broken.write_text(text.replace('<html lang="en">', "<html>"), encoding="utf-8")
    assert any("html-has-lang" in str(result["violations"]) for result in checked(broken))
