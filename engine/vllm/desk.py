"""The tuning desk of the hook: a step costs a few instructions, and a read does the rest.

A step leaves one plain tuple; the thread that answers a read makes columns of them, beside the engine's loop.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

from rooftune.engine.interface import ChangeKind
from rooftune.engine.protocol import About, Ring, TuningDesk, in_force
from rooftune.policies import wire
from rooftune.policies.envelope import Envelope
from rooftune.policies.lease import Lease
from rooftune.policies.request import Setting

# A planned step: when (s), budget and revision, sequences, decode tokens, decode context, running,
# waiting, pool reading; of one that was not of decodes alone also prefill tokens, prefills, prefill context, attention
# work, partial prefills, preemptions.
Row = tuple[Any, ...]
# The same when its tokens are there: start (s), end (s), what was planned.
Written = tuple[float, float, Row]

_DECODES_ALONE: Row = (0, 0, 0, 0.0, 0, 0)
_COLUMNS = (
    "planned_s", "held", "sequences", "decode_tokens", "decode_context_tokens", "running", "waiting", "kv_used",
    "prefill_tokens", "prefills", "prefill_context_tokens", "attention_work", "partial_prefills", "preemptions",
)  # fmt: skip


class RowDesk(TuningDesk):
    """``TuningDesk`` with little work per step. ``renew`` and ``keep`` are for the engine's
    thread alone; used: 0..1 from a pool reading; stirred: called after a change."""

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
        stirred: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(about, envelope, boot, now_s, gap_bounds_s=gap_bounds_s, ring_rows=ring_rows)
        self._used, self._stirred = used, stirred
        self._written: Ring[Written] = Ring(ring_rows)
        self._landed = 0
        self._known = self._book
        self._held: Lease | None = None
        self._began_s = -math.inf  # latest step under this lease, kept by the engine's thread without the lock
        self.force = in_force(self._known)

    # --- the engine's side ---

    def renew(self, now_s: float) -> None:
        """A step begins now: ``force`` is what it runs under. An expired lease ends here."""
        if self._book is not self._known:
            self._look()
        held = self._held
        if held is not None:
            if now_s >= self._began_s and now_s - held.granted_s < held.length_s:
                self._began_s = now_s
            else:
                with self._lock:
                    self._settle(now_s)
                self._look()

    def keep(self, rows: Iterable[Written], in_flight: int) -> None:
        """The tokens of some steps are there, the oldest first; in_flight: steps that were planned after them."""
        with self._lock:
            for row in rows:
                self._written.append(self._landed, row)
                self._landed += 1
            self._next_step = self._landed + in_flight

    def _look(self) -> None:
        book = self._known = self._book
        self._held = book.lease
        self._began_s = -math.inf if book.lease is None else book.seen_s
        self.force = in_force(book)

    def _catch_up(self) -> None:
        self._stepped_s = self._began_s
        super()._catch_up()

    # --- the protocol's side ---

    def _answer(self, kind: ChangeKind, actor: str, reason: str, before: int = -1) -> wire.PushAnswer:
        self._stirred()
        return super()._answer(kind, actor, reason, before)

    def steps_after(self, after: int) -> wire.StepColumns:
        rows, common = self._read(self._written, after)
        whole = [row if len(row) == len(_COLUMNS) else row + _DECODES_ALONE for _, _, row in rows]
        columns: dict[str, Any] = dict.fromkeys(_COLUMNS, ())
        if rows:
            columns = dict(zip(_COLUMNS, zip(*whole, strict=True), strict=True))
        del columns["planned_s"]
        held = columns.pop("held")
        columns["budget_tokens"] = tuple(budget_tokens for budget_tokens, _ in held)
        columns["revision"] = tuple(revision for _, revision in held)
        columns["step"] = tuple(range(common["next"] - len(rows) + 1, common["next"] + 1))  # they have no holes
        columns["kv_used"] = tuple(map(self._used, columns["kv_used"]))
        columns["start_s"] = tuple(row[0] for row in rows)
        columns["duration_s"] = tuple(row[1] - row[0] for row in rows)
        return wire.StepColumns(**common, **columns)
