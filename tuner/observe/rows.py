"""Rows of the tuning protocol as arrays, and what the rest of the controller makes of them.

Times are seconds on the engine's own monotonic clock; an instant that was not reached is NaN.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rooftune.policies import wire
from rooftune.policies.errors import InputError
from rooftune.policies.outcomes import Outcomes
from rooftune.tuner.model.samples import StepSamples

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

FINISHED, FAILED, ABORTED = 0, 1, 2
_ENDS = {"finished": FINISHED, "failed": FAILED, "aborted": ABORTED}


class Rows:
    """Columns of one length; a subclass is a frozen dataclass of arrays."""

    def select(self, rows: BoolArray | IntArray) -> Self:
        """The rows of a mask or of indices, in that order."""
        return type(self)(**{name: value[rows] for name, value in self._columns()}, **self._others())

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        """All rows of the parts in their order; at least one part."""
        listed = list(parts)
        if not listed:
            raise InputError("no rows to join; give at least one part")
        names = [name for name, _ in listed[0]._columns()]
        joined = {name: np.concatenate([getattr(part, name) for part in listed]) for name in names}
        return cls(**joined, **listed[0]._others())

    def _columns(self) -> list[tuple[str, npt.NDArray[Any]]]:
        pairs = [(field.name, getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]  # a dataclass
        return [(name, value) for name, value in pairs if isinstance(value, np.ndarray)]

    def _others(self) -> dict[str, Any]:
        pairs = [(field.name, getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]  # a dataclass
        return {name: value for name, value in pairs if not isinstance(value, np.ndarray)}


@dataclass(frozen=True, eq=False)
class StepRows(Rows):
    """Columns of ``wire.StepColumns``, shape (n,) each, in the order of steps."""

    step: IntArray
    start_s: FloatArray
    duration_s: FloatArray
    budget_tokens: IntArray
    prefill_tokens: IntArray
    decode_tokens: IntArray
    sequences: IntArray
    prefills: IntArray
    decode_context_tokens: IntArray
    prefill_context_tokens: IntArray
    attention_work: FloatArray
    partial_prefills: IntArray
    running: IntArray
    waiting: IntArray
    kv_used: FloatArray
    preemptions: IntArray
    revision: IntArray

    def __len__(self) -> int:
        return len(self.step)

    @property
    def end_s(self) -> FloatArray:
        return self.start_s + self.duration_s

    @property
    def computed_tokens(self) -> IntArray:
        return self.prefill_tokens + self.decode_tokens

    @classmethod
    def from_wire(cls, page: wire.StepColumns) -> "StepRows":
        """The rows of one answer."""
        return cls(**{field.name: _array(getattr(page, field.name), field.type) for field in fields(cls)})

    @classmethod
    def none(cls) -> "StepRows":
        return cls(**{field.name: _array((), field.type) for field in fields(cls)})

    def samples(self) -> StepSamples:
        """For the fit: the steps that computed something and took time."""
        kept = self.select((self.computed_tokens > 0) & (self.duration_s > 0.0) & (self.sequences > 0))
        return StepSamples(
            duration_s=kept.duration_s,
            prefill_tokens=_floats(kept.prefill_tokens),
            decode_tokens=_floats(kept.decode_tokens),
            sequences=_floats(kept.sequences),
            context_decode_tokens=_floats(kept.decode_context_tokens),
            context_prefill_tokens=_floats(kept.prefill_context_tokens),
            attention_work=kept.attention_work,
        )


@dataclass(frozen=True, eq=False)
class RequestRows(Rows):
    """Columns of ``wire.RequestColumns``, shape (n,) each, in the order of their end. ended: FINISHED, FAILED, ABORTED.

    gap_over: shape (n, k), gaps strictly above each of ``gap_bounds_s``. ttft_s: from arrival to first token.
    """

    sequence: IntArray
    arrival_s: FloatArray
    scheduled_s: FloatArray
    ttft_s: FloatArray
    finish_s: FloatArray
    prompt_tokens: IntArray
    cached_tokens: IntArray
    output_tokens: IntArray
    gap_count: IntArray
    longest_gap_s: FloatArray
    preemptions: IntArray
    ended: IntArray
    gap_over: IntArray
    gap_bounds_s: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.sequence)

    @classmethod
    def from_wire(cls, page: wire.RequestColumns) -> "RequestRows":
        """The rows of one answer."""
        plain = {
            field.name: _array(getattr(page, field.name), field.type)
            for field in fields(cls)
            if field.name not in ("ended", "gap_over", "gap_bounds_s")
        }
        ended = np.array([_ENDS[word] for word in page.ended], dtype=np.int64)
        over = np.array(page.gap_over, dtype=np.int64).reshape(len(page.gap_bounds_s), len(ended)).T
        return cls(**plain, ended=ended, gap_over=over, gap_bounds_s=page.gap_bounds_s)

    @classmethod
    def none(cls, gap_bounds_s: Sequence[float] = ()) -> "RequestRows":
        plain = {
            field.name: _array((), field.type)
            for field in fields(cls)
            if field.name not in ("ended", "gap_over", "gap_bounds_s")
        }
        over = np.zeros((0, len(gap_bounds_s)), dtype=np.int64)
        return cls(**plain, ended=np.zeros(0, dtype=np.int64), gap_over=over, gap_bounds_s=tuple(gap_bounds_s))

    def outcomes(self) -> Outcomes:
        """For targets: finished and failed requests in the order given (leave aborted ones out with ``select``).

        The distribution of all gaps is not in the protocol; targets on gaps are judged per request, by the engine's
        gap bounds or by the longest gap. Raises InputError when a first token came after the end.
        """
        if (self.arrival_s + self.ttft_s > self.finish_s + 1e-6).any():
            raise InputError("a request ended before its first token; drop its row, and see to the engine's clock")
        return Outcomes(
            arrival_s=self.arrival_s,
            first_token_s=self.arrival_s + self.ttft_s,
            finish_s=np.where(self.ended == FINISHED, self.finish_s, np.nan),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            scheduled_s=self.scheduled_s,
            longest_gap_s=np.nan_to_num(self.longest_gap_s),
            gap_count=self.gap_count,
            cached_tokens=self.cached_tokens,
            failed=self.ended != FINISHED,
            gap_bounds_s=np.array(self.gap_bounds_s),
            gap_over=self.gap_over,
        )


def _array(values: Sequence[float | int | None], kind: Any) -> npt.NDArray[Any]:
    """None becomes NaN in a column of floats; a column of counts holds none."""
    if "float64" in str(kind):
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    return np.array(values, dtype=np.int64)


def _floats(column: IntArray) -> FloatArray:
    return column.astype(np.float64)
