"""The tuning desk of the hook: what happens in a step is done in a few instructions, the rest when somebody reads.

A step leaves one plain tuple; columns are made of them by the thread that answers, beside the engine's loop.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from engine.protocol import NO_MODEL, About, Ring, TuningDesk
from policies import wire
from policies.envelope import Envelope
from policies.request import Setting
from policies.step_time import StepModel

# A planned step, as written: step, when (s), budget, prefill tokens, decodes, sequences, prefills, decode context,
# prefill context, attention work, partial prefills, running, waiting, pool reading, preemptions, revision.
Planned = tuple[int, float, int, int, int, int, int, int, int, float, int, int, int, float, int, int]
# The same when its tokens are there: start (s), end (s), what was planned.
Written = tuple[float, float, Planned]

_COLUMNS = (
    "step", "", "budget_tokens", "prefill_tokens", "decode_tokens", "sequences", "prefills", "decode_context_tokens",
    "prefill_context_tokens", "attention_work", "partial_prefills", "running", "waiting", "kv_used", "preemptions",
    "revision",
)  # fmt: skip


class Force(NamedTuple):
    """What steps run under until the book changes."""

    setting: Setting
    step_model: StepModel
    revision: int


class RowDesk(TuningDesk):
    """``TuningDesk`` for an engine whose every step is waited for. ``begin``, ``skip`` and ``keep`` are for the
    engine's thread alone; used: 0..1 from a pool reading."""

    def __init__(
        self,
        about: About,
        envelope: Envelope,
        boot: Setting,
        now_s: Callable[[], float],
        *,
        gap_bounds_s: tuple[float, ...] = (),
        used: Callable[[float], float] = float,
        ring_rows: int = wire.MAX_ROWS,
    ) -> None:
        super().__init__(about, envelope, boot, now_s, gap_bounds_s=gap_bounds_s, ring_rows=ring_rows)
        self._used = used
        self._written: Ring[Written] = Ring(ring_rows)
        self._known = self._book
        self._leased = False
        self._began_s = -math.inf  # latest step under this lease; the book is told of it when it is asked next
        self._granted_s = self._length_s = 0.0
        self.force = self._force()

    # --- the engine's side ---

    def begin(self, now_s: float) -> int:
        """The number of the step that begins now; ``force`` is what it runs under. A lease that is over ends here."""
        if self._book is not self._known:
            self._look()
        if self._leased:
            if now_s >= self._began_s and now_s - self._granted_s < self._length_s:
                self._began_s = now_s
            else:
                with self._lock:
                    self._settle(now_s)
                self._look()
        step = self._next_step
        self._next_step = step + 1
        return step

    def skip(self) -> None:
        """The step that began computes nothing: its number goes to the next one."""
        self._next_step -= 1

    def keep(self, number: int, row: Written) -> None:
        """A step's tokens are there."""
        with self._lock:
            self._written.append(number, row)

    def _look(self) -> None:
        book = self._known = self._book
        self._leased, self._began_s = book.lease is not None, -math.inf
        if book.lease is not None:
            self._granted_s, self._length_s, self._began_s = book.lease.granted_s, book.lease.length_s, book.seen_s
        self.force = self._force()

    def _force(self) -> Force:
        book = self._known
        return Force(book.setting, book.step_model or NO_MODEL, book.revision)

    def _settle(self, now_s: float) -> float:
        if self._began_s > self._book.seen_s:
            super()._settle(self._began_s)
        return super()._settle(now_s)

    # --- the protocol's side ---

    def steps_after(self, after: int) -> wire.StepColumns:
        rows, common = self._read(self._written, after)
        columns: dict[str, Any] = dict(zip(_COLUMNS, zip(*(row[2] for row in rows), strict=True), strict=False))
        if not rows:
            columns = dict.fromkeys(_COLUMNS, ())
        del columns[""]
        columns["kv_used"] = tuple(map(self._used, columns["kv_used"]))
        columns["start_s"] = tuple(row[0] for row in rows)
        columns["duration_s"] = tuple(row[1] - row[0] for row in rows)
        return wire.StepColumns(**common, **columns)
