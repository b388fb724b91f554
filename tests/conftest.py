"""Fixtures for every test, and the check that a test which needs ../shared/data runs wherever that folder exists."""

import os
import re
import signal
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"
_SHARED_WORDS = ("shared/data", "shared_data")

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

# No deadline: the machines that run this are busy, and time is not what a property is about. `make check` tries fewer
# examples than `make test`.
settings.register_profile("quick", deadline=None, print_blob=True, max_examples=30)
settings.register_profile("full", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("ROOFTUNE_EXAMPLES", "quick"))

# A shell that starts the tests in the background has them ignore Ctrl-C, and what they start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder ../shared/data (traces, profiles, recorded metrics); skips only where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("needs the folder ../shared/data beside the project")
    return SHARED_DATA


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of the vLLM environment: $ROOFTUNE_VLLM_ENV or .venv-vllm (make vllm-env)."""
    python = Path(os.environ.get("ROOFTUNE_VLLM_ENV") or ROOT / ".venv-vllm") / "bin" / "python"
    if not python.exists():
        pytest.fail(f"no vLLM environment at {python.parents[1]}; run: make vllm-env (or set ROOFTUNE_VLLM_ENV)")
    return python


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whole files of a marker that this run leaves out are not imported: torch alone takes longer than many tests."""
    left_out = [mark for mark in ("engine", "vllm") if f"not {mark}" in config.getoption("-m")]
    if collection_path.suffix != ".py" or not left_out:
        return None
    own = re.search(r"^pytestmark = (.*)$", collection_path.read_text(encoding="utf-8"), re.MULTILINE)
    return True if own and any(f"mark.{mark}" in own[1] for mark in left_out) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that needs the data and is skipped although the data is there has failed."""
    report = yield
    marked = "shared_data" in getattr(item, "fixturenames", ()) or item.get_closest_marker("shared_data") is not None
    return report if hasattr(report, "wasxfail") else _no_skip_beside_the_data(report, marked)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole file that skips itself."""
    report = yield
    return _no_skip_beside_the_data(report, marked=False)


def _no_skip_beside_the_data(report: Report, marked: bool) -> Report:
    reason = str(report.longrepr)
    if report.skipped and SHARED_DATA.is_dir() and (marked or any(word in reason for word in _SHARED_WORDS)):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: skipped although ../shared/data is there: {reason}"
    return report
