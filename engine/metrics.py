"""What the engine tells Prometheus: hears every step and request as an Observer, answers a scrape as a collector."""

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from rooftune.engine import metrics_names as names
from rooftune.engine.interface import (
    ChangeKind,
    Engine,
    FinishReason,
    RejectReason,
    RequestRecord,
    Snapshot,
    StepRecord,
)
from rooftune.engine.metrics_series import Histogram, StepTable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Steps that are counted together, at the latest: the code that counts is then warm, which it never is after a forward.
HEARD_TOGETHER = 64


class Metrics(Collector):
    """One engine's series, in a registry of their own. Every method may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._ttft = Histogram(names.WAIT_BOUNDS_S)
        self._queue = Histogram(names.WAIT_BOUNDS_S)
        self._gap = Histogram(names.GAP_BOUNDS_S)
        self._tpot = Histogram(names.GAP_BOUNDS_S)
        self._steps = StepTable(names.COMPUTED_TOKEN_BOUNDS, names.STEP_BOUNDS_S)
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

    # --- what the engine tells -----------------------------------------------------------------

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
            self._ended[record.finished] += 1
            if record.tpot_s is not None:
                self._tpot.add((record.tpot_s,))

    def on_rejected(self, reason: RejectReason) -> None:
        with self._lock:
            self._rejected[reason] += 1

    def on_change(self, kind: ChangeKind, revision: int, actor: str, reason: str) -> None:
        with self._lock:
            self._changes[kind] += 1

    def _count_heard(self) -> None:
        """Steps and gaps since the last time; the lock is held. Whoever appends meanwhile is counted now or next."""
        while self._gaps_heard:
            gaps_s = self._gaps_heard.popleft()
            self._gap.add(gaps_s)
            self._output_tokens += len(gaps_s)
        while self._steps_heard:
            record = self._steps_heard.popleft()
            context_tokens = record.decode_context_tokens + record.prefill_context_tokens
            self._steps.add(record.computed_tokens, context_tokens, record.duration_s)
            self._prefill_tokens += record.prefill_tokens
            self._decode_tokens += record.decode_tokens

    # --- what Prometheus asks ------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """All series at one moment."""
        snapshot = self._engine.snapshot()
        with self._lock:
            self._count_heard()
            found = [*self._histograms(), *self._step_table(), *self._counters(snapshot), *self._gauges(snapshot)]
        yield from found

    def _histograms(self) -> Iterator[Metric]:
        for (name, text), histogram in (
            (names.TTFT, self._ttft),
            (names.QUEUE, self._queue),
            (names.GAP, self._gap),
            (names.TPOT, self._tpot),
        ):
            family = HistogramMetricFamily(name, text)
            family.add_metric((), histogram.buckets(), histogram.total)
            yield family

    def _step_table(self) -> Iterator[Metric]:
        durations = HistogramMetricFamily(*names.STEP, labels=("computed_tokens",))
        tokens = CounterMetricFamily(*names.STEP_TOKENS, labels=("computed_tokens",))
        context = CounterMetricFamily(*names.STEP_CONTEXT, labels=("computed_tokens",))
        for label, (histogram, sums) in self._steps.rows.items():
            durations.add_metric((label,), histogram.buckets(), histogram.total)
            tokens.add_metric((label,), sums[0])
            context.add_metric((label,), sums[1])
        return iter((durations, tokens, context))

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
        ended = CounterMetricFamily("rooftune_requests_ended", "Requests by why they ended.", labels=("reason",))
        for finish in FinishReason:
            ended.add_metric((finish.value,), self._ended[finish])
        rejected = CounterMetricFamily("rooftune_requests_rejected", "Requests not taken, and why.", labels=("reason",))
        for refusal in RejectReason:
            rejected.add_metric((refusal.value,), self._rejected[refusal])
        changes = CounterMetricFamily("rooftune_knob_changes", "What moved the knobs.", labels=("kind",))
        for kind in ChangeKind:
            changes.add_metric((kind.value,), self._changes[kind])
        yield from (ended, rejected, changes)

    def _gauges(self, snapshot: Snapshot) -> Iterator[Metric]:
        for name, text, value in (
            ("rooftune_running_requests", "Requests in the running batch.", snapshot.running),
            ("rooftune_waiting_requests", "Requests taken but not running.", snapshot.waiting),
            ("rooftune_partial_prefill_requests", "Requests part-way through a prompt.", snapshot.partial_prefills),
            ("rooftune_kv_used_ratio", "Share of the KV blocks in use, 0..1.", snapshot.kv_used),
            (
                "rooftune_budget_configured_tokens",
                "Token budget of the setting in force.",
                snapshot.budget_configured_tokens,
            ),
            ("rooftune_budget_in_force_tokens", "What the latest step was allowed.", snapshot.budget_in_force_tokens),
            ("rooftune_lease_left_seconds", "Until the boot setting is back; 0: no lease.", snapshot.lease_left_s),
            ("rooftune_knob_revision", "Grows with every change of the knobs.", snapshot.revision),
            ("rooftune_pushes_blocked", "1 after a blocking revert, until a resume.", snapshot.blocked),
            ("rooftune_healthy", "0 once the engine has broken.", snapshot.healthy),
        ):
            yield GaugeMetricFamily(name, text, float(value))
