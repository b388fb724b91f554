"""A test that needs ../shared/data may not be skipped if the folder exists: shown on a small project made for it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
MARKERS = "[pytest]\nmarkers =\n    shared_data: needs data\n"

# File -> its only test, or the file that skips itself.
MUST_FAIL = {
    "test_fixture.py": "def test_it(shared_data):\n    pytest.skip('not today')\n",
    "test_marker.py": "@pytest.mark.shared_data\ndef test_it():\n    pytest.skip('not today')\n",
    "test_reason.py": "@pytest.mark.skipif(True, reason='needs ../shared/data')\ndef test_it():\n    pass\n",
    "test_whole_file.py": "pytest.skip('needs ../shared/data', allow_module_level=True)\n",
}
MAY_SKIP = {
    "test_other_reason.py": "def test_it():\n    pytest.skip('no GPU')\n",
    "test_expected.py": "@pytest.mark.shared_data\n@pytest.mark.xfail\ndef test_it():\n    raise AssertionError\n",
}


def run_pytest(folder: Path, files: dict[str, str], with_data: bool) -> subprocess.CompletedProcess[str]:
    tests = folder / "project" / "tests"
    tests.mkdir(parents=True)
    (folder / "project" / "pytest.ini").write_text(MARKERS)
    (tests / "conftest.py").write_text(CONFTEST.read_text())
    for name, body in files.items():
        (tests / name).write_text(f"import pytest\n\n{body}")
    if with_data:
        (folder / "shared" / "data").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ["-q", "-rA", "--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder / "project",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, set[str]]:
    """File -> the words of the summary about it."""
    found: dict[str, set[str]] = {}
    for word, name in re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b.*?(test_\w+\.py)", done.stdout, re.MULTILINE):
        found.setdefault(name, set()).add(word)
    return found


def test_a_skip_beside_the_data_fails(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, MUST_FAIL | MAY_SKIP, with_data=True)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    seen = outcomes(done)
    assert {name for name in MUST_FAIL if seen[name] <= {"FAILED", "ERROR"}} == set(MUST_FAIL), done.stdout
    assert seen["test_other_reason.py"] == {"SKIPPED"}
    assert seen["test_expected.py"] == {"XFAIL"}


def test_skips_without_the_data_do_not_fail(tmp_path: Path) -> None:
    files = MUST_FAIL | {"test_plain.py": "def test_it(shared_data):\n    raise AssertionError('ran without data')\n"}
    done = run_pytest(tmp_path, files, with_data=False)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert outcomes(done) == {name: {"SKIPPED"} for name in files}
