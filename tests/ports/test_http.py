"""``HttpPort``: any peer leads to a value or a ``PortError`` with the right fault, and never to a hang."""

import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooftune.policies import wire
from rooftune.policies.errors import InputError
from rooftune.tuner.ports.base import PortError, PortFault
from rooftune.tuner.ports.http import HttpPort, Timeouts
from tests.ports.samples import PUSH, TAKEN, refusal, state
from tests.ports.scripted import Script, answer, message, raw, scripted

QUICK = Timeouts(connect_s=5.0, total_s=0.4)
PATIENT = Timeouts(connect_s=30.0, total_s=60.0)


def fault_of(script: Script, timeouts: Timeouts = PATIENT, ask: Callable[[HttpPort], object] = HttpPort.state) -> str:
    with scripted(script) as server:
        port = HttpPort(server.url, timeouts=timeouts)
        with pytest.raises(PortError) as caught:
            ask(port)
        assert server.url in str(caught.value) and "\n" not in str(caught.value)
        return caught.value.fault


def test_a_state_round_trips() -> None:
    with scripted(message(state(revision=5))) as server:
        port = HttpPort(server.url + "/tuning/v1/")
        assert port.state() == state(revision=5)
        assert port.address == server.url
        assert server.received[0][0].startswith("GET /tuning/v1/state HTTP/1.1\r\n")
        assert server.header("authorization") is None


def test_a_push_revert_and_resume_go_where_the_protocol_says() -> None:
    with scripted(message(TAKEN)) as server:
        port = HttpPort(server.url)
        assert port.push(PUSH) == TAKEN
        revert = wire.RevertRequest(actor="a", reason="b", block=False)
        assert port.revert(revert) == TAKEN
        resume = wire.ResumeRequest(actor="a", reason="b")
        assert port.resume(resume) == TAKEN
        sent = [(head.partition(" HTTP")[0], body) for head, body in server.received]
    assert [line for line, _ in sent] == ["PUT /tuning/v1/knobs", "DELETE /tuning/v1/lease", "POST /tuning/v1/resume"]
    assert wire.parse(wire.PushRequest, sent[0][1]) == PUSH
    assert wire.parse(wire.RevertRequest, sent[1][1]) == revert
    assert wire.parse(wire.ResumeRequest, sent[2][1]) == resume


STATUSES = [
    (401, PortFault.UNAUTHORIZED),
    (403, PortFault.READ_ONLY),
    (404, PortFault.NO_PROTOCOL),
    (405, PortFault.NO_PROTOCOL),
    (301, PortFault.NO_PROTOCOL),
    (302, PortFault.NO_PROTOCOL),
    (307, PortFault.NO_PROTOCOL),
    (500, PortFault.SERVER_ERROR),
    (502, PortFault.SERVER_ERROR),
    (429, PortFault.SERVER_ERROR),
    (204, PortFault.SERVER_ERROR),
]


@pytest.mark.parametrize("ask", [HttpPort.state, lambda port: port.push(PUSH)], ids=["read", "push"])
@pytest.mark.parametrize(("status", "fault"), STATUSES)
def test_each_status_maps_to_its_fault(status: int, fault: PortFault, ask: Callable[[HttpPort], object]) -> None:
    body = b"" if status == 204 else b"{}"
    assert fault_of(answer(status, body, "location: http://127.0.0.1:1/x"), ask=ask) == fault


def test_a_redirect_is_not_followed() -> None:
    with (
        scripted(message(state())) as target,
        scripted(answer(302, b"", f"location: {target.url}/tuning/v1/state")) as first,
    ):
        with pytest.raises(PortError, match="redirect"):
            HttpPort(first.url).state()
        assert len(first.received) == 1 and not target.received


@pytest.mark.parametrize("code", sorted(wire.REFUSAL_STATUS))
def test_a_refusal_is_a_value(code: str) -> None:
    with scripted(message(refusal(code), wire.REFUSAL_STATUS[code])) as server:
        assert HttpPort(server.url).push(PUSH) == refusal(code)


def test_a_refusal_under_another_status_is_garbage() -> None:
    assert fault_of(message(refusal("outside_envelope"), 409), ask=lambda port: port.push(PUSH)) == PortFault.GARBAGE


@pytest.mark.parametrize(
    ("status", "fault"), [(409, PortFault.GARBAGE), (422, PortFault.GARBAGE), (503, "server_error")]
)
def test_a_refusal_without_the_protocols_body(status: int, fault: str) -> None:
    """A 503 without the protocol's body comes from a load balancer; a 409 without it is nonsense."""
    assert fault_of(answer(status, b"<html>busy</html>"), ask=lambda port: port.push(PUSH)) == fault


VERSION_2 = state().model_dump_json().replace('"protocol_version":1', '"protocol_version":2,"new":[1]').encode()
NAN = state().model_dump_json().replace("100.0", "NaN").encode()
GARBAGE: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("html", b"<html></html>"),
    ("another message", TAKEN.model_dump_json().encode()),
    ("nan", NAN),
    ("deep", b"[" * 100_000),
    ("not text", b"\xff\xfe\x00"),
    ("list", b"[]"),
    ("unknown field", state().model_dump_json().replace("{", '{"more":1,', 1).encode()),
]


@pytest.mark.parametrize("body", [body for _, body in GARBAGE], ids=[name for name, _ in GARBAGE])
def test_an_answer_that_the_schemas_refuse_is_garbage(body: bytes) -> None:
    assert fault_of(answer(200, body)) == PortFault.GARBAGE


def test_another_protocol_version_is_named() -> None:
    assert fault_of(answer(200, VERSION_2)) == PortFault.PROTOCOL_MISMATCH
    assert fault_of(answer(409, VERSION_2), ask=lambda port: port.push(PUSH)) == PortFault.PROTOCOL_MISMATCH


def test_rows_from_another_position_are_garbage() -> None:
    page = wire.RequestColumns.model_validate(
        {"boot_id": "b", "now_s": 1.0, "after": 4, "next": 4, "lost": 0}
        | {name: () for name in wire.RequestColumns.model_fields if name not in wire.Columns.model_fields}
    )
    with scripted(message(page)) as server:
        assert HttpPort(server.url).requests_after(4) == page
        with pytest.raises(PortError) as caught:
            HttpPort(server.url).requests_after(3)
        assert caught.value.fault is PortFault.GARBAGE
        assert server.received[0][0].startswith("GET /tuning/v1/requests?after=4 ")


NOTHING: dict[str, tuple[object, ...]] = dict.fromkeys(wire.FLIGHT_COLUMNS, ())
FLIGHTS = wire.FlightColumns.model_validate({"boot_id": "b", "now_s": 1.0, "left_out": 3} | NOTHING)


def test_an_engine_that_does_not_tell_what_is_in_flight_is_used_without() -> None:
    with scripted(message(FLIGHTS)) as server:
        assert HttpPort(server.url).in_flight() == FLIGHTS
        assert server.received[0][0].startswith("GET /tuning/v1/in-flight ")
    for untold in (answer(404, b"{}"), answer(503, b"busy"), answer(500, b"")):
        with scripted(untold) as server:
            assert HttpPort(server.url).in_flight() is None
    with scripted(lambda connection: server.gate.wait(5) and None) as server:
        assert HttpPort(server.url, timeouts=Timeouts(1.0, 0.2)).in_flight() is None
    assert fault_of(answer(401, b""), ask=lambda port: port.in_flight()) == PortFault.UNAUTHORIZED
    assert fault_of(answer(200, b"{}"), ask=lambda port: port.in_flight()) == PortFault.GARBAGE


def test_a_refused_connection_is_unreachable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(PortError) as caught:
            HttpPort(f"http://127.0.0.1:{unused.getsockname()[1]}").state()
    assert caught.value.fault is PortFault.UNREACHABLE


def test_an_unknown_host_name_is_unreachable() -> None:
    with pytest.raises(PortError) as caught:
        HttpPort("http://nobody.invalid").state()
    assert caught.value.fault is PortFault.UNREACHABLE


@pytest.mark.parametrize(
    "head",
    [None, b"", b"HTTP/1.1 200 x\r\nx: ", b"HTTP/1.1 200 x\r\ncontent-length: 900000\r\n\r\n"],
    ids=["silence", "an endless status", "an endless header", "a slow body"],
)
def test_a_peer_that_hangs_or_drips_times_out(head: bytes | None) -> None:
    with scripted(lambda connection: None) as server:

        def script(connection: socket.socket) -> None:
            if head is None:
                server.gate.wait(30)
                return
            connection.sendall(head)
            while not server.gate.wait(0.02):  # a byte every 20 ms for as long as the client listens
                connection.sendall(b"x")

        server.script = script
        with pytest.raises(PortError) as caught:
            HttpPort(server.url, timeouts=QUICK).state()
        assert caught.value.fault is PortFault.TIMEOUT


def test_a_silent_peer_does_not_hang_a_tls_handshake() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        with pytest.raises(PortError) as caught:
            HttpPort(f"https://127.0.0.1:{listening.getsockname()[1]}", timeouts=QUICK).state()
    assert caught.value.fault is PortFault.UNREACHABLE


@pytest.mark.parametrize("how", ["length", "chunked", "until closed"])
def test_a_huge_answer_is_cut(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_ANSWER_BYTES", 100_000)
    block = b"x" * 50_000
    heads = {"length": b"content-length: 1000000000000\r\n", "chunked": b"transfer-encoding: chunked\r\n"}

    def script(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 x\r\n" + heads.get(how, b"") + b"\r\n")
        for _ in range(1000):  # 50 MB, which the client does not read
            connection.sendall(b"C350\r\n" + block + b"\r\n" if how == "chunked" else block)

    assert fault_of(script) == PortFault.GARBAGE


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", PortFault.UNREACHABLE),
        (b"HTTP/1.1 200 x\r\ncontent-le", PortFault.UNREACHABLE),
        (b"HTTP/1.1 200 x\r\ncontent-length: 100\r\n\r\n{", PortFault.UNREACHABLE),
        (b"+OK dovecot ready\r\n\r\n", PortFault.GARBAGE),
        (b"HTTP/1.1 two x\r\n\r\n", PortFault.GARBAGE),
        (b"HTTP/1.1 200 x\r\ncontent-length: -1\r\n\r\n", PortFault.GARBAGE),
    ],
)
def test_a_broken_connection_and_a_non_http_peer(content: bytes, fault: PortFault) -> None:
    assert fault_of(raw(content)) == fault


def test_https_to_a_plain_port_is_unreachable() -> None:
    with scripted(raw(b"HTTP/1.1 400 x\r\n\r\n")) as server:
        with pytest.raises(PortError) as caught:
            HttpPort(server.url.replace("http:", "https:")).state()
        assert caught.value.fault is PortFault.UNREACHABLE
        assert isinstance(caught.value.__cause__, Exception) and "SSL" in str(caught.value)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(content=st.one_of(st.binary(max_size=300), st.binary(max_size=200).map(lambda b: b"HTTP/1.1 200 x\r\n" + b)))
def test_any_bytes_raise_only_port_errors(content: bytes) -> None:
    with scripted(raw(content)) as server:
        try:
            HttpPort(server.url, timeouts=PATIENT).state()
        except PortError as error:
            assert error.fault in (PortFault.GARBAGE, PortFault.UNREACHABLE)  # noqa: PT017 - it may also be none
        else:
            pytest.fail("a state out of chance")


def test_a_unix_socket_is_an_address(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with scripted(message(state()), socket_path=path) as server:
        port = HttpPort(server.url)
        assert port.state() == state() and port.address == f"unix:{path}"
    with pytest.raises(PortError) as caught:
        port.state()
    assert caught.value.fault is PortFault.UNREACHABLE


def test_the_token_is_read_for_every_request(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("\n  first-token-0123456 \nsecond\n")
    with scripted(message(state())) as server:
        port = HttpPort(server.url, file)
        port.state()
        assert server.header("authorization") == "Bearer first-token-0123456"
        file.write_text("rotated-token-0123456")
        port.state()
        assert server.header("authorization") == "Bearer rotated-token-0123456"
        file.unlink()
        with pytest.raises(PortError, match="token file") as caught:
            port.state()
        assert caught.value.fault is PortFault.UNAUTHORIZED and len(server.received) == 2


@pytest.mark.parametrize("content", [b"", b"\n \n", b"two words", b"caf\xe9-token-0123456", b"x\x00y", b"a" * 70_000])
def test_a_token_that_cannot_be_sent_is_found_at_the_start(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(InputError, match="token file") as caught:
        HttpPort("http://127.0.0.1:1", file)
    assert content.strip()[:8].decode("latin-1") not in str(caught.value) or not content.strip()


def test_a_token_file_that_is_not_there_is_found_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing"):
        HttpPort("http://127.0.0.1:1", tmp_path / "nothing")


BAD_ADDRESSES = [
    "", "127.0.0.1:8000", "ftp://h", "http://", "http://h:port", "http://h:99999", "http://user:secret@h", "http://h?x=1",
    "http://h/#x", "http://a b", "http://h\n", "http://" + "a" * 70, "http://a..b", "unix:", "unix:/" + "x" * 200,
    "http://[::1", "http://h\u017f",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_ADDRESSES)
def test_an_invalid_address_is_one_line(text: str) -> None:
    with pytest.raises(InputError) as caught:
        HttpPort(text)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/", "/tuning/v1", "/tuning/v1/"])
def test_an_address_as_it_is_printed(ending: str) -> None:
    assert HttpPort("https://h:1/behind" + ending).address == "https://h:1/behind"


def test_custom_certificates_are_trusted(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("not a certificate")
    with pytest.raises(InputError, match=r"ca\.pem"):
        HttpPort("https://127.0.0.1:1", ca_file=file)
    assert ssl.create_default_context().verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_timeouts_are_refused(seconds: float) -> None:
    with pytest.raises(InputError):
        Timeouts(connect_s=seconds)
    with pytest.raises(InputError):
        Timeouts(total_s=seconds)
