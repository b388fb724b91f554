"""The measuring half of bench ``vllm-hook``, in vLLM's environment: ``python -m engine.vllm.bench_inside DIR short``.

One vLLM engine in this process on a small random model. Rounds of the same requests with and without the hook follow
each other in pairs, so that a busy machine meets both; then one round with a clock around every part of the hook.
"""

import json
import random
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from engine.torch.make_model import Shape, random_llama, train_tokenizer
from engine.vllm.hook import Hook
from engine.vllm.plugin import register
from policies import wire

# Heads of 32, the least that vLLM takes on a CPU; steps of a few milliseconds, so that the share of the hook shows.
SHAPE = Shape(layers=3, hidden=128, inner=256, heads=4, kv_heads=2, vocab_tokens=1024)
CLIENTS, PAIRS, ROUNDS = {"short": 16, "full": 64}, {"short": 6, "full": 20}, {"short": 2, "full": 8}


def main(folder: Path, length: str) -> None:
    from vllm import LLM

    register()
    random_llama(SHAPE, SHAPE.vocab_tokens, 1, 4096).save_pretrained(folder / "model")
    train_tokenizer(SHAPE.vocab_tokens, 1, 4096).save_pretrained(folder / "model")
    llm = LLM(
        str(folder / "model"), dtype="float32", enforce_eager=True, max_model_len=4096, max_num_batched_tokens=512,
        max_num_seqs=32, enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    hook: Hook = scheduler.rooftune
    work = requests(CLIENTS[length])
    play(llm, work)
    ratios = []
    for pair in range(PAIRS[length]):
        took = {}
        for with_hook in (True, False) if pair % 2 else (False, True):
            scheduler.rooftune = hook if with_hook else None
            took[with_hook] = play(llm, work)
        ratios.append(took[True] / took[False])
    scheduler.rooftune = hook
    parts = Parts(scheduler, hook)
    for _ in range(ROUNDS[length]):
        play(llm, work)
    record_us, schedule_us = parts.take("record"), parts.take("schedule")
    push_policies(hook)
    for _ in range(ROUNDS[length]):
        play(llm, work)
    found = {"record_us": record_us, "schedule_us": schedule_us, "policy_us": parts.take("before"), "ratios": ratios}
    print(json.dumps(found), flush=True)


def requests(count: int) -> list[tuple[list[int], int]]:
    chance = random.Random(3)
    sizes = [(chance.choice([20, 60, 150, 400]), chance.randint(64, 200)) for _ in range(count)]
    return [([chance.randrange(3, 500) for _ in range(tokens)], output) for tokens, output in sizes]


def play(llm: Any, work: list[tuple[list[int], int]]) -> float:
    """Seconds for all of it."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
    sampling = [SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True) for _, output in work]
    start_s = perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return perf_counter() - start_s


def push_policies(hook: Hook) -> None:
    """A budget policy that predicts and an order policy: all there is to decide."""
    model = dict.fromkeys(wire.StepConstants.model_fields, 0.0) | {"slope_s_per_token": 1e-4, "floor_s": 0.005}
    wish = {
        "lease_s": 3600.0, "expected_revision": hook.desk.book.revision, "actor": "bench", "reason": "its cost",
        "knobs": {"max_running": 16, "max_partial_prefills": 2},
        "budget_policy": {"kind": "step_time_target", "target_s": 0.02, "floor_tokens": 16, "step_model": model},
        "order_policy": {"kind": "shortest_first", "aging_s": 10.0},
    }  # fmt: skip
    answer = hook.desk.push(wire.PushRequest.model_validate(wish))
    assert isinstance(answer, wire.PushAnswer), answer


class Parts:
    """Microseconds per step: ``record`` (what is written down), ``before`` (decisions), ``schedule`` (vLLM's own)."""

    def __init__(self, scheduler: Any, hook: Hook) -> None:
        self._took: dict[str, list[float]] = {"record": [], "before": [], "schedule": []}
        self._ours_us = self._record_us = 0.0
        for name in ("before", "after", "updated", "arrived", "ended"):
            self._clocked(hook, name)
        inner, self._scheduler = scheduler.schedule, scheduler

        def schedule(*arguments: Any, **named: Any) -> Any:
            self._ours_us = 0.0
            start_s = perf_counter()
            output = inner(*arguments, **named)
            self._took["schedule"].append(1e6 * (perf_counter() - start_s) - self._ours_us)
            return output

        scheduler.schedule = schedule

    def _clocked(self, hook: Hook, name: str) -> None:
        inner = getattr(hook, name)

        def act(*arguments: Any) -> Any:
            start_s = perf_counter()
            answer = inner(*arguments)
            took_us = 1e6 * (perf_counter() - start_s)
            self._ours_us += took_us
            if name == "before":
                self._took["before"].append(took_us)
            else:
                self._record_us += took_us
            if name == "updated":  # the last part of a step
                self._took["record"].append(self._record_us)
                self._record_us = 0.0
            return answer

        act.__name__ = name
        setattr(hook, name, act)

    def take(self, name: str) -> list[float]:
        """The values since the last call."""
        found, self._took[name] = self._took[name], []
        if name == "schedule":
            self._took["before"] = []
        return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
