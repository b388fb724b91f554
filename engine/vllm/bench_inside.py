"""The measuring half of bench ``vllm-hook``, run there:
``python -m rooftune.engine.vllm.bench_inside DIR short``.

One vLLM engine in this process on a small random model. Rounds of the same requests with and without the hook follow
each other in pairs, so that a busy machine meets both. Clocks stand outside and inside whatever the hook wraps: what
lies between them is the hook's, and the clocks' own, which rounds without the hook tell.
"""

import json
import random
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from rooftune.engine.torch.make_model import Shape, random_llama, train_tokenizer
from rooftune.engine.vllm import plugin
from rooftune.engine.vllm.hook import WRAPPED, Hook
from rooftune.policies import wire

# Heads of 32, the least that vLLM takes on a CPU; steps of a few milliseconds, so that the share of the hook shows.
SHAPE = Shape(layers=3, hidden=128, inner=256, heads=4, kv_heads=2, vocab_tokens=1024)
PAIRS, ROUNDS = {"short": 6, "full": 20}, {"short": 3, "full": 12}
# Requests of a round: a few that run, as where vLLM's schedule() was first measured, and up to 32.
LOADS = {"few": {"short": 2, "full": 2}, "many": {"short": 16, "full": 64}}


def main(folder: Path, length: str) -> None:
    from vllm import LLM

    clocks = Clocks()
    clocks.inside(plugin)
    plugin.register()
    random_llama(SHAPE, SHAPE.vocab_tokens, 1, 4096).save_pretrained(folder / "model")
    train_tokenizer(SHAPE.vocab_tokens, 1, 4096).save_pretrained(folder / "model")
    llm = LLM(
        str(folder / "model"), dtype="float32", enforce_eager=True, max_model_len=4096, max_num_batched_tokens=512,
        max_num_seqs=32, enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    hook: Hook = scheduler.rooftune
    loads = {name: requests(counts[length]) for name, counts in LOADS.items()}
    play(llm, loads["many"])
    ratios = []
    for pair in range(PAIRS[length]):
        took = {}
        for with_hook in (True, False) if pair % 2 else (False, True):
            scheduler.rooftune = hook if with_hook else None
            took[with_hook] = play(llm, loads["many"])
        ratios.append(took[True] / took[False])
    clocks.outside(scheduler)
    found: dict[str, Any] = {"ratios": ratios}
    for name, work in loads.items():
        found[name] = measured(llm, hook, clocks, work, ROUNDS[length])
    push_policies(hook)
    clocks.decisions(type(hook))
    for name, work in loads.items():
        play(llm, work)
        clocks.take()
        for _ in range(ROUNDS[length]):
            play(llm, work)
        found[name]["policy"] = clocks.take()["before"]
    print(json.dumps(found), flush=True)


def measured(llm: Any, hook: Hook, clocks: "Clocks", work: list[tuple[list[int], int]], rounds: int) -> dict[str, Any]:
    """Microseconds of one load, a value a step, with the hook and (``clock``) without it; read: a value a round."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    found: dict[str, Any] = {"read": [], "clock": {}}
    reader = Reader(hook)
    reader.read()
    for round_ in range(rounds):
        for with_hook in (True, False) if round_ % 2 else (False, True):
            scheduler.rooftune = hook if with_hook else None
            play(llm, work)
            for name, values in clocks.take().items():
                (found if with_hook else found["clock"]).setdefault(name, []).extend(values)
            if with_hook:
                found["read"].append(reader.read())
    scheduler.rooftune = hook
    return found


class Reader:
    """A reader of all records."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._steps = self._requests = -1

    def read(self) -> float:
        """Microseconds."""
        desk, start_s = self._hook.desk, perf_counter()
        self._hook.fold()
        self._hook.recorder.close_all()
        while (steps := desk.steps_after(self._steps)).step:
            self._steps = steps.next
        while (ended := desk.requests_after(self._requests)).sequence:
            self._requests = ended.next
        return 1e6 * (perf_counter() - start_s)


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


class Clocks:
    """Microseconds per step: ``record`` (what the hook adds around vLLM's own), ``schedule`` (vLLM's own), ``deferred``
    (records made of notes while the model computes), ``before`` (decisions, part of record)."""

    def __init__(self) -> None:
        self._inner_s = dict.fromkeys(WRAPPED, 0.0)
        self._took: dict[str, list[float]] = {}
        self._record_us = 0.0
        self.take()

    def inside(self, module: Any) -> None:
        """Around vLLM's own methods; before the hook's subclass is made."""
        hooked = module.hooked

        def timed(base: type, *arguments: Any) -> type:
            own = type(base.__name__, (base,), {name: self._inner(name, getattr(base, name)) for name in WRAPPED})
            subclass: type = hooked(own, *arguments)
            return subclass

        module.hooked = timed

    def _inner(self, name: str, method: Any) -> Any:
        inner_s = self._inner_s

        def act(*arguments: Any) -> Any:
            start_s = perf_counter()
            answer = method(*arguments)
            inner_s[name] = perf_counter() - start_s
            return answer

        return act

    def outside(self, scheduler: Any) -> None:
        """Around the hook's."""
        for name in WRAPPED:
            setattr(scheduler, name, self._outer(name, getattr(scheduler, name)))

    def _outer(self, name: str, method: Any) -> Any:
        def act(*arguments: Any) -> Any:
            start_s = perf_counter()
            answer = method(*arguments)
            self._book(name, 1e6 * (perf_counter() - start_s), 1e6 * self._inner_s[name])
            return answer

        return act

    def _book(self, name: str, outer_us: float, inner_us: float) -> None:
        if name == "get_grammar_bitmask":
            self._took["deferred"].append(outer_us - inner_us)
            return
        self._record_us += outer_us - inner_us
        if name == "schedule":
            self._took["schedule"].append(inner_us)
        elif name == "update_from_output":  # the last part of a step
            self._took["record"].append(self._record_us)
            self._record_us = 0.0

    def decisions(self, kind: Any) -> None:
        """Around what the hook does before vLLM plans."""
        inner = kind.before

        def before(*arguments: Any) -> Any:
            start_s = perf_counter()
            answer = inner(*arguments)
            self._took["before"].append(1e6 * (perf_counter() - start_s))
            return answer

        kind.before = before

    def take(self) -> dict[str, list[float]]:
        """The values since the last call."""
        found, self._took = self._took, {name: [] for name in ("record", "schedule", "deferred", "before")}
        self._record_us = 0.0
        return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
