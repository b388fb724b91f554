"""The outcome of each request of a run, measured or simulated: what targets are judged on."""

from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from rooftune.policies.errors import InputError, bad_value

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def _no_floats() -> FloatArray:
    return np.zeros(0)


def _no_ints() -> IntArray:
    return np.zeros(0, dtype=np.int64)


def _no_flags() -> BoolArray:
    return np.zeros(0, dtype=np.bool_)


def _no_counts() -> IntArray:
    return np.zeros((0, 0), dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcomes:
    """A run's requests as columns of length n; NaN: instant not reached.

    Needed: arrival_s, first_token_s, finish_s (seconds on one clock), prompt_tokens, output_tokens.
    Optional, empty when not recorded: scheduled_s; longest_gap_s (0 or NaN without gaps) with gap_count;
    cached_tokens; tenant (index into tenant_names); failed (empty: none failed).
    gap_bounds_s (k,) and gap_over (n, k): gaps of each request strictly above each bound.
    gap_values_s (m,) and gap_weights (m,): the exact distribution of all gaps of the run.
    Judging a target that needs an empty part raises InputError.

    Raises InputError for a column that is ragged, negative or not finite where it must be.
    """

    arrival_s: FloatArray
    first_token_s: FloatArray
    finish_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    scheduled_s: FloatArray = field(default_factory=_no_floats)
    longest_gap_s: FloatArray = field(default_factory=_no_floats)
    gap_count: IntArray = field(default_factory=_no_ints)
    cached_tokens: IntArray = field(default_factory=_no_ints)
    tenant: IntArray = field(default_factory=_no_ints)
    tenant_names: tuple[str, ...] = ("default",)
    failed: BoolArray = field(default_factory=_no_flags)
    gap_bounds_s: FloatArray = field(default_factory=_no_floats)
    gap_over: IntArray = field(default_factory=_no_counts)
    gap_values_s: FloatArray = field(default_factory=_no_floats)
    gap_weights: FloatArray = field(default_factory=_no_floats)

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        for label in ("first_token_s", "finish_s", "prompt_tokens", "output_tokens"):
            self._check_length(label, n)
        optional = ("scheduled_s", "longest_gap_s", "gap_count", "cached_tokens", "tenant", "failed")
        for label in optional:
            if len(getattr(self, label)):
                self._check_length(label, n)
        if not np.isfinite(self.arrival_s).all():
            raise InputError("arrival_s must be finite: every request arrived; drop the rows without an arrival")
        for label in ("prompt_tokens", "output_tokens", "cached_tokens", "gap_count"):
            values = getattr(self, label)
            if len(values) and values.min() < 0:
                raise bad_value(label, int(values.min()), "at least 0", "check the column")
        for label in ("scheduled_s", "first_token_s", "finish_s"):
            values = getattr(self, label)
            if np.isinf(values).any() or (len(values) and (values < self.arrival_s).any()):
                raise InputError(f"{label} must not be infinite nor before the arrival; use NaN for not reached")
        if len(self.tenant) and (self.tenant.min() < 0 or self.tenant.max() >= len(self.tenant_names)):
            raise InputError(f"tenant must index one of {len(self.tenant_names)} names; check the column")
        self._check_gaps(n)
        for entry in fields(self):  # freeze the content too; views keep the caller's array writable
            value = getattr(self, entry.name)
            if isinstance(value, np.ndarray):
                view = value.view()
                view.flags.writeable = False
                object.__setattr__(self, entry.name, view)

    def _check_length(self, label: str, n: int) -> None:
        if len(getattr(self, label)) != n:
            raise bad_value(f"length of {label}", len(getattr(self, label)), str(n), "give one value a request")

    def _check_gaps(self, n: int) -> None:
        if len(self.gap_bounds_s) and self.gap_over.shape != (n, len(self.gap_bounds_s)):
            raise bad_value(
                "shape of gap_over", self.gap_over.shape, str((n, len(self.gap_bounds_s))), "count per bound"
            )
        if len(self.gap_bounds_s) and not len(self.gap_count) and n:
            raise InputError("gap_over needs gap_count; give the number of gaps of each request")
        if self.gap_over.size and (self.gap_over.min() < 0 or (self.gap_over > self.gap_count[:, None]).any()):
            raise InputError("gap_over must lie within 0..gap_count; check the count")
        if len(self.gap_values_s) != len(self.gap_weights):
            raise bad_value("length of gap_weights", len(self.gap_weights), str(len(self.gap_values_s)), "one a value")
        if (self.gap_values_s < 0).any() or np.isnan(self.gap_values_s).any() or (self.gap_weights < 0).any():
            raise InputError("gap_values_s and gap_weights must be at least 0; check the distribution")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def finished(self) -> BoolArray:
        """Requests that finished without failing, shape (n,)."""
        reached = ~(np.isnan(self.finish_s) | np.isnan(self.first_token_s))
        return reached & ~self.failed if len(self.failed) else reached

    def need(self, label: str, why: str) -> npt.NDArray[np.generic]:
        """The column ``label``; raises InputError when there are requests but the column was not recorded."""
        values: npt.NDArray[np.generic] = getattr(self, label)
        if len(self) and not len(values):
            raise InputError(f"{why} needs {label}, which this run did not record; record it or drop the target")
        return values
