"""Every flag of ``rooftune serve`` takes effect: one server with all of them, tested from outside."""

import signal
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rooftune.policies import wire
from tests.system.test_serve_fake import serving, url

pytestmark = pytest.mark.slow

KEY, TOKEN = "the-api-key-0123456789", "the-tuning-token-0123456789"
FLAGS = {
    "--served-name": "mine",
    "--max-model-tokens": 700,
    "--kv-blocks": 100,
    "--block-tokens": 8,
    "--max-step-tokens": 512,
    "--step-tokens": 200,
    "--chunk-cap-tokens": 50,
    "--max-partial-prefills": 3,
    "--max-running": 6,
    "--max-queue": 0,
    "--max-prompt-tokens": 300,
    "--max-body-bytes": 5000,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client with the API key."""
    folder = tmp_path_factory.mktemp("secrets")
    for name, secret in (("key", KEY), ("token", TOKEN)):
        (folder / name).write_text(secret)
    words = [str(word) for pair in FLAGS.items() for word in pair] + ["--no-prefix-caching"]
    words += ["--api-key-file", str(folder / "key"), "--tuning-token-file", str(folder / "token")]
    headers = {"Authorization": f"Bearer {KEY}"}
    with serving(*words) as (_, lines), httpx.Client(base_url=url(lines), headers=headers, timeout=60) as client:
        yield client


def complete(client: httpx.Client, **fields: object) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1} | fields)


def rejected(client: httpx.Client) -> dict[str, float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = next(family for family in families if family.name == "rooftune_requests_rejected").samples
    return {sample.labels["reason"]: sample.value for sample in samples}


def test_the_state_shows_the_flags(served: httpx.Client) -> None:
    answer = served.get("/tuning/v1/state", headers={"Authorization": f"Bearer {TOKEN}"})
    state = wire.parse(wire.State, answer.content, wire.MAX_ANSWER_BYTES)
    fixed = state.envelope
    assert (fixed.ceiling_tokens, fixed.max_running, fixed.model_tokens) == (512, 6, 700)
    assert (fixed.kv_blocks, fixed.kv_block_tokens) == (100, 8)
    boot = {knob.name: knob.boot for knob in state.knobs}
    wanted = {"step_tokens": 200, "chunk_cap_tokens": 50, "max_partial_prefills": 3, "max_running": 6}
    assert {name: boot[name] for name in wanted} == wanted


def test_names_keys_and_limits_are_in_force(served: httpx.Client) -> None:
    (model,) = served.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("mine", 700)
    assert served.get("/v1/models", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 401
    assert complete(served, prompt=[1] * 300, model="mine").status_code == 200
    before = rejected(served)
    assert complete(served, prompt=[1] * 301).json()["error"]["code"] == "context_length_exceeded"
    assert complete(served, max_tokens=700).json()["error"]["code"] == "context_length_exceeded"
    assert rejected(served)["too_long"] == before["too_long"] + 2
    assert complete(served, user="x" * 5000).status_code == 413


def test_nothing_is_found_in_a_cache_that_is_switched_off(served: httpx.Client) -> None:
    found = [complete(served, prompt=[7] * 200).json()["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert found == [{"cached_tokens": 0}] * 2


def test_draining_ends_when_its_time_is_over() -> None:
    with serving("--drain", "0.2") as (process, lines):
        body = {"prompt": "x", "max_tokens": 100_000, "stream": True}
        with httpx.stream("POST", f"{url(lines)}/v1/completions", json=body, timeout=60) as answer:
            events = answer.iter_lines()
            next(events)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in events if line]
        assert '"engine_stopped"' in rest[-1] and len(rest) < 500, "a step takes 10 ms"
        assert process.wait(60) == 1


def test_the_queue_limit_is_enforced(served: httpx.Client) -> None:
    """No place beyond the running requests."""
    body = {"prompt": "x", "max_tokens": 300, "stream": True}
    streams = [served.build_request("POST", "/v1/completions", json=body) for _ in range(6)]
    answers = [served.send(stream, stream=True) for stream in streams]
    try:
        assert [answer.status_code for answer in answers] == [200] * 6
        refused = complete(served)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    finally:
        for answer in answers:
            answer.close()
