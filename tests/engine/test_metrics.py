"""Names and values of /metrics against traffic whose every step is known, on a clock that only the test moves."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rooftune.engine import metrics as names
from rooftune.engine.fake import FakeRunner, ManualClock
from rooftune.engine.interface import FinishReason, GenerationRequest, RejectReason, TooLong
from rooftune.engine.metrics import Histogram, Metrics
from rooftune.engine.options import EngineOptions
from rooftune.engine.running import RunningEngine
from rooftune.policies import wire
from rooftune.policies.request import PRESSURE, Setting
from rooftune.policies.step_time import StepModel

# A step costs 1 ms and 0.1 ms a token.
COST = StepModel(0.001, 0.0, 0.0, 0.0, 0.0001, 0.0, 0.0)

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Bench:
    """An engine on a manual clock with its metrics."""

    def __init__(self, **options: object) -> None:
        self.clock = ManualClock(100.0)
        common = {"setting": Setting(step_tokens=64, max_running=8), "max_queue": 2}
        runner = FakeRunner(COST, self.clock, kv_blocks=64)
        self.engine = RunningEngine(runner, EngineOptions(**(common | options)), self.clock)
        self.metrics = Metrics(self.engine.snapshot)
        self.engine.observe_with(self.metrics)

    def submit(self, prompt: list[int], max_tokens: int) -> int:
        return self.engine.submit(GenerationRequest(prompt, max_tokens), lambda event: None)

    def run(self) -> None:
        while self.engine.step():
            pass

    def series(self) -> Series:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self.metrics.page().decode())
            for sample in family.samples
        }

    def one(self, name: str, **labels: str) -> float:
        return self.series()[name, tuple(sorted(labels.items()))]


@pytest.fixture
def served() -> Bench:
    """One prompt of 100 tokens and 4 tokens out, alone: steps of 64, 36, 1, 1 and 1 tokens."""
    bench = Bench()
    bench.submit(list(range(100)), 4)
    bench.clock.advance(0.25)
    bench.run()
    return bench


def test_latencies(served: Bench) -> None:
    for name, count, total in (
        ("rooftune_ttft_seconds", 1, 0.25 + 0.0074 + 0.0046),
        ("rooftune_queue_seconds", 1, 0.25),
        ("rooftune_gap_seconds", 3, 3 * 0.0011),
        ("rooftune_tpot_seconds", 1, 0.0011),
    ):
        assert served.one(f"{name}_count") == count, name
        assert served.one(f"{name}_sum") == pytest.approx(total), name
    assert served.one("rooftune_gap_seconds_bucket", le="0.001") == 0
    assert served.one("rooftune_gap_seconds_bucket", le="0.0015") == 3
    assert served.one("rooftune_gap_seconds_bucket", le="+Inf") == 3


def test_step_table_joins_tokens_and_time(served: Bench) -> None:
    for label, steps, tokens, context in (("64", 1, 64, 0), ("48", 1, 36, 64), ("1", 3, 3, 100 + 101 + 102)):
        assert served.one("rooftune_step_duration_seconds_count", computed_tokens=label) == steps
        assert served.one("rooftune_step_computed_tokens_total", computed_tokens=label) == tokens
        assert served.one("rooftune_step_context_tokens_total", computed_tokens=label) == context
        seconds = served.one("rooftune_step_duration_seconds_sum", computed_tokens=label)
        assert seconds == pytest.approx(0.001 * steps + 0.0001 * tokens)
    labels = {dict(key).get("computed_tokens") for name, key in served.series() if "step_duration" in name}
    assert labels == {"64", "48", "1"}


def test_the_formula_can_be_refitted_from_a_scrape_alone(served: Bench) -> None:
    """Sums by label give mean tokens and mean time of a step: two labels give slope and overhead."""
    points = []
    for label in ("1", "64"):
        steps = served.one("rooftune_step_duration_seconds_count", computed_tokens=label)
        tokens = served.one("rooftune_step_computed_tokens_total", computed_tokens=label) / steps
        points.append((tokens, served.one("rooftune_step_duration_seconds_sum", computed_tokens=label) / steps))
    slope = (points[1][1] - points[0][1]) / (points[1][0] - points[0][0])
    assert slope == pytest.approx(COST.slope_s_per_token)
    assert points[0][1] - slope * points[0][0] == pytest.approx(COST.overhead_s)


def test_counts(served: Bench) -> None:
    served.submit(list(range(100)), 2)  # 96 of these are cached now
    served.run()
    for name, value in (
        ("rooftune_steps_total", 7),
        ("rooftune_prompt_tokens_total", 200),
        ("rooftune_cached_prompt_tokens_total", 96),
        ("rooftune_output_tokens_total", 6),
        ("rooftune_prefill_tokens_total", 104),
        ("rooftune_decode_tokens_total", 4),
        ("rooftune_preemptions_total", 0),
    ):
        assert served.one(name) == value, name
    assert served.one("rooftune_requests_ended_total", reason="length") == 2
    assert served.one("rooftune_requests_ended_total", reason="cancelled") == 0


def test_gauges_while_it_runs() -> None:
    bench = Bench(setting=Setting(step_tokens=64, max_running=2))
    for first in (0, 200, 400):
        bench.submit(list(range(first, first + 100)), 4)
    bench.engine.step()
    assert bench.one("rooftune_running_requests") == 1
    assert bench.one("rooftune_waiting_requests") == 2
    assert bench.one("rooftune_partial_prefill_requests") == 1
    bench.engine.step()
    assert bench.one("rooftune_running_requests") == 2
    assert bench.one("rooftune_kv_used_ratio") == pytest.approx((7 + 2) / 64)
    bench.run()
    idle = [bench.one(f"rooftune_{name}_requests") for name in ("running", "waiting", "partial_prefill")]
    assert idle == [0, 0, 0] and bench.one("rooftune_kv_used_ratio") == 0


def test_budget_lease_and_changes() -> None:
    bench = Bench()
    push = {"lease_s": 10.0, "expected_revision": 0, "actor": "a", "reason": "b"}
    policy = {"kind": "pressure", "tokens": 16, "prefills": 1}
    bench.engine.push(wire.PushRequest.model_validate(push | {"knobs": {"step_tokens": 32}, "budget_policy": policy}))
    assert bench.engine.tuning_state().setting().budget_policy == PRESSURE
    bench.submit([1], 4)
    bench.engine.step()
    bench.submit(list(range(100)), 1)
    bench.engine.step()
    assert bench.one("rooftune_budget_configured_tokens") == 32
    assert bench.one("rooftune_budget_in_force_tokens") == 16
    bench.clock.advance(4.0)
    assert bench.one("rooftune_lease_left_seconds") == pytest.approx(6.0, abs=0.1)
    bench.clock.advance(7.0)
    assert bench.one("rooftune_lease_left_seconds") == 0.0
    assert bench.one("rooftune_budget_configured_tokens") == 64
    bench.engine.revert(wire.RevertRequest())
    assert bench.one("rooftune_pushes_blocked") == 1
    bench.engine.resume(wire.ResumeRequest(actor="a", reason="b"))
    kinds = ("pushed", "lease_ended", "reverted", "resumed")
    assert [bench.one("rooftune_knob_changes_total", kind=kind) for kind in kinds] == [1, 1, 1, 1]
    assert bench.one("rooftune_knob_revision") == 4


def refuse_long(bench: Bench) -> None:
    with pytest.raises(TooLong):
        bench.submit([1] * 2000, 1)


def refuse_eleventh(bench: Bench) -> None:
    for _ in range(10):
        bench.submit([1], 1)
    with pytest.raises(Exception, match="in flight"):
        bench.submit([1], 1)


@pytest.mark.parametrize(
    ("refuse", "reason"), [(refuse_long, RejectReason.TOO_LONG), (refuse_eleventh, RejectReason.BUSY)]
)
def test_rejections(refuse: Callable[[Bench], None], reason: RejectReason) -> None:
    bench = Bench()
    refuse(bench)
    counted = {other: bench.one("rooftune_requests_rejected_total", reason=other.value) for other in RejectReason}
    assert counted == {other: float(other is reason) for other in RejectReason}


def test_cancelled_and_preempted_are_counted() -> None:
    bench = Bench()
    gone = bench.submit([5] * 20, 50)
    for first in (1000, 2000, 3000):
        bench.submit(list(range(first, first + 250)), 150)  # together more than the pool of 1,024 tokens
    bench.engine.step()
    bench.engine.cancel(gone)
    bench.run()
    assert bench.one("rooftune_requests_ended_total", reason="cancelled") == 1
    assert bench.one("rooftune_requests_ended_total", reason="length") == 3
    preempted = sum(bench.engine.steps_after(-1).preemptions)
    assert preempted > 0 and bench.one("rooftune_preemptions_total") == preempted


def test_every_name_has_help_and_a_unit(served: Bench) -> None:
    families = list(text_string_to_metric_families(served.metrics.page().decode()))
    assert all(family.documentation for family in families)
    for family in families:
        assert family.name.startswith("rooftune_")
        unit = family.name.rpartition("_")[2]
        counted = {"requests", "preemptions", "ended", "rejected", "changes", "steps", "revision", "blocked", "healthy"}
        assert unit in {"seconds", "tokens", "ratio"} | counted, family.name


def test_the_page_of_the_protocol_names_every_series_and_no_other(served: Bench) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tuning-protocol.md").read_text()
    named = set(re.findall(r"rooftune_[a-z_]+", text[text.index("## Metrics") :]))
    types = re.findall(r"# TYPE (\S+) \S+", served.metrics.page().decode())
    assert named == set(types)


def test_buckets_are_fine_around_5_ms() -> None:
    near = [bound for bound in names.GAP_BOUNDS_S if 0.004 <= bound <= 0.006]
    assert len(near) >= 5 and all(later - earlier <= 0.00051 for earlier, later in itertools.pairwise(near))
    for bounds in (names.GAP_BOUNDS_S, names.WAIT_BOUNDS_S, names.STEP_BOUNDS_S, names.COMPUTED_TOKEN_BOUNDS):
        assert list(bounds) == sorted(set(bounds))


def test_histogram_puts_a_value_on_a_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.add((0.5, 1.0, 1.5, 2.0, 9.0))
    assert histogram.buckets() == [("1", 2), ("2", 4), ("+Inf", 5)]
    assert (histogram.count, histogram.total) == (5, 14.0)


def test_an_answer_ended_for_its_reader_counts_as_finished() -> None:
    bench = Bench()
    number = bench.submit(list(range(20)), 50)
    bench.engine.step()
    bench.engine.cancel(number, FinishReason.STOP)
    bench.engine.step()
    assert bench.one("rooftune_requests_ended_total", reason="stop") == 1
    assert bench.one("rooftune_requests_ended_total", reason="cancelled") == 0
    assert bench.engine.requests_after(-1).ended == ("finished",)
