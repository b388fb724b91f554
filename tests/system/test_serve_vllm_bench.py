"""vLLM's own load generator works against our server, on both endpoints, and counts what we served."""

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest

from rooftune.tuner.bench.vllm_overload import BENCH_SERVE
from tests.links import import_path
from tests.system.test_serve_fake import ROOT, serving, url

pytestmark = pytest.mark.vllm

TOKENIZER = """
import sys
from rooftune.engine.torch.make_model import train_tokenizer
train_tokenizer(1024, 1, 4096).save_pretrained(sys.argv[1])
"""


def run(python: Path, code: str, *words: object) -> None:
    environment = os.environ | {"PYTHONPATH": import_path(), "HF_HUB_OFFLINE": "1"}
    command = [str(python), "-c", code, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, vllm_python: Path) -> Path:
    """A folder with a tokenizer: the load generator makes its prompts with one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    run(vllm_python, TOKENIZER, folder)
    return folder


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_bench_serve(vllm_python: Path, tokenizer: Path, tmp_path: Path, backend: str, endpoint: str) -> None:
    result = tmp_path / "result.json"
    with serving("--served-name", "mine") as (_, lines):
        words = ["--backend", backend, "--endpoint", endpoint, "--base-url", url(lines), "--model", "mine"]
        words += ["--tokenizer", str(tokenizer), "--dataset-name", "random", "--num-prompts", "12"]
        words += ["--random-input-len", "50", "--random-output-len", "9", "--request-rate", "20", "--ignore-eos"]
        run(vllm_python, BENCH_SERVE, *words, "--save-result", "--result-filename", result)
        page = httpx.get(f"{url(lines)}/metrics").text
    found = json.loads(result.read_text())
    assert (found["completed"], found["total_output_tokens"]) == (12, 12 * 9)
    # It may ask once more, to see whether the server is there.
    requests = round(values(page)["rooftune_ttft_seconds_count"])
    assert requests in (12, 13)
    assert values(page)["rooftune_output_tokens_total"] == requests * 9
    assert values(page)["rooftune_gap_seconds_count"] == requests * 8
    # Every event carried one token, so it saw every gap.
    assert sum(map(len, found.get("itls") or [[0] * 8] * 12)) == 12 * 8


def values(page: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}
