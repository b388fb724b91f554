"""The controller's pages: what they show, who may change something, and that clients do no harm."""

import http.client
import io
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rooftune.policies.errors import InputError
from rooftune.policies.guard import Action, Reason
from rooftune.tuner.clock import ManualClock
from rooftune.tuner.config import Config, EngineSection
from rooftune.tuner.control.outcome import SignalPart
from rooftune.tuner.control.state import operator
from rooftune.tuner.control.state.store import StateFile
from rooftune.tuner.control.status import server as status_server
from rooftune.tuner.control.status.log import EventLog
from rooftune.tuner.control.status.server import MAX_BODY_BYTES, MOST_CONNECTIONS, StatusServer
from rooftune.tuner.control.status.view import About
from tests.control.cycle_records import hold, proposal, push, twin, verify

TOKEN = "t" * 20
ABOUT = About("chat-eu-1", "live", "abcd", 15.0, "0.1.0")
P = "rooftune_controller_"


class Rig:
    """A status server with pages on a free port, its state file, clock and log."""

    def __init__(self, folder: Path, *, token: bool) -> None:
        self.clock = ManualClock(wall_s=1_764_460_800.0)
        self.state = StateFile.own(folder / "s", clock=self.clock)
        self.token_path = folder / "token"
        self.token_path.write_text(TOKEN + "\n")
        self.log = io.StringIO()
        secret = self.token_path if token else None
        self.server = StatusServer(ABOUT, self.state, self.clock, EventLog(self.log), "127.0.0.1:0", secret)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.server.port or 0, timeout=10)) as connection:
            data = json.dumps(body).encode() if isinstance(body, dict) else body
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def json(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
        status, text = self.ask(method, path, body, **headers)
        return status, json.loads(text)

    def samples(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """(name without the common prefix, values of the labels in the order of their names) -> value."""
        status, text = self.ask("GET", "/metrics")
        assert status == 200
        families = text_string_to_metric_families(text.decode())
        return {
            (sample.name.removeprefix(P), tuple(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }

    def close(self) -> None:
        self.server.close()
        self.state.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, token=True)
    yield made
    made.close()


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, token=False)
    yield made
    made.close()


def _bearer(token: str = TOKEN) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# --- health ---------------------------------------------------------------------------------------


def test_healthy_while_cycles_run_and_ready_after_a_successful_read(bare: Rig) -> None:
    assert bare.json("GET", "/healthz") == (200, {"healthy": True, "since_cycle_s": 0.0})
    assert bare.ask("GET", "/readyz")[0] == 503
    bare.server.publish(hold(1))
    assert bare.ask("GET", "/readyz")[0] == 200
    bare.clock.sleep(4 * 15.0 + 61.0)  # the loop hangs
    assert bare.ask("GET", "/healthz")[0] == 503 and bare.ask("GET", "/readyz")[0] == 503
    bare.server.publish(hold(2))
    assert bare.ask("GET", "/healthz")[0] == 200


def test_unreadable_engine_or_store_is_not_ready_but_healthy(bare: Rig) -> None:
    unread = (Reason.UNREACHABLE, Reason.UNAUTHORIZED, Reason.NO_PROTOCOL, Reason.GARBAGE)
    for reason in (*unread, Reason.STORE_FAILED):
        bare.server.publish(hold(1, reason))
        assert bare.ask("GET", "/readyz")[0] == 503 and bare.ask("GET", "/healthz")[0] == 200


def test_a_wall_clock_jump_does_not_affect_health(bare: Rig) -> None:
    bare.server.publish(hold(1))
    bare.clock.jump(1e6)
    assert bare.ask("GET", "/healthz")[0] == 200


# --- metrics --------------------------------------------------------------------------------------


def test_before_the_first_cycle_nothing_is_claimed(bare: Rig) -> None:
    found = bare.samples()
    assert found["info", ("chat-eu-1", "abcd", "live", "0.1.0")] == 1
    assert found["paused", ()] == 0 and found["ready", ()] == 0
    names = {name for name, _ in found}
    assert not names & {"lease_left_seconds", "knee_tokens", "goodput_rps", "attainment_ratio", "step_age_seconds"}


def test_what_a_push_shows(bare: Rig) -> None:
    bare.server.publish(push(41))
    bare.clock.sleep(10.0)
    found = bare.samples()
    assert found["cycles_total", ("push", "step_limited")] == 1 and found["pushes_total", ()] == 1
    assert found["knob", ("step_tokens",)] == 2048 and found["knob", ("chunk_cap_tokens",)] == 0
    assert [found[name, ()] for name in ("knee_tokens", "knee_low_tokens", "knee_high_tokens")] == [200, 180, 230]
    assert found["twin_error_ratio", ("p95", "ttft")] == pytest.approx(0.06)
    assert found["twin_error_ratio", ("p99", "longest gap")] == pytest.approx(-0.04)
    assert found["lease_left_seconds", ()] == pytest.approx(88.0)
    assert found["step_age_seconds", ()] == pytest.approx(10.2)
    assert found["stage_latest_seconds", ("observe",)] == pytest.approx(0.02)
    assert found["signal", ("queue_growing",)] == 1
    assert found["exploration_spent_slo_seconds", ()] == 12.5
    assert {source: found["attainment_ratio", (source,)] for source in ("measured", "predicted", "proposed")} == (
        pytest.approx({"measured": 0.9, "predicted": 0.91, "proposed": 0.97})
    )
    assert {source: found["goodput_rps", (source,)] for source in ("measured", "predicted", "proposed")} == (
        pytest.approx({"measured": 6.3, "predicted": 7.0 * 0.91, "proposed": 7.0 * 0.97})
    )


def test_counters_add_up_and_past_signals_are_0(bare: Rig) -> None:
    bare.server.publish(push(1))
    bare.server.publish(hold(2, lost_steps=7))
    bare.server.publish(hold(3, verify=verify(1), signals=(SignalPart(code="kv_bound", evidence={}),), lost_requests=2))
    found = bare.samples()
    assert found["cycles_total", ("hold", "searching")] == 2
    assert found["verdicts_total", ("better",)] == 1 and found["verdicts_total", ("worse",)] == 0
    assert found["stage_seconds_count", ("fit",)] == 3 and found["stage_seconds_sum", ("fit",)] == pytest.approx(0.15)
    assert found["lost_steps_total", ()] == 7 and found["lost_requests_total", ()] == 2
    assert found["signal", ("queue_growing",)] == 0 and found["signal", ("kv_bound",)] == 1


def test_a_verdict_is_counted_once_and_not_in_every_cycle_of_its_trial(bare: Rig) -> None:
    bare.server.publish(push(1))
    for number in (2, 3, 4):
        bare.server.publish(hold(number, Reason.VERIFYING, verify=verify(1, verdict="inconclusive")))
    assert bare.samples()["verdicts_total", ("inconclusive",)] == 0
    late = verify(1, verdict="inconclusive")
    bare.server.publish(hold(5, Reason.INCONCLUSIVE_TOO_LONG, action=Action.REVERT, verify=late))
    assert bare.samples()["verdicts_total", ("inconclusive",)] == 1


def test_the_twins_figures_stay_until_the_next_search_or_another_engine(bare: Rig) -> None:
    bare.server.publish(hold(1, twin=twin(), proposal=proposal()))
    first = bare.samples()
    bare.server.publish(hold(2))
    later = bare.samples()
    error, shares = (
        ("twin_error_ratio", ("p95", "ttft")),
        [("attainment_ratio", (s,)) for s in ("predicted", "proposed")],
    )
    assert later[error] == first[error] == pytest.approx(0.06)
    assert [later[key] for key in shares] == [first[key] for key in shares] == pytest.approx([0.91, 0.97])
    bare.server.publish(hold(3, in_force={"step_tokens": 512}))
    assert not set(shares) & set(bare.samples()), "they were about another setting"
    bare.server.publish(hold(4, boot_id="b2"))
    assert error not in bare.samples()


def test_an_unknown_value_has_no_sample(bare: Rig) -> None:
    bare.server.publish(push(1))
    bare.server.publish(hold(2, observed=None, in_force=None, lease_left_s=None, metrics_age_s=None))
    names = {name for name, _ in bare.samples()}
    gone = {"lease_left_seconds", "step_age_seconds", "knob", "knee_tokens", "goodput_rps", "twin_error_ratio"}
    assert not names & gone
    bare.server.publish(hold(3, twin=twin(attainment_error=None)))
    assert ("attainment_ratio", ("predicted",)) not in bare.samples()


def test_an_expired_lease_is_0_never_negative(bare: Rig) -> None:
    bare.server.publish(hold(1))
    bare.clock.sleep(1000.0)
    assert bare.samples()["lease_left_seconds", ()] == 0


def test_an_unavailable_store_hides_only_its_series(bare: Rig) -> None:
    bare.state.close()
    bare.server.publish(hold(1))
    found = bare.samples()
    assert ("paused", ()) not in found and found["cycle_number", ()] == 1
    status, shown = bare.json("GET", "/status")
    assert status == 200 and "state.db" in shown["wishes"]["error"]


# --- status and changes ---------------------------------------------------------------------------


def test_status_holds_the_whole_record(bare: Rig) -> None:
    status, shown = bare.json("GET", "/status")
    assert status == 200 and shown["last"] is None and shown["schema"] == "rooftune.status"
    bare.server.publish(push(41))
    operator.pause(bare.state, "me", "lunch", 1.0)
    bare.clock.sleep(3.0)
    _, shown = bare.json("GET", "/status")
    assert shown["last"] == push(41).model_dump(mode="json", by_alias=True)
    assert shown["wishes"]["paused"]["reason"] == "lunch" and shown["since_cycle_s"] == 3.0


def test_without_a_token_file_nothing_is_changed(bare: Rig) -> None:
    for path in ("/pause", "/resume", "/revert"):
        for headers in ({}, _bearer()):
            status, said = bare.json("POST", path, {}, **headers)
            assert status == 403 and "token_file" in said["error"]
    assert operator.read(bare.state) == operator.OperatorRequests()


def test_with_a_token_file_only_its_token_may_change_anything(rig: Rig) -> None:
    wrong = ("Bearer ", f"Bearer {TOKEN[1:]}", f"Bearer {TOKEN.upper()}", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x")
    for path in ("/pause", "/resume", "/revert"):
        assert rig.ask("POST", path, {})[0] == 401
        assert [rig.ask("POST", path, {}, Authorization=value)[0] for value in wrong] == [401] * len(wrong)
    assert operator.read(rig.state) == operator.OperatorRequests()


def test_a_block_set_at_the_engine_is_shown(rig: Rig) -> None:
    rig.server.publish(hold(6))
    assert rig.samples()[("blocked", ())] == 0.0
    rig.server.publish(hold(7, Reason.BLOCKED_AFTER_REVERT))
    assert rig.samples()[("blocked", ())] == 1.0


def test_pause_resume_and_revert_record_actor_and_reason(rig: Rig) -> None:
    status, said = rig.json("POST", "/pause", {"actor": "ann", "reason": "deploy"}, **_bearer())
    assert status == 200 and said["asked"] == "pause"
    asked = operator.read(rig.state).paused
    assert asked is not None and (asked.actor, asked.reason, asked.id) == ("http:ann", "deploy", said["wish"])
    assert rig.json("POST", "/resume", None, **_bearer())[0] == 202
    assert not operator.read(rig.state).paused
    status, said = rig.json("POST", "/revert", {}, **_bearer())
    assert status == 202 and operator.read(rig.state).blocked
    revert, _ = operator.pending(rig.state)
    assert revert is not None and revert.id == said["wish"]
    assert [line.split()[2] for line in rig.log.getvalue().splitlines()] == [
        "event=pause",
        "event=resume",
        "event=revert",
    ]
    assert "actor=http:ann reason=deploy" in rig.log.getvalue()


def test_a_token_changes_without_a_restart_and_a_missing_one_refuses_everything(rig: Rig) -> None:
    rig.token_path.write_text("n" * 20)
    assert rig.ask("POST", "/pause", {}, **_bearer())[0] == 401
    assert rig.ask("POST", "/pause", {}, **_bearer("n" * 20))[0] == 200
    rig.token_path.unlink()
    assert rig.ask("POST", "/pause", {}, **_bearer("n" * 20))[0] == 401


def test_a_failing_store_is_reported_and_nothing_is_promised(rig: Rig) -> None:
    rig.state.close()
    status, said = rig.json("POST", "/revert", {}, **_bearer())
    assert status == 503 and "state.db" in said["error"]


ODD: list[tuple[str, str, bytes | None, int]] = [
    ("GET", "/", None, 404),
    ("POST", "/nothing", b"{}", 404),
    ("GET", "/pause", None, 405),
    ("POST", "/metrics", b"{}", 405),
    ("PUT", "/pause", b"{}", 501),
    ("POST", "/pause", b"{", 422),
    ("POST", "/pause", b'{"who": "me"}', 422),
    ("POST", "/pause", b'{"actor": 1}', 422),
    ("POST", "/pause", b"x" * (MAX_BODY_BYTES + 1), 413),
    ("GET", "/status?x=1", None, 200),
    ("HEAD", "/healthz", None, 200),
]


def test_odd_requests(rig: Rig) -> None:
    for method, path, body, status in ODD:
        assert rig.ask(method, path, body, **_bearer())[0] == status, (method, path, body)
    assert not operator.read(rig.state).paused


@pytest.mark.slow
def test_non_http_bytes_and_silent_clients_do_no_harm(rig: Rig) -> None:
    address = ("127.0.0.1", rig.server.port or 0)
    for data in (b"\x16\x03\x01\x00\xff" * 50, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"\r\n\r\n", b""):
        with closing(socket.create_connection(address, timeout=5)) as client:
            client.sendall(data)
    silent = [socket.create_connection(address, timeout=5) for _ in range(MOST_CONNECTIONS)]
    one_more = socket.create_connection(address, timeout=5)
    assert one_more.recv(10) == b""  # closed at once: the limit is reached
    for client in (*silent, one_more):
        client.close()
    for _ in range(50):
        try:
            assert rig.ask("GET", "/healthz")[0] == 200
            break
        except (ConnectionError, http.client.HTTPException):
            threading.Event().wait(0.02)  # their threads have yet to notice
    else:
        pytest.fail("no answer after the silent clients had gone")


def test_a_client_that_never_ends_its_request_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server, "TIMEOUT_S", 0.2)
    rig = Rig(tmp_path, token=False)
    with closing(rig), closing(socket.create_connection(("127.0.0.1", rig.server.port or 0), timeout=5)) as client:
        client.sendall(b"GET /healthz")
        assert client.recv(10) == b""


def test_many_readers_while_the_loop_publishes(bare: Rig) -> None:
    statuses: list[int] = []

    def read() -> None:
        statuses.extend(bare.ask("GET", path)[0] for path in ("/metrics", "/status", "/healthz"))

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for number in range(1, 40):
        bare.server.publish(push(number))
    for thread in threads:
        thread.join()
    assert statuses.count(200) == 18


# --- opening --------------------------------------------------------------------------------------


def test_an_address_in_use_and_a_token_file_without_tokens_are_input_errors(tmp_path: Path) -> None:
    with StateFile.own(tmp_path / "s") as state, closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        clock, log = ManualClock(), EventLog(io.StringIO())
        with pytest.raises(InputError, match=f"listen is '{listen}'"):
            StatusServer(ABOUT, state, clock, log, listen, None)
        (tmp_path / "short").write_text("short")
        with pytest.raises(InputError, match="at least 16 characters"):
            StatusServer(ABOUT, state, clock, log, None, tmp_path / "short")


def test_without_an_address_there_is_only_the_log(tmp_path: Path) -> None:
    config = Config(engine=EngineSection(url="http://127.0.0.1:8000"), listen=None)
    stream = io.StringIO()
    with StateFile.own(tmp_path) as state:
        server = StatusServer.of(config, state, ManualClock(), stream)
        server.publish(hold(1, Reason.SHADOW, mode="shadow"))
        server.publish(push(2))
        assert server.port is None and f"actor=rooftune/{state.instance}" in stream.getvalue()
        server.close()
    assert "event=cycle cycle=1 action=hold reason=shadow" in stream.getvalue()


def test_a_push_names_its_actor(bare: Rig) -> None:
    bare.server.publish(push(1))
    bare.server.publish(hold(2, Reason.VERDICT_WORSE, action=Action.REVERT))
    pushed, reverted = bare.log.getvalue().splitlines()
    assert "event=push" in pushed and "actor=rooftune/abcd" in pushed and "reason=step_limited" in pushed
    assert "level=warning" in reverted and "event=revert" in reverted and "actor=rooftune/abcd" in reverted
