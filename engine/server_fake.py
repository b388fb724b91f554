"""An engine without a model behind the real server: steps take as long as a step-time model says, on the wall clock."""

import time
from dataclasses import replace

from rooftune.engine.fake import FAKE_FACTS, FakeRunner, ManualClock
from rooftune.policies.errors import bad_value
from rooftune.policies.step_time import NAMED_MODELS

PREFIX = "fake:"
_MODEL_TOKENS = 131_072
_KV_BLOCKS = 8192
# Prompts may use the lower half; the upper half is what it says.
_VOCAB_TOKENS = 1 << 18
FAKE_PROMPT_VOCAB_TOKENS = _VOCAB_TOKENS // 2


class WallClock(ManualClock):
    """Advancing it takes that long."""

    def __call__(self) -> float:
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)


def fake_runner(source: str, kv_blocks: int | None, block_tokens: int) -> FakeRunner:
    """``fake:8b-2tbs`` and the like. Raises InputError for a step-time model without that name."""
    name = source.removeprefix(PREFIX)
    if name not in NAMED_MODELS:
        raise bad_value("fake model", source, " or ".join(PREFIX + known for known in NAMED_MODELS), "take one of them")
    facts = replace(FAKE_FACTS, name=source, vocab_tokens=_VOCAB_TOKENS, max_model_tokens=_MODEL_TOKENS)
    return FakeRunner(
        NAMED_MODELS[name],
        WallClock(),
        kv_blocks=kv_blocks or _KV_BLOCKS,
        block_tokens=block_tokens,
        facts=facts,
        read_all=False,
    )
