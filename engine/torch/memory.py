"""How many KV blocks fit: free memory of the device, and the rule behind ``--kv-blocks auto``."""

from pathlib import Path

import torch
from rooftune.policies.errors import InfeasibleError

# On a CPU the memory belongs to others as well: a quarter of what is free, and no more than this.
CPU_SHARE = 0.25
CPU_MOST_BYTES = 4 << 30
# On a CUDA card the rest is for activations, logits and the allocator's own gaps.
CUDA_SHARE = 0.80


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on ``device``, in bytes; on a CPU the smaller of machine and container."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return min(_machine_free(), _container_free())


def auto_kv_blocks(device: torch.device, block_bytes: int, max_model_tokens: int, block_tokens: int) -> int:
    """KV blocks for ``--kv-blocks auto``: by free memory, at most what 256 requests of full length need.

    block_bytes: one block over all layers. Raises InfeasibleError when not even one block fits.
    """
    free = free_bytes(device)
    usable = free * CUDA_SHARE if device.type == "cuda" else min(free * CPU_SHARE, CPU_MOST_BYTES)
    blocks = min(int(usable // block_bytes), 256 * -(-max_model_tokens // block_tokens))
    if blocks < 1:
        raise InfeasibleError(
            f"{free} bytes are free on {device}, one KV block needs {block_bytes}; free memory or take a smaller model"
        )
    return blocks


def _machine_free() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return CPU_MOST_BYTES


def _container_free() -> int:
    """What the control group leaves (version 2, else version 1); unlimited reads as a very large number."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if Path(limit).exists() and Path(used).exists():
            text = Path(limit).read_text().strip()
            if text != "max":
                return max(0, int(text) - int(Path(used).read_text()))
    return 1 << 62
