"""A test that needs ../shared/data may not be skipped where the folder is: shown on a project made for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
MARKERS = "[pytest]\nmarkers =\n    shared_data: needs data\n"

BODIES = {
    "fixture": "def test_a(shared_data):\n    pytest.skip('not today')\n",
    "marker": "@pytest.mark.shared_data\ndef test_a():\n    pytest.skip('not today')\n",
    "reason": "@pytest.mark.skipif(True, reason='needs ../shared/data')\ndef test_a():\n    pass\n",
    "whole file": "pytest.skip('needs ../shared/data', allow_module_level=True)\n",
}


def run_pytest(folder: Path, body: str, with_data: bool) -> subprocess.CompletedProcess[str]:
    tests = folder / "project" / "tests"
    tests.mkdir(parents=True)
    (folder / "project" / "pytest.ini").write_text(MARKERS)
    (tests / "conftest.py").write_text(CONFTEST.read_text())
    (tests / "test_it.py").write_text(f"import pytest\n\ndef test_other():\n    pass\n\n{body}")
    if with_data:
        (folder / "shared" / "data").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder / "project",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("kind", BODIES)
def test_skip_beside_the_data_fails_the_run(tmp_path: Path, kind: str) -> None:
    done = run_pytest(tmp_path, BODIES[kind], with_data=True)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "skipped although ../shared/data is there" in done.stdout


def test_skip_without_the_data_is_no_failure(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "def test_a(shared_data):\n    pass\n", with_data=False)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "1 skipped" in done.stdout


def test_skip_for_another_reason_is_no_failure(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "def test_a():\n    pytest.skip('no GPU')\n", with_data=True)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
