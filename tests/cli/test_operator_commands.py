"""``rooftune pause``, ``resume``, ``revert``: with a controller, without one, over HTTP, straight at an engine."""

import io
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rooftune.policies import wire
from rooftune.policies.errors import UnreachableError
from rooftune.tuner.cli.controller import client
from rooftune.tuner.clock import SystemClock
from rooftune.tuner.control.state import operator
from rooftune.tuner.control.state.store import StateFile
from rooftune.tuner.control.status.log import EventLog
from rooftune.tuner.control.status.server import StatusServer
from rooftune.tuner.control.status.view import About
from rooftune.tuner.ports.fetch import Timeouts
from tests.cli.controller import rooftune
from tests.control.cycle_records import push
from tests.ports.samples import TAKEN, refusal
from tests.ports.scripted import Script, Scripted, answer, message, scripted

TOKEN = "t" * 20


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROOFTUNE_STATE", "ROOFTUNE_ENGINE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture
def running(tmp_path: Path) -> Iterator[StateFile]:
    """A state folder that a controller holds: this process."""
    with StateFile.own(tmp_path / "s") as state:
        yield state


def _folder(tmp_path: Path) -> operator.OperatorRequests:
    with StateFile.visit(tmp_path / "s") as state:
        return operator.read(state)


# --- the state folder -----------------------------------------------------------------------------


def test_a_pause_without_a_controller_makes_the_next_one_start_paused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rooftune("pause", "--state", tmp_path / "s", "--reason", "deploy") == 0
    assert "no controller runs; the next one pushes nothing until" in capsys.readouterr().out
    with StateFile.own(tmp_path / "s") as state:
        asked = operator.read(state).paused
        assert asked is not None and asked.reason == "deploy" and asked.actor.startswith("operator/")
    assert rooftune("resume", "--state", tmp_path / "s") == 0
    assert _folder(tmp_path).paused is None


def test_pause_and_resume_reach_the_controller_that_runs(
    tmp_path: Path, running: StateFile, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rooftune("pause", "--state", tmp_path / "s") == 0
    assert operator.read(running).paused
    assert rooftune("resume", "--state", tmp_path / "s") == 0
    assert not operator.read(running).paused and operator.pending(running)[1] is not None
    assert "pid" in capsys.readouterr().out


def test_a_revert_waits_until_the_controller_has_done_it(
    tmp_path: Path, running: StateFile, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop() -> None:
        while (request := operator.pending(running)[0]) is None:
            threading.Event().wait(0.02)
        operator.mark_done(running, request)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    assert rooftune("revert", "--state", tmp_path / "s", "--wait", "30s") == 0
    thread.join(10)
    assert "reverted by the controller" in capsys.readouterr().out
    assert operator.read(running).blocked


def test_an_unfulfilled_revert_names_the_way_without_a_controller(
    tmp_path: Path, running: StateFile, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rooftune("revert", "--state", tmp_path / "s", "--wait", "50ms") == 3
    assert "rooftune revert --engine URL" in capsys.readouterr().out
    assert operator.pending(running)[0] is not None  # it stays a request
    running.close()
    assert rooftune("revert", "--state", tmp_path / "s") == 1
    assert "no controller runs" in capsys.readouterr().out
    assert _folder(tmp_path).blocked is not None


# --- straight at the engine -----------------------------------------------------------------------


def test_a_revert_at_the_engine_needs_no_controller_and_blocks(token: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(message(TAKEN)) as engine:
        assert rooftune("revert", "--engine", engine.url, "--token-file", token, "--reason", "bad night") == 0
        head, body = engine.received[0]
        assert head.startswith("DELETE /tuning/v1/lease ") and engine.header("Authorization") == f"Bearer {TOKEN}"
        sent = wire.parse(wire.RevertRequest, body)
        assert sent.block and sent.reason == "bad night" and sent.actor.startswith("operator/")
    output = capsys.readouterr().out
    assert "boot setting in force from step 7" in output
    assert f"rooftune resume --engine {engine.url} --token-file {token}" in output


def test_a_resume_at_the_engine(
    token: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOFTUNE_ENGINE_TOKEN_FILE", str(token))
    with scripted(message(TAKEN)) as engine:
        assert rooftune("resume", "--engine", engine.url) == 0
        assert engine.received[0][0].startswith("POST /tuning/v1/resume ")
        assert engine.header("Authorization") == f"Bearer {TOKEN}"
    assert "pushes are allowed again" in capsys.readouterr().out


def test_without_a_controller_a_configuration_is_enough(
    tmp_path: Path, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(message(TAKEN)) as engine:
        config = tmp_path / "c.yaml"
        config.write_text(f"engine: {{url: '{engine.url}', token_file: token}}\nstate: s\n")
        assert rooftune("revert", "--config", config) == 0
        with StateFile.visit(tmp_path / "s") as state:  # blocked, but there is nothing left to do at the engine
            assert operator.read(state).blocked and operator.pending(state) == (None, None)
        assert rooftune("resume", "--config", config) == 0
        assert [head.split()[0] for head, _ in engine.received] == ["DELETE", "POST"]
    with StateFile.visit(tmp_path / "s") as state:
        assert not operator.read(state).blocked and operator.pending(state) == (None, None)


def test_a_resume_after_a_pending_revert_is_done_after_it(
    tmp_path: Path, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the next controller would block the engine, against the operator's latest command."""
    assert rooftune("revert", "--state", tmp_path / "s") == 1  # no controller is there to do it
    with scripted(message(TAKEN)) as engine:
        config = tmp_path / "c.yaml"
        config.write_text(f"engine: {{url: '{engine.url}', token_file: token}}\nstate: s\n")
        assert rooftune("resume", "--config", config) == 0
    with StateFile.visit(tmp_path / "s") as state:
        revert, resume = operator.pending(state)
        assert revert is not None and resume is not None and not operator.read(state).blocked


@pytest.mark.parametrize(
    ("script", "code", "output"),
    [
        (message(refusal("clock_unreadable"), 503), 1, "refused (clock_unreadable)"),
        (answer(401, b"{}"), 1, "token"),
        (answer(200, b"hello"), 3, "engine"),
    ],
)
def test_an_engine_that_refuses_is_reported(
    script: Script, code: int, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(script) as engine:
        assert rooftune("revert", "--engine", engine.url) == code
    err = capsys.readouterr().err
    assert output in err and err.count("\n") == 1


# --- over a controller's pages --------------------------------------------------------------------


@pytest.fixture
def server(running: StateFile, token: Path) -> Iterator[StatusServer]:
    about = About("chat-eu-1", "live", running.instance, 15.0)
    made = StatusServer(about, running, SystemClock(), EventLog(io.StringIO()), "127.0.0.1:0", token)
    made.publish(push(3))
    yield made
    made.close()


def test_pause_resume_and_revert_work_over_http(
    running: StateFile, server: StatusServer, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{server.port}"
    assert rooftune("pause", "--face", url, "--token-file", token, "--reason", "x") == 0
    assert operator.read(running).paused
    assert rooftune("resume", "--face", url, "--token-file", token) == 0
    assert rooftune("revert", "--face", url, "--token-file", token) == 0
    assert operator.read(running).blocked
    capsys.readouterr()
    assert rooftune("status", "--face", url) == 0
    output = capsys.readouterr().out
    assert "runs, reads its engine" in output and "knee" in output and "200 tokens (180 to 230)" in output
    assert rooftune("status", "--face", url, "--json") == 0
    assert json.loads(capsys.readouterr().out)["last"]["number"] == 3


def test_the_status_over_http_when_the_requests_cannot_be_read(
    running: StateFile, server: StatusServer, capsys: pytest.CaptureFixture[str]
) -> None:
    running.keep(operator.KEY, "{")
    assert rooftune("status", "--face", f"http://127.0.0.1:{server.port}") == 0
    assert "operator requests in the state file cannot be read" in capsys.readouterr().out


def test_without_the_token_and_at_a_wrong_address(server: StatusServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune("pause", "--face", f"http://127.0.0.1:{server.port}") == 1
    assert "answers 401" in capsys.readouterr().err
    assert rooftune("pause", "--face", "http://127.0.0.1:9") == 3
    assert rooftune("pause", "--face", "nothing") == 2
    with scripted(answer(404, b'{"error": "not found"}')) as engine:
        capsys.readouterr()
        assert rooftune("status", "--face", engine.url) == 2
    assert "has no /status, so it is no controller" in capsys.readouterr().err
    assert rooftune("pause", "--face", f"http://127.0.0.1:{server.port}", "--reason", "a\nb") == 2
    assert rooftune("revert", "--face", "http://h:1", "--engine", "http://h:2") == 2
    for line in capsys.readouterr().err.splitlines():
        assert line.startswith("rooftune: ")


def test_an_address_without_a_controller_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    server: Scripted
    with scripted(answer(200, b"<html>")) as server:
        assert rooftune("status", "--face", server.url) == 3
    assert "is no controller's" in capsys.readouterr().err


@pytest.mark.parametrize("text", [b'{"data": "x"}', b'{"asked": "resume"}', b"[" * 200_000])
def test_a_200_from_another_server_is_not_taken_for_a_pause(text: bytes) -> None:
    with pytest.raises(UnreachableError):
        client._parsed("http://127.0.0.1:9", "/pause", 200, text, command=True)


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200 x\r\nx-more: ", b"HTTP/1.1 200 x\r\n\r\n"])
def test_a_page_that_drips_forever_is_one_line(
    begun: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then keeps every limit of a single read, in the head as in the body."""
    monkeypatch.setattr(client, "TIMEOUTS", Timeouts(total_s=0.4))

    def drip(connection: socket.socket) -> None:
        connection.sendall(begun)
        while not server.gate.wait(0.05):
            connection.sendall(b" ")

    with scripted(drip) as server:
        assert rooftune("status", "--face", server.url) == 3
    output = capsys.readouterr().err
    assert output.count("\n") == 1 and "timed out after 0.4 s" in output


def test_an_address_with_a_password_is_refused_without_showing_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune("status", "--face", "http://me:secret@127.0.0.1:9") == 2
    assert "secret" not in capsys.readouterr().err
    assert rooftune("status", "--face", "http://127.0.0.1:port") == 2
