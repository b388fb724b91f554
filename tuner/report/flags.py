"""The exact flags that put a setting in force, and how to go back. The border to other systems' names.

Facts about vLLM hold for 0.32.0: ``max_num_batched_tokens`` is fixed at start, sizes the worker's buffers and the KV
pool and must never be exceeded; ``max_num_scheduled_tokens`` is the budget in force below it (absent in 0.12);
``long_prefill_token_threshold`` is the chunk cap; the partial-prefill caps are in 0.12 and 0.20 and gone from 0.27 on.
"""

from dataclasses import dataclass

from tuner.record import RunRecord, TrialPart

_NEEDS_HOOK = {
    "budget_policy": "the budget policy",
    "order_policy": "the order policy",
    "pass_over_max_s": "the longest passing-over",
}
_OLD_CAPS = {
    "max_partial_prefills": "--max-num-partial-prefills",
    "max_long_partial_prefills": "--max-long-partial-prefills",
}


@dataclass(frozen=True)
class Flags:
    """A command line's worth of flags. notes: what the flags alone cannot say, one sentence each."""

    lines: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.lines)


def vllm_flags(record: RunRecord, trial: TrialPart) -> Flags:
    """Flags of ``vllm serve`` for one setting, with the room above it that the engine was said to have."""
    s = trial.setting
    lines = [
        f"--max-num-batched-tokens {record.engine.ceiling_tokens}",
        f"--max-num-scheduled-tokens {s['step_tokens']:g}",
        f"--long-prefill-token-threshold {s.get('chunk_cap_tokens', 0):g}",
        f"--max-num-seqs {s.get('max_running', record.engine.max_seqs):g}",
    ]
    notes: list[str] = []
    for name, flag in _OLD_CAPS.items():
        if s.get(name):
            notes.append(f"{flag} {s[name]:g} exists in vLLM 0.12 and 0.20 only; later versions need Rooftune's hook.")
    for name, what in _NEEDS_HOOK.items():
        if s.get(name):
            notes.append(f"vLLM has no flag for {what}: it needs Rooftune's hook.")
    return Flags(tuple(lines), tuple(notes))


def vllm_flags_before(record: RunRecord) -> Flags:
    """Flags of the setting in force: what to start with again in order to go back.

    A server without ``--max-num-scheduled-tokens`` has its budget as its ceiling.
    """
    s = record.current.setting
    lines = [f"--max-num-batched-tokens {s['step_tokens']:g}"]
    if s.get("chunk_cap_tokens"):
        lines.append(f"--long-prefill-token-threshold {s['chunk_cap_tokens']:g}")
    lines.append(f"--max-num-seqs {s.get('max_running', record.engine.max_seqs):g}")
    return Flags(tuple(lines), ())


def elsewhere(trial: TrialPart) -> tuple[tuple[str, str, str], ...]:
    """(system, flags, catch) for engines other than vLLM; the twin follows vLLM's scheduler, not theirs."""
    budget = f"{trial.setting['step_tokens']:g}"
    return (
        ("SGLang", f"--chunked-prefill-size {budget}", "prompt tokens of a step only; set at start"),
        ("TensorRT-LLM", f"max_num_tokens: {budget}", "rounded to its KV block; set at start"),
        ("TGI", f"--max-batch-prefill-tokens {budget}", "prompt tokens only; set at start"),
    )
