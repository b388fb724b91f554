"""What the first screen says where gaps play no part, and where the twin has been checked."""

from rooftune.tuner.record import StepModelPart
from rooftune.tuner.report import trust
from rooftune.tuner.report.build import twin_error
from tests.report.records import record, record_values


def test_a_prefill_only_report_says_it_is_tuned_for_the_first_token() -> None:
    traffic = {**record_values()["traffic"], "output_p50_tokens": 1, "output_p99_tokens": 1, "output_max_tokens": 1}
    assert any("prefill-only" in line for line in trust.caveats(record(traffic=traffic)))
    assert not any("prefill-only" in line for line in trust.caveats(record()))


def test_errors_of_the_twin_in_a_model_file_reach_the_record_and_step_errors_do_not() -> None:
    values = record_values()["step_model"]
    part = StepModelPart(**{**values, "codes": (), "errors": {"held_out_mape": 0.03, "twin_ttft_p99": -0.04}})
    assert twin_error(part) == {"ttft_p99": -0.04}
