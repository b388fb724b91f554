"""Port, reader and window against our own engine: over HTTP with the real server, and by the ring of a real desk."""

import random
import threading
from pathlib import Path

import pytest

from rooftune.engine.fake import FakeRunner, ManualClock
from rooftune.engine.interface import GenerationRequest
from rooftune.engine.options import EngineOptions
from rooftune.engine.running import RunningEngine
from rooftune.policies import wire
from rooftune.policies.request import Setting
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.observe.protocol import ProtocolReader
from rooftune.tuner.observe.window import Window
from rooftune.tuner.ports.base import PortError, PortFault
from rooftune.tuner.ports.http import HttpPort, Timeouts
from tests.engine.server_harness import HTTP, LetterRunner, Live, live, soon

TOKEN = "tuning-token-0123456789"
PATIENT = Timeouts(30.0, 60.0)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    return file


def complete(server: Live, prompt_tokens: int, tokens: int, times: int = 1) -> None:
    body = {"model": "letters", "prompt": "a" * prompt_tokens, "max_tokens": tokens, "seed": 1}
    for _ in range(times):
        assert HTTP.post(f"{server.public}/v1/completions", json=body).status_code == 200


def test_nothing_is_lost_while_traffic_runs(token: Path) -> None:
    with live(tuning_token=token) as server:
        port = HttpPort(server.public, token, PATIENT)
        reader, window = ProtocolReader(port), Window(600.0)
        threads = [threading.Thread(target=complete, args=(server, 40 + 9 * n, 60, 5)) for n in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            window = window.add(reader.read())
        for thread in threads:
            thread.join()
        assert soon(server.idle)
        reading = reader.read()
        window = window.add(reading)
        assert not reading.busy and reading.metrics_age_s == 0.0 and reading.in_system == 0
    assert window.steps.step.tolist() == list(range(reading.state.step))
    assert window.requests.sequence.tolist() == list(range(20)) and window.lost_steps == window.lost_requests == 0
    tokens = window.requests.prompt_tokens.sum() + window.requests.output_tokens.sum() - 20
    assert window.steps.computed_tokens.sum() == tokens - window.requests.cached_tokens.sum()
    assert len(window.demand()) == 20


def test_a_push_is_accepted_refused_and_reverted(token: Path) -> None:
    with live(tuning_token=token, step_tokens=512) as server:
        port = HttpPort(server.public, token, PATIENT)
        reader, window = ProtocolReader(port), Window(600.0)
        complete(server, 100, 5)

        def push(tokens: int, revision: int, lease_s: float = 60.0) -> wire.PushAnswer | wire.Refusal:
            knobs = wire.Knobs(step_tokens=tokens)
            return port.push(
                wire.PushRequest(knobs=knobs, lease_s=lease_s, expected_revision=revision, actor="test", reason="why")
            )

        taken = push(32, 0)
        assert isinstance(taken, wire.PushAnswer) and taken.revision == 1
        refused = [push(64, 0), push(513, 1), push(64, 1, lease_s=80_000.0)]
        assert [answer.code for answer in refused if isinstance(answer, wire.Refusal)] == [
            "conflict_revision",
            "outside_envelope",
        ]
        complete(server, 100, 5)
        reading = reader.read()
        window = window.add(reading)
        assert reading.state.setting().step_tokens == 64 and reading.state.lease is not None
        assert set(window.steps.budget_tokens[window.steps.revision == reading.state.revision]) == {64}
        since_s = window.in_force_from(reading.state.revision)
        assert (len(window.requests), len(window.requests_since(since_s))) == (2, 1)
        assert isinstance(port.revert(wire.RevertRequest(actor="test", reason="enough")), wire.PushAnswer)
        assert reader.read().state.blocked
        again = push(64, reader.read().state.revision)
        assert isinstance(again, wire.Refusal) and again.code == "blocked_by_revert"
        assert isinstance(port.resume(wire.ResumeRequest(actor="test", reason="go on")), wire.PushAnswer)
        assert not port.state().blocked


def test_a_wrong_token_and_an_engine_without_one(token: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("another-token-0123456789")
    with live(tuning_token=token) as server:
        for file in (wrong, None):
            with pytest.raises(PortError) as caught:
                HttpPort(server.public, file, PATIENT).state()
            assert caught.value.fault is PortFault.UNAUTHORIZED
    with live() as server:
        with pytest.raises(PortError) as caught:
            HttpPort(server.public, token, PATIENT).state()
        assert caught.value.fault is PortFault.NO_PROTOCOL, "no tuning routes on a public port without a token"
        private = HttpPort(server.private, None, PATIENT)
        assert private.state().revision == 0
        with pytest.raises(PortError) as caught:
            private.revert(wire.RevertRequest())
        assert caught.value.fault is PortFault.READ_ONLY


def test_a_step_that_hangs_is_seen_as_stale_and_a_stopped_engine_as_unreachable(token: Path) -> None:
    runner = LetterRunner()
    with live(runner=runner, tuning_token=token) as server:
        port = HttpPort(server.public, token, PATIENT)
        reader = ProtocolReader(port)
        complete(server, 10, 3)
        assert soon(lambda: not reader.read().busy)
        runner.gate.clear()
        thread = threading.Thread(target=complete, args=(server, 10, 3))
        thread.start()
        assert soon(lambda: reader.read().busy)
        assert port.in_flight() is None, "the step does not end"
        ages = [reader.read().metrics_age_s for _ in range(3)]
        assert 0.0 <= ages[0] < ages[1] < ages[2]
        runner.gate.set()
        thread.join()
        assert soon(lambda: reader.read().metrics_age_s == 0.0)
        flights = port.in_flight()
        assert flights is not None and flights.request_id == ()
    with pytest.raises(PortError) as caught:
        reader.read()
    assert caught.value.fault is PortFault.UNREACHABLE


class EnginePort:
    """An engine in this process without a network, but every answer is serialised to bytes."""

    address = "here"

    def __init__(self, engine: RunningEngine) -> None:
        self.engine = engine

    def state(self) -> wire.State:
        return wire.parse(wire.State, self.engine.tuning_state().model_dump_json().encode())

    def steps_after(self, after: int) -> wire.StepColumns:
        page = self.engine.steps_after(after).model_dump_json().encode()
        return wire.parse(wire.StepColumns, page, wire.MAX_ANSWER_BYTES)

    def requests_after(self, after: int) -> wire.RequestColumns:
        page = self.engine.requests_after(after).model_dump_json().encode()
        return wire.parse(wire.RequestColumns, page, wire.MAX_ANSWER_BYTES)

    def in_flight(self) -> wire.FlightColumns | None:
        page = self.engine.in_flight().model_dump_json().encode()
        return wire.parse(wire.FlightColumns, page, wire.MAX_ANSWER_BYTES)

    def push(self, request: wire.PushRequest) -> wire.PushAnswer | wire.Refusal:
        return self.engine.push(request)

    def revert(self, request: wire.RevertRequest) -> wire.PushAnswer:
        return self.engine.revert(request)

    def resume(self, request: wire.ResumeRequest) -> wire.PushAnswer:
        return self.engine.resume(request)

    def close(self) -> None:
        pass


def engine_of(ring_rows: int) -> tuple[RunningEngine, ManualClock]:
    hands = ManualClock()
    runner = FakeRunner(NAMED_MODELS["8b-2tbs"], hands, kv_blocks=20_000, read_all=False)
    options = EngineOptions(Setting(step_tokens=512, max_running=64), max_queue=1000, ring_rows=ring_rows)
    return RunningEngine(runner, options, hands), hands


def turn_until(engine: RunningEngine, hands: ManualClock, until_s: float, chance: random.Random, rate: float) -> None:
    """Traffic of ``rate`` requests a second, of 100 to 2,000 prompt and up to 80 output tokens."""
    arrival_s = hands.now_s + chance.expovariate(rate)
    while hands.now_s < until_s:
        if hands.now_s >= arrival_s:
            prompt = range(1, chance.randint(100, 2000))
            engine.submit(GenerationRequest(prompt, chance.randint(1, 80), ignore_eos=True), lambda event: None)
            arrival_s += chance.expovariate(rate)
        elif not engine.step():
            hands.now_s = min(arrival_s, until_s)


@pytest.mark.slow
def test_the_default_cadence_loses_nothing_under_load() -> None:
    """Reads every 10 s of a busy engine with some 20 requests a second and rings of the default size."""
    engine, hands = engine_of(wire.MAX_ROWS)
    reader, window, chance = ProtocolReader(EnginePort(engine)), Window(600.0), random.Random(1)
    for turn in range(1, 4):
        turn_until(engine, hands, 10.0 * turn, chance, 20.0)
        window = window.add(reader.read())
    assert len(window.steps) > 1000 and window.lost_steps == window.lost_requests == 0
    assert window.steps.step.tolist() == list(range(engine.tuning_state().step))
    assert window.requests.sequence.tolist() == list(range(len(window.requests))) and len(window.requests) > 400
    assert window.in_system > 0 and window.complete_from_s == float("-inf")


@pytest.mark.slow
def test_an_overrun_ring_reports_how_much_is_lost() -> None:
    engine, hands = engine_of(60)
    reader, window, chance = ProtocolReader(EnginePort(engine)), Window(600.0), random.Random(1)
    window = window.add(reader.read())
    for turn in range(1, 3):
        turn_until(engine, hands, 2.5 * turn, chance, 20.0)
        window = window.add(reader.read())
    steps = engine.tuning_state().step
    assert window.lost_steps > 0 and window.lost_steps + len(window.steps) == steps
    assert window.steps_from_s > 2.5, "earlier rows are incomplete"
