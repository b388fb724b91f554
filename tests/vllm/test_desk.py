"""The hook's desk equals the engine's desk, in fewer instructions; its rows wait for a reader."""

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rooftune.engine.protocol import About, TuningDesk
from rooftune.engine.vllm.desk import RowDesk
from rooftune.engine.vllm.records import ARRIVED, ENDED, Recorder
from rooftune.policies import wire
from rooftune.policies.envelope import Envelope, full_bounds
from rooftune.policies.request import Setting
from tests.engine.random_pushes import random_push

BOOT = Setting(512, max_running=32)
ABOUT = About(
    "vllm",
    "0",
    "m",
    wire.BootEnvelope(
        ceiling_tokens=512, max_running=32, model_tokens=None, kv_blocks=None, kv_block_tokens=None, chunking=True
    ),
)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def envelope() -> Envelope:
    return Envelope(full_bounds(512, 32))


def row_desk(now_s: Callable[[], float], **more: Any) -> RowDesk:
    return RowDesk(ABOUT, envelope(), BOOT, now_s, **more)


def test_the_row_desk_agrees_with_the_tuning_desk() -> None:
    """Random pushes, reverts, leases that end, and a clock that also jumps, goes back or cannot be read."""
    chance, clock = random.Random(11), Clock()
    desks = row_desk(clock), TuningDesk(ABOUT, envelope(), BOOT, clock)
    seen, ended = set(), 0
    for turn in range(6000):
        clock.now_s += chance.choice([0.01, 0.01, 0.01, 0.5, 3.0])
        if chance.random() < 0.02:
            clock.now_s += chance.choice([-0.5, -30.0, 30.0])
        if chance.random() < 0.05:
            wish = random_push(chance, desks[1].book.revision)
            answers = [desk.push(wish) for desk in desks]
            assert answers[0] == answers[1], turn
        if chance.random() < 0.005:
            for desk in desks:
                desk.revert(wire.RevertRequest(block=False))
        now_s = math.nan if chance.random() < 0.002 else clock.now_s
        held = desks[1].book.lease
        desks[0].renew(now_s)
        force = desks[1].begin_step(now_s)
        assert desks[0].force == force, turn
        ended += held is not None and desks[1].book.lease is None
        seen.add(force.setting.step_tokens)
        desks[0].keep((), desks[1].steps)
        if chance.random() < 0.02:
            left = [desk.lease_left_s() for desk in desks]
            assert left[0] == left[1], turn
    assert len(seen) > 50 and ended > 50


def test_rows_round_trip_and_pool_usage_becomes_a_share() -> None:
    clock = Clock()
    desk = row_desk(clock, used=lambda free: 1.0 - free / 200, ring_rows=4)
    assert desk.steps_after(-1).step == ()
    for step in range(6):
        more = (9, 1, 5, 4.5, 1, 0) if step != 3 else ()
        desk.keep([(float(step), step + 0.25, (float(step), (512, 8), 3, 2, 40, 3, 7, 150, *more))], in_flight=2)
        assert desk.steps == step + 3
    page = desk.steps_after(-1)
    assert page.lost == 2 and page.step == (2, 3, 4, 5) and page.start_s == (2.0, 3.0, 4.0, 5.0)
    assert set(page.duration_s) == {0.25} and set(page.kv_used) == {0.25}
    names = ("budget_tokens", "prefill_tokens", "decode_tokens", "sequences", "prefills", "decode_context_tokens",
             "prefill_context_tokens", "attention_work", "partial_prefills", "running", "waiting", "preemptions",
             "revision")  # fmt: skip
    assert [getattr(page, name)[0] for name in names] == [512, 9, 2, 3, 1, 40, 5, 4.5, 1, 3, 7, 0, 8]
    assert [getattr(page, name)[1] for name in names] == [512, 0, 2, 3, 0, 40, 0, 0.0, 0, 3, 7, 0, 8], "decodes alone"


def test_unread_ended_requests_are_bounded() -> None:
    clock = Clock()
    desk = row_desk(clock)
    recorder = Recorder(SimpleNamespace(), desk, (), lambda: None)
    for number in range(3000):
        request = SimpleNamespace(
            request_id=str(number), num_prompt_tokens=number + 1, num_output_tokens=0, num_preemptions=0,
            status=SimpleNamespace(name="FINISHED_ABORTED"), sampling_params=None, arrival_time=0.0,
        )  # fmt: skip
        recorder.notes += [(ARRIVED, request, clock(), 0.0), (ENDED, request, clock())]
        recorder.catch_up()
    assert not recorder.notes
    waiting = 3000 - len(desk.requests_after(-1).sequence) - len(desk.requests_after(999).sequence)
    assert 1000 <= waiting <= 1025, "the last thousand wait for a reader, in memory as little as their numbers"
    recorder.close_all()
    page = desk.requests_after(1999)
    assert page.prompt_tokens == tuple(range(2001, 3001)) and set(page.ended) == {"aborted"} and page.lost == 0
    assert not recorder.tracks
