"""Encoding a prompt: only as far as it can fit, without blocking others, and counted when refused."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftune.engine.interface import RejectReason
from rooftune.engine.server.limits import Limits
from rooftune.engine.server.request import encode_within
from rooftune.engine.server.stream import ByteTokenizer
from tests.engine.server_harness import HTTP, MODEL, HeldTokenizer, Live, live, soon

PATH = "/v1/completions"


class Words(ByteTokenizer):
    """A token a word; notes how many characters it was given."""

    def __init__(self) -> None:
        super().__init__(512)
        self.seen_chars = 0

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        self.seen_chars += len(text)
        return [len(word) % 512 for word in text.split()]


@given(st.text(alphabet="ab \n", max_size=3000), st.integers(1, 60))
def test_a_prompt_that_fits_is_encoded_whole_and_others_are_refused(text: str, most: int) -> None:
    tokenizer = Words()
    whole = tokenizer.encode(text)
    found = encode_within(tokenizer, text, most, special=True)
    assert found == (whole if len(whole) <= most else None)


def test_of_a_text_that_is_far_too_long_only_the_beginning_is_encoded() -> None:
    tokenizer = Words()
    assert encode_within(tokenizer, "hello " * 1_000_000, 100, special=True) is None
    assert tokenizer.seen_chars < 20_000


def test_a_long_text_with_few_tokens_is_encoded_completely() -> None:
    tokenizer = Words()
    assert encode_within(tokenizer, "x" * 1_000_000, 100, special=True) == [1_000_000 % 512]
    assert tokenizer.seen_chars < 3_000_000


def test_more_messages_than_tokens_never_reach_the_template() -> None:
    lengths: list[int] = []

    class Counting(ByteTokenizer):
        def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
            lengths.append(len(messages))
            return "x"

    with live(tokenizer=Counting(512), limits=Limits(prompt_tokens=200)) as server:
        for count, status in ((200, 200), (201, 400)):
            body = {"messages": [{"role": "user", "content": ""}] * count, "max_tokens": 1}
            answer = HTTP.post(f"{server.public}/v1/chat/completions", json=body)
            assert answer.status_code == status
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert lengths == [200]


@pytest.mark.slow
def test_the_tuning_protocol_and_draining_wait_for_no_prompt(tmp_path: Path) -> None:
    """However many prompts are being encoded."""
    file, tokenizer = tmp_path / "token", HeldTokenizer()
    file.write_text("the-tuning-token-0123456789")
    headers = {"Authorization": "Bearer the-tuning-token-0123456789"}
    answers: list[int] = []

    def ask(server: Live) -> None:
        answers.append(HTTP.post(server.public + PATH, json={"prompt": "x", "max_tokens": 1}).status_code)

    with live(tokenizer=tokenizer, tuning_token=file) as server:
        clients = [threading.Thread(target=ask, args=(server,)) for _ in range(50)]
        for client in clients:
            client.start()
        try:
            assert soon(lambda: tokenizer.begun > 0)
            for method, path in (("GET", "state"), ("GET", "steps"), ("DELETE", "lease")):
                answer = httpx.request(method, f"{server.public}/tuning/v1/{path}", headers=headers, timeout=20)
                assert answer.status_code == 200
            server.stop.now()
            assert soon(lambda: not server.engine.snapshot().accepting)
            assert answers == [], "no prompt was ready meanwhile"
        finally:
            tokenizer.may.set()
            for client in clients:
                client.join(60)
    assert set(answers) == {503} and len(answers) == 50


REFUSED = [
    ({"prompt": "x" * 300}, RejectReason.TOO_LONG),
    ({"prompt": [1] * 300}, RejectReason.TOO_LONG),
    ({"prompt": "x", "max_tokens": 2048}, RejectReason.TOO_LONG),
    ({"prompt": [600]}, RejectReason.INVALID),
    ({"prompt": "x", "n": 2}, RejectReason.INVALID),
    ({"prompt": ""}, RejectReason.INVALID),
    (b"{", RejectReason.INVALID),
]


@pytest.mark.parametrize(("body", "reason"), REFUSED, ids=[str(body)[:40] for body, _ in REFUSED])
def test_a_refused_request_is_counted_once(body: dict | bytes, reason: RejectReason) -> None:
    with live(limits=Limits(prompt_tokens=200)) as server:
        sent = {"content": body} if isinstance(body, bytes) else {"json": {"model": MODEL} | body}
        assert HTTP.post(server.public + PATH, **sent).status_code == 400
        page = server.metrics.page().decode()
        for other in RejectReason:
            assert f'rooftune_requests_rejected_total{{reason="{other.value}"}} {float(other is reason)}' in page
