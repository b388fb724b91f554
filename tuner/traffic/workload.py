"""Traffic as plain arrays: what the twin replays. Frozen and checked when it is made."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rooftune.policies.errors import InputError, bad_value

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MAX_TOKENS_PER_REQUEST = 10_000_000
MAX_ARRIVAL_S = 1e9


def _empty_ints() -> IntArray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Traffic:
    """Requests in order of arrival.

    arrival_s: seconds from the start of the window, ascending, shape (n,).
    prompt_tokens, output_tokens: at least 1 each, shape (n,).
    cached_tokens: prompt tokens already in the engine's prefix cache at arrival, 0..prompt - 1, shape (n,).
    tenant: index into ``tenant_names``, shape (n,).
    prefix_offsets, prefix_keys: optional content of the prompts in compressed rows. The keys of request r
    are ``prefix_keys[prefix_offsets[r]:prefix_offsets[r + 1]]``, one small non-negative integer for each
    leading span of ``prefix_span_tokens`` prompt tokens; equal keys at one position mean equal content up
    to the end of that span. Empty arrays: no content known.
    name: where the traffic came from, for reports.

    Raises InputError when an array is empty, ragged, unsorted, not finite or out of range.
    """

    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    cached_tokens: IntArray
    tenant: IntArray
    tenant_names: tuple[str, ...] = ("default",)
    prefix_offsets: IntArray = field(default_factory=_empty_ints)
    prefix_keys: IntArray = field(default_factory=_empty_ints)
    prefix_span_tokens: int = 0
    name: str = "traffic"

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        if n == 0:
            raise InputError(f"{self.name} holds no requests; give a file with at least one")
        for label in ("prompt_tokens", "output_tokens", "cached_tokens", "tenant"):
            if len(getattr(self, label)) != n:
                raise bad_value(f"length of {label}", len(getattr(self, label)), str(n), "give one value a request")
        self._check_values()
        if len(self.prefix_offsets) or len(self.prefix_keys) or self.prefix_span_tokens:
            self._check_prefixes(n)

    def _check_values(self) -> None:
        if not np.all(np.isfinite(self.arrival_s)) or self.arrival_s.min() < 0 or self.arrival_s.max() > MAX_ARRIVAL_S:
            raise InputError(f"{self.name}: arrival_s must be finite and within 0..{MAX_ARRIVAL_S:g}; check the column")
        if np.any(np.diff(self.arrival_s) < 0):
            raise InputError(f"{self.name}: arrival_s must ascend; sort the requests by time")
        for label in ("prompt_tokens", "output_tokens"):
            values = getattr(self, label)
            if values.min() < 1 or values.max() > MAX_TOKENS_PER_REQUEST:
                worst = int(values.min() if values.min() < 1 else values.max())
                bound = f"within 1..{MAX_TOKENS_PER_REQUEST}"
                raise bad_value(f"{self.name}: {label}", worst, bound, "check the column")
        if np.any(self.cached_tokens < 0) or np.any(self.cached_tokens >= self.prompt_tokens):
            raise InputError(f"{self.name}: cached_tokens must lie within 0..prompt_tokens - 1; check the column")
        if np.any(self.tenant < 0) or np.any(self.tenant >= len(self.tenant_names)):
            raise InputError(f"{self.name}: tenant must index one of {len(self.tenant_names)} names; check the column")

    def _check_prefixes(self, n: int) -> None:
        offsets = self.prefix_offsets
        if len(offsets) != n + 1 or self.prefix_span_tokens < 1:
            raise InputError(
                f"{self.name}: prefix_offsets must hold {n + 1} values and the span be at least 1; "
                "give both, or no prefix content"
            )
        keys_each = np.diff(offsets)
        if offsets[0] != 0 or offsets[-1] != len(self.prefix_keys) or np.any(keys_each < 0):
            raise InputError(f"{self.name}: prefix_offsets must ascend from 0 to {len(self.prefix_keys)}; check them")
        if len(self.prefix_keys) and self.prefix_keys.min() < 0:
            least = int(self.prefix_keys.min())
            raise bad_value(f"{self.name}: prefix key", least, "at least 0", "renumber the keys")
        spans = -(-self.prompt_tokens // self.prefix_span_tokens)
        if np.any(keys_each > spans):
            row = int(np.argmax(keys_each > spans))
            raise bad_value(
                f"{self.name}: number of prefix keys of request {row}",
                int(keys_each[row]),
                f"at most {int(spans[row])} (its prompt in spans of {self.prefix_span_tokens})",
                "drop the keys beyond",
            )

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """Seconds between the first and the last arrival."""
        return float(self.arrival_s[-1] - self.arrival_s[0])
