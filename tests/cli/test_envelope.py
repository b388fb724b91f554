"""``rooftune envelope``: vLLM's own default, the price of a ceiling, the flags, and the exit codes."""

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from rooftune.policies.commands import COMMAND_GROUP
from rooftune.tuner.cli.main import main

POINTS = {"envelope": EntryPoint("envelope", "rooftune.tuner.cli.envelope:COMMAND", COMMAND_GROUP)}
RTX4090 = ("--vllm", "0.32.0", "--card-memory", "24564MiB", "--card-name", "NVIDIA GeForce RTX 4090")
RTX4090 += ("--model-tokens", "8192")
QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip


class Ask:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str]:
        code = main(["envelope", *words], POINTS)
        output = self._capsys.readouterr()
        return code, output.out + output.err

    def json(self, *words: str) -> tuple[int, dict[str, Any]]:
        code, text = self(*words, "--json")
        document = json.loads(text)
        assert document["schema"] == "rooftune.envelope" and document["version"] == 1
        return code, document


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    return Ask(capsys)


@pytest.mark.parametrize(
    ("words", "tokens", "sequences"),
    [
        (("--card-memory", "24GiB"), 2048, 256),
        (("--card-memory", "24GiB", "--usage", "llm"), 8192, 256),
        (("--card-memory", "80GiB", "--card-name", "NVIDIA H100 80GB HBM3"), 8192, 1024),
        (("--card-memory", "80GiB", "--card-name", "NVIDIA A100-SXM4-80GB"), 2048, 256),
        (("--card-memory", "192GiB"), 16_384, 1024),
        (("--card-memory", "24GiB", "--throughput"), 4096, 512),
        (("--platform", "cpu", "--world-size", "2"), 4096, 256),
    ],
)
def test_vllms_own_default(ask: Ask, words: tuple[str, ...], tokens: int, sequences: int) -> None:
    code, found = ask.json("--vllm", "0.32.0", "--model-tokens", "32768", *words)
    assert code == 0 and found["advice"] is None
    assert found["default"] == {"ceiling_tokens": tokens, "sequences": sequences}


def test_case_9_two_starts_price_a_ceiling_and_the_flags_are_exact(ask: Ask) -> None:
    """RTX 4090, Qwen3-8B: 40,464 tokens of KV cache under 2,048 and 36,720 under 8,192."""
    code, text = ask(*RTX4090, "--boot", "2048:40,464", "--boot", "8192:36720", "--want", "8192")
    assert code == 0
    lines = text.splitlines()
    assert "--max-num-batched-tokens 2048 --max-num-seqs 256" in lines[0]
    assert lines[1] == "start with: --max-num-batched-tokens 8192 --max-num-scheduled-tokens 2048"
    assert "3744 tokens" in lines[2] and "9.3 %, 234 blocks; measured" in lines[2] and lines[2].endswith("36720")


def test_case_9_one_start_and_the_models_shape_estimate_it(ask: Ask, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN3_8B))
    words = (*RTX4090, "--boot", "2048:40464", "--model-config", str(config), "--want", "8192", "--budget", "512")
    code, found = ask.json(*words)
    assert code == 0 and found["advice"]["basis"] == "geometry"
    assert found["advice"]["kv_tokens_lost"] == pytest.approx(3744, rel=0.1)
    assert found["advice"]["flags"][-2:] == ["--max-num-scheduled-tokens", "512"]
    config.write_text(json.dumps(QWEN3_8B | {"num_hidden_layers": "many"}))
    code, text = ask(*words)
    assert code == 2 and "num_hidden_layers" in text and "'many'" in text and text.count("\n") == 1


def test_case_9_without_room_for_one_prompt_the_advice_is_no(ask: Ask) -> None:
    code, text = ask(*RTX4090, "--boot", "2048:40464", "--boot", "8192:36720", "--want", "65536")
    assert code == 1 and "do not" in text


def test_case_10_blocks_lost_and_a_ceiling_that_ended_a_start(ask: Ask) -> None:
    """2,241 blocks at 100 tokens, 2,196 at 2,048; 131,072 failed at start."""
    words = (*RTX4090, "--boot", f"2048:{2196 * 16}", "--boot", f"100:{2241 * 16}", "--ended", "131072")
    code, found = ask.json(*words, "--want", "8192")
    assert code == 0 and found["advice"]["kv_blocks_lost"] == 142 and found["objections"] == []
    code, found = ask.json(*words, "--want", "131072")
    assert code == 1
    assert [(one["problem"], one["bound"]) for one in found["objections"]][-1] == ("above_learnt_bound", 131_071)


def test_an_old_version_lacks_the_flag_and_a_multimodal_item_must_fit(ask: Ask) -> None:
    boots = ("--boot", "2048:40464", "--boot", "8192:36720")
    old = ("--vllm", "0.12.0", "--card-memory", "24GiB", "--model-tokens", "8192", *boots, "--want", "8192")
    code, text = ask(*old)
    assert code == 0 and "start with: --max-num-batched-tokens 8192\n" in text and "lacks" in text
    code, text = ask(*RTX4090, *boots, "--want", "8192", "--budget", "512", "--item-tokens", "767")
    assert code == 1 and "below item: --max-num-scheduled-tokens 512, bound 767" in text


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("--vllm", "newest", "--model-tokens", "8192", "--card-memory", "24GiB"), "'newest'"),
        (("--vllm", "9.9", "--model-tokens", "8192", "--card-memory", "24GiB"), "its rules are not known"),
        (("--vllm", "0.32.0", "--model-tokens", "8192"), "--card-memory is missing"),
        (("--vllm", "0.32.0", "--model-tokens", "8192", "--card-memory", "24"), "80GiB"),
        (("--vllm", "0.32.0", "--model-tokens", "0", "--card-memory", "24GiB"), "--model-tokens"),
        ((*RTX4090, "--usage", "both"), "one of server, llm"),
        ((*RTX4090, "--boot", "2048:40464"), "--boot goes with --want"),
        ((*RTX4090, "--want", "8192"), "--want needs the start of today"),
        ((*RTX4090, "--want", "8192", "--boot", "2048"), "CEILING:KV_TOKENS"),
        ((*RTX4090, "--want", "8192", "--boot", "2048:40464"), "two starts"),
        ((*RTX4090, "--want", "8192", "--boot", "2048:1", "--model-config", "/no/such"), "cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_2(ask: Ask, words: tuple[str, ...], output: str) -> None:
    code, text = ask(*words)
    assert code == 2 and output in text and text.count("\n") == 1, text
