"""A ``plan_step`` that checks every invariant of one step before it returns the plan, and counts what occurred.

It takes the place of ``plan_step`` in the plain walk, so that every random run is checked step by step.
"""

from collections import Counter
from functools import cmp_to_key
from itertools import pairwise

from rooftune.policies import packing
from rooftune.policies import request as r
from rooftune.policies.order import goes_before
from rooftune.policies.request import Boot, Setting, State
from rooftune.policies.step_time import StepModel
from tests.properties.block_check import check_blocks

MOST_STEPS = 20_000


def waiting_list(state: State) -> list[int]:
    """The waiting requests from head to tail; asserts that the list is whole in both directions."""
    found, before, request = [], -1, int(state.counters[r.WAITING_HEAD])
    while request >= 0:
        assert state.requests[request, r.PREV] == before and state.requests[request, r.STATUS] == r.WAITING
        found.append(request)
        before, request = request, int(state.requests[request, r.NEXT])
    assert state.counters[r.WAITING_TAIL] == before
    assert state.counters[r.WAITING_COUNT] == len(found) == len(set(found))
    return found


def running_list(state: State) -> list[int]:
    """The running requests in serving order; asserts that none is in it twice."""
    found = state.running[: state.counters[r.RUNNING_COUNT]].tolist()
    assert len(set(found)) == len(found)
    assert all(state.requests[request, r.STATUS] == r.RUNNING for request in found)
    return found


def decodes_in(rows: list[list[int]], running: list[int]) -> list[int]:
    return [q for q in running if rows[q][r.KNOWN] - rows[q][r.COMPUTED] == 1 and rows[q][r.KNOWN] > rows[q][r.PROMPT]]


def part_way(rows: list[list[int]], running: list[int], at_least: int = 0) -> int:
    """Running requests whose prompt (of ``at_least`` tokens), or what preemption cost them, is not computed yet."""
    short = [q for q in running if rows[q][r.COMPUTED] < rows[q][r.KNOWN] and rows[q][r.PROMPT] >= at_least]
    return len(short) - len(decodes_in(rows, short))


class Watch:
    """Callable like ``plan_step``. seen: how often each feature took effect."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.steps = 0
        self.pool: int | None = None

    def __call__(self, setting: Setting, boot: Boot, model: StepModel, state: State, now_s: float) -> int:
        self.steps += 1
        assert self.steps < MOST_STEPS, "the run does not end"
        if self.pool is None:
            held = sum(int(state.requests[q, r.HELD]) for q in running_list(state))
            self.pool = int(state.counters[r.FREE_BLOCKS]) + held if boot.contents == 0 else len(state.blocks)
        before = state._replace(requests=state.requests.copy())
        rows, running, waiting = before.requests.tolist(), running_list(state), waiting_list(state)
        count = packing.plan_step(setting, boot, model, state, now_s)
        after = state.requests.tolist()
        plan = [(int(q), int(tokens)) for q, tokens in state.planned[:count]]
        preempted = set(state.preempted[: state.counters[r.PREEMPTED_COUNT]].tolist())
        self._tokens(setting, boot, state, rows, running, plan)
        self._decodes(boot, rows, running, plan, preempted)
        self._chunks(setting, boot, state, rows, running, waiting, plan)
        self._admissions(setting, before, state, rows, running, waiting, plan, now_s)
        self._caps(setting, state, rows, after, running)
        if setting.order_policy == r.FCFS:
            served = [int(state.requests[q, r.ADMITTED]) for q in running_list(state)]
            assert served == sorted(served)
        else:
            self._order(setting, before, rows, plan, now_s)
        check_blocks(state, boot, running_list(state), waiting_list(state), self.pool)
        self._note(setting, boot, rows, state, plan, preempted)
        return count

    def _tokens(self, setting, boot, state, rows, running, plan):
        """The budget holds, no request is planned twice, none computes unknown tokens."""
        budget, decodes = state.counters[r.BUDGET], len(decodes_in(rows, running))
        assert sum(tokens for _, tokens in plan) <= budget <= boot.ceiling_tokens
        assert budget <= max(setting.step_tokens, decodes + 1)
        if setting.budget_policy == r.FIXED_BUDGET and decodes <= setting.step_tokens:
            assert budget == setting.step_tokens
        assert len({q for q, _ in plan}) == len(plan)
        for request, tokens in plan:
            row = state.requests[request]
            assert tokens >= 1 and row[r.STATUS] == r.RUNNING and row[r.COMPUTED] <= row[r.KNOWN]
            start = rows[request][r.COMPUTED] if request in running else row[r.HIT]
            assert row[r.COMPUTED] == start + tokens
        assert len(running_list(state)) == 0 or plan or state.counters[r.PREEMPTED_COUNT] > 0, "a step without progress"

    def _decodes(self, boot, rows, running, plan, preempted):
        """With the rule on, every decode that is not preempted gets its token in every step."""
        got = dict(plan)
        for request in decodes_in(rows, running):
            assert got.get(request, 1) == 1
            if request not in got and request not in preempted:
                self.seen["decode without a token"] += 1
                # A decode may also stand behind one that found no block and preempted itself.
                assert boot.keep_decodes_moving == 0 or preempted, f"decode {request} got nothing"

    def _chunks(self, setting, boot, state, rows, running, waiting, plan):
        """The chunk cap holds for all but a lone request; chunking off runs a prompt whole."""
        eligible = len(running) + len(waiting)
        cap = setting.chunk_cap_tokens
        if cap > 0 and eligible > 1:
            fair = boot.ceiling_tokens // eligible if setting.adaptive_chunk_cap else 0
            assert all(tokens <= max(cap, fair) for _, tokens in plan)
            self.seen["chunk cap binds"] += any(
                t == cap and state.requests[q, r.COMPUTED] < state.requests[q, r.KNOWN] for q, t in plan
            )
            self.seen["adaptive cap above the cap"] += any(tokens > cap for _, tokens in plan)
        elif cap > 0 and plan and plan[0][1] > cap:
            self.seen["lone request past the cap"] += 1
        if boot.chunking == 0 and (cap == 0 or eligible <= 1):
            assert all(state.requests[q, r.COMPUTED] == state.requests[q, r.KNOWN] for q, _ in plan if q not in running)

    def _admissions(self, setting, before, state, rows, running, waiting, plan, now_s):
        """Sequence cap and order of admission; only a partial-prefill cap lets a request pass, for a bounded time."""
        admitted = [q for q, _ in plan if q not in running]
        assert set(admitted) <= set(waiting)
        if admitted:
            assert state.counters[r.PREEMPTED_COUNT] == 0 or setting.order_policy != r.FCFS
            assert len(running) + len(admitted) <= setting.max_running
        if setting.order_policy == r.FCFS:
            line = waiting
        else:
            first = cmp_to_key(lambda a, b: -1 if goes_before(before, setting, a, b, now_s) else 1)
            line = sorted(waiting, key=first)
        assert admitted == [q for q in line if q in set(admitted)]
        caps = setting.max_partial_prefills > 0 or setting.max_long_partial_prefills > 0
        passed = line[: line.index(admitted[-1])] if admitted else []
        for request in passed:
            if request not in admitted:
                assert caps and state.counters[r.HELD_BACK] > 0
                assert now_s - state.arrival_s[request] < setting.pass_over_max_s
                self.seen["passed over"] += 1
        if state.counters[r.HELD_BACK] > 0:
            self.seen["held back by a cap"] += 1
            self.seen["passing-over ended"] += any(
                now_s - state.arrival_s[q] >= setting.pass_over_max_s for q in line if q not in admitted
            )

    def _caps(self, setting, state, rows, after, running):
        """At the end of a step no more prompts are half-read than the caps allow, or than before."""
        now_running = running_list(state)
        if setting.max_partial_prefills > 0:
            assert part_way(after, now_running) <= max(setting.max_partial_prefills, part_way(rows, running))
        if setting.max_long_partial_prefills > 0:
            long = setting.long_prompt_tokens
            most = max(setting.max_long_partial_prefills, part_way(rows, running, long))
            assert part_way(after, now_running, long) <= most

    def _order(self, setting, before, rows, plan, now_s):
        """Decodes first, then prefills strictly in the policy's order, with the aged before or behind the others."""
        decodes = set(decodes_in(rows, [q for q, _ in plan if rows[q][r.STATUS] == r.RUNNING]))
        line = [q for q, _ in plan]
        assert set(line[: len(decodes)]) == decodes
        prefills = line[len(decodes) :]
        for first, second in pairwise(prefills):
            assert goes_before(before, setting, first, second, now_s)
        self.seen["order other than arrival"] += prefills != sorted(prefills)
        aged = [q for q in prefills if now_s - before.arrival_s[q] >= setting.aging_s]
        turn = "before" if before.counters[r.AGED_FIRST] else "behind"
        self.seen[f"aged {turn} the others"] += 0 < len(aged) < len(prefills)

    def _note(self, setting, boot, rows, state, plan, preempted):
        seen = self.seen
        seen["preemption"] += len(preempted)
        seen["resumed after preemption"] += any(
            rows[q][r.STATUS] == r.WAITING and rows[q][r.PREEMPTIONS] > 0 for q, _ in plan
        )
        seen["prefix hit"] += any(rows[q][r.STATUS] == r.WAITING and state.requests[q, r.HIT] > 0 for q, _ in plan)
        seen["block shared"] += boot.contents != 0 and bool((state.blocks[:, r.REFERENCES] > 1).any())
        if state.counters[r.BUDGET] != setting.step_tokens:
            seen[f"budget policy {setting.budget_policy} binds"] += 1
        seen["sequence cap full"] += (
            state.counters[r.RUNNING_COUNT] >= setting.max_running and state.counters[r.WAITING_COUNT] > 0
        )
