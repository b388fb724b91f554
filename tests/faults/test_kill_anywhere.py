"""kill -9 at every stage of a cycle: the engine is at its boot setting when the lease ends, or the next controller
continues from what it finds. Here the kill is an exception that nothing catches; test_kill_process has a real one.
"""

from collections.abc import Callable

import pytest

from rooftune.policies.guard import Action
from rooftune.tuner.control.outcome import CycleRecord, Stage
from tests.control.doubles import Rig, options, proposes, rig
from tests.control.live import BOOT, LiveEngine
from tests.control.test_loop import CROWD, GOOD, TIGHT

pytestmark = pytest.mark.slow

QUICK = options(search_requests=20)
# Every stage, a few of them in a plain run.
STAGES = [pytest.param(stage, marks=() if stage is Stage.PUSH else pytest.mark.slow) for stage in Stage]
FITTING = BOOT._replace(step_tokens=512)


class Killed(BaseException):
    """An exception that no handler of the loop may catch."""


def killer(at: Stage, when: Callable[[], bool]) -> Callable[[Stage], None]:
    def after(stage: Stage) -> None:
        if stage is at and when():
            raise Killed

    return after


def pushed(record: CycleRecord) -> bool:
    return record.action is Action.PUSH


def killed(run: Rig) -> None:
    """The cycle in which it dies leaves no record."""
    number = len(run.store.records)
    run.clock.sleep(run.options.cycle_s)
    with pytest.raises(Killed):
        run.controller.cycle()
    assert len(run.store.records) == number


@pytest.mark.slow
@pytest.mark.parametrize("stage", list(Stage))
def test_killed_before_a_push_the_next_controller_starts_from_boot(stage: Stage) -> None:
    armed: list[bool] = []
    run = rig(proposes(step_tokens=512), options=QUICK, after_stage=killer(stage, lambda: bool(armed)))
    run.run(2)
    armed.append(True)
    killed(run)
    again = run.again()
    again.run(6, until=pushed)
    numbers = [r.number for r in run.store.records]
    assert numbers == sorted(set(numbers)) and numbers[-1] > numbers[1] + 1, "the lost cycle keeps its number"
    assert again.setting == FITTING


@pytest.mark.parametrize("stage", STAGES)
def test_killed_in_a_trial_the_next_controller_resumes_and_judges_it(stage: Stage) -> None:
    armed: list[bool] = []
    run = rig(proposes(step_tokens=512, gain=0.12), options=QUICK, after_stage=killer(stage, lambda: bool(armed)))
    run.run(6, until=pushed)
    push = run.records[-1].number
    armed.append(True)
    killed(run)
    assert run.setting == FITTING
    again = run.again()
    again.run_trial()
    verify = again.records[-1].verify
    assert verify is not None and (verify.verdict, verify.push_cycle) == ("better", push)
    assert again.setting == FITTING and not any(map(pushed, again.records)), "kept without a second push"


def test_killed_at_the_instant_of_the_push() -> None:
    """The push was sent and arrived; only the intent was recorded."""
    armed: list[bool] = []
    run = rig(proposes(step_tokens=512, gain=0.12), options=QUICK, after_stage=killer(Stage.PUSH, lambda: bool(armed)))
    run.run(2)
    armed.append(True)
    honest = run.port.push

    def push(request):  # type: ignore[no-untyped-def]  # a port's method, scripted
        answer = honest(request)
        if request.knobs.step_tokens:
            raise Killed
        return answer

    run.port.push = push  # type: ignore[method-assign]  # scripted
    killed(run)
    number = max(run.store.noted, default=0)
    if not number:  # it died renewing; the push comes in the next cycle
        again = rig(run.searcher.reply, engine=run.engine, clock=run.clock, store=run.store, options=QUICK)
        again.port.push = push  # type: ignore[method-assign]  # scripted
        with pytest.raises(Killed):
            again.run(6)
        number = max(run.store.noted)
    assert run.setting == FITTING and run.store.get(number) is None
    after = run.again()
    after.run_trial()
    verify = after.records[-1].verify
    assert verify is not None and (verify.verdict, verify.push_cycle) == ("better", number)


@pytest.mark.parametrize("stage", STAGES)
def test_killed_for_good_the_engine_reverts_when_the_lease_ends(stage: Stage) -> None:
    armed: list[bool] = []
    run = rig(proposes(step_tokens=512), options=QUICK, after_stage=killer(stage, lambda: bool(armed)))
    run.run(6, until=pushed)
    armed.append(True)
    killed(run)
    assert run.setting == FITTING
    run.clock.sleep(QUICK.lease_s + 1.0)
    assert run.setting == BOOT and run.engine.running.tuning_state().lease is None


def test_a_controller_restarted_after_the_lease_starts_from_boot() -> None:
    run = rig(proposes(step_tokens=512), options=QUICK)
    run.run(6, until=pushed)
    run.clock.sleep(QUICK.lease_s + 5.0)
    again = run.again()
    again.run(1)
    assert "no verdict" in again.records[0].detail and again.records[0].verify is None
    again.run(6, until=pushed)
    assert again.setting == FITTING


def test_killed_while_reverting_a_bad_setting_the_engine_drops_it() -> None:
    engine = LiveEngine(CROWD, boot=GOOD, options={"ceiling_tokens": 2048})
    run = rig(proposes(step_tokens=2048, gain=0.3), engine=engine, options=options(settle_s=1.0, slo=TIGHT))
    honest = run.port.revert

    def revert(request):  # type: ignore[no-untyped-def]  # a port's method, scripted
        honest(request)
        raise Killed

    run.port.revert = revert  # type: ignore[method-assign]  # scripted
    with pytest.raises(Killed):
        run.run(40)
    assert run.setting == GOOD
    again = run.again()
    again.run(2)
    assert again.setting == GOOD and "no verdict" in again.records[0].detail


def test_an_unknown_lease_of_ours_is_returned() -> None:
    """The state folder was lost, or another program used our name."""
    run = rig(proposes(step_tokens=512), options=QUICK)
    run.run(6, until=pushed)
    run.store.values.pop("loop")
    again = run.again()
    again.run(1)
    record = again.records[0]
    assert (record.action, record.reason.value) == (Action.REVERT, "found_foreign")
    assert again.setting == BOOT
