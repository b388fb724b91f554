"""The contract of the tuning protocol: what every engine that offers it must do.

Subclass ``TuningProtocolContract``, give it a fixture ``endpoint``, and all tests run on it. An endpoint is asked only
for what the protocol offers, for load, and for time.
"""

from itertools import pairwise
from typing import Any, Protocol

import pytest

from rooftune.policies import wire
from rooftune.policies.envelope import KNOB_NAMES

Answer = wire.PushAnswer | wire.Refusal


class Endpoint(Protocol):
    """One engine with the load that a test needs. Every method returns once its effect has happened."""

    def tuning_state(self) -> wire.State: ...
    def push(self, request: wire.PushRequest) -> Answer: ...
    def revert(self, request: wire.RevertRequest) -> wire.PushAnswer: ...
    def resume(self, request: wire.ResumeRequest) -> wire.PushAnswer: ...
    def steps_after(self, after: int) -> wire.StepColumns: ...
    def requests_after(self, after: int) -> wire.RequestColumns: ...
    def in_flight(self) -> wire.FlightColumns: ...

    def load(self) -> None:
        """Submit requests that keep the engine busy for at least 60 steps: prompts and decodes."""
        ...

    def run_steps(self, count: int) -> None:
        """Let at least ``count`` steps pass, fewer only when nothing is left to do."""
        ...

    def finish(self) -> None:
        """Let everything in flight finish."""
        ...

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with or without steps."""
        ...


def push(endpoint: Endpoint, lease_s: float = 100.0, **fields: Any) -> Answer:
    """A push; fields that belong to the message are taken as such, all others are knobs."""
    whole = {
        "lease_s": lease_s,
        "actor": "contract",
        "reason": "a test of the contract",
        "expected_revision": endpoint.tuning_state().revision,
    }
    knobs = {name: fields.pop(name) for name in list(fields) if name in wire.Knobs.model_fields}
    return endpoint.push(wire.PushRequest.model_validate(whole | {"knobs": knobs} | fields))


def taken(answer: Answer) -> wire.PushAnswer:
    assert isinstance(answer, wire.PushAnswer), answer
    return answer


def refused(answer: Answer, code: str) -> wire.Refusal:
    assert isinstance(answer, wire.Refusal) and answer.code == code, answer
    return answer


def in_force(state: wire.State) -> dict[str, Any]:
    return {knob.name: knob.value for knob in state.knobs}


def boot(state: wire.State) -> dict[str, Any]:
    return {knob.name: knob.boot for knob in state.knobs}


def lower(state: wire.State) -> int:
    """A budget that differs from the boot one and is allowed."""
    knob = next(knob for knob in state.knobs if knob.name == "step_tokens")
    assert knob.mode == "live" and knob.boot is not None and knob.min is not None and knob.boot > knob.min
    return int(max(knob.min, knob.boot // 2))


class TuningProtocolContract:
    """The tests; see the module."""

    def test_the_state_is_complete(self, endpoint: Endpoint) -> None:
        state = endpoint.tuning_state()
        assert {knob.name for knob in state.knobs} == set(KNOB_NAMES)
        assert in_force(state) == boot(state) and state.lease is None and not state.blocked
        for knob in state.knobs:
            if knob.mode != "absent":
                assert knob.min is not None and knob.max is not None and knob.value is not None
                assert knob.min <= knob.value <= knob.max, knob
        ceiling = next(knob.max for knob in state.knobs if knob.name == "step_tokens")
        assert ceiling == state.envelope.ceiling_tokens
        assert endpoint.tuning_state().boot_id == state.boot_id
        assert wire.State.model_validate_json(state.model_dump_json()) == state

    def test_a_push_is_in_force_from_the_step_it_names_and_not_before(self, endpoint: Endpoint) -> None:
        endpoint.load()
        endpoint.run_steps(5)
        before = endpoint.tuning_state()
        budget = lower(before)
        answer = taken(push(endpoint, step_tokens=budget))
        assert answer.revision == before.revision + 1
        after = endpoint.tuning_state()
        assert after.revision == answer.revision and in_force(after) == boot(before) | {"step_tokens": budget}
        assert after.lease is not None and (after.lease.actor, after.lease.length_s) == ("contract", 100.0)
        endpoint.run_steps(5)
        steps = endpoint.steps_after(-1)
        by_step = dict(zip(steps.step, steps.revision, strict=True))
        assert answer.effective_from_step in by_step, "the engine ran on, so the step it names has run"
        for step, revision in by_step.items():
            assert revision == (answer.revision if step >= answer.effective_from_step else before.revision), step
        for step, tokens, decodes in zip(steps.step, steps.budget_tokens, steps.decode_tokens, strict=True):
            if step >= answer.effective_from_step:
                assert tokens <= max(budget, decodes)

    def test_outside_the_envelope_nothing_changes(self, endpoint: Endpoint) -> None:
        before = endpoint.tuning_state()
        most = before.envelope.ceiling_tokens
        answer = refused(push(endpoint, step_tokens=most + 1, chunk_cap_tokens=1), "outside_envelope")
        assert [(breach.knob, breach.broken, breach.limit) for breach in answer.breaches] == [
            ("step_tokens", "maximum", most)
        ]
        assert wire.REFUSAL_STATUS[answer.code] == 422
        after = endpoint.tuning_state()
        assert in_force(after) == in_force(before) and after.revision == before.revision == answer.revision
        assert after.lease is None

    def test_another_revision_is_refused_and_nothing_changes(self, endpoint: Endpoint) -> None:
        budget = lower(endpoint.tuning_state())
        first = taken(push(endpoint, step_tokens=budget))
        before = endpoint.tuning_state()
        answer = refused(push(endpoint, step_tokens=budget, expected_revision=first.revision - 1), "conflict_revision")
        assert wire.REFUSAL_STATUS[answer.code] == 409 and answer.revision == first.revision
        assert in_force(endpoint.tuning_state()) == in_force(before)

    def test_another_actor_must_wait(self, endpoint: Endpoint) -> None:
        budget = lower(endpoint.tuning_state())
        taken(push(endpoint, step_tokens=budget))
        refused(push(endpoint, step_tokens=budget, actor="another"), "held_by_other")
        taken(push(endpoint, step_tokens=budget, reason="the holder may renew"))

    def test_a_lease_ends_by_itself(self, endpoint: Endpoint) -> None:
        start = endpoint.tuning_state()
        taken(push(endpoint, lease_s=2.0, step_tokens=lower(start)))
        held = endpoint.tuning_state().lease
        assert held is not None and 0.0 < held.left_s <= 2.0
        endpoint.pass_time(2.5)
        after = endpoint.tuning_state()
        assert after.lease is None and in_force(after) == boot(start) and after.revision == start.revision + 2

    def test_a_lease_ends_under_load_without_a_request(self, endpoint: Endpoint) -> None:
        start = endpoint.tuning_state()
        endpoint.load()
        taken(push(endpoint, lease_s=2.0, step_tokens=lower(start)))
        endpoint.run_steps(3)
        endpoint.pass_time(2.5)
        endpoint.run_steps(3)
        steps = endpoint.steps_after(-1)
        assert sorted(set(steps.revision)) == [start.revision + 1, start.revision + 2]
        assert steps.revision[-1] == start.revision + 2

    def test_a_renewal_starts_now(self, endpoint: Endpoint) -> None:
        budget = lower(endpoint.tuning_state())
        taken(push(endpoint, lease_s=2.0, step_tokens=budget))
        taken(push(endpoint, lease_s=100.0, step_tokens=budget))
        endpoint.pass_time(2.5)
        assert in_force(endpoint.tuning_state())["step_tokens"] == budget

    def test_revert_blocks_until_resume(self, endpoint: Endpoint) -> None:
        start = endpoint.tuning_state()
        budget = lower(start)
        taken(push(endpoint, step_tokens=budget))
        answer = endpoint.revert(wire.RevertRequest(actor="operator", reason="too slow"))
        state = endpoint.tuning_state()
        assert in_force(state) == boot(start) and state.lease is None and state.blocked
        assert state.revision == answer.revision == start.revision + 2
        again = endpoint.revert(wire.RevertRequest())
        assert again.revision == answer.revision, "nothing left to revert"
        refused(push(endpoint, step_tokens=budget), "blocked_by_revert")
        resumed = endpoint.resume(wire.ResumeRequest(actor="operator", reason="understood"))
        assert resumed.revision == answer.revision + 1
        taken(push(endpoint, step_tokens=budget))

    def test_revert_without_a_block_lets_the_next_push_in(self, endpoint: Endpoint) -> None:
        budget = lower(endpoint.tuning_state())
        taken(push(endpoint, step_tokens=budget))
        endpoint.revert(wire.RevertRequest(actor="controller", reason="worse", block=False))
        assert not endpoint.tuning_state().blocked
        taken(push(endpoint, step_tokens=budget))

    def test_a_step_time_target_brings_its_constants(self, endpoint: Endpoint) -> None:
        if in_force(endpoint.tuning_state()).get("budget_policy") is None:
            pytest.skip("this engine has no budget policies")
        tokens = lower(endpoint.tuning_state())
        model = dict.fromkeys(wire.StepConstants.model_fields, 0.0) | {"slope_s_per_token": 0.001}
        wanted = {"kind": "step_time_target", "target_s": (tokens + 0.5) * 0.001, "floor_tokens": 1}
        taken(push(endpoint, budget_policy=wanted | {"step_model": model}))
        endpoint.load()
        endpoint.run_steps(20)
        steps = endpoint.steps_after(-1)
        bound = [
            (allowed, max(tokens, decodes + 1))
            for allowed, decodes, prefills in zip(steps.budget_tokens, steps.decode_tokens, steps.prefills, strict=True)
            if prefills > 0
        ]
        assert bound and all(allowed == most for allowed, most in bound)

    def test_step_records_are_true_and_read_in_parts(self, endpoint: Endpoint) -> None:
        endpoint.load()
        endpoint.finish()
        whole, requests = endpoint.steps_after(-1), endpoint.requests_after(-1)
        assert whole.lost == 0 and len(whole.step) >= 20 and whole.step[0] == 0
        assert all(later == earlier + 1 for earlier, later in pairwise(whole.step))
        for prefill, decode, budget in zip(whole.prefill_tokens, whole.decode_tokens, whole.budget_tokens, strict=True):
            assert 0 < prefill + decode <= budget
        known = sum(requests.prompt_tokens) + sum(requests.output_tokens) - len(requests.sequence)
        if sum(requests.preemptions) == 0:
            assert sum(whole.prefill_tokens) + sum(whole.decode_tokens) == known - sum(requests.cached_tokens)
        assert all(s >= n >= p for s, n, p in zip(whole.running, whole.sequences, whole.prefills, strict=True))
        ends = [start + length for start, length in zip(whole.start_s, whole.duration_s, strict=True)]
        slack = 1e-6
        assert all(end <= later + slack for end, later in zip(ends, whole.start_s[1:], strict=False))
        middle = whole.step[len(whole.step) // 2]
        rest = endpoint.steps_after(middle)
        assert rest.step == whole.step[len(whole.step) // 2 + 1 :] and rest.next == whole.next and rest.lost == 0
        nothing = endpoint.steps_after(whole.next)
        assert nothing.step == () and nothing.next == whole.next

    def test_finished_requests_say_what_they_waited_for(self, endpoint: Endpoint) -> None:
        endpoint.load()
        endpoint.finish()
        requests = endpoint.requests_after(-1)
        assert len(requests.sequence) > 0
        for row in range(len(requests.sequence)):
            assert requests.ended[row] == "finished"
            scheduled_s, ttft_s = requests.scheduled_s[row], requests.ttft_s[row]
            assert scheduled_s is not None and ttft_s is not None
            first_s = requests.arrival_s[row] + ttft_s
            assert requests.arrival_s[row] <= scheduled_s < first_s <= requests.finish_s[row] + 1e-9
            assert requests.gap_count[row] == requests.output_tokens[row] - 1
            longest_s = requests.longest_gap_s[row]
            if longest_s is not None:
                span_s = requests.finish_s[row] - first_s
                assert span_s / requests.gap_count[row] - 1e-9 <= longest_s <= span_s + 1e-9
            else:
                assert requests.gap_count[row] == 0
        assert endpoint.requests_after(requests.next).sequence == ()

    def test_what_is_in_flight_is_listed_and_becomes_the_records_that_follow(self, endpoint: Endpoint) -> None:
        assert endpoint.in_flight().request_id == ()
        endpoint.load()
        arrived = endpoint.in_flight()
        assert len(arrived.request_id) == 12 and not any(arrived.output_tokens)
        endpoint.run_steps(25)
        flights, steps = endpoint.in_flight(), endpoint.steps_after(-1)
        rows = [dict(zip(wire.FLIGHT_COLUMNS, row, strict=True)) for row in zip(*_flight_columns(flights), strict=True)]
        assert flights.boot_id == endpoint.tuning_state().boot_id and flights.left_out == 0
        assert len(set(flights.request_id)) == len(rows) == 12, "none has ended yet"
        assert sum(flights.running) == steps.running[-1] and len(rows) - sum(flights.running) == steps.waiting[-1]
        admitted = [row["scheduled_s"] for row in rows if row["running"]]
        assert admitted == sorted(admitted), "running requests come by admission"
        waiting = [row["arrival_s"] for row in rows if not row["running"]]
        assert waiting == sorted(waiting), "then the queue"
        for row in rows:
            produced, known = row["output_tokens"], row["prompt_tokens"] + row["output_tokens"]
            assert row["computed_tokens"] <= known and (row["computed_tokens"] == 0 or row["running"])
            if produced:
                assert row["scheduled_s"] < row["first_token_s"] <= row["last_token_s"] <= flights.now_s
                assert row["computed_tokens"] >= known - 1, "decodes have all but their newest token"
            else:
                assert row["first_token_s"] is row["last_token_s"] is None
        assert any(row["output_tokens"] > 1 for row in rows) and any(not row["running"] for row in rows)
        assert endpoint.in_flight() == flights.model_copy(update={"now_s": endpoint.in_flight().now_s}), "a read alone"
        endpoint.finish()
        assert endpoint.in_flight().request_id == ()
        requests = endpoint.requests_after(-1)
        ended = sorted(
            zip(requests.arrival_s, requests.prompt_tokens, requests.scheduled_s, requests.ttft_s, strict=True)
        )
        for (arrival_s, prompt, scheduled_s, ttft_s), row in zip(ended, sorted(rows, key=_by_arrival), strict=True):
            assert (arrival_s, prompt) == (row["arrival_s"], row["prompt_tokens"])
            assert row["scheduled_s"] in (None, scheduled_s)
            assert row["first_token_s"] in (None, pytest.approx(arrival_s + ttft_s))


def _flight_columns(flights: wire.FlightColumns) -> list[tuple[Any, ...]]:
    return [getattr(flights, name) for name in wire.FLIGHT_COLUMNS]


def _by_arrival(row: dict[str, Any]) -> tuple[float, int]:
    return row["arrival_s"], row["prompt_tokens"]
