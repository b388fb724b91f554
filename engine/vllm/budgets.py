"""What a budget policy allows, asked in every step and worked out only when the answer may have changed."""

from rooftune.policies.budget import step_budget
from rooftune.policies.request import Boot, Setting
from rooftune.policies.step_time import StepModel

# Decode-only steps that one answer is tried to hold for.
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
        if same:  # it may well be asked again
            ahead = context_tokens + _AHEAD_STEPS * decodes
            if step_budget(setting, boot, model, decodes, ahead, prefills, first_computed) == tokens:
                until = ahead
        self._asked, self._tokens, self._from, self._until = asked, tokens, context_tokens, until
        return tokens
