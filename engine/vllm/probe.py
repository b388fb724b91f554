"""What this vLLM lets us move: probed at its start, never assumed."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rooftune.engine.vllm.knobs import VLLMS_OWN, Knobs
from rooftune.policies import wire
from rooftune.policies.envelope import KNOB, Envelope, KnobBound, Mode, full_bounds
from rooftune.policies.errors import printable
from rooftune.policies.request import Setting

KNOWN = range(27, 33)  # minor versions of 0.x whose scheduler has been read
# Without these the hook cannot work; with them it keeps records.
NEEDED = (
    "running", "waiting", "requests",
    "max_num_scheduled_tokens", "max_num_running_reqs", "kv_cache_manager", "scheduler_config",
)  # fmt: skip

# Every budget policy comes down to vLLM's own budget; the rest that vLLM lacks is enforced over its queue.
_OVER_ITS_QUEUE = tuple(name for name, knob in KNOB.items() if name not in VLLMS_OWN and knob.policy != "budget_policy")


@dataclass(frozen=True, slots=True)
class Probe:
    """envelope: what may be moved. boot_envelope, model: for the state. notes: a line for everything unusual.

    read_only: nothing moves.
    """

    envelope: Envelope
    boot_envelope: wire.BootEnvelope
    model: str
    notes: tuple[str, ...]
    read_only: bool


def missing(scheduler: Any, needed: Sequence[str] = NEEDED) -> str | None:
    """Why we cannot even record: a name that this scheduler, or a class of schedulers, lacks."""
    lacks = [name for name in needed if not hasattr(scheduler, name)]
    return f"this vLLM's scheduler has no {', '.join(lacks)}: an unknown version" if lacks else None


def probe(scheduler: Any, knobs: Knobs, version: str) -> Probe:
    """Everything that is fixed once a scheduler stands."""
    config = scheduler.vllm_config
    chunking = bool(getattr(knobs._config, "enable_chunked_prefill", True))
    unsure = [*_version(version), *_surroundings(config, scheduler)]
    absent = _absent(scheduler, knobs, chunking)
    model_tokens = int(getattr(scheduler, "max_model_len", 0)) or None
    bounds = tuple(
        _bound(bound, knobs.boot, model_tokens if not chunking else None, bool(unsure))
        for bound in full_bounds(knobs.ceiling_tokens, knobs.most_running)
        if bound.name not in absent
    )
    notes = [f"read-only: {'; '.join(unsure)}"] if unsure else []
    reasons: dict[str, list[str]] = {}
    for name, why in absent.items():
        reasons.setdefault(why, []).append(name)
    notes += [f"absent, for {why}: {', '.join(names)}" for why, names in reasons.items()]
    return Probe(
        envelope=Envelope(bounds),
        boot_envelope=wire.BootEnvelope(
            ceiling_tokens=knobs.ceiling_tokens,
            max_running=knobs.most_running,
            model_tokens=model_tokens,
            kv_blocks=int(config.cache_config.num_gpu_blocks or 0) or None,
            kv_block_tokens=int(getattr(scheduler, "block_size", 0)) or None,
            chunking=chunking,
            plan_ahead=bool(getattr(knobs._config, "async_scheduling", False)),
        ),
        model=printable(str(getattr(config.model_config, "model", ""))) or "unknown",
        notes=tuple(printable(note)[:200] for note in notes),
        read_only=bool(unsure),
    )


def _bound(bound: KnobBound, boot: Setting, whole_tokens: int | None, read_only: bool) -> KnobBound:
    """whole_tokens: the longest prompt where prompts run whole or never; else None."""
    minimum, maximum = bound.minimum, bound.maximum
    if bound.name == "step_tokens" and whole_tokens is not None:
        minimum = min(whole_tokens, boot.step_tokens)
    if bound.name == "chunk_cap_tokens":
        maximum = max(maximum, boot.chunk_cap_tokens)  # vLLM boots with one that never binds
    return KnobBound(bound.name, minimum, maximum, Mode.RESTART if read_only else Mode.LIVE)


def _version(version: str) -> list[str]:
    found = re.match(r"(\d+)\.(\d+)", version)
    numbers = (int(found[1]), int(found[2])) if found else (-1, -1)
    if numbers[0] == 0 and numbers[1] in KNOWN:
        return []
    return [f"vLLM {version[:20]} is untested (0.{KNOWN[0]} to 0.{KNOWN[-1]} are known)"]


def _surroundings(config: Any, scheduler: Any) -> list[str]:
    """What has not been tried with a hook, so nothing is moved there."""
    parallel, model = config.parallel_config, config.model_config
    found = []
    for name, what in (
        ("data_parallel_size", "data parallel"),
        ("tensor_parallel_size", "tensor parallel"),
        ("pipeline_parallel_size", "pipeline parallel"),
        ("decode_context_parallel_size", "context parallel"),
        ("_api_process_count", "several API servers"),
    ):
        if int(getattr(parallel, name, 1) or 1) > 1:
            found.append(what)
    if getattr(config, "speculative_config", None) is not None:
        found.append("speculative decoding")
    if getattr(config, "kv_transfer_config", None) is not None:
        found.append("a KV connector")
    if getattr(config, "ec_transfer_config", None) is not None:
        found.append("an encoder connector")
    if getattr(model, "is_multimodal_model", False):
        found.append("a multimodal model")
    if getattr(scheduler, "is_encoder_decoder", False) or getattr(model, "runner_type", "generate") != "generate":
        found.append("a model that does not just generate")
    if getattr(scheduler, "need_mamba_block_aligned_split", False):
        found.append("prompts split at block boundaries")
    return [f"untested with {', '.join(found)}"] if found else []


def _absent(scheduler: Any, knobs: Knobs, chunking: bool) -> dict[str, str]:
    """Knob -> why this scheduler has none."""
    found: dict[str, str] = {}
    if not knobs.has_active_cap:
        found["max_running"] = "this vLLM has no active-request cap, and lowering max_num_running_reqs ends its engine"
    if not knobs.has_adaptive:
        found["adaptive_chunk_cap"] = "this vLLM has none"
    if not hasattr(scheduler.waiting, "appendleft"):
        found |= dict.fromkeys(_OVER_ITS_QUEUE, "vLLM orders its queue by priority")
    elif len(scheduler.kv_cache_config.kv_cache_groups) != 1:
        found |= dict.fromkeys(_OVER_ITS_QUEUE, "the KV cache has several groups")
    if not chunking:
        found |= dict.fromkeys(
            ("chunk_cap_tokens", "adaptive_chunk_cap", *_OVER_ITS_QUEUE), "prompts are not read in chunks"
        )
    return found


class _Usage:
    """A pool of which only the share in use is known."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    @property
    def num_free_blocks(self) -> float:
        return float(self._manager.usage)


def pool_of(manager: Any) -> tuple[Any, Callable[[float], float]]:
    """What counts the free KV blocks, and the share of the pool, 0..1, from its ``num_free_blocks``.

    ``manager.usage`` is three calls deep, which a step can spare.
    """
    blocks = getattr(manager, "block_pool", None)
    queue: Any = getattr(blocks, "free_block_queue", None)
    total = int(getattr(blocks, "num_gpu_blocks", 0)) - 1  # one is vLLM's null block
    if total > 0 and hasattr(queue, "num_free_blocks") and manager.usage == 1.0 - queue.num_free_blocks / total:
        return queue, lambda free: 1.0 - free / total
    return _Usage(manager), float


def length_of(waiting: Any) -> Callable[[Any], int]:
    """How to count vLLM's queue: its own ``len`` is two calls above that of the deque below it."""
    return deque.__len__ if isinstance(waiting, deque) else len
