"""Synthetic traffic: rates, spread, shapes and lengths are as requested, and a seed reproduces them."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.cli.generate import COMMAND
from rooftune.tuner.traffic.generate import (
    NAMED_MIXES,
    Constant,
    Day,
    Exponential,
    Gamma,
    LogNormal,
    Poisson,
    RequestClass,
    Uniform,
    document_mix,
    generate,
    named_mix,
    with_rare_class,
)
from rooftune.tuner.traffic.traces import load_traffic

PLAIN = (RequestClass(1.0, Constant(100), Constant(10)),)


def gaps(arrival_s: np.ndarray) -> np.ndarray:
    return np.diff(arrival_s)


@pytest.mark.parametrize(("arrivals", "cv"), [(Poisson(5.0), 1.0), (Gamma(5.0, 0.3), 0.3), (Gamma(5.0, 3.0), 3.0)])
def test_rate_and_spread_of_gaps(arrivals: Poisson | Gamma, cv: float) -> None:
    arrival_s = generate(arrivals, PLAIN, 20_000.0, seed=3).arrival_s
    assert arrival_s[-1] <= 20_000.0
    assert len(arrival_s) / 20_000.0 == pytest.approx(5.0, rel=0.06)
    assert gaps(arrival_s).std() / gaps(arrival_s).mean() == pytest.approx(cv, rel=0.06)


def test_a_day_has_its_peak_its_trough_and_its_mean() -> None:
    day = Day(rate_rps=2.0, peak_to_trough=4.0, peak_at_s=14 * 3600.0)
    arrival_s = generate(day, PLAIN, 86_400.0, seed=1).arrival_s
    by_hour, _ = np.histogram(arrival_s, bins=24, range=(0.0, 86_400.0))
    assert len(arrival_s) / 86_400.0 == pytest.approx(2.0, rel=0.02)
    # The peak lies at 14:00 and the trough at 02:00, each on the border of two hours.
    assert by_hour[13:15].sum() / by_hour[1:3].sum() == pytest.approx(4.0, rel=0.08)
    assert int(np.argmax(by_hour)) in range(12, 17)


def test_the_same_seed_gives_the_same_requests_and_another_does_not() -> None:
    def mix(seed: int) -> list[float]:
        traffic = document_mix(seed, 3.0, 100.0, 30, (60_000, 100_000))
        return [*traffic.arrival_s, *traffic.prompt_tokens, *traffic.output_tokens]

    assert mix(1) == mix(1)
    assert mix(1) != mix(2)


def test_random_streams_are_independent() -> None:
    rare, often = (document_mix(7, 3.0, 600.0, one_in, (60_000, 100_000)) for one_in in (30, 8))
    assert np.array_equal(rare.arrival_s, often.arrival_s)
    short = (rare.prompt_tokens <= 1500) & (often.prompt_tokens <= 1500)
    assert short.sum() > 1000
    assert np.array_equal(rare.prompt_tokens[short], often.prompt_tokens[short])


def test_a_class_draws_independently_of_the_others() -> None:
    rare = RequestClass(0.2, Uniform(60_000, 100_000), Exponential(200.0))
    for_all = [
        generate(Poisson(3.0), (RequestClass(0.8, short, Constant(1)), rare), 600.0, seed=7)
        for short in (Constant(100), Uniform(100, 1500))
    ]
    long = [traffic.prompt_tokens[traffic.prompt_tokens >= 60_000] for traffic in for_all]
    assert len(long[0]) > 200
    assert np.array_equal(*long)


def test_document_mix_of_the_benches() -> None:
    traffic = document_mix(1, 3.0, 20_000.0, 30, (60_000, 100_000))
    long = traffic.prompt_tokens > 1500
    assert long.mean() == pytest.approx(1 / 30, rel=0.1)
    assert traffic.prompt_tokens[long].min() >= 60_000
    assert traffic.prompt_tokens[long].max() <= 100_000
    assert traffic.prompt_tokens[~long].min() == 100
    assert traffic.prompt_tokens[~long].max() == 1500
    assert traffic.output_tokens.min() == 1
    assert traffic.output_tokens.mean() == pytest.approx(200, rel=0.02)
    bursty = document_mix(1, 3.0, 20_000.0, 30, (60_000, 100_000), burst_cv=3.0)
    assert gaps(bursty.arrival_s).std() > 2 * gaps(traffic.arrival_s).std()


def test_length_distributions() -> None:
    rng = np.random.default_rng(0)
    assert set(Constant(7).sample(rng, 5)) == {7}
    assert set(Uniform(3, 5).sample(rng, 1000)) == {3, 4, 5}
    assert Exponential(200.0).sample(rng, 50_000).mean() == pytest.approx(200, rel=0.03)
    logs = np.log(LogNormal(800.0, 0.5).sample(rng, 50_000))
    assert np.exp(np.median(logs)) == pytest.approx(800, rel=0.02)
    assert logs.std() == pytest.approx(0.5, rel=0.03)
    assert LogNormal(1.0, 5.0).sample(rng, 1000).min() == 1


def test_pairs_of_a_lengths_file_stay_together() -> None:
    pairs = (np.array([10, 20, 30]), np.array([1, 2, 3]))
    one = RequestClass(1.0, Constant(1), Constant(1), pairs=pairs)
    traffic = generate(Poisson(10.0), (one,), 100.0, seed=0)
    assert set(traffic.prompt_tokens) == {10, 20, 30}
    assert np.array_equal(traffic.prompt_tokens, 10 * traffic.output_tokens)


def test_tenants_and_cached_share() -> None:
    classes = (
        RequestClass(0.75, Constant(100), Constant(1), tenant="chat", cached_share=0.5),
        RequestClass(0.25, Constant(1), Constant(1), tenant="batch", cached_share=1.0),
    )
    traffic = generate(Poisson(10.0), classes, 1000.0, seed=0)
    chat = traffic.tenant == traffic.tenant_names.index("chat")
    assert chat.mean() == pytest.approx(0.75, rel=0.03)
    assert set(traffic.cached_tokens[chat]) == {50}
    assert set(traffic.cached_tokens[~chat]) == {0}


@pytest.mark.parametrize("name", list(NAMED_MIXES))
def test_named_mixes_generate_traffic(name: str) -> None:
    assert len(generate(Poisson(5.0), named_mix(name), 100.0, seed=0)) > 300


def test_a_rare_class_keeps_its_share() -> None:
    classes = with_rare_class(RequestClass(0.2, Constant(5), Constant(5)), PLAIN)
    assert [c.share for c in classes] == [0.8, 0.2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: generate(Poisson(0.0), PLAIN, 10.0, 0),
        lambda: generate(Poisson(float("nan")), PLAIN, 10.0, 0),
        lambda: generate(Poisson(1.0), PLAIN, float("inf"), 0),
        lambda: generate(Poisson(1e6), PLAIN, 1e9, 0),
        lambda: generate(Poisson(1e-9), PLAIN, 1.0, 0),
        lambda: generate(Poisson(1.0), PLAIN, 10.0, -1),
        lambda: generate(Poisson(1.0), (), 10.0, 0),
        lambda: generate(Poisson(1.0), (*PLAIN, *PLAIN), 10.0, 0),
        lambda: generate(Gamma(1.0, 0.0), PLAIN, 10.0, 0),
        lambda: generate(Day(1.0, 0.5), PLAIN, 10.0, 0),
        lambda: document_mix(0, 3.0, 600.0, 1.0, (60_000, 100_000)),
        lambda: document_mix(0, 3.0, 600.0, 30, (100_000, 60_000)),
        lambda: Exponential(0.5),
        lambda: LogNormal(100.0, float("nan")),
        lambda: RequestClass(0.0, Constant(1), Constant(1)),
        lambda: named_mix("nonsense"),
    ],
)
def test_bad_values_are_input_errors(make: object) -> None:
    assert callable(make)
    with pytest.raises(InputError):
        make()


def command(words: str) -> int:
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)
    return COMMAND.run(parser.parse_args(words.split()))


def test_the_command_writes_what_it_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mix.csv"
    words = "--rate 3 --span 10m --prompt 100-1500 --output exp:200 --long 1/30:60000-100000 --seed 1 --json"
    assert command(f"{words} --out {out}") == 0
    summary = json.loads(capsys.readouterr().out)
    traffic = load_traffic(out)
    assert summary["requests"] == len(traffic)
    assert (traffic.prompt_tokens >= 60_000).mean() == pytest.approx(1 / 30, rel=0.4)
    first = out.read_bytes()
    assert command(f"{words} --out {out}") == 0
    assert out.read_bytes() == first


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--rate 3 --span 600", "--span is '600'.*write 600s"),
        ("--rate 0 --span 600s", "--rate is '0'"),
        ("--rate 3 --span 600s --cv 2", "--cv belongs to --shape gamma"),
        ("--rate 3 --span 600s --shape sine", "--shape is 'sine', must be one of"),
        ("--rate 3 --span 600s --mix chat --prompt 5", "exclude each other"),
        ("--rate 3 --span 600s --long 60000", "--long is '60000', must be SHARE:LENGTHS"),
        ("--rate 3 --span 600s --long 1/0:5", "share of --long is '1/0'"),
        ("--rate 3 --span 600s --prompt 5-", "longest of --prompt is ''"),
        ("--rate 3 --span 600s --lengths absent.csv", "absent.csv does not exist"),
        ("--rate 3 --span 600s --seed x", "--seed is 'x'"),
    ],
)
def test_the_command_refuses_in_one_line_and_writes_nothing(words: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=expected):
        command(f"{words} --out {tmp_path / 'out.csv'}")
    assert list(tmp_path.iterdir()) == []
