"""vLLM's own budget and sequence cap: by its rules here, and against its code where it is installed."""

import json
import random
import subprocess
from pathlib import Path

import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.ports.vllm.boot import GIB, Batch, Card, Platform, Start, Usage, default_batch

H100 = Card(80 * GIB, "NVIDIA H100 80GB HBM3")
A100 = Card(80 * GIB, "NVIDIA A100-SXM4-80GB")
B200 = Card(180 * GIB, "NVIDIA B200")
RTX4090 = Card(25_250_627_584, "NVIDIA GeForce RTX 4090")
CPU = Card(64 * GIB, "", Platform.CPU)
LONG = 131_072


@pytest.mark.parametrize(
    ("card", "usage", "expected"),
    [
        (B200, Usage.SERVER, Batch(16_384, 1024)),
        (B200, Usage.LLM, Batch(16_384, 1024)),
        (H100, Usage.SERVER, Batch(8192, 1024)),
        (H100, Usage.LLM, Batch(16_384, 1024)),
        (A100, Usage.SERVER, Batch(2048, 256)),
        (A100, Usage.LLM, Batch(8192, 256)),
        (RTX4090, Usage.SERVER, Batch(2048, 256)),
        (Card(0), Usage.SERVER, Batch(2048, 256)),
        (CPU, Usage.SERVER, Batch(2048, 128)),
        (CPU, Usage.LLM, Batch(4096, 256)),
        (Card(0, "V6E", Platform.TPU), Usage.SERVER, Batch(1024, 256)),
        (Card(0, "V5P", Platform.TPU), Usage.LLM, Batch(512, 256)),
    ],
)
def test_the_card_decides(card: Card, usage: Usage, expected: Batch) -> None:
    assert default_batch(card, Start(model_tokens=LONG, usage=usage)) == expected


def test_other_inputs_change_the_defaults() -> None:
    assert default_batch(CPU, Start(model_tokens=LONG, world_size=2)) == Batch(4096, 256)
    assert default_batch(H100, Start(model_tokens=LONG, throughput=True)) == Batch(16_384, 2048)
    assert default_batch(H100, Start(model_tokens=LONG, throughput=True, step_tokens=512)) == Batch(512, 512)
    assert default_batch(RTX4090, Start(model_tokens=LONG, chunking=False)) == Batch(LONG, 256)
    assert default_batch(RTX4090, Start(model_tokens=1024, chunking=False)) == Batch(2048, 256)
    assert default_batch(RTX4090, Start(model_tokens=8192, prefix_item_tokens=2520)) == Batch(2520, 256)
    assert default_batch(RTX4090, Start(model_tokens=4, sequences=8)) == Batch(32, 8), "sequences x model length"
    assert default_batch(H100, Start(model_tokens=LONG, batched_dp=True)) == Batch(256, 256)
    assert default_batch(H100, Start(model_tokens=LONG, sequences=4000)) == Batch(8192, 4000), "the operator's stay"


@pytest.mark.parametrize(
    "bad", [{"model_tokens": 0}, {"world_size": 0}, {"step_tokens": 0}, {"sequences": 0}, {"prefix_item_tokens": -1}]
)
def test_bad_values_are_named(bad: dict[str, int]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        Start(**({"model_tokens": 10} | bad))  # type: ignore[arg-type]  # numbers for numbers
    with pytest.raises(InputError, match="memory_bytes"):
        Card(-1)


# Runs inside vLLM's environment: its own functions on a card, a model and a parallel layout that are made up.
ASK = """
import json, sys
from types import SimpleNamespace as Made
import vllm.engine.arg_utils as arg_utils
from vllm.usage.usage_lib import UsageContext

class Platform:
    def __init__(self, case): self.case = case
    def get_device_total_memory(self): return self.case["memory"]
    def get_device_name(self): return self.case["name"]
    def is_tpu(self): return self.case["platform"] == "tpu"
    def is_cpu(self): return self.case["platform"] == "cpu"

answers = []
for case in json.load(sys.stdin):
    arg_utils.current_platform = Platform(case)
    self = Made(
        pipeline_parallel_size=1, tensor_parallel_size=case["world"], max_num_batched_tokens=case["tokens"],
        max_num_seqs=case["sequences"], performance_mode="throughput" if case["throughput"] else "balanced",
        enable_chunked_prefill=case["chunking"], get_batch_defaults=arg_utils.EngineArgs.get_batch_defaults,
        _get_min_mm_batched_tokens=lambda config, case=case: (case["item"], "image") if case["item"] else None,
    )
    model = Made(max_model_len=case["model"], is_multimodal_model=case["item"] > 0, is_mm_prefix_lm=True, model="m")
    usage = UsageContext.OPENAI_API_SERVER if case["usage"] == "server" else UsageContext.LLM_CLASS
    arg_utils.EngineArgs._set_default_max_num_seqs_and_batched_tokens_args(
        self, usage, model, Made(use_batched_dp_moe=case["dp"]))
    answers.append([self.max_num_batched_tokens, self.max_num_seqs])
print(json.dumps(answers))
"""


@pytest.mark.vllm
def test_every_rule_is_vllms_own(vllm_python: Path) -> None:
    chance = random.Random(7)
    cases = []
    for _ in range(400):
        platform = chance.choice(["gpu", "gpu", "gpu", "cpu", "tpu"])
        names = ["V6E", "V5E", "V5P"] if platform == "tpu" else ["NVIDIA H100", "NVIDIA A100-SXM4-80GB", "L4", ""]
        cases.append(
            {
                "memory": chance.choice([0, 24, 48, 69, 70, 80, 141, 159, 160, 288]) * GIB,
                "name": chance.choice(names),
                "platform": platform,
                "world": chance.choice([1, 2, 8]),
                "usage": chance.choice(["server", "llm"]),
                "throughput": chance.random() < 0.3,
                "chunking": chance.random() < 0.8,
                "dp": chance.random() < 0.1,
                "item": chance.choice([0, 0, 300, 5000, 40_000]),
                "model": chance.choice([1, 7, 512, 8192, 131_072]),
                "tokens": chance.choice([None, None, 1, 700, 20_000]),
                "sequences": chance.choice([None, None, 1, 16, 3000]),
            }
        )
    process = subprocess.run(
        [vllm_python, "-c", ASK], input=json.dumps(cases), capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr[-2000:]
    theirs = json.loads(process.stdout.splitlines()[-1])
    for case, answer in zip(cases, theirs, strict=True):
        card = Card(case["memory"], case["name"], Platform(case["platform"]))
        start = Start(
            model_tokens=case["model"],
            usage=Usage(case["usage"]),
            world_size=case["world"],
            throughput=case["throughput"],
            chunking=case["chunking"],
            prefix_item_tokens=case["item"],
            batched_dp=case["dp"],
            step_tokens=case["tokens"],
            sequences=case["sequences"],
        )
        ours = default_batch(card, start)
        assert [ours.ceiling_tokens, ours.sequences] == answer, case
