"""The tuning protocol's contract on hooked schedulers of the installed vLLM, and what is visible only from inside."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rooftune.policies import wire
from tests.contracts.tuning_protocol import TuningProtocolContract, in_force, push, refused, taken
from tests.vllm.endpoint import Driver, DriverEndpoint

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def driver(vllm_python: Path) -> Iterator[Driver]:
    running = Driver(vllm_python)
    yield running
    running.close()


class TestContract(TuningProtocolContract):
    """vLLM's synchronous scheduler."""

    @pytest.fixture
    def endpoint(self, driver: Driver) -> DriverEndpoint:
        return DriverEndpoint(driver)


class TestContractAhead(TuningProtocolContract):
    """vLLM's asynchronous one: a step is planned while the one before it runs."""

    @pytest.fixture
    def endpoint(self, driver: Driver) -> DriverEndpoint:
        return DriverEndpoint(driver, ahead=True)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("longs", [1, 2])
@pytest.mark.parametrize("end", ["lease end", "revert", "cap", "budget", "order"])
def test_every_decode_gets_a_token_in_every_step(driver: Driver, ahead: bool, longs: int, end: str) -> None:
    """Long prompts read in small chunks ahead of decodes; then the cap falls away, or the budget falls."""
    endpoint = DriverEndpoint(driver, ahead=ahead)
    taken(push(endpoint, chunk_cap_tokens=4, lease_s=5.0))
    driver.ask("add", [(700, 1)] * longs)
    endpoint.run_steps(2)
    driver.ask("add", [(5, 60)] * 6)
    endpoint.run_steps(20)
    if end == "lease end":
        endpoint.pass_time(10.0)
    elif end == "revert":
        endpoint.revert(wire.RevertRequest())
    elif end == "cap":
        taken(push(endpoint, chunk_cap_tokens=0))
    elif end == "budget":
        taken(push(endpoint, step_tokens=4))
    else:
        taken(push(endpoint, chunk_cap_tokens=0, order_policy={"kind": "shortest_first", "aging_s": 10.0}))
    changed = len(endpoint.steps_after(-1).step)
    endpoint.finish()
    steps, requests = endpoint.steps_after(-1), endpoint.requests_after(-1)
    assert len(requests.sequence) == 6 + longs
    assert max(steps.prefill_tokens[changed:]) > (10 if end != "budget" else 1), "the long prompts go on"
    # From the moment that all six decode until the first of them ends: all of them, in every step.
    assert set(steps.decode_tokens[10:60]) == {6}


def test_an_aborted_request_is_reported_as_aborted(driver: Driver) -> None:
    endpoint = DriverEndpoint(driver)
    endpoint.load()
    endpoint.run_steps(30)
    driver.ask("abort", ["0", "11"])
    endpoint.finish()
    requests = endpoint.requests_after(-1)
    assert sorted(requests.ended) == ["aborted"] * 2 + ["finished"] * 10
    assert sum(ttft_s is None for ttft_s in requests.ttft_s) == 1, "the last one still waited"


@pytest.mark.parametrize("part", [("arranger", "before"), ("recorder", "_planned"), ("desk", "keep")])
def test_a_fault_in_the_hook_switches_it_off_and_vllm_continues(driver: Driver, part: tuple[str, str]) -> None:
    endpoint = DriverEndpoint(driver)
    start = endpoint.tuning_state()
    taken(push(endpoint, step_tokens=20, chunk_cap_tokens=7, max_running=3))
    endpoint.load()
    endpoint.run_steps(5)
    driver.ask("break", part)
    endpoint.run_steps(5)
    state = endpoint.tuning_state()
    assert any("hook off after a fault" in note for note in state.notes), state.notes
    assert state.lease is None and {knob.mode for knob in state.knobs} == {"restart"}
    assert in_force(state) == in_force(start)
    knobs = json.loads(driver.ask("knobs"))
    assert (knobs["budget"], knobs["cap"], knobs["active"]) == (64, 0, 8)
    refused(push(endpoint, step_tokens=20), "outside_envelope")
    endpoint.finish()
    assert json.loads(driver.ask("knobs"))["left"] == 0, "every request finished"


def test_a_fault_in_the_list_of_what_is_in_flight_leaves_the_hook_on(driver: Driver) -> None:
    endpoint = DriverEndpoint(driver)
    endpoint.load()
    driver.ask("break", ("recorder", "in_flight"))
    endpoint.run_steps(5)
    assert driver.ask("in-flight") == "null\n"
    taken(push(endpoint, step_tokens=20))
    endpoint.finish()
    assert endpoint.tuning_state().notes == () and len(endpoint.requests_after(-1).sequence) == 12


def test_preempted_and_aborted_requests_in_flight(driver: Driver) -> None:
    """A pool too small for all: preempted requests wait with what they have produced and compute nothing."""
    endpoint = DriverEndpoint(driver, num_blocks=40)
    endpoint.load()
    waited = 0
    for _ in range(40):
        endpoint.run_steps(5)
        flights, ended = endpoint.in_flight(), endpoint.requests_after(-1)
        assert len(set(flights.request_id)) == len(flights.request_id) == 12 - len(ended.sequence)
        for produced, computed, running in zip(
            flights.output_tokens, flights.computed_tokens, flights.running, strict=True
        ):
            waited += produced > 0 and not running
            assert running or computed == 0
    assert waited > 0, "some was preempted"
    endpoint.finish()
    endpoint.load()
    endpoint.run_steps(2)
    first = endpoint.in_flight().request_id[0]
    driver.ask("abort", [first])
    assert first not in endpoint.in_flight().request_id
    endpoint.finish()
    assert endpoint.in_flight().request_id == ()


def test_an_untested_version_is_read_only_with_a_note(driver: Driver) -> None:
    endpoint = DriverEndpoint(driver, version="0.40.1")
    state = endpoint.tuning_state()
    assert len(state.notes) == 1 and "read-only: vLLM 0.40.1 is untested" in state.notes[0]
    breaches = refused(push(endpoint, step_tokens=20), "outside_envelope").breaches
    assert [breach.broken for breach in breaches] == ["needs_restart"]
    endpoint.load()
    endpoint.finish()
    assert len(endpoint.requests_after(-1).sequence) == 12, "records are still kept"


def test_a_late_reader_gets_the_number_of_lost_rows(driver: Driver) -> None:
    endpoint = DriverEndpoint(driver)
    while endpoint.tuning_state().step < wire.MAX_ROWS + 500:
        for _ in range(8):
            endpoint.load()
            endpoint.finish()
    begun = endpoint.tuning_state().step
    first = endpoint.steps_after(-1)
    assert first.lost == begun - wire.MAX_ROWS > 0 and first.step[0] == first.lost
    assert len(first.step) == 1000, "a thousand rows an answer"
    rest = endpoint.steps_after(first.next)
    assert rest.lost == 0 and rest.step[0] == first.next + 1
