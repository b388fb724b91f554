"""What an engine fixes at its start, checked once: the boot setting, the ceilings, the queue."""

from dataclasses import dataclass

from rooftune.engine.protocol import About
from rooftune.engine.step import ModelFacts
from rooftune.policies import wire
from rooftune.policies.envelope import Envelope, full_bounds
from rooftune.policies.errors import bad_value
from rooftune.policies.request import Boot, Setting

# A slot reserves a row of block table and keys; a longer queue costs memory and its requests come too late.
MAX_QUEUE = 100_000
# Request records count the gaps above each of these: common targets for the gap between tokens.
GAP_TARGETS_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class EngineOptions:
    """Raises InputError when something does not fit together.

    setting: the boot setting. ceiling_tokens, max_running: greatest token budget and sequence cap that may ever be
    pushed; 0 = those of the boot setting. max_queue: most requests in flight beyond max_running. max_model_tokens:
    most tokens of a request; 0 = the model's own. prefix_caching: find KV blocks by content. gap_bounds_s: ascending;
    gaps above them are counted per request. ring_rows: step and request records kept.
    """

    setting: Setting
    ceiling_tokens: int = 0
    max_running: int = 0
    max_queue: int = 1024
    max_model_tokens: int = 0
    prefix_caching: bool = True
    reserve_whole_prompt: bool = True
    gap_bounds_s: tuple[float, ...] = ()
    ring_rows: int = wire.MAX_ROWS
    engine_version: str = "0"

    def __post_init__(self) -> None:
        for name in ("ceiling_tokens", "max_running"):
            if getattr(self, name) == 0:
                own = self.setting.step_tokens if name == "ceiling_tokens" else self.setting.max_running
                object.__setattr__(self, name, own)
            if not 1 <= getattr(self, name) <= wire.MAX_TOKENS:
                raise bad_value(name, getattr(self, name), f"within 1..{wire.MAX_TOKENS}", "0 takes the boot value")
        if not 0 <= self.max_queue <= MAX_QUEUE:
            raise bad_value("max_queue", self.max_queue, f"within 0..{MAX_QUEUE}", "512 is usual")
        if self.max_model_tokens < 0:
            raise bad_value("max_model_tokens", self.max_model_tokens, "at least 0", "0 takes the model's own length")
        bounds = self.gap_bounds_s
        if len(bounds) > wire.MAX_GAP_BOUNDS or list(bounds) != sorted(set(bounds)) or any(b < 0 for b in bounds):
            raise bad_value(
                "gap bounds", bounds, f"at most {wire.MAX_GAP_BOUNDS}, ascending, at least 0 s", "correct them"
            )

    def boot(self, facts: ModelFacts) -> Boot:
        """Chunked prefill, known contents, and always the rule that keeps decodes moving (docs/tuning-protocol.md)."""
        return Boot(
            ceiling_tokens=self.ceiling_tokens,
            block_tokens=facts.block_tokens,
            chunking=1,
            reserve_whole_prompt=int(self.reserve_whole_prompt),
            contents=1,
            keep_decodes_moving=1,
        )

    def model_tokens(self, facts: ModelFacts) -> int:
        """Most tokens of one request, prompt and output, as the model and these options have it."""
        own = facts.max_model_tokens
        return min(own, self.max_model_tokens) if self.max_model_tokens else own

    def max_request_tokens(self, facts: ModelFacts) -> int:
        """Most tokens of one request that also fit the KV pool: the last token of a request never needs an entry."""
        return min(self.model_tokens(facts), facts.kv_tokens + 1)

    def envelope(self) -> Envelope:
        return Envelope(full_bounds(self.ceiling_tokens, self.max_running))

    def about(self, facts: ModelFacts) -> About:
        return About(
            "rooftune-engine",
            self.engine_version,
            facts.name,
            wire.BootEnvelope(
                ceiling_tokens=self.ceiling_tokens,
                max_running=self.max_running,
                model_tokens=self.model_tokens(facts),
                kv_blocks=facts.kv_blocks,
                kv_block_tokens=facts.block_tokens,
                chunking=True,
            ),
        )
