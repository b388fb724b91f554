"""The tuning protocol over HTTP: access, refusals, and that a refusal changes nothing."""

import json
import random
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooftune.engine.step import StepBatch
from rooftune.policies import wire
from tests.engine.server_harness import HTTP, LetterRunner, Live, letters, live, soon

pytestmark = pytest.mark.slow

TOKEN = "the-tuning-token-0123456789"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
READS = ["/state", "/steps", "/requests", "/in-flight", "/openapi.json"]
WRITES = [("PUT", "/knobs"), ("DELETE", "/lease"), ("POST", "/resume")]


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture
def server(token_file: Path):
    with live(tuning_token=token_file) as running:
        yield running


def call(server: Live, method: str, path: str, body: object = None, headers: dict = AUTH) -> httpx.Response:
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    return HTTP.request(method, f"{server.public}/tuning/v1{path}", content=content, headers=headers)


def wish(revision: int = 0, **fields: object) -> dict:
    common = {"lease_s": 60.0, "expected_revision": revision, "actor": "test", "reason": "because"}
    return {"knobs": {"step_tokens": 256}} | common | fields


def state(server: Live) -> wire.State:
    return wire.parse(wire.State, call(server, "GET", "/state").content, wire.MAX_ANSWER_BYTES)


def test_push_revert_resume(server: Live) -> None:
    answer = call(server, "PUT", "/knobs", wish())
    pushed = wire.parse(wire.PushAnswer, answer.content)
    assert answer.status_code == 200 and pushed.revision == 1
    now = state(server)
    assert now.setting().step_tokens == 256 and now.lease is not None and now.lease.actor == "test"
    reverted = call(server, "DELETE", "/lease")  # one line of curl: no body
    assert reverted.status_code == 200
    assert (state(server).setting().step_tokens, state(server).blocked) == (512, True)
    blocked = call(server, "PUT", "/knobs", wish(2))
    assert (blocked.status_code, blocked.json()["code"]) == (409, "blocked_by_revert")
    assert call(server, "POST", "/resume", {"actor": "a", "reason": "b"}).status_code == 200
    assert call(server, "PUT", "/knobs", wish(state(server).revision)).status_code == 200


REFUSED = [
    (wish(7), 409, "conflict_revision"),
    (wish(knobs={"step_tokens": 513}), 422, "outside_envelope"),
    (wish(knobs={"max_running": 100_000}), 422, "outside_envelope"),
    (wish(knobs={"step_tokens": 256, "chunk_cap_tokens": 513}), 422, "outside_envelope"),
    (wish(knobs={"step_tokens": "256"}), 422, "malformed"),
    (wish(knobs={"unheard_of": 1}), 422, "malformed"),
    (wish(surplus=1), 422, "malformed"),
    (wish(lease_s=0.0), 422, "malformed"),
    (wish(lease_s=1e9), 422, "malformed"),
    (wish(actor=""), 422, "malformed"),
    (wish(protocol_version=2), 422, "malformed"),
    ({}, 422, "malformed"),
    ([], 422, "malformed"),
    (b"", 422, "malformed"),
    (b"\x80\x04\x95pickle", 422, "malformed"),
    (b'{"lease_s": NaN}', 422, "malformed"),
    (b"[" * 60_000, 422, "malformed"),
    (b" " * 65_537, 413, "malformed"),
]


@pytest.mark.parametrize(("body", "status", "code"), REFUSED, ids=[str(body)[:60] for body, _, _ in REFUSED])
def test_a_refused_push_changes_nothing(server: Live, body: object, status: int, code: str) -> None:
    before = state(server)
    answer = call(server, "PUT", "/knobs", body)
    refusal = wire.parse(wire.Refusal, answer.content)
    assert (answer.status_code, refusal.code) == (status, code)
    after = state(server)
    assert (after.revision, after.knobs, after.lease) == (before.revision, before.knobs, None)


def test_the_broken_bound_is_named(server: Live) -> None:
    refusal = wire.parse(wire.Refusal, call(server, "PUT", "/knobs", wish(knobs={"step_tokens": 513})).content)
    assert [(breach.knob, breach.broken, breach.limit) for breach in refusal.breaches] == [
        ("step_tokens", "maximum", 512)
    ]


@pytest.mark.parametrize("query", ["?after=x", "?after=-2", "?after=1.0", "?after=", "?after=1&after=2", "?since=1"])
def test_bad_queries(server: Live, query: str) -> None:
    for path in ("/steps", "/requests"):
        answer = call(server, "GET", path + query)
        assert (answer.status_code, wire.parse(wire.Refusal, answer.content).code) == (422, "malformed")
    assert call(server, "GET", "/state" + query).status_code == 422


def test_step_and_request_records_match_what_was_served(server: Live) -> None:
    body = {"prompt": [1] * 700, "max_tokens": 3}
    assert HTTP.post(f"{server.public}/v1/completions", json=body).status_code == 200
    found = wire.parse(wire.StepColumns, call(server, "GET", "/steps").content, wire.MAX_ANSWER_BYTES)
    assert found.prefill_tokens == (512, 188, 0, 0) and found.decode_tokens == (0, 0, 1, 1)
    later = wire.parse(wire.StepColumns, call(server, "GET", "/steps?after=1").content, wire.MAX_ANSWER_BYTES)
    assert later.step == found.step[2:]
    rows = wire.parse(wire.RequestColumns, call(server, "GET", "/requests").content, wire.MAX_ANSWER_BYTES)
    assert (rows.prompt_tokens, rows.output_tokens, rows.ended) == ((700,), (3,), ("finished",))


class Watched(LetterRunner):
    """Records the start and end of every step, its tokens and the KV entries before them."""

    def __init__(self) -> None:
        super().__init__(step_s=0.01)
        self.seen: list[tuple[float, float, int, int]] = []

    def run(self, step: StepBatch) -> list[int]:
        begun_s = time.monotonic()
        tokens = super().run(step)
        context = sum(segment.start for segment in step.segments)
        self.seen.append((begun_s, time.monotonic(), step.computed_tokens, context))
        return tokens


def test_step_records_are_true_under_load(token_file: Path) -> None:
    """Durations add up to the time that passed, tokens and contexts are those that were computed."""
    runner = Watched()
    with live(tuning_token=token_file, runner=runner, step_tokens=64) as server:
        runner.gate.clear()
        url = f"{server.public}/v1/completions"
        bodies = [{"prompt": [seed] * 100, "max_tokens": 60, "seed": seed} for seed in range(12)]
        clients = [threading.Thread(target=HTTP.post, args=(url,), kwargs={"json": body}) for body in bodies]
        for client in clients:
            client.start()
        assert soon(lambda: server.engine.snapshot().running + server.engine.snapshot().waiting == 12)
        runner.gate.set()
        for client in clients:
            client.join()
        steps = wire.parse(wire.StepColumns, call(server, "GET", "/steps").content, wire.MAX_ANSWER_BYTES)
    # From the second step on: the first waited at the gate.
    passed_s = runner.seen[-1][1] - runner.seen[1][0]
    assert sum(steps.duration_s[1:]) == pytest.approx(passed_s, rel=0.02)
    computed = [p + d for p, d in zip(steps.prefill_tokens, steps.decode_tokens, strict=True)]
    contexts = [p + d for p, d in zip(steps.prefill_context_tokens, steps.decode_context_tokens, strict=True)]
    assert list(zip(computed, contexts, strict=True)) == [seen[2:] for seen in runner.seen]
    assert sum(computed) == 12 * (100 + 59)


def test_with_a_token_every_route_needs_it(server: Live, token_file: Path) -> None:
    bad = [{}, {"Authorization": TOKEN}, {"Authorization": "Bearer wrong-token-0123456789"}]
    bad += [{"Authorization": f"Bearer {TOKEN}x"}, {"X-Forwarded-For": "127.0.0.1"}]
    for headers in bad:
        for method, path in [*(("GET", path) for path in READS), *WRITES]:
            answer = call(server, method, path, wish(), headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert [call(server, "GET", path).status_code for path in READS] == [200] * 5
    token_file.write_text("rotated-token-0123456789")
    assert call(server, "GET", "/state").status_code == 401
    assert call(server, "GET", "/state", None, {"Authorization": "Bearer rotated-token-0123456789"}).status_code == 200
    token_file.write_text("")
    assert call(server, "GET", "/state", None, {"Authorization": "Bearer rotated-token-0123456789"}).status_code == 401


def test_without_a_token_the_public_port_has_no_tuning_routes_and_the_private_one_is_read_only() -> None:
    with live() as server:
        for method, path in [*(("GET", path) for path in READS), *WRITES]:
            assert call(server, method, path, wish(), {}).status_code == 404
        private = f"{server.private}/tuning/v1"
        assert [HTTP.get(private + path).status_code for path in READS] == [200] * 5
        for method, path in WRITES:
            answer = HTTP.request(method, private + path, content=json.dumps(wish()).encode(), headers=AUTH)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "read_only")
        assert server.engine.snapshot().revision == 0
        assert HTTP.post(f"{server.private}/v1/completions", json={"prompt": "x"}).status_code == 404


def test_a_push_under_load_is_in_force_in_the_step_it_names(token_file: Path) -> None:
    runner = LetterRunner(step_s=0.001)
    with live(tuning_token=token_file, runner=runner) as server:
        body = {"prompt": [1] * 2000, "max_tokens": 40}
        url = f"{server.public}/v1/completions"
        clients = [threading.Thread(target=HTTP.post, args=(url,), kwargs={"json": body}) for _ in range(4)]
        for client in clients:
            client.start()
        assert soon(lambda: server.engine.snapshot().step > 3)
        runner.gate.clear()  # the step that runs now waits until the push is in
        pushed = wire.parse(wire.PushAnswer, call(server, "PUT", "/knobs", wish(knobs={"step_tokens": 100})).content)
        runner.gate.set()
        for client in clients:
            client.join()
        steps = server.engine.steps_after(-1)
    under = dict(zip(steps.step, zip(steps.revision, steps.budget_tokens, strict=True), strict=True))
    assert max(under) >= pushed.effective_from_step
    for step, (revision, budget) in under.items():
        assert (revision, budget) == ((1, 100) if step >= pushed.effective_from_step else (0, 512))


def test_openapi_describes_every_route_and_resolves(server: Live) -> None:
    page = call(server, "GET", "/openapi.json").json()
    described = {(method.upper(), path) for path, methods in page["paths"].items() for method in methods}
    assert described == {("GET", f"/tuning/v1{path}") for path in READS[:4]} | {
        (method, f"/tuning/v1{path}") for method, path in WRITES
    }
    schemas = page["components"]["schemas"]
    text = json.dumps(page)
    assert "$defs" not in text
    for part in text.split('"$ref": "')[1:]:
        name = part.split('"', 1)[0].removeprefix("#/components/schemas/")
        assert name in schemas, name
    for part in text.split('"mapping": ')[1:]:
        for target in json.loads(part[: part.index("}") + 1]).values():
            assert target.removeprefix("#/components/schemas/") in schemas


def test_openapi_declares_every_answer_and_its_schema(server: Live) -> None:
    page = call(server, "GET", "/openapi.json").json()
    requests = [
        ("GET", path, None, AUTH)
        for path in ("/state", "/steps", "/requests", "/in-flight", "/steps?after=x", "/in-flight?x=1")
    ]
    requests += [(method, path, None, {}) for method, path in [*WRITES, *(("GET", path) for path in READS[:4])]]
    requests += [("PUT", "/knobs", body, AUTH) for body, _, _ in REFUSED]
    requests += [("PUT", "/knobs", wish(), AUTH), ("PUT", "/knobs", wish(1, actor="another"), AUTH)]
    requests += [("DELETE", "/lease", None, AUTH), ("POST", "/resume", {"actor": "a", "reason": "b"}, AUTH)]
    requests += [("POST", "/resume", None, AUTH)]
    requests += [("DELETE", "/lease", body, AUTH) for body in ([], b" " * 70_000)]
    seen = Counter[int]()
    for method, path, body, headers in requests:
        answer = call(server, method, path, body, headers)
        declared = page["paths"][f"/tuning/v1{path.partition('?')[0]}"][method.lower()]["responses"]
        seen[answer.status_code] += 1
        schema = declared[str(answer.status_code)]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        if schema == "Error":
            shape = page["components"]["schemas"]["ErrorPart"]
            assert set(answer.json()["error"]) == set(shape["properties"]) == set(shape["required"])
        else:
            wire.parse(getattr(wire, schema), answer.content, wire.MAX_ANSWER_BYTES)
    assert set(seen) == {200, 401, 409, 413, 422}


def test_openapi_declares_the_bounds_of_the_query(server: Live) -> None:
    page = call(server, "GET", "/openapi.json").json()
    for path in ("/steps", "/requests"):
        (after,) = page["paths"][f"/tuning/v1{path}"]["get"]["parameters"]
        least, most = after["schema"]["minimum"], after["schema"]["maximum"]
        bounds = (least - 1, least, most, most + 1)
        assert [call(server, "GET", f"{path}?after={at}").status_code for at in bounds] == [422, 200, 200, 422]


def test_a_token_may_hold_any_character(server: Live, token_file: Path) -> None:
    token_file.write_text("schlüssel-für-die-knöpfe-€", encoding="utf-8")
    given = [text.encode() for text in ("schlüssel-für-die-knöpfe-€", "schlussel-fur-die-knopfe-E")]
    found = [call(server, "GET", "/state", None, {b"Authorization": b"Bearer " + text}).status_code for text in given]
    assert found == [200, 401]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.dictionaries(
    st.sampled_from(["knobs", "lease_s", "expected_revision", "actor", "reason", "budget_policy", "order_policy", "x"]),
    JSON,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(WRITES), FIELDS.map(lambda fields: wish() | fields) | JSON, st.booleans())
def test_any_body_gets_an_answer_of_the_protocol(server: Live, door: tuple[str, str], body: object, cut: bool) -> None:
    content = json.dumps(body).encode()
    answer = call(server, *door, content[: len(content) // 2] if cut else content)
    assert answer.status_code in (200, 409, 422)
    wire.parse(wire.PushAnswer if answer.status_code == 200 else wire.Refusal, answer.content)


@pytest.mark.slow
def test_10000_fuzzed_control_calls_beside_streams(token_file: Path) -> None:
    """Random bytes, random edits of good messages, good messages: always an answer, and never a wrong token."""
    with live(tuning_token=token_file, runner=LetterRunner(step_s=0.002)) as server:
        fuzz(server, random.Random(3))


def fuzz(server: Live, chance: random.Random) -> None:
    good = [wish(), wish(1), wish(knobs={"step_tokens": 64, "max_running": 4}), {"actor": "a", "reason": "b"}, {}]
    seen: Counter[int] = Counter()
    wrong: list[str] = []
    over = threading.Event()

    def stream(seed: int) -> None:
        while not over.is_set():
            body = {"prompt": [seed] * 100, "max_tokens": 60, "seed": seed}
            text = HTTP.post(f"{server.public}/v1/completions", json=body).json()["choices"][0]["text"]
            if text != letters(seed, 100, 60):
                wrong.append(text)

    streams = [threading.Thread(target=stream, args=(seed,)) for seed in range(3)]
    for thread in streams:
        thread.start()
    for _ in range(10_000):
        content = bytearray(json.dumps(chance.choice(good)).encode())
        for _ in range(chance.choice((0, 0, 1, 2, 8))):
            content[chance.randrange(len(content))] = chance.randrange(256)
        if chance.random() < 0.1:
            content = bytearray(chance.randbytes(chance.randrange(200)))
        method, path = chance.choice([*WRITES, ("GET", f"/steps?after={chance.randrange(-3, 10**6)}")])
        seen[call(server, method, path, bytes(content), AUTH if chance.random() < 0.95 else {}).status_code] += 1
    over.set()
    for thread in streams:
        thread.join()
    assert not wrong and set(seen) <= {200, 401, 409, 422}
    assert min(seen[200], seen[401], seen[409], seen[422]) > 50, seen
    assert HTTP.get(f"{server.public}/health").status_code == 200
