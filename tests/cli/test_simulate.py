"""``simulate`` and ``sweep``: the same replay, one setting or a grid."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import rooftune, write_mix


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mix(tmp_path_factory.mktemp("traffic") / "mix.csv", requests=200)


def _json(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert rooftune(*words, "--json", "--quiet") == 0
    output = capsys.readouterr()
    assert output.err == ""
    values: dict[str, Any] = json.loads(output.out)
    assert values["schema"] == "rooftune.replays"
    return values


def _base(command: str, traffic: Path) -> tuple[object, ...]:
    return (command, "--traffic", traffic, "--step-model", "8b-2tbs")


def test_table_has_quantiles_share_and_steps(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rooftune(*_base("simulate", mix), "--gap-p99", "30ms", "--step-tokens", "512", "--quiet") == 0
    output = capsys.readouterr().out
    for word in ("TTFT p50 / p95 / p99", "gap p50 / p99", "requests that meet every target", "steps", "budget 512"):
        assert word in output


def test_a_smaller_budget_makes_gaps_shorter_and_prompts_wait(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, large = (
        _json(capsys, *_base("simulate", mix), "--step-tokens", budget)["rows"][0] for budget in (512, 4096)
    )
    assert small["gap_p99_s"] < large["gap_p99_s"]
    assert small["ttft_p99_s"] > large["ttft_p99_s"]
    assert small["simulated_steps"] > large["simulated_steps"]


def test_prefix_caching_off_reads_every_prompt_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traffic = tmp_path / "cached.csv"
    rows = "".join(f"{i},4000,20,3500\n" for i in range(20))
    traffic.write_text("arrival_s,prompt_tokens,output_tokens,cached_tokens\n" + rows)
    on, off = (
        _json(capsys, *_base("simulate", traffic), "--prefix-caching", switch)["rows"][0] for switch in ("on", "off")
    )
    assert on["ttft_p50_s"] < off["ttft_p50_s"]


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (("--chunk-cap", "64", "--max-partial-prefills", "2"), {"chunk_cap_tokens": 64, "max_partial_prefills": 2}),
        (("--chunk-cap", "64", "--adaptive-chunk-cap", "on"), {"chunk_cap_tokens": 64, "adaptive_chunk_cap": 1}),
        (("--order", "shortest-first", "--aging", "5s"), {"order_policy": 1, "aging_s": 5.0}),
        (("--order", "deadline", "--ttft-target", "2s"), {"order_policy": 2, "ttft_target_s": 2.0}),
        (("--budget-policy", "step-time-target", "--budget-target", "25ms"), {"budget_policy": 1}),
        (("--budget-policy", "pressure", "--pressure-tokens", "300"), {"budget_policy": 2, "pressure_tokens": 300}),
        (("--max-running", "64"), {"max_running": 64}),
    ],
)
def test_every_knob_reaches_the_twin(
    mix: Path, flags: tuple[str, ...], setting: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = _json(capsys, *_base("simulate", mix))["rows"][0]
    row = _json(capsys, *_base("simulate", mix), *flags)["rows"][0]
    assert setting.items() <= row["setting"].items()
    # At this load a sequence cap of 64 never binds; everything else shows.
    assert (
        flags[0] == "--max-running"
        or row["longest_wait_s"] != plain["longest_wait_s"]
        or (row["gap_p99_s"] != plain["gap_p99_s"])
    )


def test_a_request_that_never_fits_shows_never_in_every_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traffic = tmp_path / "large.csv"
    traffic.write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,5000,10\n2,100,10\n")
    words = (*_base("simulate", traffic), "--kv-tokens", "2000", "--ttft-p99", "2s")
    row = _json(capsys, *words)["rows"][0]
    assert row["refused"] == 1
    assert row["ttft_p99_s"] == row["longest_wait_s"] == row["margins"][0]["measured_s"] == "inf"
    assert rooftune(*words, "--quiet") == 0
    (output,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("longest wait")]
    assert output.split()[-2:] == ["never", "3"]


def test_the_cap_of_long_prompts_reaches_the_twin(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*_base("simulate", mix), "--step-tokens", "512", "--chunk-cap", "256")
    held = ("--max-long-partial-prefills", "1", "--long-prompt-tokens", "1000", "--pass-over-max", "5s")
    plain, capped = (_json(capsys, *words, *more)["rows"][0] for more in ((), held))
    assert capped["setting"].items() >= {"long_prompt_tokens": 1000, "pass_over_max_s": 5.0}.items()
    assert capped["ttft_p95_s"] != plain["ttft_p95_s"]


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        (("--step-tokens", "100"), "sequence cap (256)"),
        (("--step-tokens", "9000"), "within 1..8192"),
        (("--order", "random"), "shortest-first"),
        (("--order", "deadline"), "--ttft-target"),
        (("--aging", "5s"), "--order"),
        (("--budget-policy", "pressure"), "--pressure-tokens"),
        (("--budget-target", "5ms"), "step-time-target"),
        (("--chunk-cap", "-1"), "--chunk-cap"),
        (
            ("--budget-policy", "pressure", "--pressure-tokens", "9000"),
            "--pressure-tokens is 9000, must be below the token budget (2048)",
        ),
        (
            ("--budget-policy", "step-time-target", "--budget-target", "20ms", "--budget-floor", "2048"),
            "--budget-floor is 2048, must be below the token budget (2048)",
        ),
        (("--long-prompt-tokens", "4000"), "--long-prompt-tokens does nothing without --max-long-partial-prefills"),
        (
            ("--long-prompt-tokens", "4000", "--max-long-partial-prefills", "0"),
            "--long-prompt-tokens does nothing without --max-long-partial-prefills",
        ),
        (("--max-long-partial-prefills", "2"), "--max-long-partial-prefills needs --long-prompt-tokens"),
        (("--pass-over-max", "5s"), "--pass-over-max does nothing without --max-partial-prefills or"),
        (("--adaptive-chunk-cap", "on"), "--adaptive-chunk-cap does nothing without --chunk-cap"),
        (("--max-running", "300"), "1..256"),
    ],
)
def test_bad_setting_is_one_line(
    mix: Path, flags: tuple[str, ...], needed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rooftune(*_base("simulate", mix), *flags, "--quiet") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert needed in output.err
    assert output.err.count("\n") == 1
