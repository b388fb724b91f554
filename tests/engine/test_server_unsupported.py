"""Fields that this server does not support: refused if they would change the answer, otherwise accepted."""

import json
import re
from pathlib import Path

import httpx
import pytest

from rooftune.engine.server import fields as server_unsupported
from rooftune.engine.server.fields import ROLES, Fields, StreamOptions
from tests.engine.server_harness import HTTP, Live, live

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": [{"role": "user", "content": "x"}]}}


@pytest.fixture(scope="module")
def server():
    with live() as running:
        yield running


def ask(server: Live, path: str, fields: dict) -> httpx.Response:
    body = PROMPTS[path] | {"max_tokens": 1} | fields
    return HTTP.post(server.public + path, content=json.dumps(body).encode())


# Of OpenAI's interface and vLLM's; each would change the answer, or what it is made from.
CHANGING = [
    {"n": 2}, {"n": 0}, {"n": True}, {"best_of": 2}, {"echo": True}, {"suffix": "x"}, {"logprobs": 0}, {"logprobs": 5},
    {"logprobs": True}, {"top_logprobs": 3}, {"prompt_logprobs": 0}, {"logit_bias": {"5": 1}}, {"top_k": 5},
    {"min_p": 0.1}, {"presence_penalty": 1}, {"frequency_penalty": -1}, {"repetition_penalty": 1.2}, {"min_tokens": 3},
    {"use_beam_search": True}, {"length_penalty": 0.5}, {"allowed_token_ids": [1]}, {"bad_words": ["x"]},
    {"include_stop_str_in_output": True}, {"skip_special_tokens": False}, {"spaces_between_special_tokens": False},
    {"truncate_prompt_tokens": 1}, {"prompt_embeds": "x"}, {"guided_json": {}}, {"guided_choice": ["x"]},
    {"guided_regex": "x"}, {"guided_grammar": "x"}, {"structured_outputs": {"choice": ["x"]}}, {"cache_salt": "x"},
    {"response_format": {"type": "json_object"}}, {"return_tokens_as_token_ids": True}, {"thinking_token_budget": 1},
    {"max_token": 1}, {"nobody's": 0}, {"": 1}, {"\ud800": 1}, {"x" * 9000: 1},
]  # fmt: skip
CHANGING_CHATS = [
    {"tools": [{"type": "function"}]}, {"tool_choice": "required"}, {"functions": [{}]}, {"reasoning_effort": "high"},
    {"verbosity": "low"}, {"chat_template": "x"}, {"chat_template_kwargs": {"x": 1}}, {"continue_final_message": True},
    {"add_generation_prompt": False}, {"add_special_tokens": True}, {"modalities": ["audio"]}, {"audio": {}},
    {"documents": []}, {"web_search_options": {}}, {"prediction": {}}, {"prompt": "x"},
]  # fmt: skip
ASKED = [(path, fields) for path in PROMPTS for fields in CHANGING] + [(CHAT, fields) for fields in CHANGING_CHATS]
ASKED += [(COMPLETIONS, {"add_special_tokens": False}), (COMPLETIONS, {"messages": []})]


@pytest.mark.parametrize(("path", "fields"), ASKED, ids=[f"{path} {fields}"[:60] for path, fields in ASKED])
def test_a_field_that_would_change_the_answer_is_refused_by_name(server: Live, path: str, fields: dict) -> None:
    answer = ask(server, path, fields)
    error = answer.json()["error"]
    (name,) = fields
    assert answer.status_code == 400 and len(error["message"]) < 300
    assert error["param"] == ascii(name[:64])[1:-1] and error["param"] in error["message"]


# Fields that common clients and load generators add.
NEUTRAL = {
    "n": 1, "best_of": 1, "logprobs": None, "echo": False, "top_k": -1, "repetition_penalty": 1.0, "min_tokens": 0,
    "presence_penalty": 0.0, "user": "someone", "logit_bias": {}, "min_p": 0.0, "suffix": None, "store": False,
    "metadata": {"a": "b"}, "skip_special_tokens": True, "include_stop_str_in_output": False, "service_tier": "auto",
    "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "unheard_of": None, "priority": 0,
}  # fmt: skip


@pytest.mark.parametrize("path", PROMPTS)
def test_fields_that_change_nothing_are_accepted(server: Live, path: str) -> None:
    assert ask(server, path, NEUTRAL | {"add_special_tokens": path == COMPLETIONS}).status_code == 200


@pytest.mark.parametrize("path", PROMPTS)
def test_two_lengths_that_differ_are_refused(server: Live, path: str) -> None:
    assert ask(server, path, {"max_tokens": 3, "max_completion_tokens": 3}).json()["usage"]["completion_tokens"] == 3
    refused = ask(server, path, {"max_tokens": 3, "max_completion_tokens": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_continuous_usage_grows_with_the_stream(server: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = ask(server, COMPLETIONS, {"max_tokens": 3, "stream": True, "stream_options": options})
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {1}
    plain = ask(server, COMPLETIONS, {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": False}})
    assert "usage" not in plain.text


@pytest.mark.parametrize("options", [{"include_obfuscation": True}, {"include_usage": True, "else": 1}])
def test_unknown_stream_options_are_refused(server: Live, options: dict) -> None:
    answer = ask(server, COMPLETIONS, {"stream": True, "stream_options": options})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")


def test_the_page_names_every_accepted_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    table = page[page.index("## Fields") : page.index("## Refusals")]
    named = set(re.findall(r"`([a-z_]+)`", table))
    taken = Fields.model_fields.keys() | server_unsupported.NO_MATTER | {"prompt", "messages"}
    assert taken <= named
    others = named - taken - set(ROLES) - StreamOptions.model_fields.keys()
    assert others == {"null", "text", "token_ids", "cached_tokens"}
