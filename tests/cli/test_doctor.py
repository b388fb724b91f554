"""``rooftune doctor``: its findings, its exit codes, and that it changes nothing."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from rooftune.policies import wire
from rooftune.policies.commands import COMMAND_GROUP
from rooftune.tuner.cli.doctor import engine as doctor_engine
from rooftune.tuner.cli.main import main
from rooftune.tuner.control.outcome import SignalPart
from rooftune.tuner.control.signals.find import Signal
from rooftune.tuner.control.state.store import StateFile
from rooftune.tuner.ports.base import PortError, PortFault
from rooftune.tuner.ports.http import HttpPort
from tests.control.cycle_records import hold
from tests.engine.server_harness import HTTP, Live, live, soon
from tests.ports.samples import state
from tests.ports.scripted import Script, answer, message, routes
from tests.ports.test_vllm_discovery import vllm
from tests.ports.test_vllm_env import HOOK_POINTS, Env

POINTS = {"doctor": EntryPoint("doctor", "rooftune.tuner.cli.doctor.command:COMMAND", COMMAND_GROUP)}
TOKEN = "tuning-token-0123456789"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    return file


class Doctor:
    """Runs the command and keeps its output."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.line: str | None = None

    def __call__(self, *words: object) -> tuple[int, dict[str, list[str]]]:
        """Exit code, and marks by check in their order."""
        patience = ["--timeout", "30s"] if "--engine" in words else []
        code = main(["doctor", "--json", *patience, *map(str, words)], POINTS)
        document = json.loads(self._capsys.readouterr().out)
        assert document["schema"] == "rooftune.doctor" and document["exit_code"] == code
        self.line, self.findings = document["plugins_line"], document["findings"]
        marks: dict[str, list[str]] = {}
        for one in document["findings"]:
            assert one["text"].isprintable() and (one["mark"] != "bad" or one["remedy"] or "; " in one["text"])
            marks.setdefault(one["check"], []).append(one["mark"])
        return code, marks

    def text(self, check: str) -> str:
        return next(one["text"] for one in self.findings if one["check"] == check)


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    monkeypatch.setattr(doctor_engine, "BETWEEN_S", 0.01)
    return Doctor(capsys)


def complete(server: Live) -> None:
    body = {"model": "letters", "prompt": "a" * 40, "max_tokens": 10}
    assert HTTP.post(f"{server.public}/v1/completions", json=body).status_code == 200
    assert soon(server.idle)


def test_a_healthy_engine_passes(doctor: Doctor, token: Path) -> None:
    with live(tuning_token=token) as server:
        complete(server)
        before = HttpPort(server.public, token).state()
        code, marks = doctor("--engine", server.public, "--token-file", token)
        after = HttpPort(server.public, token).state()
    assert code == 0
    assert {check: found for check, found in marks.items() if found != ["ok"]} == {"headroom": ["note"]}
    assert {"reachable", "protocol", "writes", "blocked", "lease", "knobs", "alive", "rows"} <= set(marks)
    assert (after.revision, after.lease, after.knobs) == (before.revision, before.lease, before.knobs)


def test_a_world_readable_token_is_noted(doctor: Doctor, token: Path) -> None:
    for mode, wanted in ((0o640, None), (0o644, ["note"])):
        token.chmod(mode)
        _, marks = doctor("--engine", "http://127.0.0.1:9", "--token-file", token)
        assert marks.get("token") == wanted
    assert str(token) in doctor.text("token") and TOKEN not in json.dumps(doctor.findings)


def test_the_lease_holder_is_reported(doctor: Doctor, token: Path) -> None:
    with live(tuning_token=token) as server:
        port = HttpPort(server.public, token)
        port.push(
            wire.PushRequest(
                knobs=wire.Knobs(step_tokens=64), lease_s=60.0, expected_revision=0, actor="somebody", reason="why not"
            )
        )
        code, marks = doctor("--engine", server.public, "--token-file", token)
        assert code == 0 and marks["lease"] == ["note"] and "somebody" in doctor.text("lease")
        port.revert(wire.RevertRequest(actor="me", reason="enough"))
        code, marks = doctor("--engine", server.public, "--token-file", token)
        assert code == 1 and marks["blocked"] == ["bad"]
        assert port.state().blocked, "the doctor's read reverted nothing"


def test_a_private_port_without_a_token_is_read_only(doctor: Doctor) -> None:
    with live() as server:
        code, marks = doctor("--engine", server.private)
    assert code == 1 and marks["writes"] == ["bad"] and marks["protocol"] == ["ok"] and marks["rows"] == ["ok"]


@pytest.mark.parametrize(
    ("reply", "check", "code"),
    [
        (answer(401, b"{}"), "token", 1),
        (answer(500, b"{}"), "reachable", 3),
        (answer(200, b"garbage"), "reachable", 3),
        (answer(200, b'{"protocol_version":2}'), "protocol", 1),
        (answer(404, b"{}"), "protocol", 1),
        (answer(302, b"", "location: http://elsewhere"), "protocol", 1),
    ],
)
def test_one_problem_is_one_bad_line(doctor: Doctor, reply: Script, check: str, code: int) -> None:
    with routes({"/tuning/v1/state": reply}) as server:
        ended, marks = doctor("--engine", server.url)
    assert ended == code and marks.pop(check) == ["bad"] and set(marks) <= {"reachable"}


def test_an_unreachable_engine_is_exit_3(doctor: Doctor) -> None:
    code, marks = doctor("--engine", "http://127.0.0.1:9")
    assert code == 3 and marks == {"reachable": ["bad"]}


def test_a_vllm_without_the_hook_gets_limits_and_remedy(doctor: Doctor) -> None:
    with routes(vllm()) as server:
        code, marks = doctor("--engine", server.url)
        assert code == 1 and marks["hook"] == ["bad"] and marks["uses"] == ["note"] and marks["version"] == ["ok"]
        assert "computed_tokens" in doctor.text("unseen")
    with routes(vllm(version=b'{"version":"0.19.0"}')) as server:
        code, marks = doctor("--engine", server.url)
        assert code == 1 and marks["version"] == ["bad"]


def pages(kind: type[wire.Message], **columns: Any) -> Script:
    names = set(kind.model_fields) - set(wire.Columns.model_fields)
    row = {"boot_id": "boot", "now_s": 100.0, "after": -1, "next": -1, "lost": 0} | dict.fromkeys(names, ())
    return message(kind.model_validate(row | columns))


@contextmanager
def engine(first: wire.State, steps: Callable[[int], Script] | None = None) -> Iterator[str]:
    def step_page(connection: socket.socket) -> None:
        after = int(server.received[-1][0].partition("after=")[2].split(" ")[0])
        (steps(after) if steps else pages(wire.StepColumns, after=after, next=after))(connection)

    refused = wire.Refusal(code="conflict_revision", revision=0, message="no")
    answers = {
        "/tuning/v1/state": message(first),
        "/tuning/v1/knobs": message(refused, 409),
        "/tuning/v1/steps": step_page,
        "/tuning/v1/requests": pages(wire.RequestColumns),
    }
    with routes(answers) as server:
        yield server.url


def test_a_read_only_hook_says_why(doctor: Doctor) -> None:
    knobs = (
        {"name": "step_tokens", "mode": "restart", "value": 512, "boot": 512, "min": 1, "max": 512},
        {"name": "order_policy", "mode": "absent"},
    )
    notes = ("read-only: untested with speculative decoding", "absent: order_policy: why")
    with engine(state(engine="vllm", engine_version="0.30.0", knobs=knobs, notes=notes)) as url:
        code, marks = doctor("--engine", url)
    assert code == 1 and marks["knobs"] == ["bad"] and marks["engine_note"] == ["note", "note"]
    assert marks["version"] == ["note"] and "headroom" not in marks


def steps(numbers: tuple[int, ...], ends_s: tuple[float, ...], lost: int = 0) -> Callable[[int], Script]:
    """The page of steps of a second each, by what was asked for; one request runs in each."""
    names = set(wire.StepColumns.model_fields) - set(wire.Columns.model_fields)
    columns: dict[str, Any] = dict.fromkeys(names, (1,) * len(numbers))
    columns |= {"step": numbers, "start_s": tuple(end - 1.0 for end in ends_s), "duration_s": (1.0,) * len(numbers)}
    columns |= {"attention_work": (0.0,) * len(numbers), "kv_used": (0.1,) * len(numbers)}
    columns |= {"waiting": (0,) * len(numbers), "next": numbers[-1], "lost": lost}

    def page(after: int) -> Script:
        nothing = pages(wire.StepColumns, after=after, next=after)
        return nothing if after >= numbers[-1] else pages(wire.StepColumns, **columns)

    return page


def test_rows_that_would_be_lost_are_reported(doctor: Doctor) -> None:
    """The ring has run over and holds three seconds; a controller would read every fifteen."""
    with engine(state(step=10, now_s=99.5), steps((7, 8, 9), (96.0, 98.0, 99.0), lost=7)) as url:
        code, marks = doctor("--engine", url)
    assert code == 1 and marks["rows"] == ["bad"] and "3.0 s" in doctor.text("rows")
    assert marks["alive"] == ["ok"]


def test_a_hung_engine_is_reported(doctor: Doctor) -> None:
    with engine(state(step=1, now_s=160.0), steps((0,), (100.0,))) as url:
        code, marks = doctor("--engine", url)
    assert code == 1 and marks["alive"] == ["bad"] and "60 s" in doctor.text("alive")
    assert marks["rows"] == ["ok"] and marks["signal"] == ["bad"], "and the signal has a section in the runbook"


def test_the_token_over_the_open_network_is_a_note(
    doctor: Doctor, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*words: object, **more: object) -> None:
        raise PortError(PortFault.UNREACHABLE, "no engine at this address; see whether it runs")

    monkeypatch.setattr(doctor_engine, "discover", gone)
    code, marks = doctor("--engine", "http://192.0.2.1:9", "--token-file", token)
    assert code == 3 and marks["encryption"] == ["note"]


# --- a vLLM environment ---


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Env:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.chdir(tmp_path)
    found = Env(tmp_path / "env")
    found.install("vllm", "0.32.0", "[vllm.general_plugins]\nlora = vllm.lora:f\n")
    return found


def test_the_exact_line_names_every_plugin_in_use(doctor: Doctor, env: Env, capsys: pytest.CaptureFixture[str]) -> None:
    env.install("rooftune", "0.1.0", HOOK_POINTS)
    code, marks = doctor("--vllm-env", env.folder)
    assert code == 0 and marks["vllm"] == marks["rooftune"] == ["ok"] and marks["plugins"] == ["note", "note"]
    assert doctor.line == "VLLM_PLUGINS=lora,rooftune"
    assert main(["doctor", "--vllm-env", str(env.folder)], POINTS) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "VLLM_PLUGINS=lora,rooftune", "the last line can be copied"


def test_the_operators_allowlist_is_kept(doctor: Doctor, env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    env.install("rooftune", "0.1.0", HOOK_POINTS)
    doctor("--vllm-env", env.folder, "--vllm-plugins", "theirs")
    assert doctor.line == "VLLM_PLUGINS=theirs,rooftune"
    monkeypatch.setenv("VLLM_PLUGINS", "rooftune,other")
    code, marks = doctor("--vllm-env", env.folder)
    assert doctor.line == "VLLM_PLUGINS=other,rooftune" and marks["plugins"][-1] == "ok" and code == 0


def test_an_incomplete_environment_is_reported(doctor: Doctor, env: Env, tmp_path: Path) -> None:
    code, marks = doctor("--vllm-env", env.folder)
    assert code == 1 and marks["rooftune"] == ["bad"] and marks["vllm"] == ["ok"]
    empty = Env(tmp_path / "empty", "python3.10")
    code, marks = doctor("--vllm-env", empty.folder)
    assert code == 1 and marks["python"] == marks["vllm"] == marks["rooftune"] == ["bad"]


# --- a controller ---


def test_the_controllers_latest_signals_are_shown(doctor: Doctor, tmp_path: Path) -> None:
    with StateFile.own(tmp_path) as found:
        number = found.next_number()
        seen = SignalPart(code=Signal.KV_BOUND.value, evidence={"kv_used": 1.0})
        found.put(hold(number, signals=(seen,)))
        code, marks = doctor("--state", tmp_path)
    assert code == 0 and marks == {"controller": ["ok"], "signal": ["note"]}
    assert "kv_bound" in doctor.text("signal") and str(number) in doctor.text("controller")


def test_a_controller_that_does_not_answer_is_3(doctor: Doctor) -> None:
    code, marks = doctor("--face", "http://127.0.0.1:9")
    assert code == 3 and marks == {"controller": ["bad"]}


# --- usage ---


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--engine"),
        (["--engine", "localhost:8000"], "localhost:8000"),
        (["--token-file", "x"], "--token-file"),
        (["--vllm-env", "/nonexistent"], "/nonexistent"),
        (["--engine", "http://h", "--timeout", "soon"], "--timeout"),
        (["--engine", "http://h", "--token-file", "/nonexistent"], "/nonexistent"),
        (["--state", "/nonexistent"], "/nonexistent"),
    ],
)
def test_bad_arguments_are_one_line_and_2(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words], POINTS) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and named in shown.err
