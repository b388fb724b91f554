"""Assembles the controller: ``rooftune run`` and ``make demo`` call ``run_controller``."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from rooftune.policies.errors import RefusedError, UnreachableError
from rooftune.policies.guard import Action, Reason
from rooftune.tuner.clock import Clock, SystemClock
from rooftune.tuner.config import Config
from rooftune.tuner.control.cycle.draft import AfterStage
from rooftune.tuner.control.cycle.loop import Controller
from rooftune.tuner.control.explain.explain import MEANING, knobs, points, share
from rooftune.tuner.control.explain.report import write_report
from rooftune.tuner.control.job import Limits
from rooftune.tuner.control.options import options_of
from rooftune.tuner.control.outcome import CycleRecord, VerifyPart
from rooftune.tuner.control.ports import Searcher
from rooftune.tuner.control.searcher.worker import ChildSearcher
from rooftune.tuner.control.state.store import StateFile
from rooftune.tuner.control.status.server import StatusServer
from rooftune.tuner.observe.protocol import ProtocolReader
from rooftune.tuner.ports.http import HttpPort, Timeouts

# A change in attainment that is worth a line of its own.
MOVED_SHARE = 0.02


def line_of(record: CycleRecord, before: CycleRecord | None) -> str:
    """One line on the news of this cycle; empty when nothing important changed since ``before``."""
    event = _event(record, before)
    if event is None:
        return ""
    return f"cycle {record.number}: {event}" + (f"; {_served(record)}" if record.observed else "")


def _event(record: CycleRecord, before: CycleRecord | None) -> str | None:
    meaning = MEANING.get(record.reason, record.reason.value)
    if record.action is Action.PUSH and record.pushed is not None:
        return f"pushed {knobs(record.pushed)}{_predicted(record)}"
    if record.action is Action.REVERT:
        asked = record.reason is Reason.BLOCKED_AFTER_REVERT
        did = "set the engine back to its boot setting" if asked else "took the push back"
        return f"{did}: {meaning}{_verdict(record.verify)}"
    if record.verify is not None and record.verify.verdict == "better":
        return f"keeps the push of cycle {record.verify.push_cycle}{_verdict(record.verify)}"
    if record.would_push is not None and (before is None or before.would_push != record.would_push):
        return f"would push {knobs(record.would_push)} in live mode{_predicted(record)}"
    if before is None or before.reason is not record.reason:
        return f"{meaning}" + (f" ({record.detail})" if record.detail else "")
    moved = _moved(record, before)
    return meaning if moved >= MOVED_SHARE else None


def _moved(record: CycleRecord, before: CycleRecord) -> float:
    now, then = record.observed, before.observed
    if now is None or then is None or now.attainment is None or then.attainment is None:
        return 0.0
    return abs(now.attainment - then.attainment)


def _served(record: CycleRecord) -> str:
    seen = record.observed
    if seen is None or seen.attainment is None:
        return "no request has ended"
    knee = record.fit.knee_tokens if record.fit is not None else None
    return f"{share(seen.attainment)} of {seen.requests} requests within the targets" + (
        f", knee {knee:.0f} tokens" if knee is not None else ""
    )


def _predicted(record: CycleRecord) -> str:
    if record.predicted_gain is not None:
        return f" (predicted: {points(record.predicted_gain)} points)"
    gain = record.proposal.gain if record.proposal is not None else None
    return "" if gain is None else f" (a step towards a setting with {points(gain)} points predicted)"


def _verdict(verify: VerifyPart | None) -> str:
    if verify is None or verify.observed_gain is None:
        return ""
    return f", {points(verify.observed_gain, verify.half_width)} points on {verify.requests} requests"


Tell = Callable[[str], None]


class Stop:
    """Set by a signal: the loop ends after the current cycle. A second signal ends the process at once."""

    def __init__(self) -> None:
        self._requested = threading.Event()

    def __bool__(self) -> bool:
        return self._requested.is_set()

    def request(self) -> None:
        self._requested.set()

    def wait(self, seconds: float, clock: Clock) -> None:
        """Waits on ``clock``, at most until a stop is requested."""
        if isinstance(clock, SystemClock):
            self._requested.wait(max(0.0, seconds))
        elif not self:
            clock.sleep(max(0.0, seconds))


@contextmanager
def on_signals(stop: Stop) -> Iterator[None]:
    """Inside, SIGTERM, SIGINT and SIGHUP (not under nohup) request a stop; restores the handlers. Main thread only."""
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
        stop.request()

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
    after_stage: AfterStage = lambda stage: None,
    stop: Stop | None = None,
    searcher: Searcher | None = None,
) -> int:
    """Runs ``cycles`` cycles, or until a stop is requested; returns the command's exit code.

    A clean end returns the lease, so that the engine is at its boot setting; after a kill the lease expires.
    report: folder for a report. after_stage: see ``Controller``; searcher: replaces the child process in tests.
    Raises RooftuneError when it cannot start: the state folder or the address is in use.
    """
    clock, stop = clock or SystemClock(), Stop() if stop is None else stop
    with ExitStack() as stack:
        stack.enter_context(on_signals(stop))
        store = stack.enter_context(StateFile.own(config.state, config.retention, clock))
        status = StatusServer.of(config, store, clock)
        stack.callback(status.close)
        for note in store.notes:
            status.log_event("state", note)
            tell(note)
        engine = config.engine
        port = HttpPort(
            engine.url,
            engine.token_file,
            Timeouts(engine.timeout_s, engine.timeout_s),
            ca_file=engine.ca_file,
            clock=clock,
        )
        stack.callback(port.close)
        search = config.search
        limits = Limits(search.timeout_s, search.idle_exit_s, search.memory_bytes, search.nice)
        searcher = searcher or ChildSearcher(limits, clock=clock)
        stack.callback(searcher.close)
        controller = Controller(
            engine=engine.shown_name,
            port=port,
            reader=ProtocolReader(port),
            searcher=searcher,
            store=store,
            clock=clock,
            options=options_of(config, config.storage_url),
            deploying=lambda: may_be_there(config.freeze_file),
            publish=status.publish,
            after_stage=after_stage,
        )
        try:
            records = turn(controller, config.cadence.cycle_s, clock, cycles, stop, tell)
        finally:  # also after a defect of ours: no push may stay unwatched
            result = controller.stop()
            status.log_event("stop", result)
        tell(f"stopped: {result}")
        if report is not None:
            tell(f"report: {write_report(report, store, records, engine.shown_name)}")
        latest = store.get(records[1]) if cycles == 1 else None
    return 0 if latest is None else _ONCE.get(latest.reason, 0)


# What the only cycle of ``--once`` ends the command with: nobody waits for the next one.
_ONCE = {
    Reason.UNREACHABLE: UnreachableError.exit_code,
    Reason.GARBAGE: UnreachableError.exit_code,
    Reason.STORE_FAILED: UnreachableError.exit_code,
    Reason.UNAUTHORIZED: RefusedError.exit_code,
    Reason.NO_PROTOCOL: RefusedError.exit_code,
}


def may_be_there(freeze_file: Path | None) -> bool:
    """Whether the freeze file may exist; an unreadable place (rights, a lost share) counts as yes."""
    try:
        return freeze_file is not None and freeze_file.exists()
    except OSError:
        return True


def turn(
    controller: Controller, cycle_s: float, clock: Clock, cycles: int | None, stop: Stop, tell: Tell
) -> tuple[int, int]:
    """Runs a cycle every ``cycle_s``; after one that ran over, the next starts at once and missed ones are skipped.

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
