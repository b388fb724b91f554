"""No change of knobs or policy, revert or lease end starves a decode: it gets a token in every step.

So no gap exceeds one step, and no step is larger than the largest budget that was in force. KV blocks are plenty here:
a preempted request waits for blocks, which is another matter.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftune.policies import packing
from rooftune.policies import request as r
from rooftune.policies.envelope import Envelope, KnobBound
from rooftune.policies.lease import LeaseBook, LeaseReason, Push, boot_book, expire, push, resume, revert
from rooftune.policies.packing import finish_step
from rooftune.policies.request import Boot, Setting, State, append_waiting, new_state
from rooftune.policies.step_time import NAMED_MODELS, StepModel, chunk_attention_work, priced, step_time
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.twin import Change
from rooftune.tuner.traffic.workload import Traffic
from tests.properties.watch import Watch, decodes_in, running_list
from tests.twin.random_runs import SEEDS, Pick, make_setting, picker
from tests.twin.walk import planned_time_s, walk

MODEL = StepModel(0.0015, 1e-4, 0.008, 6e-8, 2e-4, 2e-9, 0.0)
REAL = NAMED_MODELS["8b-2tbs"]
BOOT = Boot(ceiling_tokens=512, block_tokens=16, chunking=1, reserve_whole_prompt=1, contents=0, keep_decodes_moving=1)
STEPS = 80
SERVER = Setting(step_tokens=64, max_running=16)
ENVELOPE = Envelope(tuple(KnobBound(name, 0, 1e9) for name in Setting._fields))


def change_something(pick: Pick, book: LeaseBook, now_s: float) -> tuple[LeaseBook, LeaseReason | str]:
    """Push, revert, resume, or let a lease run out: anything that a controller, an operator and time can do."""
    what = pick(["wait", "wait", "wait", "push", "push", "revert", "expire"])
    if what == "push":
        wanted = make_setting(pick, 1, 512, 16)
        names = Setting._fields if pick([0, 1]) else ("step_tokens", "chunk_cap_tokens", "max_running", "order_policy")
        changes = {name: getattr(wanted, name) for name in names}
        wish = Push(changes, pick([0.02, 0.2, 5.0]), book.revision, "test", "random", MODEL)
        book, outcome = push(resume(book, now_s)[0] if book.blocked else book, wish, now_s)
        return book, outcome.reason
    if what == "revert":
        book, outcome = revert(book, now_s, block=False)
        return book, outcome.reason
    book, outcome = expire(book, now_s)
    return book, outcome.reason


def some_traffic(pick: Pick, n: int) -> State:
    state = new_state(n, pool_blocks=100_000)
    state.requests[:, r.PROMPT] = [pick([1, 3, 40, 150, 900]) for _ in range(n)]
    state.requests[:, r.OUTPUT] = [pick([1, 10, 100]) for _ in range(n)]
    state.requests[:, r.KNOWN] = state.requests[:, r.PROMPT]
    return state


def drive(seed: int, n: int, boot: Boot, total: Counter[str]) -> None:
    """STEPS steps under a lease book that is changed all the time; every gap is one step, within the budget."""
    pick = picker(seed)
    state, watch = some_traffic(pick, n), Watch()
    book = boot_book(ENVELOPE, SERVER, 0.0)
    now_s, arrived, largest_budget = 0.0, 0, 0
    last_token_s: dict[int, float] = {}
    for _ in range(STEPS):
        book, reason = change_something(pick, book, now_s)
        total[str(reason)] += 1
        largest_budget = max(largest_budget, book.setting.step_tokens)
        for _ in range(pick([0, 0, 1, 6])):
            if arrived < n:
                state.arrival_s[arrived] = now_s
                append_waiting(state, arrived)
                arrived += 1
        decodes = decodes_in(state.requests.tolist(), running_list(state))
        total["more decodes than budget"] += len(decodes) > book.setting.step_tokens
        start_s = now_s
        if watch(book.setting, boot, MODEL, state, now_s) == 0:
            now_s += 0.01
            continue
        now_s += planned_time_s(priced(MODEL), state)
        rows = state.planned[: state.counters[r.PLANNED_COUNT]].tolist()
        assert sum(tokens for _, tokens in rows) <= largest_budget
        total["prefill beside decodes"] += 0 < len(decodes) < len(rows)
        for request, _ in rows:
            if state.requests[request, r.COMPUTED] == state.requests[request, r.KNOWN]:
                # The token before came at the end of the step before: the gap is this one step.
                assert last_token_s.get(request, start_s) == start_s
                last_token_s[request] = now_s
        finish_step(boot, state)
    assert watch.seen["preemption"] == 0
    total.update(watch.seen)


def test_every_decode_gets_a_token_in_every_step_whatever_changes() -> None:
    total: Counter[str] = Counter()

    @settings(max_examples=70)
    @given(SEEDS, st.integers(2, 40))
    def check(seed: int, n: int) -> None:
        drive(seed, n, BOOT, total)

    check()
    for what in ("ok", "expired", "reverted", "more decodes than budget", "prefill beside decodes", "chunk cap binds"):
        assert total[what] >= 5, (what, total)
    assert total["order other than arrival"] >= 1
    assert total["decode without a token"] == 0


@pytest.mark.slow
def test_the_same_with_the_rule_removed_fails() -> None:
    without = BOOT._replace(keep_decodes_moving=0)
    total: Counter[str] = Counter()
    broken = 0
    for seed in range(200):
        try:
            drive(seed, 20, without, total)
        except AssertionError:
            broken += 1
    assert broken >= 5


@pytest.mark.slow
@pytest.mark.parametrize("half", ["effective_budget", "effective_chunk_cap"])
def test_both_halves_of_the_rule_are_needed(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_half_less = {
        "effective_budget": lambda budget, ceiling, decodes: budget,
        "effective_chunk_cap": lambda cap, left, behind: cap,
    }
    monkeypatch.setattr(packing, half, one_half_less[half])
    broken = 0
    for seed in range(100):
        try:
            drive(seed, 20, BOOT, Counter())
        except AssertionError:
            broken += 1
    assert broken >= 3


def decodes_behind_a_prompt(decodes: int) -> State:
    """A 60,000-token prompt, 256 of it computed, and behind it in serving order ``decodes`` decodes."""
    state = new_state(decodes + 1, pool_blocks=10_000)
    state.requests[:, r.PROMPT], state.requests[0, r.PROMPT] = 1, 60_000
    state.requests[:, r.OUTPUT] = 1_000
    state.requests[:, r.KNOWN], state.requests[0, r.KNOWN] = 2, 60_000
    state.requests[:, r.COMPUTED], state.requests[0, r.COMPUTED] = 1, 256
    state.requests[:, r.HELD], state.requests[0, r.HELD] = 1, 16
    state.requests[:, r.STATUS] = r.RUNNING
    state.requests[:, r.ADMITTED] = state.running[: decodes + 1] = np.arange(decodes + 1)
    state.counters[r.FREE_BLOCKS] -= 16 + decodes
    state.counters[r.RUNNING_COUNT] = state.counters[r.ADMISSIONS] = decodes + 1
    return state


@pytest.mark.parametrize(("keep", "prompt_tokens", "served"), [(0, 256, 44), (1, 200, 100)])
def test_a_capped_prompt_can_starve_the_decodes_behind_it(keep: int, prompt_tokens: int, served: int) -> None:
    """Budget 300, cap 256, 100 decodes: vLLM's order leaves 44 tokens for 100, and the same 56 wait step after step."""
    state, boot = decodes_behind_a_prompt(100), BOOT._replace(keep_decodes_moving=keep)
    for _ in range(3):
        packing.plan_step(Setting(300, 256), boot, MODEL, state, 0.0)
        rows = state.planned[: state.counters[r.PLANNED_COUNT]].tolist()
        assert rows[0] == [0, prompt_tokens]
        assert rows[1:] == [[decode, 1] for decode in range(1, served + 1)]
        finish_step(boot, state)


@pytest.mark.parametrize(("keep", "served"), [(0, 64), (1, 100)])
def test_a_budget_below_the_decodes_still_serves_them_all(keep: int, served: int) -> None:
    """A push may lower budget and sequence cap under 100 decodes to 64: none of them may wait for another to finish."""
    state, boot = decodes_behind_a_prompt(100), BOOT._replace(keep_decodes_moving=keep)
    state.running[:101] = np.roll(np.arange(101), -1)  # the prompt last
    state.requests[0, r.ADMITTED] = 101
    count = packing.plan_step(Setting(64, max_running=64), boot, MODEL, state, 0.0)
    assert count == served


def test_dropping_the_cap_stretches_the_longest_gap_from_13_ms_to_2_4_s_without_the_rule() -> None:
    """A 60k prompt ahead of 20 decodes at budget 2,048; the cap goes from 256 to 0 after about 10,000 prompt tokens."""
    longest_s = {}
    for keep in (0, 1):
        for cap in (256, 0):
            longest_s[keep, cap] = longest_gap_s(keep, cap, at_s=0.5)
    assert longest_s[0, 256] == longest_s[1, 256] == pytest.approx(0.013, rel=0.05)
    assert longest_s[0, 0] == pytest.approx(2.4, rel=0.05)
    # With the rule no gap exceeds one step of the whole budget, at its longest with 60,000 tokens behind the chunk.
    whole_s = step_time(REAL, 2_048, 21, 62_000, chunk_attention_work(2_048, 60_000))
    assert 0.08 < longest_s[1, 0] <= whole_s


def longest_gap_s(keep: int, later_cap: int, at_s: float) -> float:
    """Longest gap of the 20 decodes; for an unchanged cap only the part of the prompt read by ``at_s`` counts."""
    prompt = 60_000 if later_cap == 0 else 10_000
    n = 21
    traffic = Traffic(
        np.array([0.0] + [0.001] * (n - 1)),
        np.array([prompt] + [20] * (n - 1), dtype=np.int64),
        np.array([1] + [60] * (n - 1), dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
    )
    engine = Engine(Boot(2_048, 16, 1, 1, 0, keep), 10_000)
    changes = [Change(at_s, Setting(2_048, later_cap))]
    result = walk(traffic, engine, Setting(2_048, 256), REAL, changes=changes)
    return float(result.outcomes.longest_gap_s[1:].max())
