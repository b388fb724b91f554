"""The engine's Prometheus metrics: an Observer of every step and request, and a collector for scrapes."""

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate, groupby
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from rooftune.engine.interface import (
    ChangeKind,
    FinishReason,
    RejectReason,
    RequestRecord,
    Snapshot,
    StepRecord,
)

# Targets of 5 ms need steps of half a millisecond around them; beyond a second the shape no longer matters.
GAP_BOUNDS_S = (
    0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.0045, 0.005, 0.0055, 0.006, 0.007, 0.008, 0.009,
    0.01, 0.012, 0.014, 0.016, 0.018, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5,
    1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
WAIT_BOUNDS_S = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
STEP_BOUNDS_S = (
    0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03,
    0.04, 0.05, 0.065, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
# Two to an octave: a knee between two of them is placed within 20 %.
COMPUTED_TOKEN_BOUNDS = (
    1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
    8192, 12288, 16384, 24576, 32768,
)  # fmt: skip

TTFT = ("rooftune_ttft_seconds", "Arrival to first token, queue included.")
QUEUE = ("rooftune_queue_seconds", "Arrival to first scheduling, of requests that got a token.")
GAP = ("rooftune_gap_seconds", "Gap between neighbouring tokens of one request.")
TPOT = ("rooftune_tpot_seconds", "Per request: (finish - first token) / (output tokens - 1).")
STEP = (
    "rooftune_step_duration_seconds",
    "Duration of a step. computed_tokens: upper bound of the tokens it computed; the lower bound is the next smaller.",
)
STEP_TOKENS = (
    "rooftune_step_computed_tokens",
    "Tokens computed by the steps of rooftune_step_duration_seconds with the same label.",
)
STEP_CONTEXT = (
    "rooftune_step_context_tokens",
    "KV entries read by the steps of rooftune_step_duration_seconds with the same label.",
)


class Histogram:
    """Counts per bucket and a sum. Not locked; the owner locks."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._labels = (*(f"{bound:g}" for bound in self._bounds), "+Inf")
        self._counts = [0] * len(self._labels)
        self.total = 0.0

    def add(self, values: Iterable[float]) -> None:
        """Each value goes into the first bucket whose upper bound is not below it."""
        bounds, counts = self._bounds, self._counts
        # Gaps of one step are mostly equal: a request that decodes in it mostly got a token in the one before as well.
        for value, same in groupby(values):
            count = len(list(same))
            counts[bisect_left(bounds, value)] += count
            self.total += count * value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulated, as Prometheus wants them: (upper bound, values up to it)."""
        return list(zip(self._labels, map(float, accumulate(self._counts)), strict=True))


class StepTable:
    """Steps by how many tokens they computed: a duration histogram and the exact sums for each bucket of tokens."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[Histogram, list[int]]] = {}

    def add(self, computed_tokens: int, context_tokens: int, duration_s: float) -> None:
        place = bisect_left(COMPUTED_TOKEN_BOUNDS, computed_tokens)
        label = str(COMPUTED_TOKEN_BOUNDS[place]) if place < len(COMPUTED_TOKEN_BOUNDS) else "+Inf"
        row = self.rows.get(label)
        if row is None:
            row = self.rows[label] = (Histogram(STEP_BOUNDS_S), [0, 0])
        row[0].add((duration_s,))
        row[1][0] += computed_tokens
        row[1][1] += context_tokens

    def families(self) -> Iterator[Metric]:
        """The durations, the tokens and the context, by bucket of tokens."""
        durations = HistogramMetricFamily(*STEP, labels=("computed_tokens",))
        tokens = CounterMetricFamily(*STEP_TOKENS, labels=("computed_tokens",))
        context = CounterMetricFamily(*STEP_CONTEXT, labels=("computed_tokens",))
        for label, (histogram, sums) in self.rows.items():
            durations.add_metric((label,), histogram.buckets(), histogram.total)
            tokens.add_metric((label,), sums[0])
            context.add_metric((label,), sums[1])
        yield from (durations, tokens, context)


def histograms(named: Iterable[tuple[tuple[str, str], Histogram]]) -> Iterator[Metric]:
    """Of (name, text) and what was counted."""
    for (name, text), histogram in named:
        yield HistogramMetricFamily(name, text, histogram.buckets(), histogram.total)


def gauges(named: Iterable[tuple[str, str, float | None]]) -> Iterator[Metric]:
    """Of name, text and value; None: not known yet, and left out."""
    for name, text, value in named:
        if value is not None:
            yield GaugeMetricFamily(name, text, float(value))


def knob_gauges(
    configured_tokens: float | None, in_force_tokens: int | None, lease_left_s: float, revision: int, blocked: bool
) -> Iterator[Metric]:
    """Where the knobs stand."""
    return gauges(
        (
            ("rooftune_budget_configured_tokens", "Token budget of the setting in force.", configured_tokens),
            ("rooftune_budget_in_force_tokens", "What the latest step was allowed.", in_force_tokens),
            ("rooftune_lease_left_seconds", "Until the boot setting is back; 0: no lease.", lease_left_s),
            ("rooftune_knob_revision", "Grows with every change of the knobs.", revision),
            ("rooftune_pushes_blocked", "1 after a blocking revert, until a resume.", blocked),
        )
    )


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Most steps counted in one batch: from the second on the counting code is in cache, which it never is after a forward.
HEARD_TOGETHER = 64


class Metrics(Collector):
    """One engine's series, in a registry of their own. Every method may be called from any thread."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._lock = threading.Lock()
        self._ttft = Histogram(WAIT_BOUNDS_S)
        self._queue = Histogram(WAIT_BOUNDS_S)
        self._gap = Histogram(GAP_BOUNDS_S)
        self._tpot = Histogram(GAP_BOUNDS_S)
        self._steps = StepTable()
        self._steps_heard: deque[StepRecord] = deque()
        self._gaps_heard: deque[Sequence[float]] = deque()
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._prefill_tokens = self._decode_tokens = 0
        self._ended: Counter[FinishReason] = Counter()
        self._rejected: Counter[RejectReason] = Counter()
        self._changes: Counter[ChangeKind] = Counter()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def page(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self._registry)

    # --- events from the engine ----------------------------------------------------------------

    def on_step(self, record: StepRecord) -> None:
        self._steps_heard.append(record)
        if len(self._steps_heard) >= HEARD_TOGETHER:
            with self._lock:
                self._count_heard()

    def on_first_token(self, ttft_s: float, queue_s: float, prompt_tokens: int, cached_tokens: int) -> None:
        with self._lock:
            self._ttft.add((ttft_s,))
            self._queue.add((queue_s,))
            self._prompt_tokens += prompt_tokens
            self._cached_tokens += cached_tokens
            self._output_tokens += 1

    def on_gaps(self, gaps_s: Sequence[float]) -> None:
        self._gaps_heard.append(gaps_s)

    def on_finished(self, record: RequestRecord) -> None:
        with self._lock:
            self._ended[record.ended] += 1
            if record.tpot_s is not None:
                self._tpot.add((record.tpot_s,))

    def on_rejected(self, reason: RejectReason) -> None:
        with self._lock:
            self._rejected[reason] += 1

    def on_change(self, kind: ChangeKind, revision: int, actor: str, reason: str) -> None:
        with self._lock:
            self._changes[kind] += 1

    def _count_heard(self) -> None:
        """Count steps and gaps since the last call, under the lock. Later ones are counted now or at the next call."""
        while self._gaps_heard:
            gaps_s = self._gaps_heard.popleft()
            self._gap.add(gaps_s)
            self._output_tokens += len(gaps_s)
        while self._steps_heard:
            record = self._steps_heard.popleft()
            context_tokens = record.decode_context_tokens + record.prefill_context_tokens
            self._steps.add(record.prefill_tokens + record.decode_tokens, context_tokens, record.duration_s)
            self._prefill_tokens += record.prefill_tokens
            self._decode_tokens += record.decode_tokens

    # --- scrapes -------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """All series at one moment."""
        snapshot = self._snapshot()
        with self._lock:
            self._count_heard()
            shapes = histograms(((TTFT, self._ttft), (QUEUE, self._queue), (GAP, self._gap), (TPOT, self._tpot)))
            found = [*shapes, *self._steps.families(), *self._counters(snapshot)]
        yield from (*found, *self._gauges(snapshot))

    def _counters(self, snapshot: Snapshot) -> Iterator[Metric]:
        for name, text, value in (
            ("rooftune_steps", "Steps since the start.", snapshot.step),
            ("rooftune_preemptions", "Requests preempted since the start.", snapshot.preemptions),
            ("rooftune_prefill_tokens", "Prompt tokens computed, recomputed ones too.", self._prefill_tokens),
            ("rooftune_decode_tokens", "Decode tokens computed.", self._decode_tokens),
            ("rooftune_output_tokens", "Tokens sent.", self._output_tokens),
            ("rooftune_prompt_tokens", "Prompt tokens of requests that got a token.", self._prompt_tokens),
            ("rooftune_cached_prompt_tokens", "Those the prefix cache spared.", self._cached_tokens),
        ):
            yield CounterMetricFamily(name, text, value)
        by_label: tuple[tuple[str, str, str, type[StrEnum], Mapping[Any, int]], ...] = (
            ("rooftune_requests_ended", "Requests by why they ended.", "reason", FinishReason, self._ended),
            ("rooftune_requests_rejected", "Requests not taken, and why.", "reason", RejectReason, self._rejected),
            ("rooftune_knob_changes", "What moved the knobs.", "kind", ChangeKind, self._changes),
        )
        for name, text, label, kinds, counted in by_label:
            family = CounterMetricFamily(name, text, labels=(label,))
            for kind in kinds:
                family.add_metric((kind.value,), counted[kind])
            yield family

    def _gauges(self, now: Snapshot) -> Iterator[Metric]:
        yield from gauges(
            (
                ("rooftune_running_requests", "Requests in the running batch.", now.running),
                ("rooftune_waiting_requests", "Requests taken but not running.", now.waiting),
                ("rooftune_partial_prefill_requests", "Requests part-way through a prompt.", now.partial_prefills),
                ("rooftune_kv_used_ratio", "Share of the KV blocks in use, 0..1.", now.kv_used),
                ("rooftune_healthy", "0 once the engine has broken.", now.healthy),
            )
        )
        yield from knob_gauges(
            now.budget_configured_tokens, now.budget_in_force_tokens, now.lease_left_s, now.revision, now.blocked
        )
