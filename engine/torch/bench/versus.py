"""Bench ``engine-vs-transformers``: the same requests through our loop and through transformers' continuous batching.

One model, one dtype, one budget, greedy, the same prompts and output lengths, all handed over at once. Theirs runs as
its documentation has it for requests of different lengths: ``continuous_batching_context_manager`` and
``add_request``, kept between runs, in inference mode, with the page size that costs it least, found beforehand in this
very process. Runs are paired: each pair has prompts of its own, so that no prefix cache helps either side, and the two
sides take turns at going first. Figures are medians of the pairs' ratios with their interval (95 %), by the clock and,
since other processes' load falls on one run more than on another, by the CPU time of the whole process.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from rooftune.engine.interface import GenerationRequest, TokenEvent
from rooftune.engine.options import EngineOptions
from rooftune.engine.running import RunningEngine
from rooftune.engine.torch.bench.models import bench_model
from rooftune.engine.torch.load import choose_dtype, load_runner
from rooftune.policies.commands import Figure
from rooftune.policies.quantiles import median_interval
from rooftune.policies.request import Setting

BUDGET_TOKENS = 512
KV_TOKENS = 32_768
LONGEST_WAIT_S = 1800.0
# No new pair after this long, once there are enough for a median: a slow machine measures less, and still ends.
PAIRS_S = 300.0
LEAST_PAIRS = 3


@dataclass(frozen=True)
class Ran:
    """One run. cpu_s: CPU time of the whole process; answers: in the order of the requests."""

    seconds: float
    cpu_s: float
    answers: list[list[int]]

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.answers))


def bench(short: bool) -> Iterator[Figure]:
    """short: a made model, whose steps are mostly overhead, and one page size; else SmolLM2."""
    with bench_model("tiny" if short else None) as folder:
        yield from compare(folder, *(7, 12, PAGE_TOKENS[:1]) if short else (5, 16, PAGE_TOKENS))


def compare(folder: Path, pairs: int, requests: int, page_tokens: Sequence[int]) -> Iterator[Figure]:
    """Figures of ``pairs`` paired runs on the model in ``folder``; fewer where they take more than PAIRS_S."""
    dtype = choose_dtype("auto", torch.device("cpu"))
    ours = Ours(folder)
    warm = mixed_requests(len(CLASSES), ours.vocab_tokens, seed=0)
    theirs = best_of_theirs(folder, dtype, warm, page_tokens)
    ours.run(warm)  # as the other side has by now
    pairs_ran: list[tuple[Ran, Ran]] = []
    begun_s = time.perf_counter()
    while len(pairs_ran) < pairs and (len(pairs_ran) < LEAST_PAIRS or time.perf_counter() - begun_s < PAIRS_S):
        work = mixed_requests(requests, ours.vocab_tokens, seed=len(pairs_ran) + 1)
        if len(pairs_ran) % 2 == 0:
            mine, other = ours.run(work), theirs.run(work)
        else:
            other, mine = theirs.run(work), ours.run(work)
        if mine.output_tokens != other.output_tokens:
            raise RuntimeError(f"{mine.output_tokens} tokens against {other.output_tokens}: not the same work")
        pairs_ran.append((mine, other))
    ours.close()
    theirs.close()
    yield from figures(pairs_ran)


def figures(pairs_ran: list[tuple[Ran, Ran]]) -> Iterator[Figure]:
    """Ours and theirs, at least one pair."""
    tokens = sum(mine.output_tokens for mine, _ in pairs_ran)
    mine_s, other_s = (sum(pair[side].seconds for pair in pairs_ran) for side in (0, 1))
    yield Figure("tokens_per_s", tokens / mine_s, "1/s", baseline=tokens / other_s)
    yield from _ratio("tokens_per_s_ratio", [other.seconds / mine.seconds for mine, other in pairs_ran])
    yield from _ratio("tokens_per_cpu_s_ratio", [other.cpu_s / mine.cpu_s for mine, other in pairs_ran])
    yield Figure("pairs", len(pairs_ran), "runs of each")
    # In 16 bits two correct answers differ where the two best tokens are nearly tied; in float32 all would be equal.
    answers = [(one, two) for mine, other in pairs_ran for one, two in zip(mine.answers, other.answers, strict=True)]
    yield Figure("same_answers", sum(one == two for one, two in answers) / len(answers), "of all")


def _ratio(name: str, ratios: list[float]) -> Iterator[Figure]:
    low, middle, high = median_interval(ratios)
    yield Figure(name, middle, "times theirs")
    yield Figure(f"{name}_low", low, "times theirs")
    yield Figure(f"{name}_high", high, "times theirs")


# Least and most prompt tokens, least and most output tokens.
CLASSES = (
    (20, 80, 32, 96),  # short questions
    (300, 600, 32, 64),  # questions with passages to answer from
    (900, 1500, 16, 32),  # long documents
    (30, 100, 128, 192),  # long answers
)


def mixed_requests(count: int, vocab_tokens: int, seed: int) -> list[GenerationRequest]:
    """The four classes in turn, each request with the exact number of tokens to produce."""
    chance = random.Random(seed)
    work = []
    for index in range(count):
        least, most, least_output, most_output = CLASSES[index % len(CLASSES)]
        prompt = [chance.randrange(3, vocab_tokens) for _ in range(chance.randint(least, most))]
        work.append(GenerationRequest(prompt, chance.randint(least_output, most_output), ignore_eos=True))
    return work


class Ours:
    """Our engine with its own thread, as ``rooftune serve`` runs it, without the HTTP."""

    def __init__(self, folder: Path) -> None:
        runner = load_runner(str(folder), device="cpu", kv_blocks=KV_TOKENS // 16)
        self.vocab_tokens = runner.facts.vocab_tokens
        self._engine = RunningEngine(runner, EngineOptions(Setting(step_tokens=BUDGET_TOKENS)))
        self._engine.start()

    def run(self, work: list[GenerationRequest]) -> Ran:
        answers: list[list[int]] = [[] for _ in work]
        done, left = Event(), len(work)

        def hear(answer: list[int], event: TokenEvent) -> None:
            nonlocal left
            answer.extend(event.token_ids)
            if event.finished is not None:
                left -= 1
                if left == 0:
                    done.set()

        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        for request, answer in zip(work, answers, strict=True):
            self._engine.submit(request, partial(hear, answer))
        if not done.wait(LONGEST_WAIT_S):
            raise RuntimeError(f"our engine has not answered within {LONGEST_WAIT_S:g} s")
        return Ran(time.perf_counter() - begun_s, time.process_time() - begun_cpu_s, answers)

    def close(self) -> None:
        self._engine.stop()


# What matters on a CPU beside the budget. Its default page of 256 tokens is meant for CUDA kernels, and of its two
# attentions without flash the eager one multiplies every query with every key: both take several times as long here.
PAGE_TOKENS = (16, 32, 64)


class Theirs:
    """transformers' own continuous batching, its manager kept between runs."""

    def __init__(self, model: PreTrainedModel, page_tokens: int) -> None:
        config = ContinuousBatchingConfig(
            page_size=page_tokens, num_blocks=KV_TOKENS // page_tokens, max_batch_tokens=BUDGET_TOKENS
        )
        with torch.inference_mode():  # its thread takes the mode of the thread that starts it
            self._context = model.continuous_batching_context_manager(
                generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=256),
                continuous_batching_config=config,
            )
            self._manager = self._context.__enter__()

    def run(self, work: list[GenerationRequest]) -> Ran:
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        names = [
            self._manager.add_request(
                list(request.prompt_token_ids), max_new_tokens=request.max_tokens, eos_token_id=-1
            )
            for request in work
        ]
        answers: dict[str, list[int]] = {}
        while len(answers) < len(names):
            result = self._manager.get_result(timeout=1.0)
            if result is not None and result.is_finished():
                answers[result.request_id] = list(result.generated_tokens)
            elif result is not None and result.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
            if not self._manager.is_running() or time.perf_counter() - begun_s > LONGEST_WAIT_S:
                raise RuntimeError("transformers' continuous batching ended or stalled")
        in_order = [answers[name] for name in names]
        return Ran(time.perf_counter() - begun_s, time.process_time() - begun_cpu_s, in_order)

    def close(self) -> None:
        self._context.__exit__(None, None, None)


def best_of_theirs(folder: Path, dtype: torch.dtype, work: list[GenerationRequest], pages: Sequence[int]) -> Theirs:
    """With the page size that costs least on ``work``: each runs twice, with other prompts, and the second counts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    cpu_s = {}
    for page_tokens in pages if len(pages) > 1 else ():
        theirs = Theirs(model, page_tokens)
        theirs.run(work)
        others = [replace(one, prompt_token_ids=one.prompt_token_ids[::-1]) for one in work]
        cpu_s[page_tokens] = theirs.run(others).cpu_s
        theirs.close()
    best = Theirs(model, min(cpu_s, key=cpu_s.__getitem__) if cpu_s else pages[0])
    best.run(work)
    return best
