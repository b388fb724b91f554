"""Step samples by column: what one step computed and how long it took. Frozen and checked when made."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from rooftune.policies.errors import InputError, bad_value

FloatArray = npt.NDArray[np.float64]

MAX_STEP_S = 3600.0
MAX_TOKENS = 1e9
# Largest number of query-key pairs: a billion tokens against a billion.
MAX_PAIRS = 1e18


@dataclass(frozen=True)
class StepSamples:
    """One row a step, every column a float64 array of shape (n,), n >= 0.

    duration_s: wall time of the step, above 0, at most an hour.
    prefill_tokens, decode_tokens: tokens the step actually computed, together at least 1.
    sequences: requests in the step, at least 1 and at most the computed tokens.
    decode_context_tokens, prefill_context_tokens: KV entries read by decodes and by the prefixes of chunks.
    attention_work: sum over prefill chunks of chunk x (already computed + chunk / 2).

    Raises InputError that names the column, the row, the value and the bound.
    """

    duration_s: FloatArray
    prefill_tokens: FloatArray
    decode_tokens: FloatArray
    sequences: FloatArray
    decode_context_tokens: FloatArray
    prefill_context_tokens: FloatArray
    attention_work: FloatArray

    def __post_init__(self) -> None:
        n = len(self.duration_s)
        for name in COLUMNS:
            column = np.asarray(getattr(self, name), dtype=np.float64)
            if column.ndim != 1 or len(column) != n:
                raise bad_value(f"shape of {name}", column.shape, f"({n},)", "give one value a step")
            object.__setattr__(self, name, column)
        _check(self.duration_s > 0.0, self.duration_s, "duration_s", "above 0 s")
        _check(self.duration_s <= MAX_STEP_S, self.duration_s, "duration_s", f"at most {MAX_STEP_S:g} s")
        for name in COLUMNS[1:-1]:
            column = getattr(self, name)
            _check((column >= 0.0) & (column <= MAX_TOKENS), column, name, f"within 0..{MAX_TOKENS:g}")
        work = self.attention_work
        _check((work >= 0.0) & (work <= MAX_PAIRS), work, "attention_work", f"within 0..{MAX_PAIRS:g}")
        total = self.computed_tokens
        _check(total >= 1.0, total, "prefill_tokens + decode_tokens", "at least 1")
        _check(self.sequences >= 1.0, self.sequences, "sequences", "at least 1")
        _check(self.sequences <= total, self.sequences, "sequences", "at most the computed tokens")

    def __len__(self) -> int:
        return len(self.duration_s)

    @property
    def computed_tokens(self) -> FloatArray:
        """Prefill and decode tokens together, shape (n,)."""
        return self.prefill_tokens + self.decode_tokens

    @property
    def context_tokens(self) -> FloatArray:
        """KV entries read, by decodes and by the prefixes of prefill chunks, shape (n,)."""
        return self.decode_context_tokens + self.prefill_context_tokens

    def select(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> "StepSamples":
        """The rows of a mask or of indices, in that order."""
        return StepSamples(*(getattr(self, name)[rows] for name in COLUMNS))


COLUMNS = tuple(field.name for field in fields(StepSamples))


def _check(good: npt.NDArray[np.bool_], values: FloatArray, name: str, bound: str) -> None:
    """NaN fails every comparison, so it is refused here too."""
    if not good.all():
        row = int(np.argmin(good))
        raise bad_value(f"{name} of step {row}", float(values[row]), bound, "check the column and its unit")


def join(parts: Iterable[StepSamples]) -> StepSamples:
    """All rows of the parts in their order; no parts give no rows."""
    listed = list(parts)
    if not listed:
        empty = np.zeros(0)
        return StepSamples(empty, empty, empty, empty, empty, empty, empty)
    return StepSamples(*(np.concatenate([getattr(part, name) for part in listed]) for name in COLUMNS))


def split_alternating(samples: StepSamples, every: int = 5, block: int = 50) -> tuple[StepSamples, StepSamples]:
    """Fit part and held-out part: the last of each ``every`` blocks of ``block`` consecutive steps is held out.

    Blocks, because neighbouring steps are near copies of each other. Raises InputError without a held-out row.
    """
    held = (np.arange(len(samples)) // block) % every == every - 1
    if not held.any():
        raise InputError(f"{len(samples)} steps leave none to hold out; give at least {every * block}")
    return samples.select(~held), samples.select(held)
