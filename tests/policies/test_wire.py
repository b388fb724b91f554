"""The protocol's schemas accept valid messages and nothing else."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftune.policies.envelope import Broken, Envelope, Violation, full_bounds
from rooftune.policies.errors import InputError
from rooftune.policies.lease import LeaseOutcome, LeaseReason, boot_book, push
from rooftune.policies.request import Setting
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.policies.wire import (
    MAX_BODY_BYTES,
    REFUSAL_STATUS,
    SCHEMAS,
    FlightColumns,
    Knobs,
    KnobState,
    PushRequest,
    RequestColumns,
    RevertRequest,
    State,
    StepColumns,
    parse,
    refusal,
)

PUSH = {
    "knobs": {"step_tokens": 1024, "adaptive_chunk_cap": True, "pass_over_max_s": 5},
    "lease_s": 60,
    "expected_revision": 0,
    "actor": "tuner",
    "reason": "a test",
}
CONSTANTS = NAMED_MODELS["8b-2tbs"]._asdict()
STEP_KEYS = [name for name in StepColumns.model_fields if name not in RequestColumns.model_fields] + ["preemptions"]


def body(value):
    return json.dumps(value).encode()


def steps(rows=2, **change):
    columns = {name: list(range(1, rows + 1)) for name in STEP_KEYS} | {"kv_used": [0.5] * rows}
    return {"boot_id": "b", "now_s": 1.0, "after": 0, "next": rows, "lost": 0} | columns | change


def requests(rows=2, **change):
    names = [n for n in RequestColumns.model_fields if n not in StepColumns.model_fields] + ["preemptions"]
    columns = {name: list(range(1, rows + 1)) for name in names if not name.startswith("gap_")}
    columns |= {"gap_count": [3] * rows, "ended": ["finished"] * rows, "gap_bounds_s": [0.03], "gap_over": [[1] * rows]}
    return {"boot_id": "b", "now_s": 1.0, "after": -1, "next": rows, "lost": 0} | columns | change


def test_a_push_goes_through_to_the_lease():
    request = parse(PushRequest, body(PUSH)).to_push()
    assert request.changes == {"step_tokens": 1024, "adaptive_chunk_cap": 1, "pass_over_max_s": 5}
    book, outcome = push(boot_book(Envelope(full_bounds(8192, 256)), Setting(512), 0.0), request, 0.0)
    assert outcome.reason is LeaseReason.OK
    assert book.setting == Setting(1024, adaptive_chunk_cap=1, pass_over_max_s=5)


@pytest.mark.parametrize(
    ("policies", "changes"),
    [
        ({"budget_policy": {"kind": "fixed"}}, {"budget_policy": 0}),
        (
            {"budget_policy": {"kind": "pressure", "tokens": 512, "prefills": 2}},
            {"budget_policy": 2, "pressure_tokens": 512, "pressure_prefills": 2},
        ),
        (
            {
                "budget_policy": {
                    "kind": "step_time_target",
                    "target_s": 0.03,
                    "floor_tokens": 64,
                    "step_model": CONSTANTS,
                }
            },
            {"budget_policy": 1, "budget_target_s": 0.03, "budget_floor_tokens": 64},
        ),
        ({"order_policy": {"kind": "fcfs"}}, {"order_policy": 0}),
        (
            {"order_policy": {"kind": "shortest_first", "aging_s": 10}},
            {"order_policy": 1, "aging_s": 10, "aged_share": 1.0, "wait_tokens_per_s": 0.0},
        ),
        (
            {"order_policy": {"kind": "shortest_first", "aging_s": 10, "aged_share": 0.2}},
            {"order_policy": 1, "aging_s": 10, "aged_share": 0.2, "wait_tokens_per_s": 0.0},
        ),
        (
            {"order_policy": {"kind": "deadline", "aging_s": 10.0, "ttft_target_s": 2.0, "prefill_s_per_token": 4e-5}},
            {
                "order_policy": 2,
                "aging_s": 10.0,
                "ttft_target_s": 2.0,
                "prefill_s_per_token": 4e-5,
                "aged_share": 1.0,
                "wait_tokens_per_s": 0.0,
            },
        ),
    ],
)
def test_policies_become_knobs(policies, changes):
    request = parse(PushRequest, body(PUSH | {"knobs": {}} | policies)).to_push()
    assert request.changes == changes
    assert set(changes) <= set(Setting._fields)
    assert request.step_model == (NAMED_MODELS["8b-2tbs"] if changes.get("budget_policy") == 1 else None)
    book = boot_book(Envelope(full_bounds(8192, 256)), Setting(512), 0.0)
    assert push(book, request, 0.0)[1].reason is LeaseReason.OK


@pytest.mark.parametrize(
    "change",
    [
        {"lease_s": 0},
        {"lease_s": -1},
        {"lease_s": math.nan},
        {"lease_s": math.inf},
        {"lease_s": "60"},
        {"lease_s": True},
        {"lease_s": 1e9},
        {"expected_revision": -1},
        {"expected_revision": 1.0},
        {"expected_revision": "0"},
        {"expected_revision": 2**60},
        {"actor": ""},
        {"actor": "a\nb"},
        {"actor": "a" * 201},
        {"reason": None},
        {"knobs": {"step_tokens": "1024"}},
        {"knobs": {"step_tokens": 1024.0}},
        {"knobs": {"step_tokens": True}},
        {"knobs": {"step_tokens": 0}},
        {"knobs": {"step_tokens": 10**30}},
        {"knobs": {"adaptive_chunk_cap": 1}},
        {"knobs": {"budget": 5}},
        {"knobs": [1]},
        {"budget_policy": {"kind": "magic"}},
        {"budget_policy": {"kind": "fixed", "tokens": 5}},
        {"budget_policy": {"kind": "step_time_target", "target_s": 0.03, "floor_tokens": 64}},
        {"budget_policy": {"kind": "step_time_target", "target_s": 0.03, "floor_tokens": 1,
                           "step_model": CONSTANTS | {"sharpness": 0.5}}},
        {"order_policy": {"kind": "deadline", "aging_s": 1.0}},
        {"protocol_version": 2},
        {"unheard_of": 1},
    ],
)  # fmt: skip
def test_a_bad_push_is_refused_in_one_line(change):
    with pytest.raises(InputError) as caught:
        parse(PushRequest, body(PUSH | change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"a":' * 5000, b" " * (MAX_BODY_BYTES + 1)])
def test_a_body_that_is_not_a_message_is_refused(raw):
    with pytest.raises(InputError):
        parse(PushRequest, raw)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_input_errors(raw):
    for kind in SCHEMAS:
        try:
            parse(kind, raw)
        except InputError:
            continue


def test_messages_are_frozen_and_survive_a_round_trip():
    first = parse(PushRequest, body(PUSH))
    with pytest.raises(ValueError, match="frozen"):
        first.lease_s = 5.0
    assert parse(PushRequest, first.model_dump_json().encode()) == first
    assert parse(RevertRequest, b"{}").block is True


def test_knob_names_are_those_of_the_scheduler():
    assert set(Knobs.model_fields) < set(Setting._fields)
    names = KnobState.model_json_schema()["properties"]["name"]["enum"]
    assert tuple(names) == Setting._fields


def state(**change):
    knobs = [{"name": "step_tokens", "mode": "live", "value": 512, "boot": 2048, "min": 1, "max": 8192}]
    envelope = dict.fromkeys(("model_tokens", "kv_blocks", "kv_block_tokens")) | {
        "ceiling_tokens": 8192, "max_running": 64, "chunking": True,
    }  # fmt: skip
    whole = {"engine": "rooftune", "engine_version": "1", "model": "m", "boot_id": "b", "now_s": 1.0, "revision": 3}
    return whole | {"envelope": envelope, "knobs": knobs, "blocked": False, "lease": None, "step": 7} | change


def test_state_gives_the_setting_in_force():
    assert parse(State, body(state())).setting() == Setting(512)
    with pytest.raises(InputError):
        parse(State, body(state(knobs=[]))).setting()


def test_a_part_that_an_older_engine_lacks_is_written_only_where_it_is_not_what_that_engine_does():
    deadline = {"kind": "deadline", "aging_s": 10.0, "ttft_target_s": 2.0, "prefill_s_per_token": 4e-5}
    plain = parse(PushRequest, body(PUSH | {"order_policy": deadline}))
    assert json.loads(plain.model_dump_json())["order_policy"] == deadline
    newer = deadline | {"aged_share": 0.1, "wait_tokens_per_s": 500.0}
    request = parse(PushRequest, body(PUSH | {"order_policy": newer}))
    assert json.loads(request.model_dump_json())["order_policy"] == newer
    assert parse(PushRequest, request.model_dump_json().encode()) == request


def test_an_engine_that_does_not_report_the_share_of_the_aged_always_serves_them_first():
    knob = {"name": "aging_s", "mode": "live", "value": 5.0, "boot": 10.0, "min": 0.0, "max": 3600.0}
    setting = parse(State, body(state(knobs=[*state()["knobs"], knob]))).setting()
    assert (setting.aging_s, setting.aged_share, setting.wait_tokens_per_s) == (5.0, 1.0, 0.0)


def test_plan_ahead_defaults_to_off():
    wire_state = state()
    assert parse(State, body(wire_state)).envelope.plan_ahead is False
    wire_state["envelope"]["plan_ahead"] = True
    assert parse(State, body(wire_state)).envelope.plan_ahead is True


KNOB = {"name": "chunk_cap_tokens", "mode": "live", "value": 1, "boot": 1, "min": 0, "max": 9}


@pytest.mark.parametrize(
    "knobs",
    [
        [KNOB, KNOB],
        [KNOB | {"mode": "absent"}],
        [KNOB | {"max": None}],
        [KNOB | {"value": 1.5}],
        [KNOB | {"name": "budget"}],
        [{"name": "chunk_cap_tokens", "mode": "live"}],
    ],
)
def test_state_with_inconsistent_knobs_is_refused(knobs):
    with pytest.raises(InputError):
        parse(State, body(state(knobs=knobs)))
    parse(State, body(state(knobs=[KNOB, {"name": "max_running", "mode": "absent"}])))


def test_columns():
    parsed = parse(StepColumns, body(steps(3, lost=5)))
    assert (parsed.step, parsed.lost) == ((1, 2, 3), 5)
    assert parse(StepColumns, body(steps(0, after=4, next=4))).step == ()
    finished = parse(RequestColumns, body(requests(2, ttft_s=[0.5, None])))
    assert finished.ttft_s == (0.5, None)


@pytest.mark.parametrize(
    "change",
    [
        {"duration_s": [1.0]},
        {"duration_s": [1.0, math.nan]},
        {"duration_s": [1.0, -0.1]},
        {"step": [2, 1]},
        {"step": [1, 1]},
        {"after": 1},
        {"next": 5},
        {"lost": -1},
        {"kv_used": [0.5, 1.1]},
        {"decode_tokens": [1, "2"]},
        {"decode_tokens": None},
    ],
)
def test_bad_step_columns_are_refused(change):
    with pytest.raises(InputError):
        parse(StepColumns, body(steps() | change))


@pytest.mark.parametrize(
    "change", [{"gap_over": []}, {"gap_over": [[1]]}, {"ended": ["finished", "lost"]},
               {"gap_bounds_s": [0.3, 0.1], "gap_over": [[0, 0], [0, 0]]}]
)  # fmt: skip
def test_bad_request_columns_are_refused(change):
    with pytest.raises(InputError):
        parse(RequestColumns, body(requests() | change))


def test_every_refusal_has_a_status_and_a_body():
    for reason in LeaseReason:
        outcome = LeaseOutcome(reason, 4)
        if not outcome.refused:
            with pytest.raises(InputError):
                refusal(outcome)
            continue
        answer = refusal(outcome)
        assert (answer.code, answer.revision) == (reason.value, 4) and answer.code in REFUSAL_STATUS
    broken = (Violation("step_tokens", 9000, Broken.MAXIMUM, 8192), Violation("pass_over_max_s", math.nan, Broken.KIND))
    answer = refusal(LeaseOutcome(LeaseReason.OUTSIDE_ENVELOPE, 4, broken))
    assert REFUSAL_STATUS[answer.code] == 422
    assert [(b.knob, b.value, b.broken, b.limit) for b in answer.breaches] == [
        ("step_tokens", 9000.0, "maximum", 8192.0),
        ("pass_over_max_s", None, "kind", None),
    ]


def flights(**change):
    columns = {
        "request_id": ["a", "b"], "arrival_s": [1.0, 2.0], "scheduled_s": [1.5, None], "first_token_s": [None, None],
        "last_token_s": [None, None], "prompt_tokens": [9, 8], "cached_tokens": [0, 0], "computed_tokens": [4, 0],
        "output_tokens": [0, 0], "running": [True, False],
    }  # fmt: skip
    return {"boot_id": "b", "now_s": 3.0, "left_out": 7} | columns | change


def test_requests_in_flight_survive_a_round_trip_with_and_without_hashes():
    for change in ({}, {"block_hashes": [["0123456789abcdef"], []]}):
        found = parse(FlightColumns, body(flights(**change)))
        assert parse(FlightColumns, found.model_dump_json().encode()) == found and found.left_out == 7


@pytest.mark.parametrize(
    "change",
    [
        {"running": [False, True]},
        {"running": [True]},
        {"running": [1, 0]},
        {"request_id": ["a", ""]},
        {"request_id": ["a", "b" * 201]},
        {"request_id": ["a", "b\n"]},
        {"arrival_s": [1.0, None]},
        {"prompt_tokens": [9, -1]},
        {"left_out": -1},
        {"block_hashes": [["0123456789abcdef"]]},
        {"block_hashes": [["0123"], []]},
        {"block_hashes": [["0123456789abcdef"] * 33, []]},
        {name: [value[0]] * 4001 for name, value in flights().items() if isinstance(value, list)},
    ],
)
def test_inconsistent_requests_in_flight_are_refused(change):
    with pytest.raises(InputError):
        parse(FlightColumns, body(flights(**change)))


def test_schemas_are_exported_and_closed():
    schemas = {kind.__name__: kind.model_json_schema() for kind in SCHEMAS}
    for schema in schemas.values():
        assert schema["additionalProperties"] is False
        assert all(part.get("additionalProperties") is False for part in schema.get("$defs", {}).values())
    json.dumps(schemas, allow_nan=False)
