"""vLLM's own names for our knobs, the boot values, and the one place that writes them.

Read from 0.32, v1/core/sched/scheduler.py: ``schedule`` reads each of them in every call. Values that come here have
been checked against the envelope; ``max_num_batched_tokens`` sizes the worker's buffers and is never written, nor is
``max_num_running_reqs``, which an assertion compares with what runs.
"""

from typing import Any

from rooftune.policies.budget import step_budget
from rooftune.policies.packing import NO_CAP
from rooftune.policies.request import Boot, Setting
from rooftune.policies.step_time import StepModel

# What a vLLM may have knobs of its own for, see ``Knobs.apply``.
VLLMS_OWN = ("step_tokens", "chunk_cap_tokens", "adaptive_chunk_cap", "max_running")


class Knobs:
    """One scheduler's knobs."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._config = scheduler.scheduler_config
        self.has_active_cap = hasattr(scheduler, "max_num_active_reqs")
        self.has_adaptive = hasattr(scheduler, "adaptive_long_prefill_threshold")
        self.ceiling_tokens = int(self._config.max_num_batched_tokens)
        self.most_running = int(scheduler.max_num_running_reqs)
        self.boot = Setting(
            step_tokens=min(int(scheduler.max_num_scheduled_tokens), self.ceiling_tokens),
            chunk_cap_tokens=int(self._config.long_prefill_token_threshold),
            adaptive_chunk_cap=int(self.has_adaptive and bool(scheduler.adaptive_long_prefill_threshold)),
            max_running=min(int(getattr(scheduler, "max_num_active_reqs", self.most_running)), self.most_running),
        )

    def set_budget(self, tokens: int) -> None:
        """The budget, limited to 1..ceiling."""
        tokens = max(1, min(int(tokens), self.ceiling_tokens))
        if self._scheduler.max_num_scheduled_tokens != tokens:
            self._scheduler.max_num_scheduled_tokens = tokens

    def set_cap(self, tokens: int, adaptive: bool) -> None:
        """Chunk cap of this step; NO_CAP or 0 = none."""
        tokens = int(tokens) if 0 < tokens < NO_CAP else 0
        if self._config.long_prefill_token_threshold != tokens:
            self._config.long_prefill_token_threshold = tokens
        if self.has_adaptive and self._scheduler.adaptive_long_prefill_threshold is not adaptive:
            self._scheduler.adaptive_long_prefill_threshold = adaptive

    def set_active(self, requests: int) -> None:
        """Requests beyond which none is admitted: at most the boot ceiling."""
        if self.has_active_cap:
            requests = max(1, min(int(requests), self.most_running))
            if self._scheduler.max_num_active_reqs != requests:
                self._scheduler.max_num_active_reqs = requests

    def apply(self, setting: Setting) -> None:
        """Everything vLLM knows of a setting; caps and orders of ours are enforced step by step."""
        self.set_budget(setting.step_tokens)
        self.set_cap(setting.chunk_cap_tokens, setting.adaptive_chunk_cap != 0)
        self.set_active(setting.max_running)


# Decode-only steps that one answer should hold for.
_AHEAD_STEPS = 16


class Budgets:
    """``step_budget`` with a memory. More context never allows more tokens, so where it allows the same at two contexts
    it does so at every one between them."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self._asked: tuple[Setting, StepModel, int, int, int] | None = None
        self._from = self._until = 0
        self._tokens = 0

    def ask(
        self, setting: Setting, model: StepModel, decodes: int, context_tokens: int, prefills: int, first_computed: int
    ) -> int:
        """Tokens; the arguments are those of ``step_budget``."""
        asked = (setting, model, decodes, prefills, first_computed)
        same = asked == self._asked
        if same and self._from <= context_tokens <= self._until:
            return self._tokens
        boot = self._boot
        tokens = step_budget(setting, boot, model, decodes, context_tokens, prefills, first_computed)
        until = context_tokens
        if same:  # the next call may well have it again
            ahead = context_tokens + _AHEAD_STEPS * decodes
            if step_budget(setting, boot, model, decodes, ahead, prefills, first_computed) == tokens:
                until = ahead
        self._asked, self._tokens, self._from, self._until = asked, tokens, context_tokens, until
        return tokens
