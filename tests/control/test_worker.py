"""The parent's side of the child process: every way in which a child can fail, with scripted children."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.clock import ManualClock
from rooftune.tuner.control.job import Job, Limits, SearchAnswer, WorkerError, WorkerFault
from rooftune.tuner.control.outcome import TwinPart
from rooftune.tuner.control.searcher.child import Reply, encoded
from rooftune.tuner.control.searcher.worker import GRACE_S, ChildSearcher, child_command
from tests.control.jobs import job

# Processes that are waited for.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ANSWER = SearchAnswer(
    twin=TwinPart(verdict="too_few", worst_error=None, attainment_error=None, errors={}),
    proposal=None,
)
# Reads one job and prints its number, for the script that follows.
_READ = "import sys, json, os, signal, time\nn = json.loads(sys.stdin.buffer.readline())['number']\n"
_STAGE = "print(json.dumps({'number': n, 'stage': 'twin'}), flush=True)\n"
_ANSWER = (
    f"print('{encoded(ANSWER).decode().strip()}'.join(['{{\"number\": %d, \"answer\": ' % n, '}}']), flush=True)\n"
)


@pytest.fixture(scope="module")
def small() -> Job:
    return job()


Start = Callable[..., ChildSearcher]


@pytest.fixture
def start() -> Iterator[Start]:
    """Searchers whose child runs a script; all closed in the end."""
    made: list[ChildSearcher] = []

    def make(script: str, clock: ManualClock | None = None, limits: Limits | None = None) -> ChildSearcher:
        made.append(ChildSearcher(limits, clock=clock, command=[sys.executable, "-c", script]))
        return made[-1]

    yield make
    for searcher in made:
        searcher.close()


def wait(searcher: ChildSearcher, most_s: float = 60.0) -> SearchAnswer:
    """The next answer; what ``answer`` raises is raised."""
    until = time.monotonic() + most_s
    while time.monotonic() < until:
        found = searcher.answer()
        if found is not None:
            return found
        time.sleep(0.01)
    raise AssertionError("no answer and no error")


def gone(pid: int, most_s: float = 30.0) -> bool:
    """Whether a process that may be a child of ours has ended."""
    until = time.monotonic() + most_s
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_child_that_answers_twice_is_one_process_and_each_answer_comes_once(start: Start, small: Job) -> None:
    searcher = start(_READ + _STAGE + _ANSWER + "n = json.loads(sys.stdin.buffer.readline())['number']\n" + _ANSWER)
    assert searcher.answer() is None and not searcher.busy and searcher.child_pid is None
    assert searcher.ask(small)
    assert searcher.busy and not searcher.ask(small)
    assert wait(searcher) == ANSWER
    first = searcher.child_pid
    assert not searcher.busy and searcher.answer() is None and first is not None
    assert searcher.ask(small)
    pid = searcher.child_pid
    assert wait(searcher) == ANSWER and pid == first


def test_submitting_and_polling_do_not_block_on_a_child_that_reads_nothing(start: Start, small: Job) -> None:
    searcher = start("import time; time.sleep(600)")
    big = small.model_copy(update={"noise_modelled_s": (0.01,) * 60_000})  # far beyond what a pipe holds
    begun = time.monotonic()
    assert searcher.ask(big)
    for _ in range(100):
        assert searcher.answer() is None
    assert time.monotonic() - begun < 30.0  # it would be 600
    assert searcher.busy


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", WorkerFault.DIED),
        ("raise ValueError('broken')", WorkerFault.DIED),
        ("sys.exit(0)", WorkerFault.DIED),  # it had begun, so it did not idle out
        ("os._exit(77)", WorkerFault.OUT_OF_MEMORY),
        ("raise MemoryError", WorkerFault.OUT_OF_MEMORY),
        ("print('LLVM ERROR: out of memory', file=sys.stderr, flush=True); os.abort()", WorkerFault.OUT_OF_MEMORY),
        ("print('[1, 2]', flush=True); time.sleep(600)", WorkerFault.NONSENSE),
        ('print(\'{"number": 1, "stage": "a", "more": 1}\', flush=True); time.sleep(600)', WorkerFault.NONSENSE),
        ("print(json.dumps({'number': 1}), flush=True); time.sleep(600)", WorkerFault.NONSENSE),
        ("print(json.dumps({'number': 9, 'stage': 'a'}), flush=True); time.sleep(600)", WorkerFault.NONSENSE),
        ("sys.stdout.write('x' * 5_000_000); sys.stdout.flush(); time.sleep(600)", WorkerFault.NONSENSE),
        ("sys.stdout.buffer.write(bytes(range(128, 256)) + b'\\n'); sys.stdout.flush()", WorkerFault.NONSENSE),
    ],
)
def test_each_failure_has_a_name_is_reported_once_and_gets_a_new_child(
    start: Start, small: Job, tmp_path: Path, script: str, fault: WorkerFault
) -> None:
    flag = tmp_path / "second"
    first = f"import os\nif not os.path.exists({str(flag)!r}):\n open({str(flag)!r}, 'w').close()\n"
    bad = "\n".join(" " + line for line in (_READ + _STAGE + script).splitlines())
    searcher = start(first + bad + "\n sys.exit(0)\n" + _READ + _ANSWER)
    searcher.ask(small)
    with pytest.raises(WorkerError) as caught:
        wait(searcher)
    assert caught.value.fault is fault
    assert searcher.answer() is None and not searcher.busy and searcher.child_pid is None
    assert searcher.ask(small)
    assert wait(searcher) == ANSWER


def test_a_hung_child_is_killed_after_its_timeout_with_its_descendants(start: Start, small: Job) -> None:
    clock = ManualClock()
    started = (
        "import subprocess; print(json.dumps({'number': n, 'stage': str(subprocess.Popen(['sleep', '600']).pid)}),"
    )
    searcher = start(_READ + started + " flush=True)\nsignal.pause()", clock, Limits(timeout_s=50.0))
    searcher.ask(small)
    while not searcher.stage.isdigit():
        assert searcher.answer() is None
        time.sleep(0.01)
    pid, grandchild = searcher.child_pid, int(searcher.stage)
    assert pid is not None
    clock.sleep(50.0 + GRACE_S)
    assert searcher.answer() is None  # the child may time out by itself until then
    clock.sleep(0.1)
    with pytest.raises(WorkerError) as caught:
        searcher.answer()
    assert caught.value.fault is WorkerFault.TIMED_OUT
    assert gone(pid) and gone(grandchild)


def test_a_stopped_child_counts_as_hung(start: Start, small: Job) -> None:
    clock = ManualClock()
    searcher = start(_READ + _STAGE + "os.kill(os.getpid(), signal.SIGSTOP)\n" + _ANSWER, clock)
    searcher.ask(small)
    clock.sleep(1e5)
    with pytest.raises(WorkerError) as caught:
        wait(searcher)
    assert caught.value.fault is WorkerFault.TIMED_OUT


def test_a_refusal_passes_on_the_childs_message_and_keeps_the_child(start: Start, small: Job) -> None:
    refuse = "print(json.dumps({'number': n, 'refused': 'window too short; wait'}), flush=True)\n"
    stay = "signal.pause()"  # it must still live when its number is read
    searcher = start(_READ + refuse + "n = json.loads(sys.stdin.buffer.readline())['number']\n" + _ANSWER + stay)
    searcher.ask(small)
    with pytest.raises(WorkerError, match="window too short") as caught:
        wait(searcher)
    assert caught.value.fault is WorkerFault.REFUSED
    pid = searcher.child_pid
    searcher.ask(small)
    assert searcher.child_pid == pid and wait(searcher) == ANSWER


def test_a_child_that_idled_out_as_the_job_arrived_is_replaced_once(start: Start, small: Job, tmp_path: Path) -> None:
    flag = tmp_path / "asleep"
    asleep = f"import os, sys\nif not os.path.exists({str(flag)!r}):\n open({str(flag)!r}, 'w').close(); sys.exit(0)\n"
    searcher = start(asleep + _READ + _ANSWER)
    searcher.ask(small)
    assert wait(searcher) == ANSWER
    never = start("pass")
    never.ask(small)
    with pytest.raises(WorkerError) as caught:
        wait(never)
    assert caught.value.fault is WorkerFault.DIED


def test_a_command_that_does_not_exist_is_a_failed_worker(small: Job) -> None:
    searcher = ChildSearcher(command=["/nowhere/python"])
    with pytest.raises(WorkerError) as caught:
        searcher.ask(small)
    assert caught.value.fault is WorkerFault.DIED and not searcher.busy


def test_an_answer_to_an_abandoned_job_is_not_taken_for_the_next(start: Start, small: Job) -> None:
    late = Reply(number=0, answer=SearchAnswer(twin=ANSWER.twin.model_copy(update={"verdict": "good"}), proposal=None))
    searcher = start(_READ + f"print('{encoded(late).decode().strip()}', flush=True)\n" + _ANSWER)
    searcher.ask(small)
    assert wait(searcher) == ANSWER


def test_an_idle_child_exits_cleanly_and_the_next_job_starts_a_new_one(start: Start, small: Job) -> None:
    searcher = start(_READ + _ANSWER)
    searcher.ask(small)
    pid = searcher.child_pid
    assert pid is not None and wait(searcher) == ANSWER and gone(pid)
    assert searcher.answer() is None and searcher.child_pid is None
    with pytest.raises(ChildProcessError):  # no zombie
        os.waitpid(pid, os.WNOHANG)
    assert searcher.ask(small) and wait(searcher) == ANSWER


def test_the_real_child_is_gone_when_idle() -> None:
    limits = Limits(idle_exit_s=0.2)
    child = subprocess.Popen(child_command(limits), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert child.wait(timeout=60) == 0
    assert child.stdin is not None and child.stdout is not None and child.stdout.read() == b""
    child.stdin.close()


def test_the_real_child_exits_when_its_standard_input_closes() -> None:
    child = subprocess.Popen(child_command(Limits()), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    child.communicate(timeout=60)
    assert child.returncode == 0


def test_the_real_child_refuses_lines_that_are_not_jobs() -> None:
    child = subprocess.Popen(
        child_command(Limits()), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    said, words = child.communicate(b'{"number": 1}\n', timeout=60)
    assert child.returncode == 76 and said == b"" and b"no order" in words


def test_the_parent_loads_neither_numba_nor_optuna_nor_torch() -> None:
    script = (
        "import sys; import rooftune.tuner.control.searcher.worker, rooftune.tuner.control.ports\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & "
        "{'numba', 'llvmlite', 'optuna', 'sqlalchemy', 'torch', 'matplotlib', 'scipy'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "bad", [{"timeout_s": 0.0}, {"idle_exit_s": -1.0}, {"memory_bytes": 1}, {"nice": 20}, {"cpus": 0}]
)
def test_invalid_limits_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Limits(**bad)  # type: ignore[arg-type]  # on purpose


def test_the_child_ignores_signals_for_the_controller(start: Start, small: Job) -> None:
    searcher = start(_READ + _STAGE + "signal.pause()")
    searcher.ask(small)
    assert searcher.child_pid is not None
    assert os.getpgid(searcher.child_pid) == searcher.child_pid != os.getpgid(0)
