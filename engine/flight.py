"""One request from arrival to its end: its tokens, its instants, and the record that remains."""

from bisect import bisect_left
from collections.abc import Sequence

from rooftune.engine.interface import FinishReason, FlightRecord, GenerationRequest, RequestRecord, Sink
from rooftune.engine.step import IntArray


class Gaps:
    """The gaps between the tokens of one request, or of several that get theirs at the same instants.

    last_s: instant of the latest token. bounds_s: ascending; over: gaps by the number of bounds they exceed.
    """

    __slots__ = ("bounds_s", "count", "last_s", "longest_s", "over")

    def __init__(self, last_s: float, bounds_s: tuple[float, ...]) -> None:
        self.last_s = last_s
        self.bounds_s = bounds_s
        self.count = 0
        self.longest_s: float | None = None
        self.over = [0] * (len(bounds_s) + 1)

    def close(self, now_s: float) -> float:
        """A token at ``now_s``; returns the gap that it closes."""
        gap_s = now_s - self.last_s
        self.last_s = now_s
        self.count += 1
        if self.longest_s is None or gap_s > self.longest_s:
            self.longest_s = gap_s
        if self.bounds_s:
            self.over[bisect_left(self.bounds_s, gap_s)] += 1
        return gap_s

    def add(self, later: "Gaps") -> None:
        """Add gaps that follow these and were counted separately."""
        self.last_s = later.last_s
        self.count += later.count
        longest_s = [gap_s for gap_s in (self.longest_s, later.longest_s) if gap_s is not None]
        self.longest_s = max(longest_s, default=None)
        if self.bounds_s:
            self.over = [one + other for one, other in zip(self.over, later.over, strict=True)]


class Flight:
    """Mutable, owned by the loop's thread. Instants in seconds on the engine's clock; None: not reached.

    token_ids: prompt and everything produced, at most most_tokens. digests: content of the prompt's whole blocks;
    named: leading blocks whose content the scheduler knows; digest: content up to the last of these. block_table: its
    row of the scheduler's, of which the request holds some.
    """

    __slots__ = (
        "arrival_s", "block_table", "cached", "digest", "digests", "finished", "first_s", "gaps", "most_tokens",
        "named", "prompt_tokens", "request", "request_id", "scheduled_s", "sink", "slot", "stops", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request_id: int,
        request: GenerationRequest,
        sink: Sink,
        arrival_s: float,
        stops: frozenset[int],
        digests: list[bytes],
        gap_bounds_s: tuple[float, ...],
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.sink = sink
        self.arrival_s = arrival_s
        self.stops = stops
        self.digests = digests
        self.token_ids = list(request.prompt_token_ids)
        self.prompt_tokens = len(self.token_ids)
        self.most_tokens = self.prompt_tokens + request.max_tokens
        self.slot = -1
        self.block_table: Sequence[int] | IntArray = ()
        self.named = 0
        self.digest = b""
        self.cached = 0
        self.scheduled_s: float | None = None
        self.first_s: float | None = None
        self.gaps = Gaps(arrival_s, gap_bounds_s)
        self.finished: FinishReason | None = None

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    def take(self, token_id: int, now_s: float) -> float | None:
        """Add a token of the step that ended at ``now_s``; returns the gap before it, None for the first."""
        token_ids = self.token_ids
        token_ids.append(token_id)
        if token_id in self.stops:
            self.finished = FinishReason.STOP
        elif len(token_ids) >= self.most_tokens:
            self.finished = FinishReason.LENGTH
        if self.first_s is None:
            self.first_s = self.gaps.last_s = now_s
            return None
        return self.gaps.close(now_s)

    def first_token(self) -> tuple[float, float, int, int]:
        """Arguments of ``Observer.on_first_token``."""
        assert self.first_s is not None and self.scheduled_s is not None
        waits_s = max(0.0, self.first_s - self.arrival_s), max(0.0, self.scheduled_s - self.arrival_s)
        return *waits_s, self.prompt_tokens, self.cached

    def row(self, computed_tokens: int, running: bool) -> FlightRecord:
        """Where it stands between two steps."""
        return FlightRecord(
            request_id=str(self.request_id),
            arrival_s=self.arrival_s,
            scheduled_s=self.scheduled_s,
            first_token_s=self.first_s,
            last_token_s=None if self.first_s is None else self.gaps.last_s,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached,
            computed_tokens=computed_tokens,
            output_tokens=self.output_tokens,
            running=running,
        )

    def record(self, sequence: int, finish_s: float, preemptions: int) -> RequestRecord:
        """What remains of a request that has ended; ``finished`` must be set."""
        assert self.finished is not None
        return RequestRecord(
            sequence=sequence,
            arrival_s=self.arrival_s,
            scheduled_s=self.scheduled_s,
            ttft_s=None if self.first_s is None else max(0.0, self.first_s - self.arrival_s),
            finish_s=finish_s,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached,
            output_tokens=self.output_tokens,
            gap_count=self.gaps.count,
            longest_gap_s=self.gaps.longest_s,
            preemptions=preemptions,
            ended=self.finished,
            gap_over=tuple(sum(self.gaps.over[bound + 1 :]) for bound in range(len(self.gaps.bounds_s))),
        )
