"""Rows of the tuning protocol as arrays, and what the rest of the controller makes of them.

Times are seconds on the engine's own monotonic clock; an instant that was not reached is NaN.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rooftune.policies import wire
from rooftune.policies.errors import InputError
from rooftune.policies.outcomes import Outcomes
from rooftune.tuner.model.samples import COLUMNS, StepSamples

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
NameArray = npt.NDArray[np.str_]

FINISHED, FAILED, ABORTED = 0, 1, 2
_ENDS = {"finished": FINISHED, "failed": FAILED, "aborted": ABORTED}


class Rows:
    """Columns of one length; a subclass is a frozen dataclass of arrays."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def select(self, rows: BoolArray | IntArray) -> Self:
        """The rows of a mask or of indices, in that order."""
        return self._with({name: getattr(self, name)[rows] for name in self._arrays()})

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        """All rows of the parts in their order; at least one part."""
        listed = list(parts)
        if not listed:
            raise InputError("no rows to join; give at least one part")
        first = listed[0]
        return first._with({name: np.concatenate([getattr(part, name) for part in listed]) for name in first._arrays()})

    def _arrays(self) -> list[str]:
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]  # a dataclass
        return [name for name in names if isinstance(getattr(self, name), np.ndarray)]

    def _with(self, columns: dict[str, npt.NDArray[Any]]) -> Self:
        return replace(self, **columns)  # type: ignore[type-var]  # a dataclass


@dataclass(frozen=True, eq=False)
class StepRows(Rows, wire.Step[IntArray, FloatArray, FloatArray]):
    """Steps by column, shape (n,) each, in their order."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def end_s(self) -> FloatArray:
        return self.start_s + self.duration_s

    @property
    def computed_tokens(self) -> IntArray:
        return self.prefill_tokens + self.decode_tokens

    @classmethod
    def from_wire(cls, *pages: wire.StepColumns) -> "StepRows":
        """The rows of some answers in their order."""
        return cls(**_arrays(wire.Step, pages))

    def samples(self) -> StepSamples:
        """For the fit: the steps that computed something and took time."""
        kept = self.select((self.computed_tokens > 0) & (self.duration_s > 0.0) & (self.sequences > 0))
        return StepSamples(*(getattr(kept, name).astype(np.float64) for name in COLUMNS))


@dataclass(frozen=True, eq=False)
class RequestRows(Rows, wire.Request[IntArray, FloatArray, FloatArray, IntArray]):
    """Requests by column, shape (n,) each, in the order of their end. ended: FINISHED, FAILED, ABORTED.

    gap_over: shape (n, k), gaps strictly above each of ``gap_bounds_s``.
    """

    gap_over: IntArray
    gap_bounds_s: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.sequence)

    @classmethod
    def from_wire(cls, *pages: wire.RequestColumns) -> "RequestRows":
        """The rows of some answers of one engine in their order."""
        bounds_s = pages[0].gap_bounds_s if pages else ()
        over = [np.array(page.gap_over, dtype=np.int64).reshape(len(bounds_s), len(page.ended)).T for page in pages]
        gap_over = np.concatenate(over) if over else np.zeros((0, 0), dtype=np.int64)
        return cls(**_arrays(wire.Request, pages), gap_over=gap_over, gap_bounds_s=bounds_s)

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


@dataclass(frozen=True, eq=False)
class FlightRows(Rows, wire.Flight[NameArray, IntArray, FloatArray, FloatArray, BoolArray]):
    """Requests that had not ended at ``now_s``, shape (n,) each: running ones by admission, then the queue."""

    now_s: float

    def __len__(self) -> int:
        return len(self.request_id)

    @classmethod
    def from_wire(cls, page: wire.FlightColumns) -> "FlightRows | None":
        """None when some are left out: who they are is not known."""
        return None if page.left_out else cls(**_arrays(wire.Flight, [page]), now_s=page.now_s)


def _arrays(record: type[Any], pages: Sequence[wire.Message]) -> dict[str, npt.NDArray[Any]]:
    """The columns of a record by name."""
    return {
        one.name: _array([value for page in pages for value in getattr(page, one.name)], one.type)
        for one in fields(record)
    }


_DTYPES = {wire.Whole: np.int64, wire.End: np.int64, wire.Name: np.str_, wire.Flag: np.bool_}


def _array(values: list[Any], kind: Any) -> npt.NDArray[Any]:
    if kind is wire.End:
        values = [_ENDS[word] for word in values]
    return np.array(values, dtype=_DTYPES.get(kind, np.float64))  # None becomes NaN
