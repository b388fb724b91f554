"""A throw-away scheduler for runner tests: requests compute random amounts, in scattered blocks.

It needs a runner only through ``run``; what it checks against comes from transformers' own ``generate``.
"""

import random
from dataclasses import dataclass, field

from rooftune.engine.step import GREEDY, Runner, Sampling, Segment, StepBatch


@dataclass
class Request:
    """One request in flight: ``known`` tokens, of which ``computed`` have KV entries in ``blocks``."""

    prompt: list[int]
    output_tokens: int
    sampling: Sampling = GREEDY
    known: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    drops: int = 0

    def __post_init__(self) -> None:
        self.known = list(self.prompt)

    @property
    def done(self) -> bool:
        return len(self.known) == len(self.prompt) + self.output_tokens

    @property
    def output(self) -> list[int]:
        return self.known[len(self.prompt) :]


class RandomSchedule:
    """Runs requests to their end in steps drawn from ``seed``.

    most_chunk: largest chunk of a prompt. drop_share: chance, per step, that one request loses its blocks and starts
    over, at most twice, or small chunks would never end. idle_share: chance that a request sits a step out.
    """

    most_drops = 2

    def __init__(
        self, runner: Runner, seed: int, *, most_chunk: int, drop_share: float = 0.1, idle_share: float = 0.2
    ) -> None:
        self.runner = runner
        self.chance = random.Random(seed)
        self.most_chunk = most_chunk
        self.drop_share = drop_share
        self.idle_share = idle_share
        self.free = list(range(runner.facts.kv_blocks))
        self.chance.shuffle(self.free)
        self.steps = 0
        self.mixed_steps = 0

    def run(self, requests: list[Request]) -> None:
        waiting, running = list(requests), []
        while waiting or running:
            while waiting and (not running or self.chance.random() < 0.5):
                running.append(waiting.pop(0))
            self._maybe_drop(running)
            self._step(running)
            for request in [request for request in running if request.done]:
                running.remove(request)
                self._give_back(request)

    def _step(self, running: list[Request]) -> None:
        chosen = [request for request in running if self.chance.random() >= self.idle_share] or running[:1]
        self.chance.shuffle(chosen)
        size = self.runner.facts.block_tokens
        segments = []
        for request in chosen:
            missing = len(request.known) - request.computed
            take = min(missing, self.chance.randint(1, self.most_chunk))
            end = request.computed + take
            while len(request.blocks) * size < end:
                request.blocks.append(self.free.pop(self.chance.randrange(len(self.free))))
            new = request.known[request.computed : end]
            segments.append(Segment(new, request.computed, list(request.blocks), take == missing, request.sampling))
        tokens = iter(self.runner.run(StepBatch(tuple(segments))))
        self.steps += 1
        self.mixed_steps += len({len(segment.token_ids) == 1 for segment in segments}) == 2
        for request, segment in zip(chosen, segments, strict=True):
            request.computed = segment.end
            if segment.sample:
                request.known.append(next(tokens))
        assert next(tokens, None) is None, "the runner sampled more tokens than segments asked for"

    def _maybe_drop(self, running: list[Request]) -> None:
        candidates = [request for request in running if request.drops < self.most_drops]
        if candidates and self.chance.random() < self.drop_share:
            victim = self.chance.choice(candidates)
            self._give_back(victim)
            victim.computed = 0
            victim.drops += 1

    def _give_back(self, request: Request) -> None:
        self.free.extend(request.blocks)
        request.blocks = []
