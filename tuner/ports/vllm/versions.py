"""What each version of vLLM takes at its start and what our hook can move in it: what was read or tried, no more.

Sources: vLLM's own code of 0.12, 0.20, 0.27 and 0.32, its public issue 39737 for 0.19, and starts of 0.32. Of a
version in between only what holds on both sides of it is taken as known.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Flag(StrEnum):
    """What a boot flag does in a version."""

    TAKEN = "taken"
    DEFAULT_ONLY = "default_only"  # the flag is there, and any other value than its default ends the start
    MISSING = "missing"  # no such flag: naming it ends the start
    UNKNOWN = "unknown"  # not looked up


class Hook(StrEnum):
    """What our hook does in a version."""

    MOVES = "moves"
    READ_ONLY = "read_only"
    NONE = "none"  # no place to serve the protocol from


@dataclass(frozen=True, order=True)
class Version:
    """major.minor.patch of a release, what follows them left out."""

    major: int
    minor: int
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


def parse_version(text: str) -> Version | None:
    """``0.32.0``, ``v0.19.1rc1``, ``0.32.0+cpu``; None for what is no version (a development build says ``dev``)."""
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", text)
    return Version(int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


FLAGS: Mapping[str, str] = {
    "ceiling_tokens": "--max-num-batched-tokens",
    "step_tokens": "--max-num-scheduled-tokens",
    "chunk_cap_tokens": "--long-prefill-token-threshold",
    "adaptive_chunk_cap": "--long-prefill-token-threshold-adaptive",
    "max_partial_prefills": "--max-num-partial-prefills",
    "max_long_partial_prefills": "--max-long-partial-prefills",
    "sequence_ceiling": "--max-num-seqs",
    "max_running": "--max-num-active-seqs",
}

# flag -> (from which minor version of 0.x on, what it does), ascending; before the first: unknown.
_PARTIAL = ((12, Flag.DEFAULT_ONLY), (24, Flag.UNKNOWN), (27, Flag.MISSING))
_SINCE: Mapping[str, tuple[tuple[int, Flag], ...]] = {
    "ceiling_tokens": ((12, Flag.TAKEN),),
    "step_tokens": ((12, Flag.MISSING), (13, Flag.UNKNOWN), (20, Flag.TAKEN)),
    "chunk_cap_tokens": ((12, Flag.TAKEN),),
    "adaptive_chunk_cap": ((12, Flag.MISSING), (28, Flag.UNKNOWN), (32, Flag.TAKEN)),
    "max_partial_prefills": _PARTIAL,
    "max_long_partial_prefills": _PARTIAL,
    "sequence_ceiling": ((12, Flag.TAKEN),),
    "max_running": ((12, Flag.MISSING), (28, Flag.UNKNOWN), (32, Flag.TAKEN)),
}
_READ = (12, 32)  # minor versions of 0.x between which the table speaks
_HOOK = range(27, 33)  # whose scheduler has been read; endpoint plugins came with 0.27
_NO_ROUTES = 20  # up to here there are no endpoint plugins

DEFAULTS: Mapping[str, int] = {"max_partial_prefills": 1, "max_long_partial_prefills": 1}


@dataclass(frozen=True)
class Capabilities:
    """flags: name in FLAGS -> what it does. hook: what ours does. tried: this minor version was run with the hook."""

    version: Version | None
    flags: Mapping[str, Flag]
    hook: Hook
    tried: bool


def capabilities(version: Version | None) -> Capabilities:
    """What is known of a version; of one that is not known nothing is assumed."""
    minor = version.minor if version is not None and version.major == 0 else -1
    hook = Hook.MOVES if minor in _HOOK else Hook.NONE if 0 <= minor <= _NO_ROUTES else Hook.READ_ONLY
    return Capabilities(version, {name: _flag(name, minor) for name in FLAGS}, hook, tried=minor == _READ[1])


def _flag(name: str, minor: int) -> Flag:
    found = Flag.UNKNOWN
    if _READ[0] <= minor <= _READ[1]:
        for since, does in _SINCE[name]:
            if minor >= since:
                found = does
    return found
