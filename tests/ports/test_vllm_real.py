"""The port, the reader and the doctor against a real vLLM server, without the hook and with it."""

import threading
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rooftune.policies import wire
from rooftune.policies.commands import COMMAND_GROUP
from rooftune.tuner.cli.main import main
from rooftune.tuner.observe.protocol import ProtocolReader
from rooftune.tuner.observe.window import Window
from rooftune.tuner.ports.base import PortError, PortFault
from rooftune.tuner.ports.http import HttpPort, Timeouts
from rooftune.tuner.ports.vllm.port import Access, Unseen, Use, discover
from rooftune.tuner.ports.vllm.versions import Hook
from tests.vllm.server import TOKEN, Server, make_model, serving

pytestmark = pytest.mark.vllm
POINTS = {"doctor": EntryPoint("doctor", "rooftune.tuner.cli.doctor.command:COMMAND", COMMAND_GROUP)}
PATIENT = Timeouts(30.0, 120.0)


@pytest.fixture(scope="module")
def model(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "model"
    make_model(vllm_python, folder)
    return folder


@pytest.fixture(scope="module")
def hooked(vllm_python: Path, model: Path) -> Iterator[Server]:
    with serving(vllm_python, model, model.parent / "hooked") as server:
        yield server


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    return file


def test_without_the_hook_vllm_is_only_observed(
    vllm_python: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(vllm_python, model, model.parent / "bare", plugin=False) as server:
        server.complete([5, 6, 7], 4)
        found = discover(server.url, timeouts=PATIENT)
        with pytest.raises(PortError) as caught:
            HttpPort(server.url, timeouts=PATIENT).state()
        ended = main(["doctor", "--engine", server.url, "--timeout", "60s"], POINTS)
    assert caught.value.fault is PortFault.NO_PROTOCOL
    assert found.access is Access.OBSERVE_ONLY and found.uses == frozenset(Use) and found.unseen == frozenset(Unseen)
    assert found.version is not None and found.able is not None and found.able.hook is Hook.MOVES and found.able.tried
    assert ended == 1 and "without the hook" in capsys.readouterr().out


def test_reading_under_load_loses_nothing(hooked: Server, token: Path) -> None:
    port = HttpPort(hooked.url, token, PATIENT)
    reader, window = ProtocolReader(port), Window(3600.0)
    window = window.add(reader.read())

    def ask(seed: int) -> None:
        for turn in range(3):
            hooked.complete([10 + (seed * 31 + turn * 7 + at) % 300 for at in range(200 + 300 * seed)], 24)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        window = window.add(reader.read())
    for thread in threads:
        thread.join()
    for _ in range(50):
        reading = reader.read()
        window = window.add(reading)
        if not reading.busy:
            break
    assert not reading.busy and reading.metrics_age_s == 0.0
    assert window.lost_steps == window.lost_requests == 0
    assert window.steps.step.tolist() == list(range(window.steps.step[0], window.steps.step[0] + len(window.steps)))
    rows = window.requests_since(0.0)
    assert len(rows) == 12 and (rows.output_tokens == 24).all() and len(window.demand()) == 12
    computed = rows.prompt_tokens.sum() - rows.cached_tokens.sum() + (rows.output_tokens - 1).sum()
    assert window.steps.computed_tokens.sum() == computed


def test_a_push_through_the_port_is_in_force_for_the_next_prompt(hooked: Server, token: Path) -> None:
    port = HttpPort(hooked.url, token, PATIENT)
    reader = ProtocolReader(port)
    revision = reader.read().state.revision
    knobs = wire.Knobs(step_tokens=256)
    wish = wire.PushRequest(
        knobs=knobs, lease_s=600.0, expected_revision=revision, actor="test", reason="smaller steps"
    )
    answer = port.push(wish)
    assert isinstance(answer, wire.PushAnswer)
    again = port.push(wish)
    assert isinstance(again, wire.Refusal) and again.code == "conflict_revision"
    hooked.complete([7 + at % 400 for at in range(1500)], 2)
    window = Window(3600.0).add(reader.read())
    assert window.steps.computed_tokens[window.steps.revision == answer.revision].max() == 256
    assert isinstance(port.revert(wire.RevertRequest(actor="test", reason="done", block=False)), wire.PushAnswer)
    assert port.state().setting().step_tokens == 2048


def test_the_doctor_passes_it_and_detects_a_wrong_token(
    hooked: Server, token: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["doctor", "--engine", hooked.url, "--timeout", "60s", "--token-file"]
    assert main([*words, str(token)], POINTS) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "vllm 0.32" in out and "takes pushes" in out
    wrong = tmp_path / "wrong"
    wrong.write_text("not-the-token-0123456789")
    wrong.chmod(0o600)  # as a token should be
    assert main([*words, str(wrong)], POINTS) == 1
    assert capsys.readouterr().out.count("\n") == 1
