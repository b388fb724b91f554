"""What every test may use, and the promise that a test which needs ../shared/data runs wherever that folder is."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"
_SHARED_WORDS = ("shared/data", "shared_data")
_skipped_despite_data = pytest.StashKey[list[str]]()

# No deadline: the machines that run this are busy, and time is not what a property is about.
settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")


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


def pytest_configure(config: pytest.Config) -> None:
    """Start the list of broken promises."""
    config.stash[_skipped_despite_data] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note a test that needs the data and was skipped although the data is there."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and SHARED_DATA.is_dir():
        reason = str(report.longrepr)
        wants = "shared_data" in getattr(item, "fixturenames", ()) or item.get_closest_marker("shared_data")
        if wants or any(word in reason for word in _SHARED_WORDS):
            item.config.stash[_skipped_despite_data].append(f"{item.nodeid}: {reason}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """The same for a whole file that skips itself."""
    report = yield
    if report.skipped and SHARED_DATA.is_dir() and any(word in str(report.longrepr) for word in _SHARED_WORDS):
        collector.config.stash[_skipped_despite_data].append(f"{collector.nodeid}: {report.longrepr}")
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skipped test that could have run is a failure of the whole run."""
    if session.config.stash[_skipped_despite_data] and session.exitstatus in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which."""
    broken = config.stash[_skipped_despite_data]
    if broken:
        terminalreporter.section("FAILED: skipped although ../shared/data is there", red=True)
        for line in broken:
            terminalreporter.line(line)
