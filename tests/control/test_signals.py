"""Every signal comes from a window with its cause; never from healthy or too little traffic."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rooftune.engine.fake import FakeRunner, ManualClock
from rooftune.engine.running import RunningEngine
from rooftune.policies.request import Setting
from rooftune.policies.step_time import StepModel
from rooftune.tuner.control.signals.budget import observed_ceiling_tokens
from rooftune.tuner.control.signals.find import FREEZING, RULES, Signal, find_signals
from rooftune.tuner.model.drift import Drift
from rooftune.tuner.observe.rows import RequestRows, StepRows
from tests.control.fake_window import MODEL, Ask, Window, chat, run


def found(window: Window, model: StepModel | None = MODEL, **more: Any) -> dict[str, dict[str, float]]:
    parts = find_signals(window.steps, window.requests, window.state, model, **more)
    assert len({part.code for part in parts}) == len(parts), "a signal came twice"
    return {part.code: part.evidence for part in parts}


def of_steps(window: Window, **columns: Any) -> Window:
    """The window with these step columns in place of its own."""
    return replace(window, steps=replace(window.steps, **columns))


def of_state(window: Window, **fields: Any) -> Window:
    return replace(window, state=window.state.model_copy(update=fields))


def of_envelope(window: Window, **fields: Any) -> Window:
    return of_state(window, envelope=window.state.envelope.model_copy(update=fields))


@pytest.fixture(scope="module")
def healthy() -> Window:
    """Ten chats a second, a budget that is often full, no queue that lasts."""
    return run(chat(1, 10, 12, output=30), Setting(512, max_running=64))


@pytest.fixture(scope="module")
def documents() -> Window:
    """The same with a document every two seconds."""
    asks = chat(1, 5, 12, output=30) + [Ask(1.0 + 2.0 * at, 8000, 20) for at in range(5)]
    return run(asks, Setting(512, chunk_cap_tokens=256, max_running=64))


def test_healthy_traffic_raises_no_signal(healthy: Window, documents: Window) -> None:
    assert len(healthy.requests) > 100 and found(healthy) == {}
    assert found(documents) == {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("rate_rps", "budget"), [(4, 2048), (10, 512), (6, 256), (20, 2048), (30, 8192)])
def test_healthy_traffic_of_many_kinds_raises_no_signal(seed: int, rate_rps: float, budget: int) -> None:
    for longest in (200, 600):
        assert found(run(chat(seed, rate_rps, 30, (50, longest)), Setting(budget, max_running=128))) == {}


def test_no_rows_raise_no_signal(healthy: Window) -> None:
    empty = replace(healthy, steps=StepRows.from_wire(), requests=RequestRows.from_wire())
    assert found(empty) == {} and found(empty, None) == {}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_few_rows_raise_no_signal(rule: Any, healthy: Window) -> None:
    few = np.arange(10)
    window = replace(healthy, steps=healthy.steps.select(few), requests=healthy.requests.select(few[:0]))
    assert found(window, now_s=float(window.steps.end_s[-1])) == {}


# --- the budget ---


@pytest.mark.slow
def test_arrivals_beyond_the_budget_grow_the_queue() -> None:
    window = run(chat(1, 80, 5), Setting(256, max_running=128), until_s=5.0)
    evidence = found(window)[Signal.QUEUE_GROWING]
    assert evidence["last"] > evidence["first"] and evidence["full_share"] > 0.9


@pytest.mark.slow
def test_partial_prefills_grow_under_a_small_cap() -> None:
    asks = chat(1, 12, 4, prompt=(3000, 6000))
    window = run(asks, Setting(512, chunk_cap_tokens=8, max_running=128), until_s=4.0)
    assert set(found(window)) & {Signal.PARTIAL_PREFILLS_GROWING, Signal.QUEUE_GROWING} == set(), "no full step yet"
    window = run(asks, Setting(256, chunk_cap_tokens=8, max_running=128), until_s=4.0)
    full = of_steps(window, budget_tokens=window.steps.computed_tokens)
    assert found(full)[Signal.PARTIAL_PREFILLS_GROWING]["last"] >= 6


@pytest.mark.slow
def test_decodes_crowd_the_budget_while_prompts_wait() -> None:
    many = [Ask(0.0, 20, 200) for _ in range(60)] + chat(1, 10, 1)
    evidence = found(run(many, Setting(64, max_running=64), until_s=2.0))[Signal.DECODES_CROWD_BUDGET]
    assert evidence["decode_tokens"] >= 0.8 * evidence["budget_tokens"]
    assert Signal.DECODES_CROWD_BUDGET not in found(run(many, Setting(512, max_running=64), until_s=2.0))


def clamped(window: Window, configured: int) -> Window:
    """What case 12 saw: the state and the records say ``configured``, the scheduler uses less."""
    return of_steps(window, budget_tokens=np.full(len(window.steps), configured))


def test_a_budget_that_is_never_reached_is_not_in_force() -> None:
    """Case 12: 8192 is set, 2048 is the most that a step computes at any load."""
    busy = run(chat(1, 30, 6, prompt=(1000, 4000), output=10), Setting(2048, max_running=128), until_s=6.0)
    evidence = found(clamped(busy, 8192))[Signal.BUDGET_NEVER_REACHED]
    assert evidence == {"observed_ceiling_tokens": 2048.0, "budget_tokens": 8192.0}
    assert observed_ceiling_tokens(busy.steps, busy.state) is None, "it is reached"


def test_a_budget_unreached_for_lack_of_work_or_sequences_is_no_signal(healthy: Window) -> None:
    assert observed_ceiling_tokens(clamped(healthy, 8192).steps, healthy.state) is None, "no request waits"
    narrow = run(chat(1, 30, 4, output=60), Setting(2048, max_running=8), until_s=4.0)
    assert (narrow.steps.waiting > 0).sum() > 100
    assert observed_ceiling_tokens(narrow.steps, narrow.state) is None, "the sequence cap holds them back"
    tight = run(chat(1, 30, 4, output=60), Setting(2048, max_running=64), kv_tokens=2000, until_s=4.0)
    assert (tight.steps.waiting > 0).sum() > 100
    assert observed_ceiling_tokens(tight.steps, tight.state) is None, "the pool holds them back"


@pytest.mark.slow
def test_falling_throughput_under_one_long_prompt_is_not_health() -> None:
    """Case 3: a huge prompt at a small budget; running requests finish, none replaces them, gaps stay short."""
    asks = [Ask(0.0, 100, 20 + 4 * at) for at in range(20)] + [Ask(0.1, 30_000, 10)]
    asks += [Ask(0.2 + 0.1 * at, 200, 30) for at in range(20)]
    window = run(asks, Setting(512, max_running=64))
    evidence = found(window)[Signal.LONG_PREFILL_BLOCKS]
    assert evidence["running_after"] <= 0.7 * evidence["running_before"]
    assert evidence["waiting_after"] > evidence["waiting_before"] and evidence["steps"] >= 20
    assert window.requests.longest_gap_s[:10].max() < 0.03, "and every gap looks fine"
    capped = run(asks, Setting(512, chunk_cap_tokens=256, max_running=64))
    assert Signal.LONG_PREFILL_BLOCKS not in found(capped), "under a cap the short ones get in"


# --- gaps ---


def test_steps_above_their_budget_mean_that_chunking_is_bypassed(healthy: Window) -> None:
    bypassed = of_steps(healthy, budget_tokens=np.minimum(healthy.steps.budget_tokens, 128))
    evidence = found(bypassed)[Signal.CHUNKING_BYPASSED]
    assert evidence["budget_tokens"] == 128 and evidence["computed_tokens"] > 128
    two = healthy.steps.budget_tokens.copy()
    two[np.argsort(healthy.steps.prefill_tokens)[-2:]] = 64
    assert found(of_steps(healthy, budget_tokens=two)) == {}, "two odd steps are not a pattern"


def test_more_decodes_than_budget_are_not_a_bypass() -> None:
    window = run([Ask(0.0, 10, 200) for _ in range(40)], Setting(64, max_running=64))
    small = of_steps(
        window, budget_tokens=np.minimum(window.steps.budget_tokens, np.where(window.steps.prefills, 64, 8))
    )
    assert Signal.CHUNKING_BYPASSED not in found(small)


@pytest.fixture(scope="module")
def whole_prompts() -> Window:
    """Prompts that run whole, as an engine without chunks reads them."""
    asks = chat(1, 5, 12, output=30) + [Ask(1.0 + 1.0 * at, 8000, 20) for at in range(10)]
    return run(asks, Setting(16_384, max_running=64))


def test_chunking_off_is_distinguished_from_off_by_model(whole_prompts: Window) -> None:
    off = of_envelope(whole_prompts, chunking=False, model_tokens=16_384)
    assert Signal.CHUNKING_OFF in found(off) and Signal.CHUNKING_OFF_BY_MODEL not in found(off)
    by_model = of_envelope(whole_prompts, chunking=False, model_tokens=131_072)
    evidence = found(by_model)[Signal.CHUNKING_OFF_BY_MODEL]
    assert evidence["step_s"] > 4 * evidence["decode_step_s"] and evidence["prompt_tokens"] >= 8000
    assert Signal.CHUNKING_OFF not in found(by_model)


def test_chunking_off_with_short_prompts_is_no_signal(healthy: Window) -> None:
    off = of_envelope(healthy, chunking=False, model_tokens=512)
    assert not {Signal.CHUNKING_OFF, Signal.CHUNKING_OFF_BY_MODEL} & set(found(off))


def long_gaps(window: Window, seconds: float) -> Window:
    return replace(window, requests=replace(window.requests, longest_gap_s=window.requests.longest_gap_s + seconds))


def test_a_tail_from_single_slow_steps(healthy: Window) -> None:
    steps = healthy.steps
    odd = np.arange(len(steps)) % 100 == 50
    window = long_gaps(of_steps(healthy, duration_s=steps.duration_s + 0.5 * odd), 0.5)
    evidence = found(window)[Signal.GAP_TAIL_SLOW_STEPS]
    assert evidence["gap_p99_s"] > 3 * evidence["explained_s"] and evidence["step_s"] > 0.5
    assert Signal.GAP_TAIL_SLOW_STEPS not in found(window, None), "without a model nothing is unexplained"
    assert Signal.GAP_TAIL_SLOW_STEPS not in found(of_steps(healthy, duration_s=steps.duration_s + 0.5 * odd))


def test_a_tail_from_pauses_between_steps(healthy: Window) -> None:
    late_s = 0.5 * np.cumsum(np.arange(len(healthy.steps)) % 100 == 50)
    window = long_gaps(of_steps(healthy, start_s=healthy.steps.start_s + late_s), 0.5)
    evidence = found(window)[Signal.GAP_TAIL_PAUSES]
    assert evidence["pause_s"] >= 0.5 and Signal.GAP_TAIL_SLOW_STEPS not in found(window)


def test_a_tail_from_steps_that_leave_out_running_requests(healthy: Window) -> None:
    more = of_steps(healthy, running=healthy.steps.running + 5 * (np.arange(len(healthy.steps)) % 10 == 0))
    assert found(long_gaps(more, 0.5))[Signal.GAP_TAIL_LEFT_OUT]["share"] >= 0.05
    assert found(more) == {}, "a few left out without a tail do no harm"


def test_preempted_requests_do_not_count_as_a_tail(healthy: Window) -> None:
    torn = healthy.requests.longest_gap_s + 5.0 * (np.arange(len(healthy.requests)) % 20 == 0)
    preempted = (np.arange(len(healthy.requests)) % 20 == 0).astype(np.int64)
    assert found(replace(healthy, requests=replace(healthy.requests, longest_gap_s=torn, preemptions=preempted))) == {}


def test_gaps_follow_the_prompts_under_a_large_budget(whole_prompts: Window, documents: Window) -> None:
    evidence = found(whole_prompts)[Signal.GAPS_FOLLOW_PROMPTS]
    assert evidence["correlation"] >= 0.6 and evidence["long_prompt_tokens"] == 8000
    assert evidence["gap_p99_long_prompts_s"] >= 3 * evidence["gap_p99_short_prompts_s"]
    shuffled = np.random.default_rng(1).permutation(len(whole_prompts.requests))
    unrelated = replace(whole_prompts.requests, prompt_tokens=whole_prompts.requests.prompt_tokens[shuffled])
    assert Signal.GAPS_FOLLOW_PROMPTS not in found(replace(whole_prompts, requests=unrelated))
    assert Signal.GAPS_FOLLOW_PROMPTS not in found(documents), "the same documents in chunks"


# --- trouble ---


def test_kv_full_and_preempting_is_kv_bound() -> None:
    """Case 23: pool full, preemptions go on, requests queue."""
    asks = chat(1, 12, 6, prompt=(100, 300), output=150)
    evidence = found(run(asks, Setting(2048, max_running=64), kv_tokens=4000, until_s=6.0))[Signal.KV_BOUND]
    assert evidence["kv_used"] > 0.95 and evidence["preemptions_per_s"] > 0
    assert Signal.KV_BOUND not in found(run(asks, Setting(2048, max_running=64), until_s=6.0))


def test_full_without_preemption_is_not_kv_bound(healthy: Window) -> None:
    assert found(of_steps(healthy, kv_used=np.full(len(healthy.steps), 1.0))) == {}


def test_throughput_that_does_not_recover_after_the_load_drops(healthy: Window) -> None:
    """Case 23, its end: the queue is gone, and each request still crawls."""
    n = len(healthy.steps)
    late = np.arange(n) >= n // 2
    crowd = of_steps(
        healthy, running=np.where(late, 4, 30), kv_used=np.where(late, 0.5, 1.0), decode_tokens=np.full(n, 4)
    )
    crowd = of_steps(crowd, decode_tokens=np.where(late, 4, 30), waiting=np.where(late, 0, 20))
    slow = of_steps(crowd, duration_s=np.where(late, 0.2, 0.02))
    evidence = found(slow)[Signal.THROUGHPUT_NOT_RECOVERED]
    assert evidence["tokens_per_s_after"] < 0.5 * evidence["tokens_per_s_before"]
    recovered = of_steps(crowd, duration_s=np.full(n, 0.02))
    assert Signal.THROUGHPUT_NOT_RECOVERED not in found(recovered)
    loaded = of_steps(slow, running=np.full(n, 30), waiting=np.full(n, 20))
    assert Signal.THROUGHPUT_NOT_RECOVERED not in found(loaded), "the load is still there"


def test_waiting_preempted_and_never_finished_is_stalled(healthy: Window) -> None:
    """Case 25: pool of 69 blocks, a request of 1024 tokens that never fits; waiting stays 1, preemptions climb."""
    n = 40
    looping = healthy.steps.select(np.arange(n))
    looping = replace(looping, waiting=np.ones(n, dtype=np.int64), preemptions=(np.arange(n) % 4 == 0).astype(np.int64))
    window = replace(healthy, steps=looping, requests=healthy.requests.select(np.arange(0)))
    found_now = find_signals(window.steps, window.requests, window.state, MODEL, now_s=float(looping.end_s[-1]))
    assert [part.code for part in found_now] == [Signal.STALLED]
    assert found_now[0].evidence["preemptions"] == 10
    ends = find_signals(looping, healthy.requests, window.state, MODEL, now_s=float(looping.end_s[-1]))
    assert Signal.STALLED not in [part.code for part in ends], "a request finished"


def test_requests_without_a_step_is_hung() -> None:
    asks = [Ask(0.0, 100, 200) for _ in range(3)]
    cut = run(asks, Setting(512, max_running=64), until_s=1.5)
    assert cut.steps.running[-1] > 0
    evidence = found(cut, now_s=cut.state.now_s + 60.0)[Signal.HUNG]
    assert evidence["silent_s"] >= 59.0 and evidence["requests"] >= 1
    assert found(cut, now_s=cut.state.now_s + 5.0) == {}
    idle = run(asks, Setting(512, max_running=64))
    assert found(idle, now_s=idle.state.now_s + 600.0) == {}, "an idle engine is not hung"


def test_a_drifted_model_is_a_signal(healthy: Window) -> None:
    evidence = found(healthy, drift=Drift(1.3, 12, True))[Signal.STEP_MODEL_DRIFTED]
    assert evidence == {"ratio": 1.3, "windows": 12.0, "slower": 1.0}


def test_steps_without_a_finished_request_raise_no_request_ended() -> None:
    slow = MODEL._replace(overhead_s=0.1)
    asks = [Ask(0.0, 100, 4000) for _ in range(3)]
    window = run(asks, Setting(512, max_running=8), until_s=35.0, model=slow)
    assert found(window, slow)[Signal.NO_REQUEST_ENDED]["running"] == 3.0
    short = run(asks, Setting(512, max_running=8), until_s=10.0, model=slow)
    assert found(short, slow) == {}


# --- requests ---


def slower_from(at_s: float, factor: float) -> Any:
    """A runner whose steps take ``factor`` times as long from ``at_s`` on."""

    def look(engine: RunningEngine, runner: FakeRunner, clock: ManualClock) -> None:
        cost = runner._cost
        if cost is not None and clock.now_s > at_s and cost.formula == MODEL:
            slow = StepModel(*(value * factor for value in MODEL[:-1]), MODEL.sharpness)
            runner._cost = cost._replace(formula=slow)

    return look


@pytest.fixture(scope="module")
def two_levels() -> Window:
    """Case 15: the same arrivals, and from the middle on every step takes four times as long."""
    asks = chat(2, 10, 14, prompt=(50, 200), output=15)
    return run(asks, Setting(2048, max_running=64), before_step=slower_from(7.0, 4.0))


def test_two_stable_levels_at_one_rate_raise_an_alarm(two_levels: Window) -> None:
    evidence = found(two_levels)[Signal.TWO_TPOT_LEVELS]
    assert evidence["tpot_after_s"] == pytest.approx(4 * evidence["tpot_before_s"], rel=0.2)
    assert evidence["rate_after_rps"] == pytest.approx(evidence["rate_before_rps"], rel=0.5)


def test_a_slower_level_after_a_push_is_blamed_on_the_push(two_levels: Window) -> None:
    pushed = of_steps(two_levels, revision=(np.arange(len(two_levels.steps)) > 300).astype(np.int64))
    assert Signal.TWO_TPOT_LEVELS not in found(pushed)


def test_a_slower_level_at_twice_the_arrivals_is_blamed_on_load() -> None:
    asks = chat(2, 5, 8, prompt=(50, 200), output=15)
    asks += [Ask(8.0 + ask.at_s, *ask[1:]) for ask in chat(3, 20, 4, prompt=(50, 200), output=15)]
    window = run(asks, Setting(2048, max_running=64), before_step=slower_from(8.0, 4.0))
    assert Signal.TWO_TPOT_LEVELS not in found(window)


@pytest.mark.slow
def test_equal_prompts_that_arrived_together_wait_unequally() -> None:
    """Case 17: four cold long prompts; a cap that lets several be read side by side evens their TTFT out."""
    four = [Ask(0.01 * at, 15_000, 5) for at in range(4)]
    evidence = found(run(four, Setting(1024, max_running=64)))[Signal.TTFT_SPREAD]
    assert evidence["ratio"] > 3.0 and evidence["requests"] == 4.0
    capped = run(four, Setting(1024, chunk_cap_tokens=512, max_running=64))
    assert Signal.TTFT_SPREAD not in found(capped)
    apart = [Ask(4.0 * at, 15_000, 5) for at in range(4)]
    assert Signal.TTFT_SPREAD not in found(run(apart, Setting(1024, max_running=64)))


def test_what_freezes_is_a_signal() -> None:
    assert set(Signal) > FREEZING
