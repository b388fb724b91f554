"""The real child process with the twin and Optuna in it: jobs, deaths, limits, orphans. Compiles the twin once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rooftune.policies.step_time import StepModel
from rooftune.tuner.control.job import Limits, WorkerError, WorkerFault
from rooftune.tuner.control.searcher.worker import ChildSearcher
from tests.control.jobs import BASE, MODEL, InlineSearcher, job, mix
from tests.control.test_worker import gone, wait

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def searcher() -> Iterator[ChildSearcher]:
    made = ChildSearcher(Limits(timeout_s=300.0))
    yield made
    made.close()


def test_the_child_answers_like_the_same_code_in_process(searcher: ChildSearcher) -> None:
    asked = job()
    assert searcher.ask(asked)
    found = wait(searcher, 300.0)
    inline = InlineSearcher()
    inline.ask(asked)
    here = inline.answer()
    assert here is not None and found == here
    assert found.proposal is not None and found.proposal.verdict == "change"
    assert found.twin.verdict == "good"
    first = searcher.child_pid
    searcher.ask(asked)
    assert wait(searcher, 300.0).proposal == found.proposal and searcher.child_pid == first


def test_the_child_foretells_blocks_and_searches_in_turn(searcher: ChildSearcher) -> None:
    asked = job(after=BASE._replace(step_tokens=512), expect=((10.0, 12.0, 30.0), (30.0, 32.0, 60.0)))
    searcher.ask(asked)
    found = wait(searcher, 300.0)
    inline = InlineSearcher()
    inline.ask(asked)
    assert found == inline.answer() and len(found.shares) == 2 and None not in found.shares
    searcher.ask(job(trials=5))
    assert wait(searcher, 300.0).twin.verdict == "good"


def test_the_child_runs_niced_on_its_cores_with_limited_memory(searcher: ChildSearcher) -> None:
    searcher.ask(job(trials=5))
    wait(searcher, 300.0)
    pid = searcher.child_pid
    assert pid is not None
    assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
    assert len(os.sched_getaffinity(pid)) <= Limits().cpus
    limits = Path(f"/proc/{pid}/limits").read_text()
    line = next(line for line in limits.splitlines() if line.startswith("Max data size"))
    assert line.split()[3] == str(Limits().memory_bytes)


def test_killed_during_a_job_it_counts_as_dead_and_the_next_job_is_answered(searcher: ChildSearcher) -> None:
    searcher.ask(job(mix(span_s=300.0), trials=1000))
    while searcher.stage != "search":
        assert searcher.answer() is None
        time.sleep(0.01)
    assert searcher.child_pid is not None
    os.kill(searcher.child_pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="signal 9") as caught:
        wait(searcher)
    assert caught.value.fault is WorkerFault.DIED
    searcher.ask(job(trials=5))
    assert wait(searcher, 300.0).proposal is not None


# Far too little. Slightly too little is different: a compiler that catches its own MemoryErrors may run until the
# job times out, and then the timeout is reported. A library that does not check for memory may crash instead.
@pytest.mark.parametrize("mib", [24, 90])
def test_too_little_memory_is_reported(mib: int) -> None:
    searcher = ChildSearcher(Limits(memory_bytes=mib << 20, timeout_s=300.0))
    searcher.ask(job())
    with pytest.raises(WorkerError) as caught:
        wait(searcher, 300.0)
    assert caught.value.fault in (WorkerFault.OUT_OF_MEMORY, WorkerFault.DIED)
    assert f"{mib} MiB" in str(caught.value) and "memory" in str(caught.value)
    searcher.close()


def test_a_job_times_out_without_polling() -> None:
    searcher = ChildSearcher(Limits(timeout_s=0.05))
    searcher.ask(job())
    pid = searcher.child_pid
    assert pid is not None and gone(pid)  # without a single poll
    with pytest.raises(WorkerError) as caught:
        wait(searcher)
    assert caught.value.fault is WorkerFault.TIMED_OUT


_PARENT = """
import sys, time
from tests.control.jobs import job, mix
from rooftune.tuner.control.searcher.worker import ChildSearcher
searcher = ChildSearcher()
searcher.ask(job(mix(span_s=300.0), trials=1000))
while searcher.stage != "search":
    searcher.answer()
    time.sleep(0.01)
print(searcher.child_pid, flush=True)
time.sleep(600)
"""


def test_a_controller_killed_in_the_middle_of_a_job_leaves_no_orphan() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait(timeout=60)
    assert gone(child)


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_an_unusable_job_is_refused_with_a_message(searcher: ChildSearcher) -> None:
    searcher.ask(job().model_copy(update={"model": dict(zip(StepModel._fields, MODEL[:-1], strict=False))}))
    with pytest.raises(WorkerError, match="sharpness") as caught:
        wait(searcher, 300.0)
    assert caught.value.fault is WorkerFault.REFUSED
    assert searcher.child_pid is not None
