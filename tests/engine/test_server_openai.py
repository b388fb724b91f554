"""OpenAI's API, used by the official client and by hand, against a live server."""

import json

import openai
import pytest

from tests.engine.server_harness import HTTP, MODEL, LetterRunner, Live, letters, live, soon


@pytest.fixture(scope="module")
def server():
    with live() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live):
    with openai.OpenAI(base_url=f"{server.public}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_completion_with_usage(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=9, seed=5)
    assert answer.object == "text_completion" and answer.model == MODEL
    assert answer.choices[0].text == letters(5, 5, 9)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 9, 14)


def test_token_id_prompts_are_the_same_as_text(client: openai.OpenAI) -> None:
    for prompt in ([1, 2, 3], [[1, 2, 3]], "abc", ["abc"]):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, seed=6)
        assert answer.choices[0].text == letters(6, 3, 4)


def test_default_length_of_a_completion_is_openais(client: openai.OpenAI) -> None:
    assert client.completions.create(model=MODEL, prompt="x").usage.completion_tokens == 16


def test_a_stream_sends_one_event_per_token(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="hello", max_tokens=7, seed=1, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == letters(1, 5, 7)
    assert [len(chunk.choices[0].text) for chunk in chunks[:-1]] == [1] * 7
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 6 + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 7
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_is_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=6, seed=2)
    chunks = list(client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6, seed=2, stream=True))
    prompt = "system: be\nuser: hi\nassistant: "
    assert whole.choices[0].message.content == letters(2, len(prompt), 6)
    assert whole.choices[0].message.role == "assistant" and whole.object == "chat.completion"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * 5
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_chat_without_max_tokens_runs_to_the_models_end(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "x" * 2000}]
    usage = client.chat.completions.create(model=MODEL, messages=messages).usage
    assert usage.total_tokens == 2048


def test_end_of_sequence_ends_the_answer_and_adds_no_text(client: openai.OpenAI) -> None:
    seed = 1_000_000 + 5 + 3
    ended = client.completions.create(model=MODEL, prompt="hello", max_tokens=9, seed=seed)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == (letters(seed, 5, 3), "stop")
    assert ended.usage.completion_tokens == 4
    ignored = client.completions.create(
        model=MODEL, prompt="hello", max_tokens=9, seed=seed, extra_body={"ignore_eos": True}
    )
    assert (ignored.usage.completion_tokens, ignored.choices[0].finish_reason) == (9, "length")


def test_stop_token_ids_end_the_answer(client: openai.OpenAI) -> None:
    text = letters(3, 5, 30)
    stop = text[4]
    extra = {"stop_token_ids": [ord(stop)], "ignore_eos": True}
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=30, seed=3, extra_body=extra)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_tokens_cut_the_text_and_free_the_request(server: Live, stream: bool) -> None:
    text = letters(4, 5, 2000)
    stop = text[20:24]
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 2000, "seed": 4, "stop": ["nowhere!", stop]}
    answer = HTTP.post(f"{server.public}/v1/completions", json=body | {"stream": stream})
    found, reason = read_stream(answer.text)[:2] if stream else read_whole(answer.json())
    assert (found, reason) == (text[: text.index(stop)], "stop")
    assert soon(server.idle)


def test_token_ids_beside_the_text_on_request(server: Live) -> None:
    body = {"prompt": [7, 8], "max_tokens": 5, "seed": 9, "return_token_ids": True}
    found = HTTP.post(f"{server.public}/v1/completions", json=body).json()["choices"][0]
    assert bytes(found["token_ids"]).decode() == found["text"] == letters(9, 2, 5)


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    prompt = list(range(100, 180))
    first, second = (client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == 64  # whole blocks of 16, the last token is always computed


def test_models_and_health(server: Live, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    entry = HTTP.get(f"{server.public}/v1/models").json()["data"][0]
    assert entry["root"] == entry["id"]  # what vLLM's own clients look for
    assert entry["max_model_len"] == server.engine.max_request_tokens and entry["vocab_size"] == 512
    assert HTTP.get(f"{server.public}/health").json() == {"status": "ok"}


def test_seedless_requests_differ(client: openai.OpenAI) -> None:
    texts = {client.completions.create(model=MODEL, prompt="a", max_tokens=12).choices[0].text for _ in range(4)}
    assert len(texts) > 1


def test_a_character_of_several_tokens_is_sent_whole() -> None:
    class Euro(LetterRunner):
        def _token(self, seed: int, position: int) -> int:
            return "€".encode()[(position - 1) % 3]

    with live(runner=Euro()) as server:
        body = {"prompt": "x", "max_tokens": 8, "stream": True}
        text, _, pieces = read_stream(HTTP.post(f"{server.public}/v1/completions", json=body).text)
    assert text == "€€\ufffd" and pieces[:6] == ["", "", "€", "", "", "€"]


def read_whole(answer: dict) -> tuple[str, str]:
    choice = answer["choices"][0]
    return choice["text"], choice["finish_reason"]


def read_stream(text: str) -> tuple[str, str, list[str]]:
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    pieces = [choice["text"] for choice in choices]
    return "".join(pieces), choices[-1]["finish_reason"], pieces
