"""What the loop does with a kept setting: blocks, refits, what a search says of it, the way back and the pause."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rooftune.policies.guard import Action, Reason
from rooftune.policies.proof.probation import DAY_S, Probation
from rooftune.policies.request import SHORTEST_FIRST, Setting
from rooftune.policies.slo import Slo, Target
from rooftune.tuner.control.cycle.observe import Seen, waiting_at
from rooftune.tuner.control.cycle.probation import block_of
from rooftune.tuner.control.explain.explain import explain
from rooftune.tuner.control.job import Job, SearchAnswer
from rooftune.tuner.control.memory import KEY, Kept, Memory, Pause, recall
from rooftune.tuner.control.outcome import Carries, CycleRecord, LoadPart
from rooftune.tuner.observe.window import Window
from rooftune.tuner.ports.base import PortError, PortFault
from tests.control import fake_window
from tests.control.doubles import MemoryStore, Rig, answer_of, options, proposes, rig
from tests.control.kept import keep, traffic
from tests.control.live import BOOT, LiveEngine, Traffic

FITTING = Setting(step_tokens=512, max_running=32)
LIKE = traffic(2.0, 200.0, 20.0, 675.0)
BLOCK_CYCLES = 3  # verify_s / 2 in cycles


def memory_of(run: Rig) -> Memory:
    return Memory.model_validate_json(run.store.values[KEY])


def kept_run(reply: Any = None, *, probation: Probation | None = None, **given: Any) -> Rig:
    """The better setting is kept; its trial showed 97 % good, boot 90 %."""
    engine = LiveEngine()
    run = rig(reply or proposes(verdict="keep", gain=0.0), engine=engine, options=options(search_requests=20, **given))
    engine.advance(60.0)
    known = Probation(expected=0.97, boot=0.9, offered_rps=2.0) if probation is None else probation
    keep(run, FITTING, share=0.97, traffic=LIKE, probation=known)
    engine.advance(60.0)
    return run


def lost(record: CycleRecord) -> bool:
    return record.reason is Reason.KEPT_LOST


def test_a_setting_that_does_what_it_showed_stays() -> None:
    run = kept_run()
    run.run(60)
    assert run.setting == FITTING and Reason.KEPT_LOST not in run.reasons
    told = [record.probation for record in run.records if record.probation is not None]
    assert len(told) >= 60 // BLOCK_CYCLES - 4 and {one.standing for one in told} == {"holds"}
    assert memory_of(run).kept is not None and memory_of(run).pause is None


def test_what_falls_behind_goes_back_to_boot_with_its_numbers_and_a_pause() -> None:
    run = kept_run()
    run.run(6)
    run.engine.slow = 4.0
    run.run(30, until=lost)
    record = run.records[-1]
    assert lost(record) and record.action is Action.REVERT and run.setting == BOOT
    assert record.probation is not None and record.probation.standing == "lost"
    assert "the setting kept since cycle 1: " in explain(record)[3] and "expected 97 %" in explain(record)[3]
    memory = memory_of(run)
    assert memory.kept is None and memory.pause is not None and memory.pause.length_s == run.options.verify_s
    assert run.run(1)[0].pause_left_s == pytest.approx(50.0)


def test_it_stays_lost_until_the_engine_has_gone_back() -> None:
    run = kept_run(probation=Probation(expected=0.97, boot=0.9, offered_rps=2.0, lost=30.0))
    failed = []

    def once(name: str) -> None:
        if name == "revert" and not failed:
            failed.append(name)
            raise PortError(PortFault.TIMEOUT, "no answer")

    run.port.script = once
    run.run(8, until=lost)
    assert lost(run.records[-1]) and run.setting == BOOT and failed
    assert run.records[-2].reason is Reason.UNREACHABLE and "kept_lost, but not taken back" in run.records[-2].detail


def test_no_push_before_the_pause_is_over() -> None:
    run = kept_run(proposes(step_tokens=700, gain=0.3), probation=Probation(expected=0.97, boot=0.9, lost=30.0))
    run.searcher.delay = 10**6
    run.run(6, until=lost)
    run.searcher.delay, run.searcher._left = 1, 1
    pause = memory_of(run).pause
    assert pause is not None
    run.run(40, until=lambda record: record.action is Action.PUSH)
    assert Reason.AFTER_LOSS in run.reasons and run.records[-1].action is Action.PUSH
    assert run.records[-1].started_at_s >= pause.lost_s + pause.length_s


def test_a_repeat_doubles_the_pause_and_one_setting_counts_once() -> None:
    first, second = (Kept(boot_id="a", setting={"step_tokens": 64}, push_cycle=cycle) for cycle in (3, 9))
    memory = Memory().paused_for(first, 1000.0, 300.0)
    assert memory.pause == Pause(push_cycle=3, lost_s=1000.0, length_s=300.0)
    assert memory.paused_for(first, 1010.0, 300.0) == memory
    again = memory.paused_for(second, 2000.0, 300.0).pause
    assert again == Pause(push_cycle=9, lost_s=2000.0, length_s=600.0)
    assert (again.left_s(2100.0), again.left_s(3000.0), again.left_s(0.0)) == (500.0, 0.0, 600.0)
    assert memory.paused_for(second, 1001.0 + DAY_S, 300.0).pause == Pause(
        push_cycle=9, lost_s=1001.0 + DAY_S, length_s=300.0
    )


def test_another_controller_goes_on_where_the_first_was_killed() -> None:
    run = kept_run()
    run.run(10)
    before = memory_of(run).kept
    after = run.again()
    after.run(BLOCK_CYCLES + 1)
    kept = memory_of(after).kept
    assert before is not None and kept is not None
    assert len(kept.probation.blocks) == len(before.probation.blocks) + 1
    assert kept.probation.blocks[:-1] == before.probation.blocks


def test_a_memory_from_before_probation_is_read_and_the_twin_says_what_to_expect() -> None:
    store = MemoryStore()
    store.values[KEY] = '{"kept":{"boot_id":"b","setting":{"step_tokens":64},"push_cycle":4,"way":null}}'
    kept = recall(store).kept
    assert kept is not None and kept.push_cycle == 4 and kept.probation == Probation() and kept.share is None
    engine = LiveEngine()
    strict = Slo((Target("ttft", 0.2, 0.9),))  # some miss it, so that there are searches
    run = rig(proposes(verdict="keep", gain=0.0), engine=engine, options=options(search_requests=20, slo=strict))
    engine.advance(60.0)
    keep(run, FITTING)
    engine.advance(60.0)
    run.run(12, until=lambda record: record.twin is not None)
    kept = memory_of(run).kept
    assert kept is not None and kept.probation.expected == 0.6, "the scripted answer's attainment"


# --- the engine got slower ---------------------------------------------------------------------


def carrying(in_force_rps: float, boot_rps: float) -> Any:
    def reply(job: Job) -> SearchAnswer:
        load = LoadPart(
            offered_rps=2.0,
            in_force=Carries(sustainable_rps=in_force_rps),
            boot=Carries(sustainable_rps=boot_rps),
        )
        return answer_of(job, verdict="keep", gain=0.0).model_copy(update={"load": load})

    return reply


def slower(reply: Any) -> Rig:
    """All requests are good before and after, so that only the pace starts a search."""
    engine = LiveEngine(Traffic(rate_rps=2.0, documents=0))
    run = rig(reply, engine=engine, options=options(search_requests=20))
    engine.advance(60.0)
    keep(run, FITTING, share=1.0, traffic=LIKE, probation=Probation(expected=1.0, boot=1.0, offered_rps=2.0))
    engine.advance(60.0)
    run.run(12)
    assert not run.searcher.jobs, "nothing to improve"
    engine.slow = 1.3
    return run


def test_a_slower_engine_is_recognised_by_decodes_alone_and_refitted_at_once() -> None:
    run = slower(proposes(verdict="keep", gain=0.0))
    run.run(12, until=lambda record: bool(run.searcher.jobs))
    noted = [record for record in run.records if "decodes alone take" in record.detail]
    assert noted and noted[0].probation is not None and noted[0].probation.pace == pytest.approx(1.3, rel=0.1)
    job = run.searcher.jobs[-1]
    assert job.model.floor_s == pytest.approx(1.3 * run.engine.model.floor_s, rel=0.1), "the new model"


@pytest.mark.parametrize(("in_force_rps", "boot_rps", "back"), [(1.5, 2.5, True), (1.5, 1.8, False), (2.5, 3.0, False)])
def test_what_no_longer_carries_the_load_goes_back_if_boot_does(
    in_force_rps: float, boot_rps: float, back: bool
) -> None:
    run = slower(carrying(in_force_rps, boot_rps))
    run.run(14, until=lost)
    assert lost(run.records[-1]) is back and (run.setting == BOOT) is back
    assert any(record.load is not None for record in run.records)
    if back:
        assert "this setting carries 1.5, the boot setting 2.5" in run.records[-1].detail


# --- overload ----------------------------------------------------------------------------------


def crowded(until_s: float) -> Seen:
    """More arrives than is served, the shortest prompts first, so that the longer ones wait for ever."""
    asks = fake_window.chat(3, 60.0, until_s, (100, 2000), 4)
    rows = fake_window.run(
        asks, Setting(512, max_running=4, order_policy=SHORTEST_FIRST, aging_s=3600.0), until_s=until_s
    )
    now_s, in_system = float(rows.steps.end_s[-1]), int(rows.steps.waiting[-1] + rows.steps.running[-1])
    window = replace(Window(600.0), steps=rows.steps, requests=rows.requests, now_s=now_s, in_system=in_system)
    slo = Slo((Target("ttft", 2.0, 0.99),))
    return cast(Seen, SimpleNamespace(window=window, now_s=now_s, slo=slo, since_s=-math.inf, verify_s=20.0))


def test_who_waits_beyond_the_target_is_lost_once_and_not_in_every_block() -> None:
    seen = crowded(20.0)
    block, whole = block_of(seen, 14.0), block_of(seen, 0.0)
    standing = waiting_at(seen.window, seen.now_s)
    assert standing > block.judged, "the queue outgrew what a block brings"
    assert block.judged <= 1.1 * 6.0 * block.offered_rps
    assert block.share == pytest.approx(whole.share, abs=0.1), "as much is lost as before, however long the queue"


def test_under_a_growing_queue_the_traffic_has_the_rate_of_arrivals() -> None:
    crowd = crowded(20.0)
    seen = Seen(
        reading=cast(Any, SimpleNamespace(now_s=crowd.now_s)), window=crowd.window, signals=(),
        slo=crowd.slo, since_s=-math.inf, window_s=600.0, verify_s=20.0,
    )  # fmt: skip
    assert seen.traffic is not None and seen.traffic.rate_rps == pytest.approx(60.0, rel=0.1)
    assert len(seen.requests) / seen.span_s < 45.0


def test_under_overload_no_replay_of_what_has_ended_says_what_to_expect() -> None:
    def reply(job: Job) -> SearchAnswer:
        load = LoadPart(offered_rps=2.0, in_force=Carries(sustainable_rps=1.5), overload=True)
        return answer_of(job, verdict="keep", gain=0.0).model_copy(update={"load": load})

    engine = LiveEngine()
    strict = Slo((Target("ttft", 0.2, 0.9),))  # some miss it, so that there are searches
    run = rig(reply, engine=engine, options=options(search_requests=20, slo=strict))
    engine.advance(60.0)
    keep(run, FITTING)
    engine.advance(60.0)
    run.run(12, until=lambda record: record.twin is not None)
    kept = memory_of(run).kept
    assert run.records[-1].twin is not None
    assert kept is not None and kept.probation.expected is None
