"""Nobody starves under an order policy: however many fresh requests arrive, the aged are served in their share.

Load is above capacity in every run and never ends, so that a fresh request is always there to go before an aged one.
"""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftune.policies import request as r
from rooftune.policies.packing import finish_step, plan_step
from rooftune.policies.request import DEADLINE, SHORTEST_FIRST, Boot, Setting, State, append_waiting, new_state
from rooftune.policies.step_time import NAMED_MODELS
from tests.twin.random_runs import SEEDS, Pick, picker

BOOT = Boot(ceiling_tokens=512, block_tokens=16, chunking=1, reserve_whole_prompt=1, contents=0, keep_decodes_moving=1)
MODEL = NAMED_MODELS["8b-2tbs"]
STEPS, STEP_S = 300, 0.01
OVERLOAD = 1.3  # prompt tokens that arrive, of those that the steps can compute


class Queue:
    """An engine under overload; every request ends with its first token, so that all of a step is for prompts."""

    def __init__(self, pick: Pick, setting: Setting, boot: Boot) -> None:
        self.pick, self.setting, self.boot = pick, setting, boot
        self.state = new_state(STEPS * setting.step_tokens, pool_blocks=1 << 20)
        self.state.requests[:, r.OUTPUT] = 1
        self.arrived, self.brought = 0, 0.0

    def arrive(self, step: int) -> None:
        requests = self.state.requests
        while self.brought <= OVERLOAD * self.setting.step_tokens * (step + 1):
            tokens = self.pick([9, 20, 20, 40, 300])
            requests[self.arrived, r.PROMPT] = requests[self.arrived, r.KNOWN] = tokens
            self.state.arrival_s[self.arrived] = step * STEP_S
            append_waiting(self.state, self.arrived)
            self.arrived, self.brought = self.arrived + 1, self.brought + tokens

    def aged(self, now_s: float) -> list[int]:
        """Requests with prompt tokens left that have waited for the aging bound, oldest first."""
        late = now_s - self.state.arrival_s[: self.arrived] >= self.setting.aging_s
        left = self.state.requests[: self.arrived, r.STATUS] != r.FINISHED
        return [int(request) for request in (late & left).nonzero()[0]]

    def left(self, requests: list[int]) -> int:
        rows = self.state.requests[requests]
        return int((rows[:, r.PROMPT] - rows[:, r.COMPUTED]).sum())


def setting_of(pick: Pick, share: float) -> Setting:
    return Setting(
        pick([64, 128]),
        max_running=1 << 14,
        order_policy=pick([SHORTEST_FIRST, DEADLINE]),
        aging_s=pick([0.1, 0.2, 0.4]),
        aged_share=share,
        ttft_target_s=pick([0.05, 0.5]),
        prefill_s_per_token=1e-4,
    )


def drive(seed: int, share: float, plan_ahead: int) -> Counter[str]:
    """A run; the oldest aged request gets tokens in its turns, and every aged one ends when all before it allow."""
    queue = Queue(picker(seed), setting_of(picker(seed), share), BOOT._replace(plan_ahead=plan_ahead))
    setting, state = queue.setting, queue.state
    turns, known, since, oldest = 0, set[int](), 0, -1
    due: dict[int, int] = {}  # an aged request -> turns of the aged by which its prompt is read
    seen: Counter[str] = Counter()
    for step in range(STEPS):
        now_s = step * STEP_S
        queue.arrive(step)
        aged = queue.aged(now_s)
        for place, request in enumerate(aged):
            if request not in known:
                known.add(request)
                due[request] = turns + math.ceil(queue.left(aged[: place + 1]) / setting.step_tokens)
        if not aged or aged[0] != oldest:
            oldest, since = (aged[0] if aged else -1), 0
        assert plan_step(setting, queue.boot, MODEL, state, now_s) > 0
        turns += int(state.counters[r.AGED_FIRST])
        got = set(state.planned[: state.counters[r.PLANNED_COUNT], 0].tolist())
        since = 0 if not aged or oldest in got else since + 1
        assert since <= math.ceil(1.0 / share), "the oldest aged request makes no progress"
        seen["fresh before aged"] += bool(aged) and not got & set(aged)
        finish_step(queue.boot, state)
        overdue = [request for request, by in due.items() if by <= turns and unread(state, request)]
        assert not overdue, f"{overdue} wait beyond their turn"
    seen["aged and read"] = sum(not unread(state, request) for request in due)
    seen["long, aged and read"] = sum(not unread(state, q) and state.requests[q, r.PROMPT] == 300 for q in due)
    assert math.floor(share * STEPS) <= turns <= math.ceil(share * STEPS)
    return seen


def unread(state: State, request: int) -> bool:
    return bool(state.requests[request, r.STATUS] != r.FINISHED)


@pytest.mark.parametrize("plan_ahead", [0, 1])
def test_the_aged_have_their_share_and_every_one_of_them_ends(plan_ahead: int) -> None:
    total: Counter[str] = Counter()

    @settings(max_examples=20, deadline=None)
    @given(SEEDS, st.sampled_from([0.1, 0.2, 0.3, 0.5, 1.0]))
    def check(seed: int, share: float) -> None:
        total.update(drive(seed, share, plan_ahead))

    check()
    for what in ("fresh before aged", "aged and read", "long, aged and read"):
        assert total[what] >= 20, (what, total)


def test_without_turns_of_the_aged_they_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftune.policies.order.aged_turn", lambda steps, share: False)
    with pytest.raises(AssertionError, match="no progress"):
        drive(1, 0.5, 0)
