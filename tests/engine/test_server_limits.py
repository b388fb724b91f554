"""Every bad request gets a clear 4xx in OpenAI's shape, and the server keeps running."""

import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooftune.engine.server.limits import Limits
from rooftune.engine.server.stream import ByteTokenizer
from rooftune.policies.errors import InputError
from tests.engine.server_harness import HTTP, MODEL, LetterRunner, Live, letters, live, soon

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    with live(limits=Limits(body_bytes=20_000, body_s=1.0, prompt_tokens=1500)) as running:
        yield running
        assert HTTP.get(f"{running.public}/health").status_code == 200
        assert soon(running.idle)


def post(server: Live, path: str, body: object, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HTTP.post(server.public + path, content=content, headers=headers)


def error_of(answer: httpx.Response) -> dict:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    return error


HI = [{"role": "user", "content": "hi"}]
BAD = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, 512]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": [1] * 1501}, "prompt"),
    ({"prompt": "é" * 900}, "prompt"),
    ({"prompt": "x", "n": 2}, "n"),
    ({"prompt": "x", "best_of": 3}, "best_of"),
    ({"prompt": "x", "echo": True}, "echo"),
    ({"prompt": "x", "logprobs": 1}, "logprobs"),
    ({"prompt": "x", "presence_penalty": 0.5}, "presence_penalty"),
    ({"prompt": "x", "top_k": 5}, "top_k"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 2048}, "prompt"),
    ({"prompt": "x" * 1501}, "prompt"),
    ({"prompt": "x", "temperature": -0.1}, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "temperature": 10**400}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "top_p": 1.1}, "top_p"),
    ({"prompt": "x", "seed": 2**64}, "seed"),
    ({"prompt": "x", "seed": "1"}, "seed"),
    ({"prompt": "x", "stop": [""]}, "stop"),
    ({"prompt": "x", "stop": [1]}, "stop"),
    ({"prompt": "x", "stop": {"a": 1}}, "stop"),
    ({"prompt": "x", "stop": "\ud800"}, "stop"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "x", "stop": "a" * 1025}, "stop"),
    ({"prompt": "x", "stop_token_ids": [9999]}, "stop_token_ids"),
    ({"prompt": "x", "stop_token_ids": "x"}, "stop_token_ids"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
    ({"prompt": "x", "ignore_eos": 1}, "ignore_eos"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "stream": True, "stream_options": []}, "stream_options"),
    ({"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
]
BAD_CHATS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [*HI, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1]"),
    ({"messages": HI, "tools": [{"type": "function"}]}, "tools"),
    ({"messages": HI, "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": HI, "logprobs": True}, "logprobs"),
    ({"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": HI, "max_tokens": 2040}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 1501}]}, "messages"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[str(body)[:50] for body, _ in BAD])
def test_bad_completion(server: Live, body: dict, param: str) -> None:
    answer = post(server, COMPLETIONS, body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=[str(body)[:60] for body, _ in BAD_CHATS])
def test_bad_chat(server: Live, body: dict, param: str) -> None:
    answer = post(server, CHAT, body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


NOT_JSON = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt":"a","prompt":"b"}', b"[" * 9999]


@pytest.mark.parametrize("body", NOT_JSON, ids=[str(body[:30]) for body in NOT_JSON])
def test_a_body_that_is_not_json_is_refused(server: Live, body: bytes) -> None:
    answer = post(server, COMPLETIONS, body)
    assert answer.status_code == 400
    error_of(answer)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(["prompt", "max_tokens", "stop", "seed", "stream", "temperature", "stop_token_ids", "model"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
            max_leaves=5,
        ),
    )
)
def test_any_object_gets_an_answer_and_never_a_500(server: Live, body: dict) -> None:
    assert post(server, COMPLETIONS, body).status_code in (200, 400, 404)


def test_a_chat_without_a_template_or_with_an_empty_one_is_400() -> None:
    class Speechless(ByteTokenizer):
        def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
            if messages[0]["content"] == "silence":
                return ""
            raise InputError("this model has no chat template; use /v1/completions")

    with live(tokenizer=Speechless(512)) as server:
        for content, words in (("hi", "no chat template"), ("silence", "empty")):
            answer = post(server, CHAT, {"messages": [{"role": "user", "content": content}]})
            error = error_of(answer)
            assert (answer.status_code, error["param"]) == (400, "messages") and words in error["message"]


def test_an_unknown_model_is_404(server: Live) -> None:
    answer = post(server, COMPLETIONS, {"model": "other", "prompt": "x"})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")


def test_unknown_paths_and_methods_have_the_same_shape(server: Live) -> None:
    assert error_of(HTTP.get(f"{server.public}/v1/nothing"))["code"] == "not_found"
    answer = HTTP.get(server.public + COMPLETIONS)
    assert answer.status_code == 405 and error_of(answer)["code"] == "method_not_allowed"


def raw(server: Live, head: str, *parts: bytes) -> bytes:
    """Sends ``parts`` as they are and reads the answer to its end."""
    port = int(server.public.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
        for part in parts:
            try:
                connection.sendall(part)
            except OSError:  # it has answered and closed already
                break
        answer = b""
        while b"\r\n\r\n" not in answer and (more := connection.recv(65536)):
            answer += more
        return answer


def test_a_body_declared_too_large_is_refused_before_it_arrives(server: Live) -> None:
    assert raw(server, "Content-Length: 99999999999").startswith(b"HTTP/1.1 413")


def test_a_chunked_body_is_cut_off_at_the_limit(server: Live) -> None:
    chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    assert raw(server, "Transfer-Encoding: chunked", *([chunk] * 6)).startswith(b"HTTP/1.1 413")


def test_a_body_that_never_arrives_times_out(server: Live) -> None:
    assert raw(server, "Content-Length: 100", b"{").startswith(b"HTTP/1.1 408")


def test_concurrent_bodies_share_a_limit() -> None:
    """Four clients stop short of the end of the greatest body; the fifth finds no room until they have gone."""
    with live(limits=Limits(body_bytes=20_000, bodies_bytes=1, body_s=30.0)) as server:
        port = int(server.public.rpartition(":")[2])
        large_body = {"prompt": "hi", "max_tokens": 1, "user": "u" * 9_000}
        with ExitStack() as slow:
            for _ in range(4):
                connection = slow.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
                connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 19000\r\n\r\n".encode())
                connection.sendall(b" " * 18_999)
            assert soon(lambda: post(server, COMPLETIONS, large_body).status_code == 429)
            full = post(server, COMPLETIONS, large_body)
            assert error_of(full)["code"] == "bodies_full" and int(full.headers["retry-after"]) > 0
            assert full.headers["connection"] == "close"
            assert post(server, COMPLETIONS, {"prompt": "hi"}).status_code == 200, "room for a small one"
        assert soon(lambda: post(server, COMPLETIONS, large_body).status_code == 200)
        assert soon(server.idle)


def test_a_full_queue_is_429_with_retry_after() -> None:
    runner = LetterRunner()
    with live(runner=runner, max_queue=1, max_running=1) as server:
        runner.gate.clear()
        with openai.OpenAI(base_url=f"{server.public}/v1", api_key="x", max_retries=0) as client:
            streams = [
                client.completions.create(model=MODEL, prompt="abc", max_tokens=3, seed=seed, stream=True)
                for seed in range(2)
            ]
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model=MODEL, prompt="abc", max_tokens=3)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            runner.gate.set()
            for seed, stream in enumerate(streams):
                assert "".join(chunk.choices[0].text for chunk in stream) == letters(seed, 3, 3)
            assert client.completions.create(model=MODEL, prompt="abc", max_tokens=3).choices[0].text
        assert 'rooftune_requests_rejected_total{reason="busy"} 1.0' in server.metrics.page().decode()


def test_api_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("first-key-0123456789\n")
    with live(api_key=key) as server:
        body = {"prompt": "x", "max_tokens": 1}

        def status(given: str | None) -> int:
            headers = {} if given is None else {"authorization": given}
            return post(server, COMPLETIONS, body, **headers).status_code

        assert status("Bearer first-key-0123456789") == 200
        wrong = (None, "", "Bearer", "Bearer x", "Bearer first-key-012345678", "Basic first-key-0123456789")
        assert [status(given) for given in wrong] == [401] * len(wrong)
        for path in ("models", f"models/{MODEL}", "models/another"):
            assert HTTP.get(f"{server.public}/v1/{path}").status_code == 401
        assert post(server, CHAT, {"messages": HI}).status_code == 401
        assert HTTP.get(f"{server.public}/health").status_code == 200
        key.write_text("second-key-0123456789\nfirst-key-0123456789\n")
        assert [status(f"Bearer {name}-key-0123456789") for name in ("first", "second")] == [200, 200]
        key.write_text("second-key-0123456789\n")
        assert [status(f"Bearer {name}-key-0123456789") for name in ("first", "second")] == [401, 200]
        key.unlink()
        assert status("Bearer second-key-0123456789") == 401
