"""The disk may fail in every write of a cycle: nothing is pushed without a record, and the loop continues."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rooftune.policies.guard import Action, Reason
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.state.file import StoreError, StoreFault
from rooftune.tuner.control.state.store import StateFile
from tests.control.doubles import BOLD, MemoryStore, Rig, options, proposes, rig
from tests.control.live import BOOT

QUICK = options(search_requests=20)
SLOW = pytest.mark.slow
FAULTS = [
    pytest.param(StoreFault.LOCKED, marks=SLOW),
    StoreFault.FULL,
    pytest.param(StoreFault.DAMAGED, marks=SLOW),
    pytest.param(StoreFault.UNUSABLE, marks=SLOW),
]


class Flaky(MemoryStore):
    """Fails in one method (the nth call of it from ``arm`` on), or in all."""

    def __init__(self) -> None:
        super().__init__()
        self.method, self.fault = "", StoreFault.FULL

    def arm(self, method: str, fault: StoreFault) -> None:
        self.method, self.fault = method, fault

    def __getattribute__(self, name: str) -> Any:
        if name in ("next_number", "note_push", "put", "value", "keep") and self.method in (name, "all"):
            raise StoreError(self.fault, f"{name} failed on purpose")
        return super().__getattribute__(name)


def pushed(record: CycleRecord) -> bool:
    return record.action is Action.PUSH


def flaky_rig() -> tuple[Rig, Flaky]:
    store = Flaky()
    return rig(proposes(step_tokens=512), options=QUICK, store=store), store


@pytest.mark.parametrize("fault", FAULTS)
def test_an_unusable_state_file_means_hold(fault: StoreFault) -> None:
    run, store = flaky_rig()
    run.run(2)
    store.arm("all", fault)
    run.run(5)
    assert {r.reason for r in run.records[2:]} == {Reason.STORE_FAILED}
    assert run.setting == BOOT and not run.port.moving
    store.arm("", fault)
    run.run(4, until=pushed)
    assert pushed(run.records[-1]), "and continues when it is back"


@pytest.mark.parametrize(
    "method", ["next_number", "note_push", pytest.param("keep", marks=SLOW), pytest.param("value", marks=SLOW)]
)
def test_a_push_that_cannot_be_recorded_is_not_sent(method: str) -> None:
    run, store = flaky_rig()
    run.run(2)
    store.arm(method, StoreFault.FULL)
    run.run(3)
    assert not run.port.moving and run.setting == BOOT
    assert run.records[-1].action is Action.HOLD


def test_an_unrecorded_push_does_not_delay_the_next_one() -> None:
    store, limits = Flaky(), replace(BOLD, dwell_s=300.0)
    run = rig(proposes(step_tokens=512), options=replace(QUICK, limits=limits), store=store)
    run.run(2)
    store.arm("note_push", StoreFault.LOCKED)
    run.run(3, until=lambda record: record.reason is Reason.STORE_FAILED)
    store.arm("", StoreFault.LOCKED)
    run.run(1)
    assert pushed(run.records[-1]) and "no verdict" not in run.records[-1].detail


def test_a_lost_record_is_reported_and_the_trial_is_kept() -> None:
    """The disk fills up between the push and the record of it."""
    run, store = flaky_rig()
    run.run(2)
    store.arm("put", StoreFault.FULL)
    run.run(3, until=pushed)
    assert "not recorded" in run.records[-1].detail
    number = run.records[-1].number
    assert store.get(number) is None and number in store.noted
    store.arm("", StoreFault.FULL)
    run.run(1)
    assert run.records[-1].verify is not None and run.records[-1].verify.push_cycle == number


def test_a_cycle_without_a_number_is_not_written_over_another() -> None:
    """The file is locked when a new controller takes its first number, and free again when the cycle ends."""
    store = MemoryStore()
    first = rig(proposes(step_tokens=512), options=QUICK, store=store)
    first.run(3)
    number = store.next_number

    def locked() -> int:
        raise StoreError(StoreFault.LOCKED, "locked on purpose")

    store.next_number = locked  # type: ignore[method-assign]  # scripted
    again = first.again()
    again.run(1)
    assert again.records[-1].reason is Reason.STORE_FAILED
    store.next_number = number  # type: ignore[method-assign]  # as it was
    again.run(1)
    assert [record.number for record in store.records] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_memory_of_another_version_starts_over() -> None:
    run = rig(proposes(step_tokens=512), options=QUICK)
    run.store.values["loop"] = '{"trial": 3}'
    run.store.values["model"] = "[]"
    run.run(5, until=pushed)
    assert pushed(run.records[-1])


def test_a_step_model_of_another_release_is_refitted() -> None:
    """It has an unknown coefficient or lacks one."""
    run = rig(proposes(verdict="keep"), options=QUICK)
    run.run(3)
    kept = json.loads(run.store.values["model"])
    for strange in ({"warp_s": 0.1}, {"floor_s": 1e9}):
        fit = kept["fit"] | {"coefficients": kept["fit"]["coefficients"] | strange}
        run.store.values["model"] = json.dumps(kept | {"fit": fit})
        again = run.again()
        again.run(2)
        assert Reason.GARBAGE not in [record.reason for record in again.records]
        assert json.loads(run.store.values["model"])["fit"]["coefficients"].keys() == kept["fit"]["coefficients"].keys()


def test_the_real_state_file_serves_the_loop_and_a_damaged_one_is_moved_aside(tmp_path: Path) -> None:
    with StateFile.own(tmp_path) as store:
        run = rig(proposes(step_tokens=512), options=QUICK, store=store)  # type: ignore[arg-type]  # still a store
        run.run(6, until=pushed)
        assert pushed(run.records[-1])
        assert store.get(run.records[-1].number) == run.records[-1]
        assert [row.number for row in store.pushes(5)] == [run.records[-1].number]
    for path in tmp_path.glob("state.db*"):
        path.write_bytes(b"not a database at all, but long enough to be looked at" * 100)
    with StateFile.own(tmp_path) as store:
        assert store.notes
        again = rig(proposes(step_tokens=512), options=QUICK, store=store)  # type: ignore[arg-type]  # as above
        again.run(3)
        assert again.records[-1].action is Action.HOLD and not again.port.moving, "it starts paused"
