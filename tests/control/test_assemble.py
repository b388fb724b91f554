"""``run_controller`` with its real parts, a closed port and a manual clock; how it ends."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rooftune.policies.errors import RefusedError
from rooftune.policies.guard import Action, Decision, Reason
from rooftune.tuner.clock import ManualClock
from rooftune.tuner.config import Config, load_config
from rooftune.tuner.control.assemble import Stop, line_of, may_be_there, run_controller, turn
from rooftune.tuner.control.cycle.draft import Draft
from rooftune.tuner.control.cycle.loop import Controller
from rooftune.tuner.control.explain.report import report_of
from rooftune.tuner.control.state.store import StateFile
from tests.control.doubles import proposes, rig

ROOT = Path(__file__).resolve().parents[2]


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config(folder: Path, **changes: Any) -> Config:
    given: dict[str, Any] = {
        "engine": {"url": f"http://127.0.0.1:{closed_port()}", "timeout_s": 1.0},
        "profile": "chat",
        "listen": None,
        "state": str(folder / "state"),
    }
    path = folder / "rooftune.yaml"
    path.write_text(json.dumps(given | changes))
    return load_config(path)


def test_an_uncheckable_freeze_file_counts_as_present(tmp_path: Path) -> None:
    class Gone(type(tmp_path)):  # type: ignore[misc]  # the platform's own kind of path
        def exists(self) -> bool:
            raise OSError(errno.ESTALE, "stale file handle")

    assert may_be_there(Gone(tmp_path / "freeze"))
    assert not may_be_there(None) and not may_be_there(tmp_path / "freeze") and may_be_there(tmp_path)


def test_a_missing_engine_is_waited_for_and_reported(tmp_path: Path) -> None:
    clock, lines = ManualClock(), []
    code = run_controller(config(tmp_path), clock=clock, cycles=3, report=tmp_path / "report", tell=lines.append)
    assert code == 0 and clock.now_s() == 30.0, "three cycles of 15 s begin within 30 s"
    with StateFile.visit(tmp_path / "state") as store:
        records = store.last(10)
    assert [record.number for record in records] == [3, 2, 1]
    assert {record.reason for record in records} == {Reason.UNREACHABLE}
    assert len([line for line in lines if line.startswith("cycle")]) == 1, "each event is reported once"
    page = (tmp_path / "report" / "live.md").read_text()
    assert "unreachable" in page and "| hold |" in page


def test_a_clean_exit_in_live_mode_reports_the_lease(tmp_path: Path) -> None:
    lines: list[str] = []
    run_controller(config(tmp_path, mode="live"), clock=ManualClock(), cycles=1, tell=lines.append)
    assert "goes back by itself" in lines[-1]


def test_a_state_folder_has_one_controller(tmp_path: Path) -> None:
    made = config(tmp_path)
    with StateFile.own(made.state), pytest.raises(RefusedError):
        run_controller(made, clock=ManualClock(), cycles=1, tell=print)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_controller_finishes_its_cycle_and_starts_no_other(tmp_path: Path, kind: signal.Signals) -> None:
    stop = Stop()

    def tell(line: str) -> None:
        if line.startswith("cycle"):
            os.kill(os.getpid(), kind)

    started_with = signal.signal(kind, signal.SIG_DFL)  # not the handlers that nohup or a shell's background set
    try:
        assert run_controller(config(tmp_path), clock=ManualClock(), cycles=50, tell=tell, stop=stop) == 0
        assert stop and signal.getsignal(kind) is signal.SIG_DFL, "handlers are put back"
    finally:
        signal.signal(kind, started_with)
    with StateFile.visit(tmp_path / "state") as store:
        assert [record.number for record in store.last(10)] == [1]


def test_a_closed_terminal_is_ignored_under_nohup(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        kill = partial(os.kill, os.getpid(), signal.SIGHUP)
        assert run_controller(config(tmp_path), clock=ManualClock(), cycles=3, tell=lambda line: kill()) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    with StateFile.visit(tmp_path / "state") as store:
        assert len(store.last(10)) == 3


def test_a_defect_ends_the_controller_and_still_returns_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []

    def stop(self: Controller) -> str:
        stopped.append("stop")
        return "given back"

    def defect(self: Controller, draft: Draft) -> Decision:
        raise ZeroDivisionError

    monkeypatch.setattr(Controller, "stop", stop)
    monkeypatch.setattr(Controller, "_run", defect)
    with pytest.raises(ZeroDivisionError):
        run_controller(config(tmp_path, mode="live"), clock=ManualClock(), cycles=3, tell=lambda line: None)
    assert stopped == ["stop"]


def test_an_overlong_cycle_is_followed_at_once_and_missed_ones_are_skipped() -> None:
    run = rig(proposes(verdict="keep"))
    run.engine.silence()
    begun: list[float] = []

    def slow(name: str) -> None:
        if name == "state":
            begun.append(run.clock.now_s())
            if len(begun) == 2:
                run.clock.sleep(45.0)

    run.port.script = slow
    turn(run.controller, 10.0, run.clock, 5, Stop(), lambda line: None)
    assert begun == [0.0, 10.0, 55.0, 65.0, 75.0]


def test_the_controllers_process_loads_no_heavy_library() -> None:
    """Twin and search, with numba and Optuna, are the child's."""
    code = (
        "import sys, rooftune.tuner.control.assemble as a; "
        "print([m for m in ('torch', 'numba', 'optuna', 'matplotlib', 'sqlalchemy', 'scipy', 'transformers') "
        "if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.stdout.strip() == "[]", answer.stdout + answer.stderr


def test_progress_lines_and_report_tell_the_same_story() -> None:
    run = rig(proposes(step_tokens=512, gain=0.12))
    run.run(10, until=lambda record: record.pushed is not None)
    run.run_trial()
    run.run(2)
    records = run.records
    lines = [line_of(now, before) for before, now in zip([None, *records], records, strict=False)]
    push = next(record for record in records if record.action is Action.PUSH)
    kept = next(r for r in records if r.verify is not None and r.verify.verdict == "better")
    assert f"cycle {push.number}: pushed token budget 512 tokens" in "".join(lines)
    assert f"cycle {kept.number}: keeps the push of cycle {push.number}" in "".join(lines)
    assert "" in lines, "a cycle like the one before it is not worth a line"
    assert all("\n" not in line for line in lines)
    page = report_of(records, "test")
    assert f"| {push.number} | token budget 512 tokens | +12.0 |" in page and "better" in page
    assert f"### Cycle {push.number}" in page and f"### Cycle {kept.number}" in page
    assert report_of([], "test").count("\n") >= 2
    # A push whose answer was lost, or that a kill interrupted, still counts as a push.
    unsaid = push.model_copy(update={"pushed": None, "in_force": records[0].in_force})
    lost = [unsaid if record is push else record for record in records]
    assert f"| {push.number} | token budget 512 tokens | +12.0 |" in report_of(lost, "test")
    gone = [record for record in records if record is not push]
    assert f"| {push.number} | no knob | +12.0 |" in report_of(gone, "test")
