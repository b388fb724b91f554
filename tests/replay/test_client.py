"""One request against a scripted server: when each part was read, and every way in which it can end.

The script moves the clock itself, so the times are exact and no machine is too slow for them.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest

from rooftune.policies.errors import InputError, RefusedError, UnreachableError
from rooftune.tuner.replay import client
from rooftune.tuner.replay.client import complete, served_model
from rooftune.tuner.replay.result_file import RequestPart
from rooftune.tuner.replay.stream import BadStream, EventReader, Flight
from tests.replay.stub import DONE, event, token, usage


class Script(httpx.AsyncBaseTransport, httpx.AsyncByteStream):
    """Each part is (seconds that pass before it, bytes or an error); all of them one answer with ``status``."""

    def __init__(self, parts: Sequence[tuple[float, bytes | Exception]], status: int = 200) -> None:
        self.now_s = 1.0
        self._parts = parts
        self._status = status
        self.sent: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(request)
        return httpx.Response(self._status, stream=self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for passed_s, data in self._parts:
            self.now_s += passed_s
            if isinstance(data, Exception):
                raise data
            yield data


def request_row(script: Script, limit_s: float = 30.0) -> RequestPart:
    flight = Flight(index=3, planned_s=0.75)

    async def one() -> None:
        async with httpx.AsyncClient(transport=script) as http:
            await complete(http, "http://x", b"{}", flight, lambda: script.now_s, limit_s)

    asyncio.run(one())
    return flight.row("default", 10, 4)


def test_every_gap_is_the_time_between_two_reads() -> None:
    parts = [(0.5, token()), (0.1, token()), (0.4, token()), (0.2, token("length") + usage(4, 6) + DONE)]
    row = request_row(Script(parts))
    assert row.failure is None and row.planned_s == 0.75 and row.sent_s == 1.0
    assert row.ttft_s == pytest.approx(0.5) and row.finish_s == pytest.approx(2.2)
    assert row.gaps_s == pytest.approx((0.1, 0.4, 0.2)) and row.tpot_s == pytest.approx(0.7 / 3)
    assert row.output_tokens == 4 and row.cached_tokens == 6


def test_tokens_of_one_read_have_a_gap_of_zero() -> None:
    row = request_row(Script([(0.5, token()), (0.3, token() + token() + token("length")), (0.0, DONE)]))
    assert row.gaps_s[1:] == (0.0, 0.0) and row.gaps_s[0] == pytest.approx(0.3)


def test_an_event_cut_anywhere_is_one_event_at_its_last_byte() -> None:
    first = token()
    for cut in range(1, len(first)):
        row = request_row(Script([(0.1, first[:cut]), (0.2, first[cut:]), (0.3, token("stop") + DONE)]))
        whole_line = first.index(b"\n")
        assert row.ttft_s == pytest.approx(0.1 if cut > whole_line else 0.3), cut
        assert row.output_tokens == 2


def test_several_tokens_in_an_event_are_counted_by_their_ids() -> None:
    three = event({"choices": [{"text": "abc", "token_ids": [1, 2, 3], "finish_reason": "length"}]})
    row = request_row(Script([(0.1, token()), (0.2, three + DONE)]))
    assert row.output_tokens == 4 and row.gaps_s == pytest.approx((0.2, 0.0, 0.0))


def test_without_ids_the_servers_count_is_used_and_gaps_are_those_of_events() -> None:
    row = request_row(Script([(0.1, token()), (0.3, token("length")), (0.0, usage(4) + DONE)]))
    assert row.output_tokens == 4 and len(row.gaps_s) == 1 and row.tpot_s == pytest.approx(0.1)


def test_an_end_event_is_not_a_token_if_the_servers_count_excludes_it() -> None:
    parts = [(0.1, token()), (0.1, token()), (0.5, token("length", text=""))]
    assert request_row(Script([*parts, (0.0, usage(2) + DONE)])).output_tokens == 2
    assert request_row(Script([*parts, (0.0, usage(3) + DONE)])).output_tokens == 3
    row = request_row(Script([*parts, (0.0, usage(2) + DONE)]))
    assert row.finish_s == pytest.approx(1.2) and len(row.gaps_s) == 1


ENDS = [
    ("cut_short", [(0.1, token()), (0.1, token())], 200),
    ("no_tokens", [(0.1, DONE)], 200),
    ("server_error", [(0.1, token()), (0.1, event({"error": {"message": "out of blocks"}}))], 200),
    ("server_error", [(0.1, token()), (0.1, token("abort") + DONE)], 200),
    ("bad_stream", [(0.1, b"data: {\n\n")], 200),
    ("bad_stream", [(0.1, b"data: 5\n\n")], 200),
    ("connection_lost", [(0.1, token()), (0.1, httpx.ReadError("reset"))], 200),
    ("http_429", [(0.0, b'{"error": {"message": "queue full"}}')], 429),
    ("http_400", [(0.0, b'{"object": "error", "message": "too long"}')], 400),
    ("http_500", [(0.0, b"<html>")], 500),
    ("http_302", [(0.0, b"")], 302),
]


@pytest.mark.parametrize(("failure", "parts", "status"), ENDS)
def test_every_failure_has_its_reason_and_is_sent_once(
    failure: str, parts: list[tuple[float, bytes | Exception]], status: int
) -> None:
    script = Script(parts, status)
    row = request_row(script)
    assert row.failure == failure and row.finish_s is None and row.tpot_s is None
    assert len(script.sent) == 1
    if status in (400, 429):
        assert row.detail in ("queue full", "too long")


def test_a_slow_answer_is_a_timeout_and_keeps_its_tokens() -> None:
    class Slow(Script):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield token()
            await asyncio.sleep(30)

    row = request_row(Slow([]), limit_s=0.3)
    assert row.failure == "timeout" and row.ttft_s is not None


def test_a_missing_server_is_unreachable_and_a_wrong_key_ends_the_run() -> None:
    class Unreachable(Script):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("refused")

    assert request_row(Unreachable([])).failure == "unreachable"
    with pytest.raises(RefusedError, match="--api-key-file"):
        request_row(Script([(0.0, b"{}")], 401))


@pytest.mark.parametrize(
    ("status", "body", "name", "longest"),
    [
        (200, b'{"data": [{"id": "m", "max_model_len": 99}, {"id": "lora"}]}', "m", 99),
        (200, b'{"data": []}', None, None),
        (200, b"[]", None, None),
        (200, b"<html>", None, None),
        (404, b"", None, None),
    ],
)
def test_served_models_are_read(status: int, body: bytes, name: str | None, longest: int | None) -> None:
    async def look() -> None:
        async with httpx.AsyncClient(transport=Script([(0.0, body)], status)) as http:
            served = await served_model(http, "http://x")
        assert (served.name, served.max_tokens) == (name, longest)

    asyncio.run(look())


@pytest.mark.parametrize(("status", "error"), [(401, RefusedError), (403, RefusedError), (503, UnreachableError)])
def test_a_server_that_refuses_or_is_not_ready_is_reported(status: int, error: type[Exception]) -> None:
    async def look() -> None:
        async with httpx.AsyncClient(transport=Script([(0.0, b"")], status)) as http:
            await served_model(http, "http://x")

    with pytest.raises(error):
        asyncio.run(look())


class Endless(Script):
    """An endless answer, ``pause_s`` before each of its parts."""

    def __init__(self, part: bytes, pause_s: float) -> None:
        super().__init__([])
        self.read_bytes = 0
        self._part, self._pause_s = part, pause_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(self._pause_s)
            self.read_bytes += len(self._part)
            yield self._part


@pytest.mark.parametrize(
    ("part", "pause_s", "message"),
    [(b" " * 65536, 0.0, "is longer than 100000 bytes"), (b" ", 0.01, "has no end after")],
)
def test_an_endless_model_list_is_one_line(
    part: bytes, pause_s: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 100_000)
    monkeypatch.setattr(client, "ANSWER_S", 0.3)
    script = Endless(part, pause_s)

    async def look() -> None:
        async with httpx.AsyncClient(transport=script) as http, asyncio.timeout(20):
            await served_model(http, "http://x")

    with pytest.raises(InputError, match=message) as refused:
        asyncio.run(look())
    assert "http://x/v1/models" in str(refused.value) and "\n" not in str(refused.value)
    assert script.read_bytes <= 100_000 + 65536


def test_the_reader_ignores_comments_and_other_fields_and_bounds_an_event() -> None:
    reader = EventReader()
    assert reader.feed(b": ping\r\nevent: x\r\ndata: [DO") == []
    assert reader.feed(b"NE]\r\n\r\n") == [b"[DONE]"]
    with pytest.raises(BadStream, match="bytes"):
        reader.feed(b"x" * (17 * 1024 * 1024))
