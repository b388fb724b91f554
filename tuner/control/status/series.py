"""/metrics of the controller. A value that is not known has no sample: missing is not zero."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, Summary, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from rooftune.policies.errors import UnreachableError
from rooftune.policies.guard import Action, Reason
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.ports import Store
from rooftune.tuner.control.state import operator
from rooftune.tuner.control.status.view import View

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "rooftune_controller_"
Values = dict[tuple[str, ...], float]  # by the values of the labels
Sample = tuple[str, str, float | None]  # name, help, value (None: not known)


class Series(Collector):
    """The series of one controller, in a registry of their own: counters since its start, and the latest record."""

    def __init__(self, view: View, store: Store) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library lacks the annotation
        self._view, self._store = view, store
        self._registry = registry = CollectorRegistry(auto_describe=False)
        about = view.about
        labels = {"engine": about.engine, "mode": about.mode, "instance": about.instance, "version": about.version}
        Info(PREFIX.rstrip("_"), "Always 1; who this controller is.", registry=registry).info(labels)
        Gauge(PREFIX + "live", "1 in live mode, 0 in shadow mode.", registry=registry).set(about.mode == "live")

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        self._cycles = counter("cycles", "Cycles by outcome.", "action", "reason")
        self._verdicts = counter("verdicts", "Verdicts on pushes.", "verdict")
        for verdict in ("better", "worse", "inconclusive"):
            self._verdicts.labels(verdict)
        self._pushes = counter("pushes", "Pushes that were sent.")
        self._lost_steps = counter("lost_steps", "Step records overwritten before they were read.")
        self._lost_requests = counter("lost_requests", "Request records overwritten before they were read.")
        text = "Time of each stage of a cycle."
        self._stages = Summary(PREFIX + "stage_seconds", text, ("stage",), registry=registry)
        text = "1 while a signal is seen, 0 when it was seen before; see the runbook."
        self._signals = Gauge(PREFIX + "signal", text, ("signal",), registry=registry)
        self._seen_signals: set[str] = set()
        registry.register(self)

    def count(self, record: CycleRecord) -> None:
        """Add a cycle that has ended."""
        self._cycles.labels(record.action.value, record.reason.value).inc()
        self._pushes.inc(record.pushed is not None)
        self._lost_steps.inc(record.lost_steps)
        self._lost_requests.inc(record.lost_requests)
        for stage, took_s in record.took_s.items():
            self._stages.labels(stage.value).observe(took_s)
        # A trial is judged in every cycle; its verdict is the one with which it ended.
        if record.verify is not None and (record.verify.verdict == "better" or record.action is Action.REVERT):
            self._verdicts.labels(record.verify.verdict).inc()
        active = {signal.code for signal in record.signals}
        self._seen_signals |= active
        for code in self._seen_signals:
            self._signals.labels(code).set(code in active)

    def page(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        seen = self._view.glance()
        samples: list[Sample] = [
            ("healthy", "1 while cycles come as they should.", float(seen.healthy)),
            ("ready", "1 while the engine is read in each cycle.", float(seen.ready)),
            ("since_cycle_seconds", "Time since the latest cycle ended.", seen.since_s),
            *self._requested(seen.record),
        ]
        if seen.record is not None:
            samples += _latest(seen.record, seen.since_s)
            yield from _tables(seen.record, seen.judged)
            yield from _load(seen.record)
        for name, text, value in samples:
            if value is not None:
                yield GaugeMetricFamily(PREFIX + name, text, value)

    def _requested(self, record: CycleRecord | None) -> Iterator[Sample]:
        try:
            requests = operator.read(self._store)
        except UnreachableError:  # the store does not answer: not known
            return
        yield "paused", "1 while an operator has paused it.", float(requests.paused is not None)
        # Also one that was set at the engine itself.
        blocked = requests.blocked is not None or (record is not None and record.reason is Reason.BLOCKED_AFTER_REVERT)
        yield "blocked", "1 after a revert by an operator, until a resume.", float(blocked)


def _latest(record: CycleRecord, since_s: float) -> Iterator[Sample]:
    age_s, left_s, fit = record.metrics_age_s, record.lease_left_s, record.fit
    yield "cycle_number", "Number of the latest cycle.", float(record.number)
    yield "step_age_seconds", "Age of the newest step seen.", age_s + since_s if isinstance(age_s, float) else None
    left_s = max(0.0, left_s - since_s) if isinstance(left_s, float) else None
    yield "lease_left_seconds", "Time left of the push in force.", left_s
    yield "trust_ratio", "Half-width of the trust region as a factor.", record.trust
    yield "exploration_spent_slo_seconds", "What trials cost today.", record.spent_slo_s
    verify = record.verify
    if verify is not None and verify.arm is not None:
        yield (
            "trial_new_setting",
            "1 while the new setting of a trial has its turn, 0 in the old one's.",
            float(verify.arm != "old"),
        )
        yield "trial_pairs", "Whole pairs of turns that the trial has counted.", float(verify.pairs)
    pause_s = record.pause_left_s
    pause_s = max(0.0, pause_s - since_s) if isinstance(pause_s, float) else None
    yield "pause_left_seconds", "Time left without pushes, after a kept setting was lost.", pause_s
    if fit is not None:
        yield "knee_tokens", "Where floor and slope of the step model meet.", fit.knee_tokens
        yield "knee_low_tokens", "Lower end of the knee's interval.", fit.knee_low_tokens
        yield "knee_high_tokens", "Upper end of the knee's interval.", fit.knee_high_tokens
        yield "drift_ratio", "Measured over modelled step time.", fit.drift_ratio


def _tables(record: CycleRecord, judged: CycleRecord | None) -> Iterator[Metric]:
    took: Values = {(stage.value,): took_s for stage, took_s in record.took_s.items()}
    yield _labelled("stage_latest_seconds", "Time of each stage in the latest cycle.", ("stage",), took)
    knobs: Values = {(name,): float(value) for name, value in (record.in_force or {}).items()}
    yield _labelled("knob", "Setting in force, by knob, in the knob's own unit.", ("knob",), knobs)
    if judged is not None and judged.twin is not None and record.in_force is not None:
        errors: Values = {_quantile_labels(name): error for name, error in judged.twin.errors.items()}
        text = "Twin's prediction over what was observed, minus 1."
        yield _labelled("twin_error_ratio", text, ("quantity", "quantile"), errors)
    shares = _attainments(record, judged)
    of = "that meet every target, measured, predicted for the setting in force, and proposed."
    yield _labelled("attainment_ratio", f"Share of requests {of}", ("source",), shares)
    yield _labelled("goodput_rps", f"Requests per second {of}", ("source",), _goodputs(record, shares))


def _load(record: CycleRecord) -> Iterator[Metric]:
    """For autoscalers, so without the controller's prefix: what arrives and what is carried."""
    load = record.load
    if load is None:
        return
    if load.offered_rps is not None:
        yield GaugeMetricFamily("rooftune_offered_rps", "Requests per second that arrive.", load.offered_rps)
    parts = {"in_force": load.in_force, "boot": load.boot}
    rates: Values = {(k,): v.sustainable_rps for k, v in parts.items() if v.sustainable_rps is not None}
    busy: Values = {(k,): v.busy_share for k, v in parts.items() if v.busy_share is not None}
    for name, text, values in (
        ("sustainable_rps", "Requests per second of this traffic that a setting carries, by the latest search.", rates),
        ("busy_share", "Share of the time in which steps run under a setting, by the latest search.", busy),
    ):
        yield _labelled(name, text, ("setting",), values, "rooftune_")


def _attainments(record: CycleRecord, judged: CycleRecord | None) -> Values:
    """What was predicted and proposed stands until the setting moves or the twin is compared with another window."""
    found: Values = {}
    if record.observed is not None and record.observed.attainment is not None:
        found["measured",] = record.observed.attainment
    if judged is None or not (
        judged is record or (judged.action is Action.HOLD and judged.in_force == record.in_force)
    ):
        return found
    then = judged.observed.attainment if judged.observed else None
    if then is not None and judged.twin is not None and judged.twin.attainment_error is not None:
        found["predicted",] = min(max(then + judged.twin.attainment_error, 0.0), 1.0)
    if judged.proposal is not None and judged.proposal.attainment_proposed is not None:
        found["proposed",] = judged.proposal.attainment_proposed
    return found


def _goodputs(record: CycleRecord, shares: Values) -> Values:
    """Shares times the rate at which requests ended; the measured one as it was measured."""
    seen = record.observed
    if seen is None or seen.goodput_rps is None or not seen.span_s > 0.0:
        return {}
    rate_rps = seen.requests / seen.span_s
    return {source: share * rate_rps for source, share in shares.items()} | {("measured",): seen.goodput_rps}


def _quantile_labels(name: str) -> tuple[str, str]:
    quantity, _, quantile = name.rpartition(" ")
    return (quantity or name, quantile if quantity else "")


def _labelled(name: str, text: str, labels: tuple[str, ...], values: Values, prefix: str = PREFIX) -> Metric:
    family = GaugeMetricFamily(prefix + name, text, labels=labels)
    for words, value in values.items():
        family.add_metric(words, value)
    return family
