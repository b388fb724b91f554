"""Which of the engine's rows are ours: by tokens and by time."""

import asyncio

import httpx
import pytest

from rooftune.policies.errors import InputError, RefusedError
from rooftune.tuner.replay.engine_side import EngineReader, match
from tests.replay.rows import columns, row

OFFSET_S = 1000.0


def test_requests_match_their_rows_in_sending_order() -> None:
    rows = [row(0, sent_s=1.0), row(1, sent_s=2.0), row(2, sent_s=3.0, prompt=99)]
    page = columns([(7, 1003.0, 99, 3, 1003.8), (8, 1002.0, 10, 3, 1002.8), (9, 1001.0, 10, 3, 1001.8)])
    part = match([page], rows, OFFSET_S)
    assert [(one.index, one.sequence) for one in part.requests] == [(0, 9), (1, 8), (2, 7)]
    assert part.missing == 0 and part.others == 0 and part.gap_bounds_s == (0.15,)


def test_rows_of_other_clients_are_excluded_by_tokens_time_and_end() -> None:
    rows = [row(0, sent_s=10.0), row(1, sent_s=20.0, failure="timeout")]
    page = columns(
        [
            (1, 1005.0, 10, 3, 1006.0),  # before ours was sent
            (2, 1010.0, 10, 4, 1010.8),  # other tokens
            (3, 1010.01, 10, 3, 1010.8),
            (4, 1020.0, 10, 3, 1020.8),  # ours failed there
        ]
    )
    part = match([page], rows, OFFSET_S)
    assert [(one.index, one.sequence) for one in part.requests] == [(0, 3)]
    assert part.others == 3 and part.missing == 0
    aborted = match([columns([(3, 1010.0, 10, 3, 1010.8)], ended="aborted", lost=5)], rows, OFFSET_S)
    assert aborted.missing == 1 and aborted.lost == 5 and aborted.requests == ()


def test_a_failed_request_of_the_same_shape_keeps_its_row() -> None:
    rows = [row(0, sent_s=10.0, failure="timeout"), row(1, sent_s=10.3), row(2, sent_s=10.3)]
    page = columns([(1, 1010.001, 10, 3, 1010.8), (2, 1010.301, 10, 3, 1011.0), (3, 1010.302, 10, 3, 1011.1)])
    part = match([page], rows, OFFSET_S)
    assert [(one.index, one.sequence) for one in part.requests] == [(1, 2), (2, 3)] and part.others == 1


def test_as_many_rows_as_requests_are_paired_in_order_however_near() -> None:
    rows = [row(0, sent_s=10.0), row(1, sent_s=10.0)]
    page = columns([(1, 1009.999, 10, 3, 1010.8), (2, 1010.0, 10, 3, 1010.8)])
    assert [one.sequence for one in match([page], rows, OFFSET_S).requests] == [1, 2]


def test_requests_that_arrived_in_another_order_match_their_rows() -> None:
    rows = [row(0, sent_s=10.0, ttft_s=0.5), row(1, sent_s=10.1, ttft_s=5.0)]
    page = columns([(1, 1010.2, 10, 3, 1015.3), (2, 1010.3, 10, 3, 1010.7)])
    assert [(one.index, one.sequence) for one in match([page], rows, OFFSET_S).requests] == [(0, 2), (1, 1)]


def test_a_row_that_ended_after_we_read_its_end_is_not_ours() -> None:
    part = match([columns([(3, 1010.0, 10, 3, 1019.0)])], [row(0, sent_s=10.0)], OFFSET_S)
    assert part.missing == 1


def reader_of(pages: list[httpx.Response], urls: list[str]) -> EngineReader:
    def answer(request: httpx.Request) -> httpx.Response:
        urls.append(str(request.url))
        return pages.pop(0)

    return EngineReader(httpx.AsyncClient(transport=httpx.MockTransport(answer)), "http://t", lambda: 2.0)


def test_reading_starts_after_existing_rows_and_continues_until_complete() -> None:
    old = columns([(40, 1.0, 10, 3, 2.0)])
    first = columns([(41, 1001.0, 10, 3, 1001.8)], now_s=1002.0).model_copy(update={"after": 40})
    none = columns([]).model_copy(update={"after": 41, "next": 41})
    second = columns([(42, 1001.5, 10, 3, 1002.3)]).model_copy(update={"after": 41})
    urls: list[str] = []
    pages = [httpx.Response(200, content=page.model_dump_json()) for page in (old, first, none, second)]
    reader = reader_of(pages, urls)

    async def read() -> None:
        await reader.begin()
        await reader.end(expected=2)

    asyncio.run(read())
    assert [url.rpartition("=")[2] for url in urls] == ["-1", "40", "41", "41"]
    assert [page.sequence for page in reader.pages] == [(41,), (), (42,)]
    # Every read took no time, so the first is the best: there the engine stood at 0 and we at 2, 0.5 after our zero.
    assert match(reader.pages, [], reader.offset_s + 1.5).clock_offset_s == 0.0 - 0.5


def test_no_protocol_a_wrong_token_and_a_restart_are_reported() -> None:
    for response, error in (
        (httpx.Response(404), InputError),
        (httpx.Response(401), RefusedError),
        (httpx.Response(200, content=b"{}"), InputError),
    ):
        with pytest.raises(error):
            asyncio.run(reader_of([response], []).begin())
    again = columns([]).model_copy(update={"boot_id": "c"})
    pages = [httpx.Response(200, content=page.model_dump_json()) for page in (columns([]), again)]
    reader = reader_of(pages, [])

    async def read() -> None:
        await reader.begin()
        await reader.end(expected=1)

    with pytest.raises(InputError, match="the engine restarted"):
        asyncio.run(read())
