"""``rooftune serve`` with a real model: made, served as a process, asked with the official client."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch")

from rooftune.engine.cli import SIZES  # noqa: E402 - only where torch is
from rooftune.engine.torch.load import ModelTokenizer, load_tokenizer, read_config  # noqa: E402
from rooftune.engine.torch.make_model import SHAPES, make_model  # noqa: E402
from tests.engine.tiny import generated  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
MAIN = """
import sys
from importlib.metadata import EntryPoint
from rooftune.tuner.cli.main import main
sys.exit(main(sys.argv[1:], {"serve": EntryPoint("serve", "rooftune.engine.cli:SERVE", "rooftune.commands")}))
"""
MESSAGES = [{"role": "user", "content": "What about the little house?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "tiny"
    make_model(target, size="tiny", seed=1, max_model_tokens=512)
    return target


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    words = ["serve", "--model", str(folder), "--port", "0", "--dtype", "float32", "--max-step-tokens", "64"]
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *words, "--kv-blocks", "200"],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    watchdog = threading.Timer(300, process.kill)
    watchdog.start()
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        assert "float32 on" in lines[0] and "3200 tokens of KV, budget 64" in lines[0]
        with openai.OpenAI(base_url=lines[1].split()[-1], api_key="none", max_retries=0, timeout=120) as made:
            yield made
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def reference(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    """transformers' own greedy continuation in float32."""
    import torch
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return generated(model, prompt, tokens)


def test_greedy_answers_are_those_of_transformers(client: openai.OpenAI, folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    for prompt in ("The house", "Where is the river? " * 20):
        ids = tokenizer(prompt).input_ids
        expected = reference(folder, ids, 24)
        extra = {"ignore_eos": True, "return_token_ids": True}
        for given in (prompt, ids):
            answer = client.completions.create(
                model="tiny", prompt=given, max_tokens=24, temperature=0, extra_body=extra
            )
            assert answer.choices[0].token_ids == expected
            assert answer.usage.prompt_tokens == len(ids)
            assert answer.choices[0].text == tokenizer.decode(expected, skip_special_tokens=True)


def test_a_chat_uses_the_models_template(client: openai.OpenAI, folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, temperature=0)
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, temperature=0, stream=True)
    streamed = "".join(chunk.choices[0].delta.content for chunk in stream)
    assert whole.usage.prompt_tokens == len(ids)
    assert whole.choices[0].message.content == streamed
    expected = reference(folder, ids, 20)
    end = tokenizer.eos_token_id
    spoken = expected[: expected.index(end)] if end in expected else expected
    assert streamed == tokenizer.decode(spoken, skip_special_tokens=True)


def test_the_same_seed_gives_the_same_answer(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(model="tiny", prompt="The", max_tokens=20, temperature=1.5, seed=seed).choices[0].text
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_too_long_is_400_and_names_the_length(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="512"):
        client.completions.create(model="tiny", prompt=[1] * 500, max_tokens=13)


def test_the_servers_tokenizer_is_the_models(folder: Path) -> None:
    theirs = load_tokenizer(str(folder))
    ours = ModelTokenizer(theirs, read_config(str(folder)).vocab_size)
    for text in ("", "plain words", "ünïcode 😀 and\nlines", "<|im_start|>", "x" * 3000):
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_the_commands_sizes_are_the_supported_ones() -> None:
    assert tuple(SHAPES) == SIZES
