"""The hook's parts that need no vLLM: the probe at start, gaps of many requests from one list, orders."""

import asyncio
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rooftune.engine.interface import FinishReason
from rooftune.engine.vllm.endpoint import TuningPlugin
from rooftune.engine.vllm.hook import Hook, hooked
from rooftune.engine.vllm.knobs import Knobs
from rooftune.engine.vllm.lists import WaitingOrder, decodes_first, hide, prefill_key, unhide
from rooftune.engine.vllm.plugin import utility
from rooftune.engine.vllm.probe import missing, probe
from rooftune.engine.vllm.scrape import Series
from rooftune.engine.vllm.tracks import TokenClock, Track, why
from rooftune.policies import wire
from rooftune.policies.envelope import KNOBS, Mode
from rooftune.policies.errors import InputError
from rooftune.policies.quantiles import median_interval
from rooftune.policies.request import DEADLINE, FCFS, SHORTEST_FIRST, Setting


def scheduler(**more: Any) -> SimpleNamespace:
    """What the probe reads of vLLM's scheduler."""
    config = SimpleNamespace(
        max_num_batched_tokens=2048, long_prefill_token_threshold=0, enable_chunked_prefill=more.pop("chunked", True),
        async_scheduling=more.pop("ahead", None),
    )  # fmt: skip
    parallel = SimpleNamespace(**{name: more.pop(name, 1) for name in ("data_parallel_size", "tensor_parallel_size")})
    model = SimpleNamespace(model="m\n", is_multimodal_model=more.pop("multimodal", False), runner_type="generate")
    whole = SimpleNamespace(
        parallel_config=parallel,
        model_config=model,
        speculative_config=more.pop("speculative", None),
        kv_transfer_config=more.pop("connector", None),
        cache_config=SimpleNamespace(num_gpu_blocks=100),
    )
    made = {
        "scheduler_config": config, "vllm_config": whole, "max_num_scheduled_tokens": 512, "max_num_running_reqs": 64,
        "max_num_active_reqs": 32, "adaptive_long_prefill_threshold": False, "waiting": deque(), "running": [],
        "requests": {}, "kv_cache_manager": object(), "block_size": 16, "max_model_len": 4096,
        "kv_cache_config": SimpleNamespace(kv_cache_groups=[object()]),
    }  # fmt: skip
    return SimpleNamespace(**{name: value for name, value in (made | more).items() if value is not absent})


absent = object()


def found(version: str = "0.32.0", **more: Any) -> Any:
    subject = scheduler(**more)
    return probe(subject, Knobs(subject), version)


def test_a_known_vllm_moves_everything() -> None:
    result = found()
    assert result.notes == () and not result.read_only and result.model == "m "
    assert {bound.mode for bound in result.envelope.bounds} == {Mode.LIVE} and len(result.envelope.by_name) == len(
        KNOBS
    )
    assert (result.boot_envelope.ceiling_tokens, result.boot_envelope.max_running) == (2048, 64)
    assert missing(scheduler()) is None


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"version": "0.26.1"}, "vLLM 0.26.1 is untested"),
        ({"version": "0.33.0"}, "vLLM 0.33.0 is untested"),
        ({"version": "dev"}, "vLLM dev is untested"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 4}, "untested with data parallel, tensor parallel"),
        ({"speculative": object()}, "speculative decoding"),
        ({"connector": object()}, "a KV connector"),
        ({"multimodal": True}, "a multimodal model"),
        ({"need_mamba_block_aligned_split": True}, "block boundaries"),
    ],
)
def test_an_untested_vllm_is_read_only_with_one_line(more: dict[str, Any], why: str) -> None:
    result = found(**more)
    assert result.read_only and len(result.notes) == 1 and why in result.notes[0]
    assert {bound.mode for bound in result.envelope.bounds} == {Mode.RESTART}


@pytest.mark.parametrize(
    ("more", "names", "why"),
    [
        ({"max_num_active_reqs": absent}, {"max_running"}, "no active-request cap"),
        ({"adaptive_long_prefill_threshold": absent}, {"adaptive_chunk_cap"}, "this vLLM has none"),
        ({"waiting": []}, {"order_policy", "max_partial_prefills"}, "by priority"),
        ({"kv_cache_config": SimpleNamespace(kv_cache_groups=[1, 2])}, {"order_policy"}, "several groups"),
        ({"chunked": False}, {"chunk_cap_tokens", "order_policy"}, "not read in chunks"),
    ],
)
def test_a_missing_knob_is_absent_with_its_reason(more: dict[str, Any], names: set[str], why: str) -> None:
    result = found("0.27.0", **more)
    assert not result.read_only and not names & set(result.envelope.by_name)
    assert any(why in note for note in result.notes)


@pytest.mark.parametrize(("ahead", "expected"), [(True, True), (False, False), (None, False)])
def test_a_scheduler_that_plans_ahead_says_so(ahead: bool | None, expected: bool) -> None:
    assert found(ahead=ahead).boot_envelope.plan_ahead is expected


def test_without_chunks_the_budget_holds_a_whole_prompt() -> None:
    result = found(chunked=False, max_num_scheduled_tokens=2048, max_model_len=2000)
    assert result.envelope.by_name["step_tokens"].minimum == 2000


def test_an_unsupported_scheduler_is_named_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert "running" in str(missing(scheduler(running=absent)))
    other = type("Other", (), {"schedule": None, "add_request": None})
    assert hooked(other, str) is other
    assert "update_from_output, get_grammar_bitmask, _free_request" in caplog.text


def request(name: str, prompt: int = 10, computed: int = 0, output: int = 0) -> Any:
    return SimpleNamespace(
        request_id=name, num_prompt_tokens=prompt, num_output_tokens=output, num_preemptions=0,
        num_tokens=prompt + output, num_computed_tokens=computed, sampling_params=SimpleNamespace(stop=[]),
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    )  # fmt: skip


def test_gaps_cut_from_the_shared_list_match_each_request() -> None:
    """Against a walk that keeps every gap of every request; some are passed over, some end, some come."""
    chance = random.Random(5)
    clock = TokenClock((0.01, 0.02, 0.05))
    last_s: dict[str, float] = {}
    gaps: dict[str, list[float]] = {}
    tracks: dict[str, Track] = {}
    now_s, number, seen = 100.0, 0, 0
    for _ in range(3000):
        now_s += chance.choice([0.004, 0.011, 0.03])
        first = []
        if len(tracks) < 12 and chance.random() < 0.2:
            name = str(number)
            first = [Track(request(name, 10 + number), number, now_s - 1.0)]
            tracks[name] = first[0]
            number += 1
        got = [name for name in tracks if tracks[name] in first or chance.random() < chance.choice([1.0, 1.0, 0.8])]
        if first or len(got) != len(clock.streaming):
            clock.update(now_s, first, set(got))
        else:
            clock.ends_s.append(now_s)
        for name in got:
            tracks[name].request.num_output_tokens += 1
            if name in last_s:
                gaps.setdefault(name, []).append(now_s - last_s[name])
            last_s[name] = now_s
        assert all(clock.latest_s(track) == last_s.get(name) for name, track in tracks.items())
        if tracks and chance.random() < 0.15:
            ending = tracks.pop(chance.choice(list(tracks)))
            clock.end(ending, ending.request, now_s)
            assert ending.request is None, "a prompt is not kept until a read"
        for record in clock.closed(1):
            own = gaps.pop(str(record.prompt_tokens - 10), [])
            assert record.gap_count == len(own) == record.output_tokens - 1 and record.ttft_s == pytest.approx(1.0)
            assert record.longest_gap_s == (pytest.approx(max(own)) if own else None)
            assert record.gap_over == tuple(sum(gap > bound + 1e-9 for gap in own) for bound in (0.01, 0.02, 0.05))
            seen += 1
    assert seen > 300


def test_a_request_that_never_got_a_token_has_no_gaps() -> None:
    clock = TokenClock(())
    track = Track(request("a"), 0, 1.0)
    clock.update(2.0, [], set())
    clock.end(track, track.request, 3.0)
    (record,) = clock.closed(9)
    assert (record.ttft_s, record.gap_count, record.longest_gap_s, record.finish_s) == (None, 0, None, 3.0)


def test_update_times_that_no_request_needs_are_dropped() -> None:
    clock, track = TokenClock((0.5,)), Track(request("a", output=4), 0, 0.0)
    for instant in range(70_000):
        clock.update(float(instant), [], set())
        clock.trim()
    assert len(clock.ends_s) < 65_537
    clock.update(70_000.0, [track], {"a"})
    for instant in range(70_001, 140_000):
        clock.update(float(instant), [], {"a"})
        clock.trim()
    clock.end(track, track.request, 140_000.0)
    (record,) = clock.closed(1)
    assert record.gap_count == 69_999 and record.longest_gap_s == 1.0 and record.gap_over == (69_999,)


@pytest.mark.parametrize(
    ("status", "by_string", "ended"),
    [
        ("FINISHED_STOPPED", False, FinishReason.STOP),
        ("FINISHED_LENGTH_CAPPED", False, FinishReason.LENGTH),
        ("FINISHED_ABORTED", False, FinishReason.CANCELLED),
        ("FINISHED_ABORTED", True, FinishReason.STOP),
        ("FINISHED_ERROR", False, FinishReason.FAILED),
    ],
)
def test_why_a_request_ended(status: str, by_string: bool, ended: FinishReason) -> None:
    assert why(status, by_string) is ended


def test_prefills_are_in_the_policys_order() -> None:
    setting = Setting(step_tokens=1, order_policy=DEADLINE, aging_s=5.0, ttft_target_s=2.0, prefill_s_per_token=0.001)
    cases = [
        (request("preempted", 90, output=3), 9.0), (request("aged", 50), 4.0), (request("short", 20), 9.5),
        (request("long", 80), 9.5), (request("late", 30), 7.5),
    ]  # fmt: skip
    keyed = [
        (prefill_key(one, Track(one, at, arrival), setting, 10.0, True)[0], one.request_id)
        for at, (one, arrival) in enumerate(cases)
    ]
    assert [name for _, name in sorted(keyed)] == ["preempted", "aged", "short", "long", "late"]
    _, until_s = prefill_key(cases[2][0], Track(cases[2][0], 0, 9.5), setting, 10.0, True)
    assert until_s == pytest.approx(9.5 + 2.0 - 0.02), "then it is late"


def test_the_queue_is_sorted_only_on_a_change_and_returns_to_arrival_order() -> None:
    names = {"a": 50, "b": 10, "c": 30}
    waiting = deque(request(name, tokens) for name, tokens in names.items())
    tracks = {one.request_id: Track(one, at, float(at)) for at, one in enumerate(waiting)}
    order, setting = WaitingOrder(), Setting(step_tokens=1, order_policy=SHORTEST_FIRST, aging_s=100.0)

    def stand() -> str:
        return "".join(one.request_id for one in waiting)

    order.sort(waiting, tracks, setting, 3.0, True)
    assert stand() == "bca"
    waiting.reverse()
    order.sort(waiting, tracks, setting, 4.0, True)
    assert stand() == "acb", "no change was reported, so nothing is sorted"
    order.sort(waiting, tracks, setting, 100.5, True)
    assert stand() == "abc", "the first one has aged"
    order.sort(waiting, tracks, setting, 100.6, False)
    assert stand() == "bca", "a step that is not for the aged"
    order.sort(waiting, tracks, setting, 100.7, True)
    assert stand() == "abc"
    order.changed()
    order.sort(waiting, tracks, setting._replace(aging_s=1000.0), 101.0, True)
    assert stand() == "bca"
    order.sort(waiting, tracks, setting._replace(order_policy=FCFS), 102.0, True)
    assert stand() == "abc"


def test_held_requests_return_to_their_places_behind_preempted_ones() -> None:
    items = [request(name) for name in "abcdef"]
    waiting = deque(items)
    held = [items[1], items[4]]
    before = hide(waiting, held)
    assert [one.request_id for one in waiting] == list("acdf")
    waiting.popleft()
    waiting.appendleft(request("x"))
    unhide(waiting, before, held)
    assert [one.request_id for one in waiting] == list("xbcdef")


def test_decodes_come_before_prefills() -> None:
    running = [request(name) for name in "pdqe"]
    partials = {one.request_id: one for one in running if one.request_id in "pq"}
    decodes_first(running, partials, list(partials.values()))
    assert [one.request_id for one in running] == list("depq")


@pytest.mark.parametrize(
    "environment",
    [
        {"ROOFTUNE_TUNING_PORT": "1", "ROOFTUNE_TUNING_SOCKET": "/x"},
        {"ROOFTUNE_TUNING_PORT": "70000"},
        {"ROOFTUNE_TUNING_PORT": "x"},
    ],
)
def test_invalid_tuning_addresses_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(InputError):
        TuningPlugin(environment)._own_door()


def test_without_token_or_port_there_is_no_route() -> None:
    app = SimpleNamespace(router=SimpleNamespace(routes=[]))
    TuningPlugin({}).attach_router(app)
    assert app.router.routes == []
    TuningPlugin({"ROOFTUNE_TOKEN_FILE": "/no/such/file"}).attach_router(app)
    assert app.router.routes == [], "and vLLM still starts"


def test_a_scrape_shows_what_was_read() -> None:
    common = {"boot_id": "b", "now_s": 9.0, "lost": 0}
    step = {name: (1,) for name in wire.StepColumns.model_fields if name not in wire.Columns.model_fields}
    steps = wire.StepColumns(
        **common, after=-1, next=4, **(step | {"step": (4,), "duration_s": (0.02,), "prefill_tokens": (99,)})
    )
    requests = wire.RequestColumns(
        **common, after=-1, next=0, sequence=(0,), arrival_s=(1.0,), scheduled_s=(1.5,), ttft_s=(2.0,), finish_s=(4.0,),
        prompt_tokens=(9,), cached_tokens=(0,), output_tokens=(3,), gap_count=(2,), longest_gap_s=(0.6,),
        preemptions=(0,), ended=("finished",),
    )  # fmt: skip
    boot = {
        "ceiling_tokens": 64,
        "max_running": 8,
        "model_tokens": 9,
        "kv_blocks": 9,
        "kv_block_tokens": 16,
        "chunking": True,
    }
    knob = wire.KnobState(name="step_tokens", mode="live", value=32, boot=64, min=1, max=64)
    state = wire.State(
        engine="vllm", engine_version="0", model="m", boot_id="b", now_s=9.0, envelope=boot,
        knobs=(knob,), revision=3, blocked=False, lease=None, step=5,
    )  # fmt: skip

    async def ask(what: str, after: int) -> str:
        rows = {"steps": steps, "requests": requests}
        if what == "state":
            return state.model_dump_json()
        if after < 0:
            return rows[what].model_dump_json()
        return rows[what].model_copy(update=dict.fromkeys(type(rows[what]).model_fields, ()) | common | {
            "after": after, "next": after, "gap_over": (), "protocol_version": 1,
        }).model_dump_json()  # fmt: skip

    series = Series()
    registry = CollectorRegistry()
    registry.register(series)
    assert generate_latest(registry) == b"", "nothing is reported before the engine has answered"
    asyncio.run(series.read(ask))
    page = generate_latest(registry).decode()
    for line in (
        'rooftune_step_duration_seconds_bucket{computed_tokens="128",le="0.02"} 1.0',
        'rooftune_step_computed_tokens_total{computed_tokens="128"} 100.0',
        "rooftune_ttft_seconds_sum 2.0", "rooftune_queue_seconds_sum 0.5", "rooftune_tpot_seconds_sum 0.5",
        "rooftune_budget_configured_tokens 32.0", "rooftune_budget_in_force_tokens 1.0", "rooftune_knob_revision 3.0",
    ):  # fmt: skip
        assert line in page, line


def test_the_median_of_pairs_and_its_interval() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    assert median_interval([float(value) for value in range(1, 7)]) == (1.0, 3.5, 6.0)
    # Twenty values: the sixth and the fifteenth hold the median with 95.9 %, the seventh would not.
    assert median_interval([float(value) for value in range(1, 21)]) == (6.0, 10.5, 15.0)


def test_a_list_that_cannot_be_made_is_refused_and_switches_nothing_off() -> None:
    def broken() -> None:
        raise AttributeError("another vLLM")

    hook: Any = SimpleNamespace(on=True, recorder=SimpleNamespace(in_flight=broken), fold=lambda: None)
    hook.in_flight = lambda: Hook.in_flight(hook)
    core = SimpleNamespace(scheduler=SimpleNamespace(rooftune=hook))
    answer = utility(core, "in-flight", "-1")
    assert isinstance(answer, list) and answer[0] == 503 and not str(answer[1]).startswith("{")
    assert hook.on
