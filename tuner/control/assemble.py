"""The real parts put together: ``run_controller`` is what ``rooftune run`` and ``make demo`` call."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from rooftune.tuner.clock import Clock, SystemClock
from rooftune.tuner.config import Config
from rooftune.tuner.control.draft import AfterStage, nothing_after
from rooftune.tuner.control.face import Face
from rooftune.tuner.control.live_report import write_report
from rooftune.tuner.control.loop import Controller
from rooftune.tuner.control.options import options_of
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.parts import Searcher
from rooftune.tuner.control.state import StateFile
from rooftune.tuner.control.told import line_of
from rooftune.tuner.control.worker import ChildSearcher, Limits
from rooftune.tuner.observe.protocol import ProtocolReader
from rooftune.tuner.ports.http import HttpPort, Timeouts

Tell = Callable[[str], None]


class Stop:
    """Set by a signal: the cycle that runs is finished, then the loop ends. A second one ends it at once."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def __bool__(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        self._asked.set()

    def wait(self, seconds: float, clock: Clock) -> None:
        """Until so much time has passed on the clock, or somebody asked."""
        if isinstance(clock, SystemClock):
            self._asked.wait(max(0.0, seconds))
        elif not self:
            clock.sleep(max(0.0, seconds))


@contextmanager
def on_signals(stop: Stop) -> Iterator[None]:
    """SIGTERM, SIGINT and a terminal that closes (unless nohup said not to mind) ask for the end while inside.

    Handlers are put back afterwards. Main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]

    def handle(kind: int, frame: FrameType | None) -> None:
        if stop:
            signal.signal(kind, signal.SIG_DFL)
            signal.raise_signal(kind)
        stop.ask()

    for kind in before:
        signal.signal(kind, handle)
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def run_controller(
    config: Config,
    *,
    clock: Clock | None = None,
    cycles: int | None = None,
    report: Path | None = None,
    tell: Tell,
    after_stage: AfterStage = nothing_after,
    stop: Stop | None = None,
    searcher: Searcher | None = None,
) -> int:
    """Cycles until somebody asks for the end, or ``cycles`` of them; returns the exit code of the command.

    On a clean end a lease of ours is given back, so that the engine is at its boot setting; one that is killed leaves
    that to the lease. report: folder for a report of what was found. after_stage: see ``Controller``; searcher: another
    one than a child process, for tests.
    Raises RooftuneError when it cannot start: a state folder that another controller holds, an address in use.
    """
    hands, asked = clock or SystemClock(), Stop() if stop is None else stop
    with ExitStack() as stack:
        stack.enter_context(on_signals(asked))
        store = stack.enter_context(StateFile.own(config.state, config.retention, hands))
        face = Face.of(config, store, hands)
        stack.callback(face.close)
        for note in store.notes:
            face.say("state", note)
            tell(note)
        engine = config.engine
        port = HttpPort(
            engine.url,
            engine.token_file,
            Timeouts(engine.timeout_s, engine.timeout_s),
            ca_file=engine.ca_file,
            clock=hands,
        )
        stack.callback(port.close)
        search = config.search
        limits = Limits(search.timeout_s, search.idle_exit_s, search.memory_bytes, search.nice)
        found = searcher or ChildSearcher(limits, clock=hands)
        stack.callback(found.close)
        controller = Controller(
            engine=engine.shown_name,
            port=port,
            reader=ProtocolReader(port, hands),
            searcher=found,
            store=store,
            clock=hands,
            options=options_of(config, config.storage_url),
            deploying=lambda: may_be_there(config.freeze_file),
            publish=face.publish,
            after_stage=after_stage,
        )
        try:
            records = turn(controller, config.cadence.cycle_s, hands, cycles, asked, tell)
        finally:  # also after a defect of ours: nothing is to hold that nobody watches
            said = controller.stop()
            face.say("stop", said)
        tell(f"stopped: {said}")
        if report is not None:
            tell(f"report: {write_report(report, store, records, engine.shown_name)}")
    return 0


def may_be_there(freeze_file: Path | None) -> bool:
    """Whether a deploy may run: a file that cannot be looked for (rights, a share that is gone) may be there."""
    try:
        return freeze_file is not None and freeze_file.exists()
    except OSError:
        return True


def turn(
    controller: Controller, cycle_s: float, clock: Clock, cycles: int | None, stop: Stop, tell: Tell
) -> tuple[int, int]:
    """Cycle after cycle, each at its time; one that took too long is followed at once, none is made up for.

    Returns the numbers of the first and the last cycle, 0 for none.
    """
    first = last = made = 0
    due_s = clock.now_s()
    shown: CycleRecord | None = None
    while not stop and (cycles is None or made < cycles):
        record = controller.cycle()
        made += 1
        first, last = first or record.number, record.number
        line = line_of(record, shown)
        if line:
            tell(line)
        shown = record
        due_s = max(due_s + cycle_s, clock.now_s())
        if cycles is None or made < cycles:
            stop.wait(due_s - clock.now_s(), clock)
    return first, last
