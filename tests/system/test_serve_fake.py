"""``rooftune serve`` as a process: what it prints, what it refuses, how it ends. The engine is a fake one."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path

import httpx
import pytest

from rooftune.engine.server import command as server_command
from rooftune.engine.server.command import FAKE_PROMPT_VOCAB_TOKENS
from rooftune.policies.commands import COMMAND_GROUP
from rooftune.tuner.cli.main import main
from tests.engine.fake_tokens import expected_tokens
from tests.links import import_path

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "tuning-token-0123456789"
POINTS = {"serve": EntryPoint("serve", "rooftune.engine.cli:SERVE", COMMAND_GROUP)}
pytestmark = pytest.mark.slow
# This checkout's command, whether or not it is installed.
MAIN = """
import sys
from importlib.metadata import EntryPoint
from rooftune.tuner.cli.main import main
sys.exit(main(sys.argv[1:], {"serve": EntryPoint("serve", "rooftune.engine.cli:SERVE", "rooftune.commands")}))
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", MAIN, "serve", *words]


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The process and the lines it printed until it was ready."""
    process = subprocess.Popen(
        command("--model", "fake:8b-2tbs", "--port", "0", *words),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": import_path(), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        lines = [process.stdout.readline().rstrip() for _ in range(3)]
        yield process, lines
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def url(lines: list[str]) -> str:
    """The public address out of "model 'x' answers at http://...:N/v1"."""
    return lines[1].rpartition(" ")[2].removesuffix("/v1")


def test_sigterm_finishes_requests_in_flight_and_exits_with_0() -> None:
    with serving() as (process, lines):
        assert lines[2].startswith("no tuning routes")
        body = {"prompt": [1, 2, 3], "max_tokens": 40, "seed": 3, "stream": True, "return_token_ids": True}
        with httpx.stream("POST", f"{url(lines)}/v1/completions", json=body, timeout=60) as answer:
            events = answer.iter_lines()
            first = next(events)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in events if line]
        assert rest[-1] == "data: [DONE]" and len([first, *rest]) == 41
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "rooftune: draining, a second signal stops at once\n"


def test_answers_are_the_fake_engines() -> None:
    with serving("--served-name", "mine") as (process, lines):
        body = {"model": "mine", "prompt": [1, 2, 3], "max_tokens": 5, "seed": 3, "return_token_ids": True}
        choice = httpx.post(f"{url(lines)}/v1/completions", json=body, timeout=60).json()["choices"][0]
        assert choice["token_ids"] == expected_tokens([1, 2, 3], 5, 3, 2 * FAKE_PROMPT_VOCAB_TOKENS)
        assert choice["text"] == "".join(f" {token}" for token in choice["token_ids"])
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_a_second_signal_stops_at_once_with_1() -> None:
    with serving() as (process, lines):
        body = {"prompt": [1, 2, 3], "max_tokens": 100_000, "stream": True}
        with httpx.stream("POST", f"{url(lines)}/v1/completions", json=body, timeout=60) as answer:
            events = answer.iter_lines()
            next(events)
            process.send_signal(signal.SIGTERM)
            assert process.stdout is not None
            assert process.stdout.readline().startswith("rooftune: draining")
            process.send_signal(signal.SIGTERM)
            assert '"engine_stopped"' in [line for line in events if line][-1]
        assert process.wait(60) == 1
        assert "unfinished" in process.stdout.read()


def test_tuning_with_a_token_on_the_public_port(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    with serving("--tuning-token-file", str(file), "--max-step-tokens", "512") as (_, lines):
        assert lines[2].endswith("/tuning/v1 (read and write, with the token)")
        assert httpx.get(f"{url(lines)}/tuning/v1/state").status_code == 401
        state = httpx.get(f"{url(lines)}/tuning/v1/state", headers={"Authorization": f"Bearer {TOKEN}"}).json()
        assert state["envelope"]["ceiling_tokens"] == 512 and state["model"] == "fake:8b-2tbs"


def test_without_a_token_only_a_private_socket_shows_the_state(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sock"
    with serving("--tuning-socket", str(path)) as (process, lines):
        assert "read-only" in lines[2]
        assert httpx.get(f"{url(lines)}/tuning/v1/state").status_code == 404
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://engine") as client:
            assert client.get("/tuning/v1/state").json()["revision"] == 0
            assert client.request("DELETE", "/tuning/v1/lease").status_code == 403
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not path.exists()


BAD = [
    (["--model", "fake:nothing"], "fake:8b-2tbs"),
    (["--max-step-tokens", "0"], "--max-step-tokens"),
    (["--step-tokens", "9999"], "--step-tokens"),
    (["--max-running", "0"], "--max-running"),
    (["--max-queue", "-1"], "--max-queue"),
    (["--kv-blocks", "many"], "--kv-blocks"),
    (["--kv-blocks", "0"], "--kv-blocks"),
    (["--block-tokens", "0"], "--block-tokens"),
    (["--chunk-cap-tokens", "-1"], "--chunk-cap-tokens"),
    (["--max-body-bytes", "1"], "body limit"),
    (["--max-prompt-tokens", "-1"], "--max-prompt-tokens"),
    (["--client-timeout", "0"], "--client-timeout"),
    (["--drain", "-1"], "--drain"),
    (["--drain", "nan"], "--drain"),
    (["--port", "70000"], "--port"),
    (["--tuning-port", "-1"], "--tuning-port"),
    (["--tuning-port", "0", "--tuning-socket", "x"], "exclude"),
    (["--host", "256.1.1.1"], "--host"),
    (["--host", "192.0.2.1"], "192.0.2.1"),
    (["--api-key-file", "/nonexistent"], "token file"),
    (["--tuning-token-file", "/dev/null"], "token file"),
    (["--tuning-socket", "/nonexistent/x"], "/nonexistent/x"),
    (["--nothing"], "--nothing"),
]


@pytest.mark.parametrize(("words", "named"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_flags_are_one_line_and_exit_2(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: every one of them is found before anything is started."""
    monkeypatch.setattr(server_command, "run", lambda *_, **__: pytest.fail("it would have started"))
    assert main(["serve", "--model", "fake:8b-2tbs", "--port", "0", *words], POINTS) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and named in shown.err, shown.err


def test_a_taken_port_is_one_line_and_exit_2() -> None:
    with serving() as (_, lines):
        port = url(lines).rpartition(":")[2]
        words = command("--model", "fake:8b-2tbs", "--port", port)
        second = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert second.returncode == 2 and second.stderr.count("\n") == 1 and port in second.stderr
