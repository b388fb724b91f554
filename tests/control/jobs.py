"""Jobs for the child: windows made by the twin itself, so that the right answer is known."""

from dataclasses import dataclass
from typing import Any

from rooftune.policies.request import Boot, Setting
from rooftune.policies.slo import Slo, Target
from rooftune.policies.step_time import NAMED_MODELS, StepModel
from rooftune.tuner.bench.search_speed import window_part_of
from rooftune.tuner.control.job import Answer, Job, WindowPart
from rooftune.tuner.control.searcher.child import Order, encoded, order_of
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.traffic.generate import document_mix
from rooftune.tuner.traffic.workload import Traffic

MODEL = NAMED_MODELS["8b-2tbs"]
BASE = Setting(2048, max_running=128)
TTFT, GAP = Target("ttft", 2.0, 0.95), Target("gap", 0.03, 0.99)
BOUNDS = {"step_tokens": (128.0, 8192.0), "chunk_cap_tokens": (16.0, 8192.0)}
ENGINE = Engine(Boot(8192, 16, 1, 1, 0, 1), 37_500, 128)


def mix(seed: int = 1, rate_rps: float = 4.0, span_s: float = 60.0) -> Traffic:
    """Chat with one in eight long prompts."""
    return document_mix(seed, rate_rps, span_s, 8, (4_000, 8_000))


def window(traffic: Traffic, setting: Setting = BASE, model: StepModel = MODEL) -> WindowPart:
    """What an engine with this step model would have reported under ``setting``."""
    return window_part_of(simulate(traffic, ENGINE, setting, model, gap_bounds_s=[0.03]).outcomes)


def job(traffic: Traffic | None = None, **changes: Any) -> Job:
    """A job over ``traffic`` with the targets TTFT 2 s and gap 30 ms."""
    values: dict[str, Any] = {
        "window": window(mix() if traffic is None else traffic),
        "engine": ENGINE,
        "model": MODEL,
        "slo": Slo((TTFT, GAP)),
        "base": BASE,
        "boot": BASE,
        "bounds": BOUNDS,
        "trials": 30,
    }
    return Job(**{**values, **changes})


@dataclass
class InlineSearcher:
    """``Searcher`` in the calling process: the answer is ready at the first poll."""

    waiting: Job | None = None

    def ask(self, job: Job) -> bool:
        if self.waiting is not None:
            return False
        self.waiting = job
        return True

    def answer(self) -> Answer | None:
        # Imported here, so that tests that need only the jobs do not load the twin's search.
        from rooftune.tuner.control.searcher.run import answer_to

        if self.waiting is None:
            return None
        job, self.waiting = self.waiting, None
        # Encoded and decoded, as a child gets it.
        raw = encoded(Order.model_construct(number=1, job=job))
        return answer_to(order_of(raw).job, lambda stage, done, total: None)

    @property
    def busy(self) -> bool:
        return self.waiting is not None

    def close(self) -> None:
        self.waiting = None
