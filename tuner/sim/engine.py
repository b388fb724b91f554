"""What the twin knows of its engine, and which settings that engine accepts."""

import math
from dataclasses import dataclass

from rooftune.policies.envelope import KNOBS
from rooftune.policies.errors import bad_value
from rooftune.policies.request import FIXED_BUDGET, Boot, Setting


@dataclass(frozen=True)
class Engine:
    """What the twin knows of the engine at start.

    boot: see ``rooftune.policies.request.Boot``. kv_blocks: blocks of the KV pool. sequence_ceiling: most requests in
    a step, fixed at start. outside_first_s, outside_token_s: constant time outside the engine, added to the
    first token's and to every later token's instant (s).
    """

    boot: Boot
    kv_blocks: int
    sequence_ceiling: int = 256
    outside_first_s: float = 0.0
    outside_token_s: float = 0.0

    def __post_init__(self) -> None:
        if self.kv_blocks < 1:
            raise bad_value("kv_blocks", self.kv_blocks, "at least 1", "give the size of the KV pool")
        if self.sequence_ceiling < 1:
            raise bad_value("sequence ceiling", self.sequence_ceiling, "at least 1", "give max_num_seqs")
        if self.boot.block_tokens < 1:
            raise bad_value("block_tokens", self.boot.block_tokens, "at least 1", "vLLM's default is 16")


def check_setting(setting: Setting, engine: Engine) -> None:
    """Raise InputError when a setting is outside the boot envelope, is invalid or would starve decodes."""
    for name, value in setting._asdict().items():
        if math.isnan(value) or value < 0:
            raise bad_value(name, value, "at least 0", "0 means no limit for every cap")
    for knob in KNOBS:
        values = tuple(range(len(knob.choices)))
        if values and getattr(setting, knob.name) not in values:
            raise bad_value(knob.label, getattr(setting, knob.name), f"one of {values}", "choose one")
    inside = "stay inside the boot envelope"
    if not 1 <= setting.step_tokens <= engine.boot.ceiling_tokens:
        raise bad_value("token budget", setting.step_tokens, f"within 1..{engine.boot.ceiling_tokens}", inside)
    if not 1 <= setting.max_running <= engine.sequence_ceiling:
        raise bad_value("sequence cap", setting.max_running, f"within 1..{engine.sequence_ceiling}", inside)
    if setting.step_tokens < setting.max_running:
        bound = f"at least the sequence cap ({setting.max_running})"
        remedy = "a smaller one starves decodes: raise it or lower the sequence cap"
        raise bad_value("token budget", setting.step_tokens, bound, remedy)
    if engine.boot.chunking == 0 and setting.budget_policy != FIXED_BUDGET:
        remedy = "a prompt that must run whole never fits a budget that shrinks: turn chunking on"
        raise bad_value("budget policy", setting.budget_policy, f"{FIXED_BUDGET} (fixed) while chunking is off", remedy)
