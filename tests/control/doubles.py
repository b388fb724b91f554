"""Test doubles for the loop's other parts: a scripted searcher, a store in memory, a whole rig."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC
from typing import Any

from rooftune.policies.guard import GuardLimits
from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo, Target
from rooftune.policies.verify import RollbackThresholds
from rooftune.tuner.control.cycle.loop import Controller
from rooftune.tuner.control.job import Answer, Expected, Job, SearchAnswer, WorkerError
from rooftune.tuner.control.memory import Trial, knobs_of
from rooftune.tuner.control.options import LoopOptions
from rooftune.tuner.control.outcome import CycleRecord, ProposalPart, TwinPart
from rooftune.tuner.control.state.file import StoreError
from rooftune.tuner.observe.protocol import ProtocolReader
from tests.control.live import LiveClock, LiveEngine, LivePort

Reply = Callable[[Job], SearchAnswer | WorkerError]
Foretell = Callable[[Job], Answer | WorkerError]


def answer_of(
    job: Job,
    *,
    gain: float | None = 0.3,
    noise: float | None = 0.02,
    verdict: str = "change",
    twin: str = "good",
    error: float | None = 0.02,
    **knobs: int | float,
) -> SearchAnswer:
    """An answer that proposes these knobs on top of the setting in force; verdict "none": no proposal."""
    found = TwinPart(verdict=twin, worst_error=0.1, attainment_error=error, errors={})  # type: ignore[arg-type]  # a literal
    part = None
    if verdict != "none":
        part = ProposalPart(
            setting=knobs_of(job.base) | knobs,
            verdict=verdict,  # type: ignore[arg-type]  # a literal
            attainment_now=0.6,
            attainment_proposed=None if gain is None else min(1.0, max(0.0, 0.6 + gain)),
            gain=gain,
            noise=noise,
            binding="longest_gap p99 0.3 s",
            trials=job.trials,
            simulated_steps=1000,
        )
    return SearchAnswer(twin=found, proposal=part)


def proposes(**parts: Any) -> Reply:
    """Always the same proposal."""
    return lambda job: answer_of(job, **parts)


def tells_nothing(job: Job) -> Expected:
    return Expected(shares=(None,) * len(job.expect))


@dataclass
class Scripted:
    """A searcher whose answer comes after ``delay`` polls. jobs: the searches it got; asked: the questions about blocks
    of a trial, which ``foretell`` answers."""

    reply: Reply
    delay: int = 1
    foretell: Foretell = tells_nothing
    jobs: list[Job] = field(default_factory=list)
    asked: list[Job] = field(default_factory=list)
    closed: bool = False
    _left: int = 0
    _job: Job | None = None

    def ask(self, job: Job) -> bool:
        if self.busy:
            return False
        (self.asked if job.expect else self.jobs).append(job)
        self._job, self._left = job, self.delay
        return True

    def answer(self) -> Answer | None:
        job = self._job
        if job is None:
            return None
        self._left -= 1
        if self._left > 0:
            return None
        self._job = None
        answer = self.foretell(job) if job.expect else self.reply(job)
        if isinstance(answer, WorkerError):
            raise answer
        return answer

    @property
    def busy(self) -> bool:
        return self._job is not None

    def close(self) -> None:
        self.closed = True


class MemoryStore:
    """``rooftune.tuner.control.ports.Store`` in memory. broken: an error for every method to raise."""

    def __init__(self, instance: str = "one") -> None:
        self._instance = instance
        self.records: list[CycleRecord] = []
        self.noted: dict[int, str] = {}
        self.values: dict[str, str] = {}
        self.broken: StoreError | None = None
        self._number = 0

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken

    @property
    def instance(self) -> str:
        return self._instance

    def next_number(self) -> int:
        self._check()
        self._number += 1
        return self._number

    def note_push(self, number: int, changes: str) -> None:
        self._check()
        self.noted[number] = changes

    def put(self, record: CycleRecord) -> None:
        self._check()
        self.records.append(record)

    def last(self, count: int, before: int | None = None) -> list[CycleRecord]:
        self._check()
        rows = [r for r in self.records if before is None or r.number < before]
        return rows[::-1][:count]

    def get(self, number: int) -> CycleRecord | None:
        self._check()
        return next((r for r in self.records if r.number == number), None)

    def value(self, key: str) -> str | None:
        self._check()
        return self.values.get(key)

    def keep(self, key: str, value: str) -> None:
        self._check()
        self.values[key] = value

    def change(self, key: str, make: Callable[[str | None], str]) -> None:
        self._check()
        self.values[key] = make(self.values.get(key))


SLO = Slo((Target("ttft", 3.0, 0.99), Target("longest_gap", 0.3, 0.99)))
BOLD = GuardLimits(largest_ratio=64.0, dwell_s=0.0, min_shadow_s=0.0, max_inconclusive_s=3600.0)


def options(**changes: Any) -> LoopOptions:
    """Quick: cycles of 10 s, windows of a minute."""
    given: dict[str, Any] = {
        "live": True,
        "slo": SLO,
        "limits": BOLD,
        "thresholds": RollbackThresholds(),
        "bounds": {"step_tokens": (1.0, math.inf), "chunk_cap_tokens": (0.0, math.inf)},
        "cycle_s": 10.0,
        "window_s": 120.0,
        "verify_s": 60.0,
        "settle_s": 2.0,
        "lease_s": 40.0,
        "search_every_s": 60.0,
        "search_requests": 40,
        "min_requests": 40,
        "trials": 10,
        "horizon_s": 120.0,
        "seed": 0,
        "storage": None,
        "zone": UTC,
    }
    return LoopOptions(**(given | changes))


@dataclass
class Rig:
    """An engine, a port and a controller on one clock."""

    engine: LiveEngine
    clock: LiveClock
    port: LivePort
    searcher: Scripted
    store: MemoryStore
    options: LoopOptions
    controller: Controller
    records: list[CycleRecord] = field(default_factory=list)

    def run_trial(self, most: int = 240) -> list[CycleRecord]:
        """Runs until the trial in force has ended, or ``most`` cycles."""
        return self.run(most, until=lambda record: record.verify is not None and self.trial is None)

    @property
    def trial(self) -> Trial | None:
        return self.controller._book.memory.trial

    def run(self, cycles: int, until: Callable[[CycleRecord], bool] | None = None) -> list[CycleRecord]:
        """Runs up to ``cycles`` cycles, each at its time, until ``until`` holds. Returns their records."""
        made = []
        for _ in range(cycles):
            self.clock.sleep(self.options.cycle_s)
            made.append(self.controller.cycle())
            if until is not None and until(made[-1]):
                break
        self.records += made
        return made

    @property
    def setting(self) -> Setting:
        """In force at the engine."""
        return self.engine.running.tuning_state().setting()

    @property
    def reasons(self) -> list[str]:
        return [record.reason.value for record in self.records]

    def again(self, **changes: Any) -> "Rig":
        """Another controller on the same engine and store, as after a kill."""
        made = rig(
            self.searcher.reply, engine=self.engine, clock=self.clock, store=self.store, options=self.options, **changes
        )
        made.searcher.foretell = self.searcher.foretell
        return made


def rig(
    reply: Reply,
    *,
    engine: LiveEngine | None = None,
    clock: LiveClock | None = None,
    store: MemoryStore | None = None,
    options: LoopOptions | None = None,
    delay: int = 1,
    **more: Any,
) -> Rig:
    """Everything put together; more: for ``Controller``."""
    made = globals()["options"]() if options is None else options
    live = engine or LiveEngine()
    hands = clock or LiveClock([live])
    port, searcher, kept = LivePort(live), Scripted(reply, delay), store or MemoryStore()
    controller = Controller(
        engine="test",
        port=port,
        reader=ProtocolReader(port),
        searcher=searcher,
        store=kept,
        clock=hands,
        options=made,
        **more,
    )
    return Rig(live, hands, port, searcher, kept, made, controller)


NAN = math.nan
