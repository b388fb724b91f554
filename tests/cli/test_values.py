"""Values as people write them."""

import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.cli.flags.values import (
    parse_burst,
    parse_count,
    parse_duration,
    parse_lengths,
    parse_number,
    parse_positive,
    parse_rate,
    parse_rate_scale,
    parse_share,
    parse_url,
)
from rooftune.tuner.traffic.generate import Constant, Exponential, LogNormal, Uniform
from rooftune.tuner.traffic.reshape import Burst


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2s", 2.0),
        ("30ms", 0.03),
        ("1.5m", 90.0),
        ("0.03s", 0.03),
        ("250us", 0.00025),
        ("2h", 7200.0),
        ("1d", 86400.0),
        (" 7 ms ", 0.007),
        ("1e3s", 1000.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


BAD_DURATIONS = ["", "30", "-1s", "0s", "nans", "infs", "1e400s", "1e10s", "5 parsecs", "s", "1_0s", "\u0663s"]


@pytest.mark.parametrize("text", BAD_DURATIONS)
def test_bad_durations(text: str) -> None:
    with pytest.raises(InputError, match="--gap-p99 is"):
        parse_duration(text, "--gap-p99")


def test_a_bare_number_shows_the_remedy_and_zero_is_allowed_on_request() -> None:
    with pytest.raises(InputError, match="write 30s or 30ms"):
        parse_duration("30", "--gap-p99")
    assert parse_duration("0s", zero=True) == 0.0


@pytest.mark.parametrize(("text", "share"), [("0.99", 0.99), ("99%", 0.99), ("1/4", 0.25), ("0", 0.0), ("100%", 1.0)])
def test_shares(text: str, share: float) -> None:
    assert parse_share(text, "--share") == share


@pytest.mark.parametrize("text", ["", "1.01", "-0.1", "101%", "1/0", "5/1", "nan", "%", "1e400/1e400", "1//2"])
def test_bad_shares(text: str) -> None:
    with pytest.raises(InputError, match="--share is"):
        parse_share(text, "--share")


def test_shares_without_ends() -> None:
    for text in ("0", "1", "0%"):
        with pytest.raises(InputError):
            parse_share(text, "--share", ends=False)


def test_counts_and_numbers() -> None:
    assert parse_count("2048", "--budget", high=8192) == 2048
    assert parse_positive("0.5", "--x") == 0.5
    assert parse_number("-2", "--x") == -2.0
    for text in ("0", "8193", "-1", "1.0", "2**70", "9" * 40, ""):
        with pytest.raises(InputError, match=r"--budget is .* within 1\.\.8192"):
            parse_count(text, "--budget", high=8192)
    for text in ("0", "-1", "nan", "inf", "1e400", ""):
        with pytest.raises(InputError):
            parse_positive(text, "--x")


def test_rates_and_scales() -> None:
    assert parse_rate("3") == parse_rate("3/s") == 3.0
    assert parse_rate_scale("1.8") == parse_rate_scale("1.8x") == 1.8
    for text in ("0", "x", "-1", "1e9"):
        with pytest.raises(InputError, match="--rate-scale"):
            parse_rate_scale(text)


def test_bursts() -> None:
    assert parse_burst("2x@0.5:60s") == Burst(2.0, 60.0, start_share=0.5)
    assert parse_burst("2.5@25%:1m") == Burst(2.5, 60.0, start_share=0.25)
    assert parse_burst("2x@120s:500ms") == Burst(2.0, 0.5, start_s=120.0)


@pytest.mark.parametrize("text", ["", "2x", "2x@0.5", "2x@0.5:60", "1x@0.5:60s", "2x@1:60s", "x@0.5:60s", "nanx@0:1s"])
def test_bad_bursts(text: str) -> None:
    with pytest.raises(InputError):
        parse_burst(text)


def test_addresses() -> None:
    for text in ("http://h:1", "http://h:1/", "http://h:1/v1", " http://h:1/v1/ ", "http://h:1/tuning/v1"):
        assert parse_url(text, "--url", sockets=False) == "http://h:1"
    for text in ("h:1", "ftp://h", "http://", "http://h:x", "http://u:p@h", "http://h?a=1", "http://h a", "unix:/x"):
        with pytest.raises(InputError, match="--url"):
            parse_url(text, "--url", sockets=False)
    assert parse_url("unix:///tmp/x", "--engine") == "unix:/tmp/x"
    assert parse_url("http://h:1/v1/", "--face", engine=False) == "http://h:1/v1"
    for text in ("http://u:secret@h:port", "ftp://u:secret@h", "http://h:0", "unix:x"):
        with pytest.raises(InputError) as caught:
            parse_url(text, "--engine")
        assert "secret" not in str(caught.value)


def test_lengths() -> None:
    assert parse_lengths("1000", "--prompt") == Constant(1000)
    assert parse_lengths("100-1500", "--prompt") == Uniform(100, 1500)
    assert parse_lengths("exp:200", "--prompt") == Exponential(200.0)
    assert parse_lengths("lognormal:800,1.2", "--prompt") == LogNormal(800.0, 1.2)
    for text in ("", "0", "-5", "5-", "5-3", "exp:", "exp:nan", "lognormal:800", "zipf:3", "1e3"):
        with pytest.raises(InputError):
            parse_lengths(text, "--prompt")
