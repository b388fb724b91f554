"""The bench times a search that found something, and a recommendation that finished."""

import os

import pytest

from rooftune.policies.errors import UnreachableError
from rooftune.tuner.bench.search_speed import IN_FORCE, bench, command_times, live_job, made, research_times

pytestmark = pytest.mark.slow


def test_the_job_is_a_whole_search_with_noise_and_draws() -> None:
    job = live_job(made(60.0), trials=30)
    assert len(job.draws) == 4 and len(job.noise_modelled_s) == len(job.noise_measured_s) == 2_000
    wall_s, cpu_s, answer = research_times(job, repeats=1)
    assert answer.twin.verdict == "good"
    assert answer.proposal is not None and answer.proposal.verdict == "change"
    assert answer.proposal.trials == 30 and answer.proposal.setting != IN_FORCE._asdict()
    # Processor time counts in hundredths of a second, and two threads of the child may run at once.
    assert 0.0 < wall_s and 0.0 <= cpu_s <= 2.0 * wall_s + 0.05


def test_a_failed_recommendation_is_not_timed() -> None:
    words = ["--traffic", "no-such-file.csv", "--step-model", "8b-2tbs", "--ttft-p99", "2s"]
    with pytest.raises(UnreachableError, match=r"ended with 2.*no-such-file"):
        command_times(words, dict(os.environ))


def test_the_short_form_uses_synthetic_traffic_under_its_own_name() -> None:
    figures = {figure.name: figure for figure in bench(short=True)}
    assert list(figures) == [
        "made_recommend_warm_s", "made_recommend_warm_cpu_s", "research_s", "research_cpu_s", "research_steps",
        "overloaded_over_easy_time",
    ]  # fmt: skip
    assert figures["research_s"].baseline == 2.0
    assert figures["research_steps"].value > 100_000
