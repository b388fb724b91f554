"""The plugin in a real vLLM server: hot changes, ten thousand pushes under load, reading, access.

``ROOFTUNE_FULL=1`` takes the whole ten thousand; else a fifth of it. No wall time is asserted anywhere.
"""

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rooftune.policies import wire
from rooftune.tuner.observe.protocol import ProtocolReader
from tests.contracts.tuning_protocol import in_force, push, taken
from tests.vllm.server import AUTH, Server, make_model, serving

pytestmark = pytest.mark.vllm

PUSHES = 10_000 if os.environ.get("ROOFTUNE_FULL") else 2_000
LONG_TOKENS, LONG_OUTPUT = 6_000, 8


def prompt(seed: int, tokens: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 500) for _ in range(tokens)]


LONG = {seed: prompt(seed, LONG_TOKENS) for seed in (1, 2, 3)}
MIXED = [(prompt(100 + index, 40 + 67 * (index % 5) ** 2), 12 + 5 * (index % 4)) for index in range(12)]


def answers(server: Server, wanted: Sequence[tuple[list[int], int]]) -> list[list[int]]:
    """All at once, so that prefills and decodes meet."""
    with ThreadPoolExecutor(len(wanted)) as clients:
        return list(clients.map(lambda one: server.complete(*one), wanted))


@pytest.fixture(scope="module")
def model(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "model"
    make_model(vllm_python, folder)
    return folder


@pytest.fixture(scope="module")
def untouched(vllm_python: Path, model: Path) -> dict[str, list[list[int]]]:
    """What a server without the plugin answers."""
    with serving(vllm_python, model, model.parent / "stock", plugin=False) as server:
        assert server.http.get(f"{server.url}/tuning/v1/state").status_code == 404
        longs = [server.complete(words, LONG_OUTPUT) for words in LONG.values()]
        return {"long": longs, "mixed": answers(server, MIXED)}


@pytest.fixture(scope="module")
def server(vllm_python: Path, model: Path, untouched: dict[str, list[list[int]]]) -> Iterator[Server]:
    with serving(vllm_python, model, model.parent / "hooked") as running:
        yield running
        assert running.process.poll() is None, "the server ended"
        assert "EngineDeadError" not in "".join(running.log)
        assert "hook off" not in "".join(running.log)


@pytest.fixture(autouse=True)
def at_boot(server: Server) -> None:
    server.revert(wire.RevertRequest(block=False))


def prefills(server: Server, after: int) -> list[int]:
    return [tokens for tokens in server.steps_after(after).prefill_tokens if tokens]


def test_the_budget_changes_while_the_server_runs(server: Server, untouched: dict[str, list[list[int]]]) -> None:
    found = []
    planned = []
    for seed, budget in ((1, 2048), (2, 256), (3, 2048)):
        taken(push(server, step_tokens=budget))
        at = server.tuning_state().step - 1
        found.append(server.complete(LONG[seed], LONG_OUTPUT))
        planned.append(prefills(server, at))
    assert planned == [[2048, 2048, 1904], [256] * 23 + [112], [2048, 2048, 1904]]
    assert found == untouched["long"]


def test_a_change_is_in_force_one_step_after_the_one_in_flight(server: Server) -> None:
    taken(push(server, step_tokens=64))
    at = server.tuning_state().step - 1
    with ThreadPoolExecutor(1) as clients:
        running = clients.submit(server.complete, prompt(9, LONG_TOKENS), 2)
        while len(server.steps_after(at).step) < 5:
            time.sleep(0.01)
        before = server.steps_after(at)  # these have ended: one more may be in flight
        answer = taken(push(server, step_tokens=512))
        running.result()
    steps = server.steps_after(at)
    assert answer.effective_from_step >= before.next + 1
    by_step = dict(zip(steps.step, zip(steps.budget_tokens, steps.revision, strict=True), strict=True))
    for step, (budget, revision) in by_step.items():
        changed = step >= answer.effective_from_step
        assert (budget, revision) == ((512, answer.revision) if changed else (64, answer.revision - 1))
    assert set(steps.prefill_tokens) >= {64, 512}


KNOBS: list[tuple[str, dict[str, Any], Callable[[wire.StepColumns], bool]]] = [
    ("chunk cap", {"chunk_cap_tokens": 96}, lambda steps: max(steps.prefill_tokens) <= 96 * max(steps.prefills)),
    ("active cap", {"max_running": 3}, lambda steps: max(steps.running) == 3),
    (
        "partial cap",
        {"chunk_cap_tokens": 64, "max_partial_prefills": 1},
        lambda steps: max(steps.partial_prefills) == 1,
    ),
    (
        "long partial cap",
        {"chunk_cap_tokens": 64, "max_long_partial_prefills": 1, "long_prompt_tokens": 600},
        lambda steps: 1 <= max(steps.partial_prefills) <= 8,
    ),
    (
        "shortest first",
        {"step_tokens": 200, "order_policy": {"kind": "shortest_first", "aging_s": 60.0}},
        lambda _: True,
    ),
    (
        "deadline",
        {
            "step_tokens": 200,
            "order_policy": {"kind": "deadline", "aging_s": 60.0, "ttft_target_s": 2.0, "prefill_s_per_token": 1e-4},
        },
        lambda _: True,
    ),
    (
        "pressure",
        {"budget_policy": {"kind": "pressure", "tokens": 128, "prefills": 1}},
        lambda steps: min(steps.budget_tokens) == 128 and max(steps.budget_tokens) == 2048,
    ),
]


@pytest.mark.parametrize(("knobs", "holds"), [part[1:] for part in KNOBS], ids=[part[0] for part in KNOBS])
def test_each_knob_is_live_and_changes_no_answer(
    server: Server,
    untouched: dict[str, list[list[int]]],
    knobs: dict[str, Any],
    holds: Callable[[wire.StepColumns], bool],
) -> None:
    answer = taken(push(server, **knobs))
    at = server.tuning_state().step - 1
    done = server.requests_after(-1).next
    assert answers(server, MIXED) == untouched["mixed"]
    steps = server.steps_after(at)
    assert set(steps.revision) == {answer.revision} and holds(steps)
    if "order_policy" in knobs:
        rows = server.requests_after(done)
        firsts = sorted(
            (arrival + (ttft or 0), tokens)
            for arrival, ttft, tokens in zip(rows.arrival_s, rows.ttft_s, rows.prompt_tokens, strict=True)
        )
        order = [tokens for _, tokens in firsts]
        # Requests admitted before all had arrived may be out of place; equal ones may swap.
        assert order[-2:] == sorted(order)[-2:], order
    check_every_decode_moved(server, at, done)


def check_every_decode_moved(server: Server, steps_after: int, requests_after: int) -> int:
    """Every step gave every request between its first and its last token one: no gap above one step."""
    ends: list[float] = []
    after = steps_after
    while (part := server.steps_after(after)).step:
        assert part.lost == 0
        ends += [start + length for start, length in zip(part.start_s, part.duration_s, strict=True)]
        after = part.next
    checked = 0
    while (rows := server.requests_after(requests_after)).sequence:
        for row in range(len(rows.sequence)):
            ttft_s = rows.ttft_s[row]
            if rows.ended[row] != "finished" or ttft_s is None or rows.preemptions[row] or not ends:
                continue
            first_s = rows.arrival_s[row] + ttft_s
            if first_s < ends[0] - 1e-6:
                continue
            updates = sum(first_s - 1e-6 <= end <= rows.finish_s[row] + 1e-6 for end in ends)
            assert updates == rows.output_tokens[row], (rows.sequence[row], updates, rows.output_tokens[row])
            checked += 1
        requests_after = rows.next
    return checked


class Load:
    """Clients that ask without a pause; every answer must be whole."""

    def __init__(self, server: Server, clients: int) -> None:
        self.server, self.stopped, self.sent, self.failed = server, False, 0, []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        while not self.stopped:
            tokens = chance.choice([5, 30, 90, 400, 1500])
            try:
                self.server.complete(prompt(chance.randrange(1 << 30), tokens), chance.choice([1, 5, 20, 40]))
                with self._lock:
                    self.sent += 1
            except (AssertionError, httpx.HTTPError) as error:
                self.failed.append(repr(error))
                return


def any_push(chance: random.Random, revision: int) -> dict[str, Any]:
    """A body for the push route: mostly near the truth, often outside or wrong in one place."""
    rarely = chance.random() < 0.25  # then something that cannot be
    model = dict.fromkeys(wire.StepConstants.model_fields, 0.0) | {"slope_s_per_token": 1e-4}
    orders: list[Any] = [
        None, {"kind": "fcfs"}, {"kind": "shortest_first", "aging_s": 0.5},
        {"kind": "deadline", "aging_s": 1.0, "ttft_target_s": 0.5, "prefill_s_per_token": 1e-4},
    ]  # fmt: skip
    budgets: list[Any] = [
        None, {"kind": "fixed"}, {"kind": "pressure", "tokens": 32, "prefills": 2},
        {"kind": "step_time_target", "target_s": 0.01, "floor_tokens": 16, "step_model": model},
    ]  # fmt: skip
    knobs: dict[str, Any] = {"step_tokens": chance.choice([1, 16, 64, 256, 1024, 2048])}
    counts = [name for name in wire.Knobs.model_fields if name not in ("adaptive_chunk_cap", "pass_over_max_s")]
    for _ in range(chance.randrange(4)):
        knobs[chance.choice(counts)] = chance.choice([1, 2, 64])
    if rarely:
        odd = [0, 2049, 2049, 2049, 10**7, -1, 0.5, "64", True, [], 2**70]
        knobs[chance.choice([*wire.Knobs.model_fields, "unknown"])] = chance.choice(odd)
        orders.append({"kind": "lifo"})
        budgets.append({"kind": "step_time_target", "target_s": 0.01, "floor_tokens": 16})
    body = {
        "knobs": knobs, "lease_s": chance.choice([0.0, 1e9] if rarely and chance.random() < 0.2 else [0.05, 0.2, 60.0]),
        "expected_revision": revision if chance.random() < 0.8 else chance.randrange(1000),
        "actor": "pusher" if chance.random() < 0.9 else "other", "reason": "because",
        "order_policy": chance.choice(orders), "budget_policy": chance.choice(budgets),
    }  # fmt: skip
    if rarely and chance.random() < 0.2:
        body[chance.choice(["surplus", "protocol_version"])] = 7
    return body


def test_thousands_of_pushes_under_load(server: Server) -> None:
    taken(push(server, step_tokens=2048))
    start = server.tuning_state()
    done = server.requests_after(-1).next
    codes: Counter[str] = Counter()
    lock = threading.Lock()

    def pusher(seed: int, count: int) -> None:
        chance = random.Random(seed)
        revision = start.revision
        with httpx.Client(timeout=300.0) as http:
            for _ in range(count):
                body = json.dumps(any_push(chance, revision)).encode()
                method, path, headers = "PUT", "/knobs", AUTH
                kind = chance.random()
                if kind < 0.05:
                    headers = {"Authorization": chance.choice(["Bearer wrong-token-0123456789", "Basic x", ""])}
                elif kind < 0.1:
                    method, path, body = "DELETE", "/lease", b'{"block": false}'
                elif kind < 0.13:
                    body = body[: chance.randrange(len(body))]
                answer = http.request(method, f"{server.url}/tuning/v1{path}", content=body, headers=headers)
                found = answer.json()
                revision = found.get("revision", revision)
                with lock:
                    codes[f"{answer.status_code} {found.get('code', '')}".strip()] += 1
                assert answer.status_code in (200, 401, 409, 422), answer.text

    with Load(server, 6) as load, ThreadPoolExecutor(8) as pushers:
        for finished in [pushers.submit(pusher, seed, PUSHES // 8) for seed in range(8)]:
            finished.result()
    assert not load.failed, load.failed
    assert load.sent > 20
    print(dict(codes))
    assert {"200", "401", "409 conflict_revision", "409 held_by_other", "422 malformed", "422 outside_envelope"} <= set(
        codes
    )
    assert codes["200"] > PUSHES / 10
    assert sum(codes.values()) == 8 * (PUSHES // 8)
    # The last valid one is in force, and the engine takes the next.
    last = taken(push(server, actor="pusher", step_tokens=77)) if server.tuning_state().lease else None
    last = last or taken(push(server, step_tokens=77))
    state = server.tuning_state()
    assert state.revision == last.revision and in_force(state)["step_tokens"] == 77 and state.notes == ()
    server.revert(wire.RevertRequest(block=False))
    assert in_force(server.tuning_state()) == {knob.name: knob.boot for knob in start.knobs}
    steps = server.steps_after(-1)
    if steps.lost == 0:
        assert check_every_decode_moved(server, start.step - 1, done) > 20


class Read:
    """A server as the controller's reader sees it."""

    def __init__(self, server: Server) -> None:
        self.state, self.steps_after, self.requests_after, self.in_flight = (
            server.tuning_state,
            server.steps_after,
            server.requests_after,
            server.in_flight,
        )


def test_reading_at_the_usual_pace_loses_nothing(server: Server) -> None:
    reader = ProtocolReader(Read(server))
    while (before := reader.read()).behind:
        pass
    readings = []
    with Load(server, 6) as load:
        for _ in range(6):
            time.sleep(1.0)
            readings.append(reader.read(flights=True))
    readings.append(reader.read(flights=True))
    known = [reading.in_flight for reading in readings if reading.in_flight is not None]
    assert any(len(flights) > 0 and flights.output_tokens.sum() > 0 for flights in known)
    steps = [int(step) for reading in readings for step in reading.steps.step]
    assert not load.failed and not any(reading.lost_steps or reading.lost_requests for reading in readings)
    assert steps == list(range(before.state.step, before.state.step + len(steps))) and len(steps) > 10
    assert sum(len(reading.requests) for reading in readings) == load.sent


def test_access_needs_the_token(server: Server) -> None:
    for method, path in (
        ("GET", "/state"),
        ("GET", "/steps"),
        ("GET", "/requests"),
        ("PUT", "/knobs"),
        ("DELETE", "/lease"),
    ):
        for headers in ({}, {"Authorization": "Bearer not-the-token-0123456789"}):
            answer = server.call(method, path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert server.call("GET", "/openapi.json").json()["info"]["title"] == "Rooftune tuning protocol"
    assert server.call("PUT", "/knobs", b"x" * 70_000).status_code == 413


def test_our_series_are_on_vllms_metrics_page(server: Server) -> None:
    server.complete(prompt(77, 300), 3)
    wanted = 'rooftune_step_computed_tokens_total{computed_tokens="384"}'
    for _ in range(100):
        page = server.http.get(f"{server.url}/metrics").text
        if wanted in page:
            break
        time.sleep(0.5)  # read every two seconds
    assert wanted in page and "vllm:iteration_tokens_total" in page
    assert "rooftune_budget_configured_tokens 2048.0" in page


def test_without_a_token_there_is_only_a_private_read_only_port(vllm_python: Path, model: Path) -> None:
    place = model.parent / "open"
    door = model.parent / "door.sock"
    with serving(vllm_python, model, place, token=False, ROOFTUNE_TUNING_SOCKET=str(door)) as server:
        assert server.http.get(f"{server.url}/tuning/v1/state").status_code == 404
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(door)), base_url="http://door") as look:
            assert wire.parse(wire.State, look.get("/tuning/v1/state").content, wire.MAX_ANSWER_BYTES).engine == "vllm"
            body = {"knobs": {"step_tokens": 64}, "lease_s": 9.0, "expected_revision": 0, "actor": "a", "reason": "b"}
            answer = look.put("/tuning/v1/knobs", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "read_only")
        assert door.stat().st_mode & 0o777 == 0o600
