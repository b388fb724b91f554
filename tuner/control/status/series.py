"""/metrics of the controller. A value that is not known has no sample: missing is not zero."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from rooftune.policies.errors import UnreachableError
from rooftune.policies.guard import Action, Reason
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.ports import Store
from rooftune.tuner.control.state import operator
from rooftune.tuner.control.status.view import Glance, View

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "rooftune_controller_"


class Series(Collector):
    """The series of one controller, in a registry of their own."""

    def __init__(self, view: View, store: Store) -> None:
        self._view, self._store = view, store
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def page(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        seen = self._view.glance()
        yield from self._about(seen)
        yield from self._requested(seen.record)
        yield from _counters(seen)
        if seen.record is not None:
            yield from _latest(seen.record, seen.since_s)
            yield from _believed(seen.record, seen.judged)
            yield from _signals(seen.record, seen.counts.signals)

    def _about(self, seen: Glance) -> Iterator[Metric]:
        about = self._view.about
        labels = {"engine": about.engine, "mode": about.mode, "instance": about.instance, "version": about.version}
        yield _labelled("info", "Always 1; who this controller is.", tuple(labels), [(tuple(labels.values()), 1.0)])
        yield _gauge("live", "1 in live mode, 0 in shadow mode.", float(about.mode == "live"))
        yield _gauge("healthy", "1 while cycles come as they should.", float(seen.healthy))
        yield _gauge("ready", "1 while the engine is read in each cycle.", float(seen.ready))
        yield _gauge("since_cycle_seconds", "Time since the latest cycle ended.", seen.since_s)

    def _requested(self, record: CycleRecord | None) -> Iterator[Metric]:
        try:
            requests = operator.read(self._store)
        except UnreachableError:  # the store does not answer: not known
            return
        yield _gauge("paused", "1 while an operator has paused it.", float(requests.paused is not None))
        # Also one that was set at the engine itself.
        blocked = requests.blocked is not None or (record is not None and record.reason is Reason.BLOCKED_AFTER_REVERT)
        yield _gauge("blocked", "1 after a revert by an operator, until a resume.", float(blocked))


def _counters(seen: Glance) -> Iterator[Metric]:
    counts = seen.counts
    outcomes = CounterMetricFamily(PREFIX + "cycles", "Cycles by outcome.", labels=("action", "reason"))
    for (action, reason), count in sorted(counts.outcomes.items()):
        outcomes.add_metric((action, reason), count)
    verdicts = CounterMetricFamily(PREFIX + "verdicts", "Verdicts on pushes.", labels=("verdict",))
    for verdict in ("better", "worse", "inconclusive"):
        verdicts.add_metric((verdict,), counts.verdicts[verdict])
    stages = SummaryMetricFamily(PREFIX + "stage_seconds", "Time of each stage of a cycle.", labels=("stage",))
    for stage, count in counts.stage_count.items():
        stages.add_metric((stage.value,), count, counts.stage_sum_s[stage])
    yield from (outcomes, verdicts, stages)
    for name, text, value in (
        ("pushes", "Pushes that were sent.", counts.pushes),
        ("lost_steps", "Step records overwritten before they were read.", counts.lost_steps),
        ("lost_requests", "Request records overwritten before they were read.", counts.lost_requests),
    ):
        yield CounterMetricFamily(PREFIX + name, text, value)


def _latest(record: CycleRecord, since_s: float) -> Iterator[Metric]:
    yield _gauge("cycle_number", "Number of the latest cycle.", float(record.number))
    stages = ((stage.value,) for stage in record.took_s)
    took = zip(stages, record.took_s.values(), strict=True)
    yield _labelled("stage_latest_seconds", "Time of each stage in the latest cycle.", ("stage",), took)
    if isinstance(record.metrics_age_s, float):
        yield _gauge("step_age_seconds", "Age of the newest step seen.", record.metrics_age_s + since_s)
    if isinstance(record.lease_left_s, float):
        yield _gauge("lease_left_seconds", "Time left of the push in force.", max(0.0, record.lease_left_s - since_s))
    text = "Setting in force, by knob, in the knob's own unit."
    yield _labelled("knob", text, ("knob",), (((name,), float(v)) for name, v in (record.in_force or {}).items()))
    yield from _maybe("trust_ratio", "Half-width of the trust region as a factor.", record.trust)
    yield _gauge("exploration_spent_slo_seconds", "What trials cost today.", record.spent_slo_s)


def _believed(record: CycleRecord, judged: CycleRecord | None) -> Iterator[Metric]:
    if record.fit is not None:
        fit = record.fit
        yield from _maybe("knee_tokens", "Where floor and slope of the step model meet.", fit.knee_tokens)
        yield from _maybe("knee_low_tokens", "Lower end of the knee's interval.", fit.knee_low_tokens)
        yield from _maybe("knee_high_tokens", "Upper end of the knee's interval.", fit.knee_high_tokens)
        yield from _maybe("drift_ratio", "Measured over modelled step time.", fit.drift_ratio)
    if judged is not None and judged.twin is not None and record.in_force is not None:
        errors = [(_quantile_labels(name), error) for name, error in judged.twin.errors.items()]
        text = "Twin's prediction over what was observed, minus 1."
        yield _labelled("twin_error_ratio", text, ("quantity", "quantile"), errors)
    shares = _attainments(record, judged)
    goodput = _goodputs(record, shares)
    text = "Share of requests that meet every target, measured, predicted for the setting in force, and proposed."
    yield _labelled("attainment_ratio", text, ("source",), (((name,), share) for name, share in shares.items()))
    text = "Requests per second that meet every target, measured, predicted for the setting in force, and proposed."
    yield _labelled("goodput_rps", text, ("source",), (((name,), rate) for name, rate in goodput.items()))


def _attainments(record: CycleRecord, judged: CycleRecord | None) -> dict[str, float]:
    """What was predicted and proposed stands until the setting moves or the twin is held against another window."""
    found: dict[str, float] = {}
    if record.observed is not None and record.observed.attainment is not None:
        found["measured"] = record.observed.attainment
    if judged is None or not (
        judged is record or (judged.action is Action.HOLD and judged.in_force == record.in_force)
    ):
        return found
    then = judged.observed.attainment if judged.observed else None
    if then is not None and judged.twin is not None and judged.twin.attainment_error is not None:
        found["predicted"] = min(max(then + judged.twin.attainment_error, 0.0), 1.0)
    if judged.proposal is not None and judged.proposal.attainment_proposed is not None:
        found["proposed"] = judged.proposal.attainment_proposed
    return found


def _goodputs(record: CycleRecord, shares: Mapping[str, float]) -> dict[str, float]:
    """Shares times the rate at which requests ended; the measured one as it was measured."""
    seen = record.observed
    if seen is None or seen.goodput_rps is None or not seen.span_s > 0.0:
        return {}
    rate_rps = seen.requests / seen.span_s
    return {name: share * rate_rps for name, share in shares.items()} | {"measured": seen.goodput_rps}


def _signals(record: CycleRecord, known: frozenset[str]) -> Iterator[Metric]:
    active = {signal.code for signal in record.signals}
    text = "1 while a signal is seen, 0 when it was seen before; see the runbook."
    yield _labelled("signal", text, ("signal",), (((code,), float(code in active)) for code in sorted(known | active)))


def _quantile_labels(name: str) -> tuple[str, str]:
    quantity, _, quantile = name.rpartition(" ")
    return (quantity or name, quantile if quantity else "")


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value)


def _maybe(name: str, text: str, value: float | None) -> Iterator[Metric]:
    if value is not None:
        yield _gauge(name, text, value)


def _labelled(name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for words, value in values:
        family.add_metric(words, value)
    return family
