"""``rooftune replay`` against a small server in this process: what is sent, written, printed and answered."""

import asyncio
import json
import os
import signal
import socket
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from rooftune.policies.commands import COMMAND_GROUP
from rooftune.tuner.cli.main import main
from rooftune.tuner.replay.result_file import ReplayResult
from tests.replay.rows import read_result
from tests.replay.stub import DONE, Received, begin, plain, stub_server, token, usage, whole

POINTS = {"replay": EntryPoint("replay", "rooftune.tuner.cli.replay:COMMAND", COMMAND_GROUP)}
HEAD = "arrival_s,prompt_tokens,output_tokens,tenant\n"


def replay(*words: object) -> int:
    return main(["replay", *map(str, words)], POINTS)


def traffic(path: Path, rows: list[tuple[float, int, int]]) -> Path:
    path.write_text(HEAD + "".join(f"{a},{p},{o},{'gold' if a else 'basic'}\n" for a, p, o in rows))
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Six requests within 50 ms, no two of one shape; the first comes late in the file's own time."""
    return traffic(tmp_path / "t.csv", [(5.0 + 0.01 * at, 20 + at, 1 + at) for at in range(6)])


def replayed(tmp_path: Path, url: str, *words: object) -> ReplayResult:
    out = tmp_path / "r.json"
    assert replay("--url", url, "--out", out, "--quiet", *words) == 0
    return read_result(out)


def test_exact_tokens_are_sent_in_order_and_judged(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_server() as stub:
        result = replayed(tmp_path, stub.url + "/v1/", "--traffic", small, "--ttft-p99", "60s", "--vocab", 50)
    bodies = sorted((one.body for one in stub.received), key=lambda body: len(body["prompt"]))
    assert [(len(body["prompt"]), body["max_tokens"]) for body in bodies] == [(20 + at, 1 + at) for at in range(6)]
    for body in bodies:
        assert body["ignore_eos"] is True and body["stream"] is True and body["model"] == "stub"
        assert min(body["prompt"]) >= 10 and max(body["prompt"]) < 50
    assert [row.index for row in result.requests] == list(range(6))
    assert [len(row.gaps_s) for row in result.requests] == list(range(6))
    assert np.allclose([row.planned_s for row in result.requests], 0.01 * np.arange(6))
    assert all(row.sent_s >= row.planned_s and row.failure is None for row in result.requests)
    (side,) = result.verdicts
    assert side.attainment == 1.0 and side.judged == 6
    assert result.model == "stub" and result.vocab_tokens == 50 and result.engine is None
    shown = capsys.readouterr()
    assert "met" in shown.out and "sent late by" in shown.out and shown.err == ""


@pytest.mark.slow
def test_the_long_gap_is_where_the_server_made_it(tmp_path: Path) -> None:
    async def pausing(one: Received, writer: asyncio.StreamWriter) -> None:
        await begin(writer)
        for at in range(6):
            await asyncio.sleep(0.8 if at == 4 else 0.005)
            writer.write(token("length" if at == 5 else None))
            await writer.drain()
        writer.write(usage(6, cached=3) + DONE)

    with stub_server(pausing) as stub:
        result = replayed(tmp_path, stub.url, "--traffic", traffic(tmp_path / "t.csv", [(0.0, 9, 6)]))
    (row,) = result.requests
    assert len(row.gaps_s) == 5 and int(np.argmax(row.gaps_s)) == 3 and row.gaps_s[3] >= 0.7
    assert row.cached_tokens == 3


def test_equal_prefix_keys_are_equal_token_prefixes_on_the_wire(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "# rooftune-traffic 1 prefix_span_tokens=8\narrival_s,prompt_tokens,output_tokens,prefix_keys\n"
        "0,20,1,1 2\n0.01,21,1,1 2\n0.02,22,1,1 3\n"
    )
    with stub_server() as stub:
        replayed(tmp_path, stub.url, "--traffic", path)
    a, b, c = sorted((one.body["prompt"] for one in stub.received), key=len)
    assert a[:16] == b[:16] and a[16:] != b[16:20] and a[:8] == c[:8] and a[8:16] != c[8:16]


@pytest.mark.slow
def test_one_seed_sends_the_same_prompts_and_no_seed_new_ones(small: Path, tmp_path: Path) -> None:
    prompts = []
    with stub_server() as stub:
        for words in (("--seed", 4), ("--seed", 4), (), ()):
            before = len(stub.received)
            replayed(tmp_path, stub.url, "--traffic", small, *words)
            prompts.append(sorted(one.body["prompt"] for one in stub.received[before:]))
    assert prompts[0] == prompts[1] and prompts[0] != prompts[2] != prompts[3]


def test_a_refused_request_is_a_failure_with_its_reason_and_is_not_sent_again(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def every_second(one: Received, writer: asyncio.StreamWriter) -> None:
        if len(one.body["prompt"]) % 2:
            await plain(writer, 429, {"error": {"message": "queue full"}})
        else:
            await whole(one, writer)

    with stub_server(every_second) as stub:
        result = replayed(tmp_path, stub.url, "--traffic", small, "--ttft-p50", "60s")
    assert len(stub.received) == 6
    assert result.failures == {"http_429": 3}
    assert {row.detail for row in result.requests if row.failure} == {"queue full"}
    (side,) = result.verdicts
    assert side.failed == 3 and side.attainment == 0.5 and side.ttft_p99_s == "inf"
    assert "http_429 x 3" in capsys.readouterr().out


def test_no_complete_answer_is_exit_1_and_still_written(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def half(one: Received, writer: asyncio.StreamWriter) -> None:
        await begin(writer)
        writer.write(token())

    with stub_server(half) as stub:
        assert replay("--url", stub.url, "--traffic", small, "--out", tmp_path / "r.json", "--quiet") == 1
    assert read_result(tmp_path / "r.json").failures == {"cut_short": 6}
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "cut_short x 6" in shown


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_writes_partial_results(
    number: signal.Signals, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def first_only(one: Received, writer: asyncio.StreamWriter) -> None:
        if len(one.body["prompt"]) == 5:
            await whole(one, writer)
            return
        await begin(writer)
        writer.write(token())
        await writer.drain()
        await asyncio.sleep(0.5)
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)

    path = traffic(tmp_path / "t.csv", [(0.0, 5, 2), (0.3, 6, 9), (500.0, 7, 2)])
    before = signal.getsignal(number)
    with stub_server(first_only) as stub:
        assert replay("--url", stub.url, "--traffic", path, "--out", tmp_path / "r.json", "--quiet") == code
    assert signal.getsignal(number) is before
    result = read_result(tmp_path / "r.json")
    assert result.interrupted and result.unsent == 1
    assert [row.failure for row in result.requests] == [None, "interrupted"]
    assert result.verdicts[0].judged == 1 and result.verdicts[0].failed == 0
    assert "interrupted: 1 requests were not sent" in capsys.readouterr().out


def test_unreachable_is_exit_3_and_a_wrong_key_exit_1_in_one_line(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: no other server can answer there
        assert replay("--url", f"http://127.0.0.1:{taken.getsockname()[1]}", "--traffic", small) == 3
    assert capsys.readouterr().err.count("\n") == 1

    async def closed(one: Received, writer: asyncio.StreamWriter) -> None:
        await plain(writer, 401, {"error": {"message": "who are you"}})

    with stub_server(closed) as stub:  # only the completions are guarded
        assert replay("--url", stub.url, "--traffic", small, "--quiet") == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "who are you" in shown and "--api-key-file" in shown
    with stub_server(models=(401, {})) as stub:
        assert replay("--url", stub.url, "--traffic", small, "--quiet") == 1
    assert "--api-key-file" in capsys.readouterr().err and stub.received == []
    (tmp_path / "key").write_text("")
    assert replay("--url", stub.url, "--traffic", small, "--api-key-file", tmp_path / "key") == 2
    assert "is empty; give the secret of --api-key-file in one line" in capsys.readouterr().err


def test_the_key_goes_to_the_server_and_not_into_the_file(small: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\nsk-very-secret \n")
    with stub_server() as stub:
        replayed(tmp_path, stub.url, "--traffic", small, "--api-key-file", tmp_path / "key")
    assert {one.headers["authorization"] for one in stub.received} == {"Bearer sk-very-secret"}
    assert "secret" not in (tmp_path / "r.json").read_text()


def test_a_preset_small_and_fast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server() as stub:
        words = ("--preset", "real-ratio", "--rate", 20, "--span", "1s", "--rate-scale", 4, "--length-scale", 0.001)
        assert replay("--url", stub.url, *words, "--json", "--quiet") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["traffic"]["requests"] == len(stub.received) > 5 and values["traffic"]["span_s"] < 0.3
    assert values["verdicts"][0]["failed"] == 0 and "requests" not in values
    # Another run sends the same arrivals and lengths, so that two settings can be compared, with other content.
    first = sorted(one.body["prompt"] for one in stub.received)
    with stub_server() as stub:
        assert replay("--url", stub.url, *words, "--json", "--quiet") == 0
    second = sorted(one.body["prompt"] for one in stub.received)
    assert sorted(map(len, first)) == sorted(map(len, second)) and first != second


def test_early_stops_and_too_long_requests_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def one_token(one: Received, writer: asyncio.StreamWriter) -> None:
        await begin(writer)
        writer.write(token("stop") + DONE)

    path = traffic(tmp_path / "t.csv", [(0.0, 5, 3), (0.0, 5000, 1)])
    with stub_server(one_token) as stub:
        assert replay("--url", stub.url, "--traffic", path, "--out", tmp_path / "r.json") == 0
    assert read_result(tmp_path / "r.json").client.short_answers == 1
    shown = capsys.readouterr()
    assert "1 answers were shorter" in shown.out and "1 of 2 requests are longer than the model's 4,096" in shown.err


def test_without_a_model_list_the_name_must_be_given(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_server(models=(404, {})) as stub:
        assert replay("--url", stub.url, "--traffic", small) == 2
        assert "--model" in capsys.readouterr().err
        result = replayed(tmp_path, stub.url, "--traffic", small, "--model", "mine")
    assert result.model == "mine" and result.vocab_tokens == 1000 and stub.received[0].body["model"] == "mine"


BAD = [
    (["--url", "nowhere"], "--url"),
    (["--url", "http://u:p@h"], "password"),
    ([], "--traffic"),
    (["--preset", "real-ratio", "--traffic", "x"], "one of the two"),
    (["--preset", "nothing"], "real-ratio"),
    (["--preset", "real-ratio", "--window", "1s:2s"], "--window"),
    (["--preset", "real-ratio", "--format", "azure"], "--format"),
    (["--traffic", "x", "--rate", "3"], "--rate"),
    (["--traffic", "x", "--preset-seed", "3"], "--preset-seed"),
    (["--preset", "real-ratio", "--vocab", "5"], "--vocab"),
    (["--preset", "real-ratio", "--timeout", "0s"], "--timeout"),
    (["--preset", "real-ratio", "--length-scale", "-1"], "--length-scale"),
    (["--preset", "real-ratio", "--seed", "-1"], "--seed"),
    (["--preset", "real-ratio", "--out", "/nonexistent/r.json"], "--out"),
    (["--preset", "real-ratio", "--api-key-file", "/nonexistent"], "/nonexistent"),
    (["--preset", "real-ratio", "--tuning-url", "x"], "--tuning-url"),
    (["--preset", "real-ratio", "--ttft-p99", "2"], "2s"),
]


@pytest.mark.parametrize(("words", "named"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_flags_are_one_line_and_exit_2(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = [] if "--url" in words else ["--url", "http://127.0.0.1:9"]
    assert replay(*url, *words) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and named in shown, shown
