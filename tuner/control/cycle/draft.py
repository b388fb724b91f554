"""A cycle's record while the cycle runs: it times the stages and collects the parts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Unpack

from pydantic import ValidationError

from rooftune.policies.guard import Decision
from rooftune.tuner.clock import Clock
from rooftune.tuner.control.cycle.push import one_line
from rooftune.tuner.control.outcome import CycleRecord, RecordParts, Stage

AfterStage = Callable[[Stage], None]


@dataclass
class Draft:
    """parts: fields of ``CycleRecord`` known so far. after_stage: called at the end of each stage, for tests.

    numbered: the store assigned ``number``; a guessed one may belong to another cycle's record.
    """

    clock: Clock
    number: int
    mode: str
    engine: str
    after_stage: AfterStage
    started_at_s: float = 0.0
    numbered: bool = False
    took_s: dict[Stage, float] = field(default_factory=dict)
    parts: RecordParts = field(default_factory=RecordParts)
    details: list[str] = field(default_factory=list)

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Times the block, also when it raises."""
        began_s = self.clock.now_s()
        try:
            yield
        finally:
            self.took_s[stage] = self.took_s.get(stage, 0.0) + max(0.0, self.clock.now_s() - began_s)
        self.after_stage(stage)

    def put(self, **parts: Unpack[RecordParts]) -> None:
        self.parts.update(parts)

    def note(self, *details: str) -> None:
        """Adds detail for people."""
        self.details.extend(text for text in details if text)

    def record(self, end: Decision) -> CycleRecord:
        """The finished record."""
        values = {
            "schema": "rooftune.cycle",
            "number": self.number,
            "started_at_s": self.started_at_s,
            "mode": self.mode,
            "engine": self.engine,
            "action": end.action,
            "reason": end.reason,
            "took_s": self.took_s,
            "detail": one_line("; ".join([*self.details, end.detail] if end.detail else self.details)),
        }
        try:
            return CycleRecord.model_validate(values | self.parts)
        except ValidationError as error:
            # Leave out the invalid parts, say so in the detail, and record the rest.
            wrong = {str(entry["loc"][0]) for entry in error.errors()}
            values["detail"] = one_line(f"{values['detail']}; left out as invalid: {', '.join(sorted(wrong))}")
            return CycleRecord.model_validate(values | {k: v for k, v in self.parts.items() if k not in wrong})
