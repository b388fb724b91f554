"""The exact flags that put a setting in force, and how to go back. The border to other systems' names.

Facts about vLLM hold for 0.32.0: ``max_num_batched_tokens`` is fixed at start, sizes the worker's buffers and the KV
pool and must never be exceeded; ``max_num_scheduled_tokens`` is the budget in force below it (absent in 0.12);
``long_prefill_token_threshold`` is the chunk cap; the partial-prefill caps are in 0.12 and 0.20 and gone from 0.27 on.
"""

from collections.abc import Mapping

from rooftune.policies.envelope import FOLLOWERS, KNOB_LABELS, KNOBS, Knob, Number
from rooftune.tuner.record import RunRecord, TrialPart

MAIN_KNOBS = ("step_tokens", "chunk_cap_tokens", "max_running")  # every vLLM has a flag for these
_OLD_CAPS = {
    "max_partial_prefills": "--max-num-partial-prefills",
    "max_long_partial_prefills": "--max-long-partial-prefills",
}


def _hooked(setting: Mapping[str, Number]) -> list[Knob]:
    """The knobs of a setting that no version of vLLM has a flag for; what follows another knob is not named."""
    flagged = {*MAIN_KNOBS, *_OLD_CAPS, *FOLLOWERS}
    return [knob for knob in KNOBS if knob.name in setting and knob.name not in flagged]


def vllm_flags(record: RunRecord) -> tuple[str, ...]:
    """Flags of ``vllm serve`` for the recommendation, with the room above it that the engine was said to have."""
    s = record.best.setting
    return (
        f"--max-num-batched-tokens {record.engine.ceiling_tokens}",
        f"--max-num-scheduled-tokens {s['step_tokens']:g}",
        f"--long-prefill-token-threshold {s.get('chunk_cap_tokens', 0):g}",
        f"--max-num-seqs {s.get('max_running', record.engine.max_seqs):g}",
    )


def flag_notes(trial: TrialPart) -> tuple[str, ...]:
    """What the flags of a setting alone cannot say, one sentence each."""
    s = trial.setting
    notes = [
        f"{flag} {s[name]:g} exists in vLLM 0.12 and 0.20 only; later versions need Rooftune's hook."
        for name, flag in _OLD_CAPS.items()
        if s.get(name)
    ]
    hooked = [f"the {knob.label}" for knob in _hooked(s)]
    if hooked:
        notes.append(f"No flag of vLLM sets {' and '.join(hooked)}: Rooftune's hook does, live.")
    return tuple(notes)


def flag_words(record: RunRecord) -> tuple[str, ...]:
    """What the flags of the recommendation mean, a sentence each: the budget in force, the ceiling, the others."""
    budget, ceiling = record.best.setting["step_tokens"], record.engine.ceiling_tokens
    sentences = [
        f"The token budget in force is --max-num-scheduled-tokens {budget:g}. vLLM 0.20, 0.27 and 0.32 know this flag; "
        f"0.12 does not: give it --max-num-batched-tokens {budget:g} instead."
    ]
    if ceiling > budget:
        sentences.append(
            f"--max-num-batched-tokens {ceiling} is only the ceiling, fixed at start: room to move the budget later "
            "without a restart (Rooftune's hook does that). It costs memory for buffers, and so some KV blocks; "
            f"without that room give --max-num-batched-tokens {budget:g} alone."
        )
    return (*sentences, "Keep your other flags (model, port, parallelism) as they are.")


def vllm_flags_before(record: RunRecord) -> tuple[str, ...]:
    """Flags of the setting in force: what to start with again in order to go back.

    A server without ``--max-num-scheduled-tokens`` has its budget as its ceiling.
    """
    s = record.current.setting
    lines = [f"--max-num-batched-tokens {s['step_tokens']:g}"]
    if s.get("chunk_cap_tokens"):
        lines.append(f"--long-prefill-token-threshold {s['chunk_cap_tokens']:g}")
    lines.append(f"--max-num-seqs {s.get('max_running', record.engine.max_seqs):g}")
    return tuple(lines)


def flags_added(record: RunRecord) -> tuple[str, ...]:
    """Names of the flags that the recommendation gives and the setting in force does not."""
    had = {line.split()[0] for line in vllm_flags_before(record)}
    return tuple(name for line in vllm_flags(record) if (name := line.split()[0]) not in had)


VLLM_VERSIONS = ("vLLM 0.12", "vLLM 0.20", "vLLM 0.27", "vLLM 0.32")
RESTART = "restart; live with the hook"
HOOK = "no flag; live with the hook"


def vllm_versions(trial: TrialPart) -> tuple[tuple[str, ...], ...]:
    """(knob, cell for each of VLLM_VERSIONS): the flag, and whether it acts live, at a restart or not at all."""
    s = trial.setting
    budget, seqs = f"{s['step_tokens']:g}", f"{s.get('max_running', 0):g}"
    since_020 = f"--max-num-scheduled-tokens {budget} ({RESTART})"
    cap = f"--long-prefill-token-threshold {s.get('chunk_cap_tokens', 0):g} ({RESTART})"
    rows = [
        ("token budget", f"--max-num-batched-tokens {budget} ({RESTART})", since_020, since_020, since_020),
        ("chunk cap", *[cap] * 4),
        ("sequence cap", *[f"--max-num-seqs {seqs} (restart; live with the hook, which holds admissions back)"] * 4),
    ]
    for name, flag in _OLD_CAPS.items():
        if s.get(name):
            old = f"{flag} {s[name]:g} ({RESTART})"
            rows.append((KNOB_LABELS[name], old, old, HOOK, HOOK))
    rows += [(knob.label, *[HOOK] * 4) for knob in _hooked(s)]
    return tuple(rows)


def elsewhere(record: RunRecord, trial: TrialPart) -> tuple[tuple[str, str, str, str], ...]:
    """(engine, knob, flag, how) for engines other than vLLM; the twin follows vLLM's scheduler, not theirs."""
    s = trial.setting
    budget, seqs = f"{s['step_tokens']:g}", f"{s.get('max_running', record.engine.max_seqs):g}"
    block = record.engine.block_tokens
    whole_blocks = f"{max(int(s['step_tokens']) // block, 1) * block}"
    rows = [
        ("SGLang", "token budget", f"--chunked-prefill-size {budget}", "restart; prompt tokens of a step only"),
        ("SGLang", "sequence cap", f"--max-running-requests {seqs}", "restart"),
        (
            "TensorRT-LLM",
            "token budget",
            f"max_num_tokens: {whole_blocks} with enable_chunked_prefill: true",
            f"restart; whole KV blocks of {block} tokens",
        ),
        ("TensorRT-LLM", "sequence cap", f"max_batch_size: {seqs}", "restart"),
        ("TGI", "token budget", f"--max-batch-prefill-tokens {budget}", "restart; prompt tokens only"),
        ("TGI", "sequence cap", "none", "absent: batches are limited by tokens (--max-batch-total-tokens)"),
    ]
    missing = ["chunk cap"] if s.get("chunk_cap_tokens") else []
    missing += [KNOB_LABELS[name] for name in _OLD_CAPS if s.get(name)]
    missing += [knob.label for knob in _hooked(s)]
    if missing:
        rows.append(("all three", ", ".join(missing), "none", "absent"))
    return tuple(rows)
