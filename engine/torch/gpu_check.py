"""``make gpu-check``: compares our two attentions on a CUDA card and measures step time by tokens.

    python -m rooftune.engine.torch.gpu_check [--device cuda] [--size auto|tiny|1b|3b|8b] [--seconds S] [--out DIR]

A model with random weights stands in for a real one: a step costs what its shape costs, whatever the weights say.
The measured steps go to DIR/steps.csv, and ``rooftune fit`` says where the knee is, with its interval.
"""

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from rooftune.engine.step import Segment, StepBatch
from rooftune.engine.torch import attention
from rooftune.engine.torch.get_model import quiet
from rooftune.engine.torch.load import (
    DTYPES,
    auto_kv_blocks,
    choose_device,
    choose_dtype,
    free_bytes,
    kv_bytes_per_token,
    make_runner,
)
from rooftune.engine.torch.make_model import SHAPES, Shape, llama_config
from rooftune.engine.torch.runner import TorchRunner
from rooftune.policies.errors import RooftuneError, bad_value
from rooftune.policies.step_time import chunk_attention_work

BLOCK_TOKENS = 16
MODEL_TOKENS = 16_384
MOST_KV_TOKENS = 288_000
FIRST_WARM_STEPS = 3
WARM_STEPS = 1
ROUND_STEPS = 3
# Two kernels add in another order, in 16 bits, through all layers; a wrong mask is off by whole deviations.
KERNELS_DIFFER = 0.25


# vocab_tokens as in real models, because logits are part of a step.
SIZES = {
    "tiny": SHAPES["tiny"],
    "1b": Shape(layers=16, hidden=2048, inner=8192, heads=32, kv_heads=8, vocab_tokens=128_256),
    "3b": Shape(layers=28, hidden=3072, inner=8192, heads=24, kv_heads=8, vocab_tokens=128_256),
    "8b": Shape(layers=32, hidden=4096, inner=14_336, heads=32, kv_heads=8, vocab_tokens=128_256),
}


Size = tuple[int, int]  # of a segment: its tokens, and the position of the first


@dataclass(frozen=True)
class Kind:
    """What one measured step computes: ``decodes`` with ``context`` KV entries each, and one chunk behind ``prior``."""

    decodes: int
    context: int
    chunk: int
    prior: int = 0

    @property
    def sizes(self) -> list[Size]:
        chunk = [(self.chunk, self.prior)] if self.chunk else []
        return [(1, self.context)] * self.decodes + chunk

    @property
    def computed_tokens(self) -> int:
        return self.decodes + self.chunk

    @property
    def kv_tokens(self) -> int:
        return self.decodes * (self.context + BLOCK_TOKENS) + self.chunk + self.prior + BLOCK_TOKENS


KINDS = (
    *(Kind(decodes, context, 0) for decodes in (1, 4, 16, 32, 64, 128, 256) for context in (63, 1023)),
    *(Kind(0, 0, chunk) for chunk in (16, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 8192)),
    *(Kind(0, 0, chunk, prior) for chunk in (256, 1024) for prior in (2048, 8192)),
    *(Kind(32, 255, chunk) for chunk in (32, 96, 224, 480, 992, 2016, 4064)),
)


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0: all is well; 1: the attentions differ; others as in every command."""
    parser = argparse.ArgumentParser(
        prog="python -m rooftune.engine.torch.gpu_check", description="the engine on a CUDA card"
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a dry run (default: %(default)s)")
    parser.add_argument("--size", default="auto", choices=("auto", *SIZES), help="default: the largest that fits")
    parser.add_argument("--seconds", type=float, default=90.0, help="for measuring (default: %(default)s)")
    parser.add_argument("--most-tokens", type=int, default=8192, metavar="N", help="in a step (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"), help="default: %(default)s")
    arguments = parser.parse_args(words)
    quiet()
    try:
        return _check(choose_device(arguments.device), arguments)
    except RooftuneError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return error.exit_code


def _check(device: torch.device, arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    if not 0.0 < arguments.seconds <= 3600.0:
        raise bad_value("--seconds", arguments.seconds, "above 0 and at most 3600", "90 is usual")
    if arguments.most_tokens < 256:
        raise bad_value("--most-tokens", arguments.most_tokens, "at least 256", "8192 shows most")
    dtype = choose_dtype("auto", device)
    name = _fitting(device) if arguments.size == "auto" else arguments.size
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (a dry run)"
    print(f"torch {torch.__version__} on {card}; Llama of size {name}, random weights, {dtype}")
    model = random_model(SIZES[name], device, dtype)
    block_bytes = BLOCK_TOKENS * kv_bytes_per_token(model.config, dtype)
    blocks = min(auto_kv_blocks(device, block_bytes, MODEL_TOKENS, BLOCK_TOKENS), MOST_KV_TOKENS // BLOCK_TOKENS)
    runner = make_runner(model, name=name, kv_blocks=blocks, block_tokens=BLOCK_TOKENS)
    facts = runner.facts
    print(f"{facts.parameters / 1e9:.2f} billion parameters, {facts.kv_tokens} tokens of KV")
    worst = kernels_differ(runner)
    if worst is None:
        print("attention: a call for each segment (no variable-length kernel for this device and dtype)")
    else:
        print(f"attention: variable-length kernel; largest difference from calls for each segment {worst:.4f}")
        if worst > KERNELS_DIFFER:
            print(f"gpu-check: they differ by more than {KERNELS_DIFFER}", file=sys.stderr)
            return 1
    measured = measure(runner, arguments.seconds, arguments.most_tokens)
    print(table(measured))
    out.mkdir(parents=True, exist_ok=True)
    write_steps(out / "steps.csv", measured)
    return _fit(out)


def _fitting(device: torch.device) -> str:
    """The largest size whose weights take at most half of the free memory."""
    free = free_bytes(device)
    for name in ("8b", "3b", "1b"):
        if 2 * 2 * random_model(SIZES[name], torch.device("meta"), torch.bfloat16).num_parameters() <= free:
            return name
    return "tiny"


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Made on the device at once: 8 billion random numbers take a CPU minutes."""
    config = llama_config(shape, shape.vocab_tokens, MODEL_TOKENS)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_step(sizes: Iterable[Size], vocab_tokens: int, chance: random.Random, held: int | None = None) -> StepBatch:
    """Segments with separate blocks for every request, so that no cache holds another's.

    held: blocks of each request; None: as many as it needs.
    """
    segments, at = list[Segment](), 0
    for tokens, start in sizes:
        blocks = held or -(-(start + tokens) // BLOCK_TOKENS)
        token_ids = [chance.randrange(vocab_tokens) for _ in range(tokens)]
        segments.append(Segment(token_ids, start, list(range(at, at + blocks)), sample=True))
        at += blocks
    return StepBatch(tuple(segments))


@torch.inference_mode()
def kernels_differ(runner: TorchRunner) -> float | None:
    """Largest difference of two logits, in standard deviations; None where there is but one attention."""
    chance = random.Random(1)
    vocab = runner.facts.vocab_tokens
    prompts = (5, 16, 100, 257, 600)
    first = make_step(((tokens, 0) for tokens in prompts), vocab, chance, held=40)
    mixed = make_step(zip((1, 33, 1, 20, 1), prompts, strict=True), vocab, chance, held=40)
    logits = []
    queries = torch.empty(1, 1, SIZES["1b"].hidden // SIZES["1b"].heads, dtype=DTYPES[runner.facts.dtype])
    if not attention.has_varlen_kernel(queries.to(runner.facts.device)):
        return None
    for allowed in (True, False):
        attention.allow_varlen = allowed
        try:
            runner.run(first)
            found = runner.forward(runner.prepare(mixed))
        finally:
            attention.allow_varlen = True
        assert found is not None
        logits.append(found.float())
    return float((logits[0] - logits[1]).abs().max() / logits[1].std())


def measure(runner: TorchRunner, seconds: float, most_tokens: int) -> dict[Kind, list[float]]:
    """Durations (s) of steps of every kind that fits, in rounds of random order until the time is up; two at least."""
    fits = [kind for kind in KINDS if kind.computed_tokens <= most_tokens and kind.kv_tokens <= runner.facts.kv_tokens]
    chance = random.Random(0)
    measured: dict[Kind, list[float]] = {kind: [] for kind in fits}
    ends_s = time.perf_counter() + seconds
    rounds = 0
    while rounds < 2 or time.perf_counter() < ends_s:
        for kind in chance.sample(fits, len(fits)):
            step = make_step(kind.sizes, runner.facts.vocab_tokens, chance)
            # The first of a kind comes out of another kind's caches; the very first also pays for choosing kernels.
            for _ in range(FIRST_WARM_STEPS if rounds == 0 else WARM_STEPS):
                runner.run(step)
            for _ in range(ROUND_STEPS):
                begun_s = time.perf_counter()
                runner.run(step)  # returns when the tokens are on this side: nothing is left on the device
                measured[kind].append(time.perf_counter() - begun_s)
        rounds += 1
    return measured


def table(measured: dict[Kind, list[float]]) -> str:
    """Median step time by kind."""
    lines = ["tokens  decodes  context  chunk  prior   median ms  steps"]
    for kind, durations_s in sorted(measured.items(), key=lambda item: (item[0].computed_tokens, item[0].context)):
        lines.append(
            f"{kind.computed_tokens:6d}  {kind.decodes:7d}  {kind.context:7d}  {kind.chunk:5d}  {kind.prior:5d}  "
            f"{1e3 * median(durations_s):10.3f}  {len(durations_s):5d}"
        )
    return "\n".join(lines)


def write_steps(path: Path, measured: dict[Kind, list[float]]) -> None:
    """The step-sample file that ``rooftune fit`` reads, version 1."""
    lines = [
        "# rooftune-steps 1",
        "duration_s,prefill_tokens,decode_tokens,sequences,context_decode_tokens,context_prefill_tokens,attention_work",
    ]
    for kind, durations_s in measured.items():
        sequences = kind.decodes + (1 if kind.chunk else 0)
        work = chunk_attention_work(kind.chunk, kind.prior)
        counts = f"{kind.chunk},{kind.decodes},{sequences},{kind.decodes * kind.context},{kind.prior},{work:g}"
        lines += [f"{duration_s:.9g},{counts}" for duration_s in durations_s]
    path.write_text("\n".join(lines) + "\n")


def _fit(out: Path) -> int:
    """Coefficients and knee by ``rooftune fit``, in a process of its own: the engine knows nothing of the tuner."""
    rooftune = Path(sys.executable).with_name("rooftune")
    words = ["fit", "--steps", str(out / "steps.csv"), "--out", str(out / "model.json")]
    if not rooftune.exists():
        line = " ".join(words)
        print(f"gpu-check: no {rooftune}; install rooftune[tuner] and run: rooftune {line}", file=sys.stderr)
        return 2
    print(f"rooftune {' '.join(words)}", flush=True)
    return subprocess.run([str(rooftune), *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
