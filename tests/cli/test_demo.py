"""The demo: its plan for a machine's speed, its output, and that nothing is left running."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rooftune.policies.commands import COMMAND_GROUP
from rooftune.policies.errors import InputError, RefusedError
from rooftune.policies.guard import Action, Reason
from rooftune.policies.request import Setting
from rooftune.tuner.bench.children import Follower
from rooftune.tuner.cli.demo.plan import (
    DOCUMENT_EVERY,
    Bounds,
    Plan,
    Speed,
    bounds_of,
    plan_of,
    speed_of,
    traffic_csv,
    unsteadiness,
)
from rooftune.tuner.cli.demo.story import asked_for, closing, happened, opening, settled, status
from rooftune.tuner.cli.main import main
from rooftune.tuner.control.status.log import outcome_fields
from tests.bench.test_children import gone
from tests.control.cycle_records import figures, fit, hold, push, verify
from tests.control.fake_window import MODEL, Ask, chat, run

ROOT = Path(__file__).resolve().parents[2]
LAPTOP, CARD = Speed(0.02, 5e-4), Speed(0.003, 2e-5)


# --- the plan ---


@pytest.mark.parametrize("speed", [LAPTOP, CARD, Speed(0.25, 4e-3), Speed(0.0095, 4e-5)])
def test_a_document_stalls_every_stream_at_the_default(speed: Speed) -> None:
    plan = plan_of(speed, boot_tokens=2048, model_tokens=8192)
    stall_s = speed.decode_s + speed.prompt_s * min(plan.document_tokens, 2048)
    assert stall_s > 4.0 * speed.decode_s
    assert 0 < plan.document_tokens <= 0.6 * 8192 and plan.answer_tokens >= 8


def test_targets_lie_between_the_usual_gap_and_a_documents() -> None:
    asks = chat(1, 4, 20, output=30) + [Ask(1.0 + 2.0 * at, 9000, 8) for at in range(10)]
    rows = run(asks, Setting(8192, max_running=32)).requests
    bounds = bounds_of(rows)
    usual, stalled = np.median(rows.longest_gap_s), rows.longest_gap_s.max()
    assert 1.5 * usual < bounds.gap_s < stalled / 1.5
    assert 0.1 < float((rows.longest_gap_s > bounds.gap_s).mean()) < 0.6, "the default breaks them for some"
    assert bounds.ttft_s >= float(np.quantile(rows.ttft_s, 0.9))
    with pytest.raises(RefusedError, match="too busy"):
        bounds_of(rows.select(np.arange(10)))


def test_the_load_is_below_the_machines_sequential_rate() -> None:
    plan = plan_of(LAPTOP, 2048, 8192)
    rows = np.loadtxt(traffic_csv(plan, 600.0, seed=1).splitlines()[1:], delimiter=",")
    busy_s = LAPTOP.prompt_s * rows[:, 1].sum() + LAPTOP.decode_s * rows[:, 2].sum() / 3.0
    assert 0.5 < busy_s / 600.0 < 0.85
    assert len(rows) / 600.0 == pytest.approx(plan.rate_rps, rel=0.15)
    assert (rows[:, 1] > 200).sum() == len(rows) // DOCUMENT_EVERY
    assert (np.diff(rows[:, 0]) >= 0).all()


def test_an_invalid_speed_is_refused() -> None:
    for bad in (0.0, float("nan"), 61.0):
        with pytest.raises(InputError):
            Speed(bad, 1e-3)


def test_the_speed_is_read_from_step_records() -> None:
    probes = [Ask(0.0, 16, 4), Ask(5.0, 32, 24), Ask(10.0, 256, 2), Ask(15.0, 1024, 2)]
    speed = speed_of(run(probes, Setting(2048, max_running=32)).steps)
    assert speed.decode_s == pytest.approx(0.0095, rel=0.05)
    assert speed.prompt_s == pytest.approx(MODEL.slope_s_per_token, rel=0.3)
    with pytest.raises(RefusedError, match="probes"):
        speed_of(run(probes, Setting(512, max_running=32)).steps)


def test_the_pace_tells_a_busy_machine_from_a_steady_one() -> None:
    steps = run(chat(1, 4, 120, output=30), Setting(2048, max_running=32)).steps
    assert unsteadiness(steps, MODEL) < 1.2
    half = np.arange(len(steps)) >= len(steps) // 2
    disturbed = replace(steps, duration_s=np.where(half, 2.5, 1.0) * steps.duration_s)
    assert unsteadiness(disturbed, MODEL) == pytest.approx(2.5, rel=0.15)
    assert np.isnan(unsteadiness(steps.select(np.arange(20)), MODEL))


def test_other_work_on_the_machine_lowers_the_load() -> None:
    probes = [Ask(0.0, 16, 4), Ask(5.0, 32, 24), Ask(10.0, 256, 2), Ask(15.0, 1024, 2)]
    steps = run(probes, Setting(2048, max_running=32)).steps
    third = (steps.decode_tokens > 0) & (np.arange(len(steps)) % 3 == 0)
    shared = replace(steps, duration_s=np.where(third, 3.0, 1.0) * steps.duration_s)
    assert speed_of(shared).decode_s > 1.4 * speed_of(steps).decode_s


# --- the story ---


def event(record: Any) -> dict[str, Any]:
    return json.loads(json.dumps(outcome_fields(record, "rooftune/x")))  # type: ignore[no-any-return]  # a JSON object


def test_the_log_is_followed_line_by_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    follower = Follower(path)
    assert list(follower.new()) == []
    path.write_text('a warning\n{"event": "stop"}\n{"cycle": 1, "reason": "idle"}\n{"cycle": 2, ')
    assert [one["cycle"] for one in follower.new()] == [1]
    with path.open("a") as file:
        file.write('"reason": "idle"}\n')
    assert [one["cycle"] for one in follower.new()] == [2] and list(follower.new()) == []


def test_events_have_a_line_and_non_events_have_none() -> None:
    pushed = happened(event(push(3)))
    assert pushed is not None and "step_tokens=1024" in pushed
    assert happened(event(hold(4, Reason.SEARCHING))) is None
    kept = happened(event(hold(5, Reason.NULL_RESULT, verify=verify(3, verdict="better"))))
    assert kept is not None and "cycle 3" in kept
    assert "90%" in status(event(hold(4, Reason.SEARCHING)))


def test_it_is_settled_when_a_push_has_proved_itself_and_nothing_better_is_found() -> None:
    better = event(hold(5, Reason.DWELL, verify=verify(3, verdict="better")))
    nothing, searching = event(hold(6, Reason.NULL_RESULT)), event(hold(6, Reason.SEARCHING))
    assert settled([better, nothing])
    assert not settled([better, searching]) and not settled([nothing]) and not settled([better])
    assert settled([better, *[searching] * 15]) and not settled([better, *[searching] * 14])


def test_the_end_shows_before_and_after() -> None:
    records = [
        hold(1, Reason.SEARCHING, observed=figures(attainment=0.4)),
        push(2, observed=figures(attainment=0.45)),
        hold(3, Reason.VERIFYING, observed=figures(attainment=0.8), fit=fit()),
        hold(4, Reason.NULL_RESULT, observed=figures(attainment=0.95), verify=verify(2, verdict="better")),
    ]
    text = closing(records)
    assert "knee" in text and "200 tokens (180 to 230)" in text
    assert text.index("45 %") < text.index("95 %") and "why (cycle 4):" in text
    reverted = hold(5, Reason.VERDICT_WORSE, action=Action.REVERT, observed=figures(attainment=0.3))
    boot = hold(6, Reason.TOO_LITTLE_DATA, observed=figures(attainment=0.5))
    text = closing([*records[:3], reverted, boot])
    assert "80 %" in text and "30 %" not in text and "50 %" not in text and "taken back" in text
    assert "too busy" not in text and "too busy" not in closing([*records[:3], reverted, boot], 1.2)
    assert "too busy with other work" in closing([*records[:3], reverted, boot], 2.4)
    assert "too busy" not in closing(records, 2.4), "a push that proved itself needs no excuse"
    nothing = closing([hold(1, Reason.SEARCHING)])
    assert "nothing was pushed" in nothing and "default" not in nothing


def test_the_opening_prints_a_curl_line_to_chat() -> None:
    text = opening(LAPTOP, Plan(1.5, 1800, 40), "http://127.0.0.1:8000", "smollm2-135m")
    line = next(line for line in text.splitlines() if line.strip().startswith("curl"))
    found = re.search(r"-d '(.*)'$", line)
    assert found is not None and json.loads(found[1])["model"] == "smollm2-135m"
    assert "within 1.5 s" in asked_for(Bounds(1.5, 0.2)) and "above 200 ms" in asked_for(Bounds(1.5, 0.2))


# --- the whole ---


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "rooftune.tuner.cli.main", "demo", "--model", "fake:8b-2tbs"]
    places = ["--work", str(folder / "work"), "--out", str(folder / "report")]
    return subprocess.Popen(
        [*command, *places, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hears_ctrl_c,
    )


def _hears_ctrl_c() -> None:
    """A shell without job control starts background processes with Ctrl-C ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def processes_of(folder: Path) -> list[int]:
    """Processes whose command names the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder / "work") in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_the_demo_runs_without_a_model_and_leaves_a_report_and_nothing_else(tmp_path: Path) -> None:
    out, err = start(tmp_path, "--span", "25s").communicate(timeout=300)
    assert "report:" in out and "live steps: a step takes" in out, err
    assert (tmp_path / "report" / "live.md").read_text().startswith("# Live run")
    assert "chat with it meanwhile" in err and "Traceback" not in err + out
    assert processes_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_demo_stops_everything_it_started(tmp_path: Path, kind: signal.Signals) -> None:
    demo = start(tmp_path, "--span", "200s")
    assert demo.stderr is not None
    for line in demo.stderr:
        if line.startswith("cycle 1"):
            break
    children = [pid for pid in processes_of(tmp_path) if pid != demo.pid]
    assert len(children) >= 3, "engine, client and controller"
    demo.send_signal(kind)
    started_s = time.monotonic()
    assert demo.wait(120) == (143 if kind is signal.SIGTERM else 130)
    assert all(gone(pid) for pid in children), time.monotonic() - started_s
    demo.stderr.close()


def test_a_second_demo_leaves_the_first_ones_folder_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = {"demo": EntryPoint("demo", "rooftune.tuner.cli.demo.command:COMMAND", COMMAND_GROUP)}
    (tmp_path / "token").write_text("of the first one")
    first = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(first, fcntl.LOCK_EX)
        assert main(["demo", "--model", "fake:8b-2tbs", "--work", str(tmp_path), "--quiet"], points) == 2
    finally:
        os.close(first)
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "another demo" in shown.err and str(tmp_path) in shown.err
    assert (tmp_path / "token").read_text() == "of the first one" and os.listdir(tmp_path) == ["token"]


@pytest.mark.parametrize(("words", "named"), [(["--config", "none.yaml"], "none.yaml"), (["--span", "soon"], "--span")])
def test_bad_flags_are_one_line_and_start_nothing(
    words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {"demo": EntryPoint("demo", "rooftune.tuner.cli.demo.command:COMMAND", COMMAND_GROUP)}
    assert main(["demo", "--model", "fake:8b-2tbs", "--work", str(tmp_path), *words], points) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and named in shown.err and shown.out == ""
    assert list(tmp_path.iterdir()) == []
