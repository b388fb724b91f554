"""What the signals look at: one window of steps and of ended requests, and the few statistics they share."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rooftune.policies import wire
from rooftune.policies.step_time import StepModel, chunk_attention_work, step_time
from rooftune.tuner.model.drift import Drift
from rooftune.tuner.model.roofline import predict
from rooftune.tuner.observe.rows import FINISHED, BoolArray, FloatArray, RequestRows, StepRows

# Fewer steps show nothing: a prompt of ordinary length takes as many.
MIN_STEPS = 50
# A p99 of fewer requests is their maximum, and one odd request alone must not raise an alarm.
MIN_REQUESTS = 30


@dataclass(frozen=True, eq=False)
class View:
    """steps and requests of one window, both of one boot of the engine; requests: those that ended in it.

    now_s: on the engine's clock. model, drift: None when there is none; then what needs them is not judged.
    """

    steps: StepRows
    requests: RequestRows
    state: wire.State
    model: StepModel | None
    drift: Drift | None
    now_s: float

    @property
    def enough_steps(self) -> bool:
        return len(self.steps) >= MIN_STEPS

    @cached_property
    def span_s(self) -> float:
        """First start to last end; 0 without steps."""
        return float(self.steps.end_s[-1] - self.steps.start_s[0]) if len(self.steps) else 0.0

    @cached_property
    def served(self) -> RequestRows:
        """Requests that finished and have a first token."""
        rows = self.requests
        return rows.select((rows.ended == FINISHED) & np.isfinite(rows.ttft_s))

    @cached_property
    def with_gaps(self) -> RequestRows:
        """Of these the ones with gaps, none torn open by a preemption: that one waits for KV, not for a step."""
        rows = self.served
        return rows.select((rows.gap_count > 0) & np.isfinite(rows.longest_gap_s) & (rows.preemptions == 0))

    @cached_property
    def above_budget(self) -> BoolArray:
        """Steps that computed more than they were allowed; decodes alone may (vLLM serves what runs)."""
        allowed = np.maximum(self.steps.budget_tokens, self.steps.decode_tokens)
        return self.steps.computed_tokens > allowed

    def value(self, knob: str) -> float:
        """The knob in force; 0 when the engine does not have it (0 is "no limit" for every cap)."""
        found = next((entry.value for entry in self.state.knobs if entry.name == knob), None)
        return 0.0 if found is None else float(found)

    @cached_property
    def predicted_s(self) -> FloatArray | None:
        """What the model says of every step, shape (n,), NaN for a step that computed nothing; None without a model."""
        if self.model is None:
            return None
        steps = self.steps
        sound = (steps.duration_s > 0.0) & (steps.sequences > 0) & (steps.sequences <= steps.computed_tokens)
        predicted_s = np.full(len(steps), np.nan)
        predicted_s[sound] = predict(self.model, steps.select(sound).samples())
        return predicted_s

    @cached_property
    def explained_s(self) -> float | None:
        """Longest step that the budgets of the window explain: the largest of them as one chunk, at the context and
        the number of requests that were there. None without a model."""
        if self.model is None or not len(self.steps):
            return None
        steps = self.steps
        budget = float(np.max(np.maximum(steps.budget_tokens, steps.decode_tokens)))
        before = float(np.max(steps.prefill_context_tokens))
        context = float(np.max(steps.decode_context_tokens)) + before
        work = chunk_attention_work(budget, before)
        return step_time(self.model, budget, float(np.max(steps.sequences)), context, work)


def thirds(values: FloatArray | np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[float, float, float]:
    """Medians of the first, the middle and the last third; needs at least three values."""
    first, middle, last = np.array_split(np.asarray(values, dtype=np.float64), 3)
    return float(np.median(first)), float(np.median(middle)), float(np.median(last))


def ranks(values: FloatArray) -> FloatArray:
    """Ranks from 0, ties share their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    upper = np.cumsum(counts)
    mean: FloatArray = (upper - 0.5 * (counts + 1))[inverse]
    return mean


def rank_correlation(one: FloatArray, other: FloatArray) -> float:
    """Spearman's, -1..1; 0 when either does not vary."""
    a, b = ranks(one), ranks(other)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0.0 else 0.0
