"""``rooftune record-steps``: existing steps, steps that arrive meanwhile, and the count of lost ones."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rooftune.policies.commands import COMMAND_GROUP, Terminated
from rooftune.tuner.cli import record_steps
from rooftune.tuner.cli.main import main
from rooftune.tuner.clock import ManualClock
from rooftune.tuner.model.sample_file import read_steps
from rooftune.tuner.observe.protocol import ProtocolReader
from tests.observe.fake_port import FakePort, broken

POINTS = {"record-steps": EntryPoint("record-steps", "rooftune.tuner.cli.record_steps:COMMAND", COMMAND_GROUP)}


def with_steps(count: int, **more: int) -> FakePort:
    port = FakePort(**more)
    for number in range(count):
        port.step(prefill_tokens=number + 1, decode_tokens=2, sequences=3, attention_work=number * 10.0)
    return port


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> FakePort:
    port = with_steps(30, page_rows=7)
    monkeypatch.setattr(port, "close", lambda: None, raising=False)
    monkeypatch.setattr(record_steps, "HttpPort", lambda *_: port)
    monkeypatch.setattr(record_steps, "SystemClock", ManualClock)
    return port


def run(*words: object) -> int:
    return main(["record-steps", "--engine", "http://fake", *map(str, words)], POINTS)


def test_recorded_steps_become_a_file_for_fit(
    port: FakePort, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--out", tmp_path / "steps.csv") == 0
    steps = read_steps(tmp_path / "steps.csv")
    assert steps.prefill_tokens.tolist() == list(range(1, 31)) and steps.decode_tokens.tolist() == [2.0] * 30
    assert steps.attention_work.tolist() == [number * 10.0 for number in range(30)]
    assert "30 steps of 3 to 32 tokens" in capsys.readouterr().out
    assert not any(name not in ("state", "steps", "requests") for name in port.received)


def test_steps_recorded_during_the_read_are_kept_and_overwritten_ones_counted() -> None:
    port, clock = with_steps(5, capacity=8), ManualClock()

    def more(name: str) -> None:
        if name == "state":
            for _ in range(4 if clock.now_s() < 1.9 else 12):
                port.step()

    port.before = more
    rows, lost, code = record_steps.record(ProtocolReader(port), clock, 2.0)
    assert code == 0
    assert clock.now_s() == 2.0
    # Four looks with four new steps each, then one with twelve of which the ring holds eight.
    assert (len(rows), lost) == (8 + 3 * 4 + 8, 1 + 4)
    assert rows.step.tolist() == sorted(set(rows.step.tolist()))


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_an_interrupted_wait_keeps_the_steps_so_far(
    stop: type[KeyboardInterrupt], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port, clock = with_steps(5), ManualClock()

    def interrupt(name: str) -> None:
        if clock.now_s() > 0.0:
            raise stop

    port.before = interrupt
    monkeypatch.setattr(port, "close", lambda: None, raising=False)
    monkeypatch.setattr(record_steps, "HttpPort", lambda *_: port)
    monkeypatch.setattr(record_steps, "SystemClock", lambda: clock)
    assert run("--out", tmp_path / "steps.csv", "--for", "60s") == code
    assert len(read_steps(tmp_path / "steps.csv")) == 5


def test_no_steps_no_answer_or_an_unusable_file_is_one_line(
    port: FakePort, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--out", tmp_path / "nowhere" / "steps.csv") == 2

    def gone(name: str) -> None:
        raise broken()

    port.before = gone
    assert run("--out", tmp_path / "steps.csv") == 3
    port.before = lambda name: None
    port.restart("second")
    assert run("--out", tmp_path / "steps.csv") == 2
    assert len(capsys.readouterr().err.splitlines()) == 3 and not (tmp_path / "steps.csv").exists()
