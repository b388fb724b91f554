"""Cases from the field at vLLM's port: what a version accepts, what a start costs, and what metrics do not show."""

import json
import math
from collections.abc import Sequence

import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.control.signals.budget import observed_ceiling_tokens
from rooftune.tuner.control.signals.find import Signal, find_signals
from rooftune.tuner.observe.protocol import ProtocolReader
from rooftune.tuner.ports.vllm.boot import (
    GIB,
    BootFlags,
    BootProblem,
    Card,
    ModelFacts,
    Objection,
    Start,
    Usage,
    default_batch,
    learnt_bound_tokens,
    objections,
)
from rooftune.tuner.ports.vllm.envelope import Basis, BootPoint, Geometry, Headroom, advise, price
from rooftune.tuner.ports.vllm.port import Unseen, discover
from rooftune.tuner.ports.vllm.versions import Capabilities, Flag, capabilities, parse_version
from tests.observe.fake_port import FakePort
from tests.ports.samples import state
from tests.ports.scripted import answer, routes
from tests.ports.test_vllm_discovery import PAGE, vllm

CASE_4 = BootFlags(
    ceiling_tokens=4096, sequence_ceiling=128, max_partial_prefills=4, max_long_partial_prefills=1, chunk_cap_tokens=256
)
TEXT = ModelFacts(model_tokens=32_768)


def able_at(version: str) -> Capabilities:
    """As a server reports its version."""
    answers = vllm() | {"/version": answer(200, json.dumps({"version": version}).encode())}
    with routes(answers) as server:
        found = discover(server.url).able
    assert found is not None
    return found


def problems(found: Sequence[Objection]) -> list[tuple[BootProblem, str]]:
    return [(one.problem, one.flag) for one in found]


def largest_safe_ceiling(
    model: ModelFacts, able: Capabilities, ended: Sequence[BootFlags], wanted: Sequence[int]
) -> int | None:
    """The largest ceiling without an objection; None when none is left."""
    safe = [tokens for tokens in wanted if not objections(BootFlags(ceiling_tokens=tokens), model, able, ended)]
    return max(safe, default=None)


# --- case 4 ---


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        ("0.12.0", ["--max-num-partial-prefills"]),
        ("0.19.0", ["--max-num-partial-prefills"]),
        ("0.19.1rc2.dev3+g1234", ["--max-num-partial-prefills"]),
        ("0.20.0", ["--max-num-partial-prefills"]),
        ("0.27.1", ["--max-num-partial-prefills", "--max-long-partial-prefills"]),
        ("0.32.0", ["--max-num-partial-prefills", "--max-long-partial-prefills"]),
    ],
)
def test_case_4_a_start_with_a_cap_that_the_version_refuses_is_not_tried(version: str, refused: list[str]) -> None:
    """Old versions take the flag with its default alone; newer ones have no such flag. Both end at the start."""
    found = objections(CASE_4, TEXT, able_at(version))
    assert problems(found) == [(BootProblem.FLAG_UNSUPPORTED, flag) for flag in refused]


def test_case_4_a_refused_start_is_tried_once_and_not_blamed_on_the_budget() -> None:
    flags = BootFlags(ceiling_tokens=4096, chunk_cap_tokens=256)
    able = able_at("0.19.0")
    assert objections(flags, TEXT, able) == ()
    ended = [flags]
    assert BootProblem.TRIED_AND_ENDED in [one.problem for one in objections(flags, TEXT, able, ended)]
    by_flag = [CASE_4]
    assert objections(flags, TEXT, able, by_flag) == (), "it was the flag that ended that one, not 4,096 tokens"


def test_case_4_nothing_is_assumed_of_an_unknown_version() -> None:
    for version in ("0.25.1", "0.40.0", "1.0.0", "0.9.2"):
        found = objections(BootFlags(max_partial_prefills=2), TEXT, able_at(version))
        assert problems(found) == [(BootProblem.FLAG_UNKNOWN, "--max-num-partial-prefills")]


def test_flags_are_written_as_vllm_takes_them() -> None:
    flags = BootFlags(ceiling_tokens=4096, sequence_ceiling=64, adaptive_chunk_cap=True)
    written = "--max-num-batched-tokens 4096 --long-prefill-token-threshold-adaptive --max-num-seqs 64"
    assert " ".join(flags.words()) == written
    assert BootFlags(adaptive_chunk_cap=False).words() == ()


# --- case 5 ---


def test_case_5_no_version_moves_the_two_caps_by_its_own_flags() -> None:
    """They were accepted and ignored; only the hook enforces them, and says so in its own state."""
    for minor in range(0, 60):
        able = capabilities(parse_version(f"0.{minor}.0"))
        assert able.flags["max_partial_prefills"] is not Flag.TAKEN
        assert able.flags["max_long_partial_prefills"] is not Flag.TAKEN


# --- case 9 ---

QWEN3_8B = Geometry(hidden_size=4096, intermediate_size=12_288, layers=36, kv_heads=8, head_size=128)
RTX4090 = [BootPoint(2048, 40_464), BootPoint(8192, 36_720)]


def test_case_9_a_larger_ceiling_costs_kv_cache_and_the_advice_says_how_much() -> None:
    advice = advise(RTX4090[0], 8192, price(RTX4090), able_at("0.32.0"), model_tokens=8192)
    assert advice.headroom is Headroom.OK and advice.basis is Basis.MEASURED
    assert advice.kv_tokens == 36_720 and advice.kv_tokens_lost == 3744 and advice.kv_blocks_lost == 234
    assert advice.kv_share_lost == pytest.approx(3744 / 40_464)
    assert advice.flags.words() == ("--max-num-batched-tokens", "8192", "--max-num-scheduled-tokens", "2048")


def test_case_9_the_models_shape_alone_estimates_the_price() -> None:
    measured, guessed = price(RTX4090), price([], QWEN3_8B)
    assert guessed.basis is Basis.GEOMETRY
    assert guessed.kv_tokens_per_token == pytest.approx(measured.kv_tokens_per_token, rel=0.1)
    assert price(RTX4090, QWEN3_8B) == measured, "what was measured comes first"
    with pytest.raises(InputError, match="two starts"):
        price(RTX4090[:1])
    with pytest.raises(InputError, match="more KV"):
        price([BootPoint(2048, 100), BootPoint(4096, 200)])


def test_case_9_headroom_that_leaves_no_room_for_one_prompt_is_refused() -> None:
    able = able_at("0.32.0")
    assert advise(RTX4090[0], 65_536, price(RTX4090), able, model_tokens=8192).headroom is Headroom.NO_ROOM
    assert advise(RTX4090[0], 131_072, price(RTX4090), able).kv_tokens == 0
    old = advise(RTX4090[0], 8192, price(RTX4090), able_at("0.12.0"))
    assert old.headroom is Headroom.NO_FLAG and old.flags.words() == ("--max-num-batched-tokens", "8192")
    smaller = advise(RTX4090[1], 2048, price(RTX4090), able)
    assert smaller.kv_tokens == 40_464 and smaller.kv_tokens_lost == -3744 and smaller.kv_share_lost < 0


# --- case 10 ---


def test_case_10_a_failed_start_sets_a_bound_and_is_never_retried() -> None:
    able = able_at("0.32.0")
    ended = [BootFlags(ceiling_tokens=131_072)]
    assert learnt_bound_tokens(ended) == 131_072
    again = objections(BootFlags(ceiling_tokens=131_072), TEXT, able, ended)
    assert [one.problem for one in again] == [BootProblem.TRIED_AND_ENDED, BootProblem.ABOVE_LEARNT_BOUND]
    larger = objections(BootFlags(ceiling_tokens=262_144), TEXT, able, ended)
    assert [(one.problem, one.bound) for one in larger] == [(BootProblem.ABOVE_LEARNT_BOUND, 131_071)]
    assert objections(BootFlags(ceiling_tokens=65_536), TEXT, able, ended) == ()
    ended.append(BootFlags(ceiling_tokens=65_536))
    assert learnt_bound_tokens(ended) == 65_536
    wanted = [2048, 8192, 32_768, 65_536, 131_072]
    seen = []
    while (tokens := largest_safe_ceiling(TEXT, able, ended, wanted)) is not None:
        seen.append(tokens)
        ended.append(BootFlags(ceiling_tokens=tokens))
    assert seen == [32_768, 8192, 2048], "each once, downwards: no loop of retries"


def test_case_10_the_price_of_a_ceiling_is_known_although_one_start_failed() -> None:
    points = [BootPoint(100, 2241 * 16), BootPoint(2048, 2196 * 16)]
    cost = price(points)
    assert cost.kv_tokens_per_token == pytest.approx(45 * 16 / 1948)
    advice = advise(points[1], 8192, cost, able_at("0.32.0"))
    assert math.isfinite(advice.kv_share_lost) and advice.kv_blocks_lost == math.ceil(6144 * 45 / 1948)


# --- case 12 ---


def test_case_12_from_metrics_alone_it_is_unknown_whether_the_budget_is_reached() -> None:
    """vLLM's iteration_tokens_total books whole prompts in the step of their first token: unusable here."""
    page = (
        PAGE
        + 'vllm:iteration_tokens_total_sum{engine="0"} 6142.0\nvllm:iteration_tokens_total_count{engine="0"} 36.0\n'
    )
    with routes(vllm(page)) as server:
        assert {Unseen.COMPUTED_TOKENS, Unseen.KNOBS} <= discover(server.url).unseen


def test_case_12_step_records_show_the_ceiling_actually_in_force() -> None:
    """Speculative decoding under a budget of 8,192: the scheduler uses 2,048 whatever waits."""
    port = FakePort()
    for _ in range(200):
        port.step(
            budget_tokens=8192, prefill_tokens=2016, decode_tokens=32, sequences=34, prefills=2, running=34, waiting=5,
            partial_prefills=1, duration_s=0.1,
        )  # fmt: skip
    reading = ProtocolReader(port).read()
    set_to = {"name": "step_tokens", "mode": "live", "value": 8192, "boot": 8192, "min": 1, "max": 8192}
    envelope = reading.state.envelope.model_dump() | {"ceiling_tokens": 8192}
    now = state(knobs=(set_to,), envelope=envelope, now_s=reading.now_s)
    assert observed_ceiling_tokens(reading.steps, now) == 2048
    found = [part.code for part in find_signals(reading.steps, reading.requests, now)]
    assert Signal.BUDGET_NEVER_REACHED.value in found


# --- case 20 ---

CASE_20 = BootFlags(ceiling_tokens=800, chunk_cap_tokens=770)


def test_case_20_budget_and_cap_are_at_least_the_largest_item() -> None:
    """The item lies at tokens 3 to 769, so 767 tokens must go through at once."""
    flags, able = CASE_20, able_at("0.32.0")
    assert objections(flags, ModelFacts(model_tokens=4096, item_tokens=767), able) == ()
    larger = objections(flags, ModelFacts(model_tokens=4096, item_tokens=790), able)
    assert [(one.problem, one.flag, one.bound) for one in larger] == [
        (BootProblem.BELOW_ITEM, "--long-prefill-token-threshold", 790)
    ]
    both = objections(flags, ModelFacts(model_tokens=4096, item_tokens=1000), able)
    assert [one.flag for one in both] == ["--max-num-batched-tokens", "--long-prefill-token-threshold"]
    uncapped = BootFlags(ceiling_tokens=1000, chunk_cap_tokens=0)
    assert objections(uncapped, ModelFacts(item_tokens=1000), able) == (), "0 is no cap"
    assert objections(flags, ModelFacts(model_tokens=4096), able) == (), "a text model has no items"


def test_case_20_vllms_own_default_makes_room_for_an_item() -> None:
    card = Card(24 * GIB)
    assert default_batch(card, Start(model_tokens=32_768, prefix_item_tokens=2520)).ceiling_tokens == 2520
    assert default_batch(card, Start(model_tokens=32_768, prefix_item_tokens=767)).ceiling_tokens == 2048


# --- case 21 ---


def test_case_21_without_a_target_on_gaps_the_largest_ceiling_that_starts_and_then_nothing() -> None:
    """An offline batch on 8 large cards: 40,000 tokens in, 256 out, budget 4,096 at first."""
    able = able_at("0.32.0")
    start = default_batch(Card(80 * GIB, "NVIDIA H100 80GB HBM3"), Start(model_tokens=65_536, usage=Usage.LLM))
    wanted = [4096, start.ceiling_tokens, 32_768, 65_536]
    model = ModelFacts(model_tokens=65_536)
    assert largest_safe_ceiling(model, able, [], wanted) == 65_536
    ended = [BootFlags(ceiling_tokens=65_536)]
    assert largest_safe_ceiling(model, able, ended, wanted) == 32_768
    larger = [tokens for tokens in wanted if tokens > 32_768]
    assert larger and largest_safe_ceiling(model, able, ended, larger) is None, "it is in force: there it stops"


# --- what vLLM itself checks at a start ---


@pytest.mark.parametrize(
    ("flags", "model", "problem"),
    [
        (BootFlags(ceiling_tokens=4096), ModelFacts(model_tokens=8192, chunking=False), BootProblem.BELOW_MODEL_LENGTH),
        (BootFlags(ceiling_tokens=64, sequence_ceiling=128), TEXT, BootProblem.BELOW_SEQUENCES),
        (BootFlags(ceiling_tokens=512, step_tokens=513), TEXT, BootProblem.ABOVE_CEILING),
        (BootFlags(sequence_ceiling=8, max_running=9), TEXT, BootProblem.ABOVE_CEILING),
        (BootFlags(chunk_cap_tokens=40_000), TEXT, BootProblem.ABOVE_MODEL_LENGTH),
    ],
)
def test_a_start_that_vllm_would_refuse_is_rejected(flags: BootFlags, model: ModelFacts, problem: BootProblem) -> None:
    assert [one.problem for one in objections(flags, model, able_at("0.32.0"))] == [problem]
