"""The tuning protocol on this engine: the contract, and what is visible only from inside."""

import json
import math
import random
from typing import Any

import pytest

from rooftune.engine.fake import ManualClock
from rooftune.engine.interface import ChangeKind
from rooftune.engine.protocol import ANSWER_ROWS, About, Ring, TuningDesk
from rooftune.engine.running import RunningEngine
from rooftune.policies import lease, wire
from rooftune.policies.envelope import Envelope, full_bounds
from rooftune.policies.errors import InputError
from rooftune.policies.lease import boot_book
from rooftune.policies.request import Setting
from tests.contracts.tuning_protocol import TuningProtocolContract, in_force
from tests.engine.loop_harness import BOOT, Callers, check_nothing_left, engine, push
from tests.engine.random_pushes import random_push

FIXED = wire.BootEnvelope(
    ceiling_tokens=512, max_running=8, model_tokens=None, kv_blocks=None, kv_block_tokens=None, chunking=True
)


class EngineEndpoint:
    """An engine turned by hand, on a clock that only steps and ``pass_time`` move."""

    def __init__(self) -> None:
        self.engine, self.clock, self.runner = engine(Setting(step_tokens=64, max_running=8), kv_blocks=400)
        self.callers = Callers(self.engine)
        for name in ("tuning_state", "push", "revert", "resume", "steps_after", "requests_after", "in_flight"):
            setattr(self, name, getattr(self.engine, name))

    def load(self) -> None:
        chance = random.Random(4)
        for _ in range(12):
            prompt = [chance.randrange(1000) for _ in range(chance.randint(60, 200))]
            self.callers.submit(prompt, chance.randint(50, 90))

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def finish(self) -> None:
        while self.engine.step():
            pass

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)


class TestContract(TuningProtocolContract):
    @pytest.fixture
    def endpoint(self) -> EngineEndpoint:
        return EngineEndpoint()


class Heard:
    """An observer that records everything."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


def test_the_desk_updates_its_lease_book_only_when_due_with_the_same_result() -> None:
    """Random steps, leases, reverts and clocks that jump both ways, against a book that is updated in every step."""
    chance, clock = random.Random(1), ManualClock(100.0)
    envelope = Envelope(full_bounds(512, 8))
    desk = TuningDesk(About("e", "0", "m", FIXED), envelope, BOOT, clock)
    book, ended = boot_book(envelope, BOOT, clock.now_s), 0
    for turn in range(4000):
        clock.now_s += chance.choice([0.01, 0.01, 0.01, 0.5, 3.0])
        if chance.random() < 0.03:
            clock.now_s += chance.choice([-0.5, -30.0, 30.0])
        if chance.random() < 0.05:
            wish = random_push(chance, desk.book.revision)
            book, outcome = lease.push(lease.expire(book, clock.now_s)[0], wish.to_push(), clock.now_s)
            assert isinstance(desk.push(wish), wire.Refusal) is outcome.refused, turn
        if chance.random() < 0.01:
            desk.revert(wire.RevertRequest(block=False))
            book, _ = lease.revert(book, clock.now_s, block=False)
        now_s = math.nan if chance.random() < 0.003 else clock.now_s
        before = book.lease
        if before is not None:
            book, _ = lease.expire(book, now_s)
        ended += before is not None and book.lease is None
        force = desk.begin_step(now_s)
        assert (force.setting, force.revision) == (book.setting, book.revision), turn
        assert desk.book.lease == book.lease and desk.book.seen_s <= book.seen_s, turn
    assert ended > 30


@pytest.mark.parametrize("end", ["lease end", "revert", "push"])
def test_no_change_starves_a_decode(end: str) -> None:
    """A long prompt admitted ahead of decodes, read in small chunks; then the cap falls away."""
    subject, clock, _ = engine(Setting(step_tokens=64, max_running=16), kv_blocks=400)
    callers = Callers(subject)
    push(subject, lease_s=1.0, chunk_cap_tokens=2)
    callers.submit(list(range(300)), 1)
    subject.step()
    for number in range(10):
        callers.submit([number], 60)
    for _ in range(20):
        subject.step()
    if end == "lease end":
        clock.advance(1.0)
    elif end == "revert":
        subject.revert(wire.RevertRequest(actor="test", reason="a test"))
    else:
        push(subject, chunk_cap_tokens=0)
    changed = len(subject.steps_after(-1).step)
    while subject.step():
        pass
    steps = subject.steps_after(-1)
    assert steps.revision[changed] == steps.revision[changed - 1] + 1
    assert max(steps.prefill_tokens[changed:]) > 10, "the cap has fallen away"
    # Every decode in every step: 10 decodes, until they end.
    assert set(steps.decode_tokens[5:50]) == {10}
    longest_s = max(gap_s for gap_s in subject.requests_after(-1).longest_gap_s if gap_s is not None)
    assert longest_s <= max(steps.duration_s) + (1.0 if end == "lease end" else 1e-9), "one step, and our own pause"
    check_nothing_left(subject)


def test_a_lease_ends_in_the_first_step_after_its_time_without_a_call() -> None:
    subject, clock, _ = engine()
    heard = Heard()
    subject.observe_with(heard)  # type: ignore[arg-type]  # it answers to every name
    callers = Callers(subject)
    for _ in range(3):
        callers.submit([1, 2, 3], 200)
    push(subject, lease_s=0.3, step_tokens=20)
    start_s = clock.now_s
    while subject.step():
        pass
    steps = subject.steps_after(-1)
    for begun_s, revision in zip(steps.start_s, steps.revision, strict=True):
        assert revision == (1 if begun_s < start_s + 0.3 else 2)
    kinds = [(kind, revision, actor) for kind, revision, actor, _ in heard.of("on_change")]
    assert kinds == [(ChangeKind.PUSHED, 1, "test"), (ChangeKind.LEASE_ENDED, 2, "test")]


def test_records_count_sent_tokens_and_join_without_a_gap() -> None:
    subject, clock, runner = engine(kv_blocks=40, reserve_whole_prompt=False, gap_bounds_s=(0.009, 0.0098, 0.02))
    heard = Heard()
    subject.observe_with(heard)  # type: ignore[arg-type]  # it answers to every name
    callers = Callers(subject)
    callers.submit_some(random.Random(3), 40)
    sent: list[tuple[int, int, int]] = []
    original = runner.run

    def run(step: Any) -> list[int]:
        contexts = sum(segment.start for segment in step.segments)
        sent.append((step.computed_tokens, len(step.segments), contexts))
        return original(step)

    runner.run = run  # type: ignore[method-assign]  # to see what the loop sends
    while subject.step():
        pass
    steps, requests = subject.steps_after(-1), subject.requests_after(-1)
    computed = [p + d for p, d in zip(steps.prefill_tokens, steps.decode_tokens, strict=True)]
    contexts = [p + d for p, d in zip(steps.prefill_context_tokens, steps.decode_context_tokens, strict=True)]
    assert list(zip(computed, steps.sequences, contexts, strict=True)) == sent
    assert sum(steps.duration_s) == pytest.approx(clock.now_s, rel=1e-12) and steps.start_s[0] == 0.0
    assert sum(steps.preemptions) > 0 and max(steps.kv_used) > 0.9
    # The observer got the same.
    assert [record.step for (record,) in heard.of("on_step")] == list(steps.step)
    assert len(heard.of("on_first_token")) == len(heard.of("on_finished")) == 40
    gaps = [gap for (closed,) in heard.of("on_gaps") for gap in closed]
    assert len(gaps) == sum(requests.gap_count)
    for bound, row in zip(requests.gap_bounds_s, requests.gap_over, strict=True):
        assert sum(row) == sum(gap > bound for gap in gaps) > (0 if bound < 0.02 else -1)
    assert max(gap for gap in requests.longest_gap_s if gap is not None) == max(gaps)


@pytest.mark.parametrize("name", ["/models/" + "m" * 300, "/models/a\nb", "", "/models/\udce4\x7f", "Zwölf 東京"])
def test_any_model_name_gives_a_readable_state(name: str) -> None:
    desk = TuningDesk(About("e", "0", name, FIXED), Envelope(full_bounds(512, 8)), BOOT, ManualClock())
    state = wire.parse(wire.State, desk.tuning_state().model_dump_json().encode(), wire.MAX_ANSWER_BYTES)
    assert state.model[-20:] == "".join(char if char.isprintable() else "?" for char in name)[-20:] or not name


def test_a_ring_counts_what_it_lost() -> None:
    ring: Ring[str] = Ring(3)
    assert ring.after(-1) == ([], 0)
    for number in range(5):
        ring.append(number, f"row {number}")
    assert ring.after(-1) == ([(2, "row 2"), (3, "row 3"), (4, "row 4")], 2)
    assert ring.after(2) == ([(3, "row 3"), (4, "row 4")], 0)
    assert ring.after(1)[1] == 0 and ring.after(0)[1] == 1
    assert ring.after(9) == ([], 0)
    for bad in (0, wire.MAX_ROWS + 1):
        with pytest.raises(InputError):
            Ring(bad)


def test_a_small_ring_reports_lost_steps() -> None:
    subject, _, _ = engine(ring_rows=10)
    Callers(subject).submit([1], 50)
    while subject.step():
        pass
    steps = subject.steps_after(4)
    assert (len(steps.step), steps.step[-1], steps.lost) == (10, 49, 35)


def test_a_long_history_is_read_in_bounded_pages() -> None:
    subject, _, _ = engine(kv_blocks=200, read_all=False)
    callers = Callers(subject)
    for _ in range(7):
        callers.submit([1], 390)
        while subject.step():
            pass
    read: list[int] = []
    while rows := subject.steps_after(read[-1] if read else -1).step:
        assert len(rows) <= ANSWER_ROWS
        read += rows
    assert read == list(range(7 * 390)) and len(read) > 2 * ANSWER_ROWS


def fuzzed(chance: random.Random, revision: int) -> bytes:
    """A body for the push route: mostly near the truth, often wrong in one place, sometimes nonsense."""
    anything = [None, True, -1, 0, 1, 17, 64, 65, 1e9, 0.5, "64", [], {}, 1e400, 2**70]
    names = [*Setting._fields, "unknown", ""]
    knobs = {chance.choice(names[:8]): chance.choice([0, 1, 7, 16, 64]) for _ in range(chance.randrange(4))}
    body: dict[str, Any] = {
        "knobs": knobs,
        "lease_s": chance.choice([0.01, 1.0, 1000.0]),
        "expected_revision": revision,
        "actor": chance.choice(["a", "a", "b"]),
        "reason": "fuzz",
    }
    if chance.random() < 0.3:
        kind = chance.choice(["fixed", "pressure", "step_time_target", "x"])
        body["budget_policy"] = {"kind": kind} | ({"tokens": 8, "prefills": 1} if kind == "pressure" else {})
    for _ in range(chance.choice([0, 0, 1, 2])):
        place = chance.choice([body, knobs])
        place[chance.choice([*list(place), *names])] = chance.choice(anything)
    text = json.dumps(body).encode()
    if chance.random() < 0.1:
        text = bytes(chance.choice([b"", text[: chance.randrange(len(text))], b"\xff" * 9, b"[]", text * 2]))
    return text


@pytest.mark.parametrize("calls", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fuzzed_control_calls_leave_the_last_valid_setting_in_force(calls: int) -> None:
    subject, clock, _ = engine(Setting(step_tokens=64, max_running=8), kv_blocks=400, read_all=False)
    callers, chance = Callers(subject), random.Random(8)
    state = subject.tuning_state()
    boot = in_force(state)
    seen = {"taken": 0, "malformed": 0}
    for call in range(calls):
        if call % 50 == 0:
            callers.submit_some(chance, 1, most_tokens=20)
        if call % 10 == 0:
            subject.step()
        before = subject.tuning_state()
        assert before.revision >= state.revision
        if before.lease is None:
            assert in_force(before) == boot
        kind = chance.random()
        if kind < 0.02:
            clock.advance(chance.choice([0.001, 0.5, 2000.0]))
            state = subject.tuning_state()
            assert in_force(state) == (boot if state.lease is None else in_force(before))
            continue
        if kind < 0.05:
            state_after_revert(subject, chance, boot)
            state = subject.tuning_state()
            continue
        try:
            wish = wire.parse(wire.PushRequest, fuzzed(chance, before.revision + (chance.random() < 0.1)))
        except InputError:
            seen["malformed"] += 1
            continue
        answer = subject.push(wish)
        state = subject.tuning_state()
        if isinstance(answer, wire.PushAnswer):
            seen["taken"] += 1
            assert answer.revision == state.revision == before.revision + 1
            assert in_force(state) == in_force(before) | dict(wish.to_push().changes)
            assert state.lease is not None and state.lease.actor == wish.actor
        else:
            seen[answer.code] = seen.get(answer.code, 0) + 1
            assert answer.revision == state.revision == before.revision
            assert in_force(state) == in_force(before) and state.blocked == before.blocked
            assert wire.REFUSAL_STATUS[answer.code] in (409, 422)
        for knob in state.knobs:
            assert knob.value is not None and knob.min is not None and knob.max is not None
            assert knob.min <= knob.value <= knob.max
    least = {"taken": 20, "malformed": 20, "outside_envelope": 100, "held_by_other": 100, "conflict_revision": 100}
    assert {code for code, part in least.items() if seen.get(code, 0) < calls // part} == set(), seen
    assert seen.get("blocked_by_revert", 0) > calls // 1000
    while subject.step():
        pass
    for number in callers.requests:
        callers.check_tokens(number)
    assert not callers.open
    check_nothing_left(subject)


def state_after_revert(subject: RunningEngine, chance: random.Random, boot: dict[str, Any]) -> None:
    """A revert, and most often a resume."""
    answer = subject.revert(wire.RevertRequest(actor="fuzz", reason="fuzz", block=chance.random() < 0.5))
    state = subject.tuning_state()
    assert state.revision == answer.revision and state.lease is None and in_force(state) == boot
    if chance.random() < 0.7:
        subject.resume(wire.ResumeRequest(actor="fuzz", reason="fuzz"))
        assert not subject.tuning_state().blocked
