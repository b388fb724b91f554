"""A vLLM server at an address: with our hook it speaks the tuning protocol; without it, what can be seen and done.

Nothing here reads vLLM's histograms: how they become quantiles is the metrics reader's business. A page that lacks a
series leaves the matching use out, with the series named, for missing is not zero.
"""

import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ValidationError

from rooftune.policies import wire
from rooftune.tuner.ports.base import PortError, PortFault
from rooftune.tuner.ports.fetch import Fetcher, Reply, Timeouts
from rooftune.tuner.ports.http import HttpPort
from rooftune.tuner.ports.vllm.versions import Capabilities, Version, capabilities, parse_version

PAGE_BYTES = 4 * 1024 * 1024
_SMALL_BYTES = 256 * 1024


class Access(StrEnum):
    """How far an engine can be reached."""

    PROTOCOL = "protocol"  # it speaks the tuning protocol: ours, or vLLM with the hook
    OBSERVE_ONLY = "observe_only"  # vLLM without the hook
    UNKNOWN_SERVER = "unknown_server"  # something that answers HTTP and is neither


class Use(StrEnum):
    """What may be done with an engine that only shows its metrics."""

    WATCH_LATENCY = "watch_latency"  # TTFT, gaps and time per token as histograms
    WATCH_LOAD = "watch_load"  # running and waiting
    WATCH_KV = "watch_kv"  # usage and preemptions
    BOOT_ADVICE = "boot_advice"  # defaults of this version, flags for the next start, what a ceiling costs


class Unseen(StrEnum):
    """What /metrics does not tell, whatever the version; only the hook's records do."""

    STEP_TIME = "step_time"  # so no roofline can be fitted
    COMPUTED_TOKENS = "computed_tokens"  # so whether the budget is reached is not known
    REQUEST_ROWS = "request_rows"  # so no traffic can be replayed, and nothing verified
    KNOBS = "knobs"  # neither their values nor a way to push


_NEEDS: Mapping[Use, tuple[tuple[str, ...], ...]] = {  # each tuple: one name of several is enough
    Use.WATCH_LATENCY: (
        ("vllm:time_to_first_token_seconds",),
        ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    ),
    Use.WATCH_LOAD: (("vllm:num_requests_running",), ("vllm:num_requests_waiting",)),
    Use.WATCH_KV: (
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    ),
}
_SAMPLE = re.compile(r"^(vllm:[a-zA-Z0-9_]+?)(?:_bucket|_sum|_count)?(?:\{|\s)", re.MULTILINE)
_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}\s+1(?:\.0)?\s*$", re.MULTILINE)
_LABEL = re.compile(r'([a-zA-Z0-9_]+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Found:
    """What is at an address. None: not told.

    state: of the protocol. engines: data-parallel engines behind this address. uses, unseen: of an engine that is only
    observed; missing: use -> series it lacks.
    """

    access: Access
    state: wire.State | None = None
    version: Version | None = None
    able: Capabilities | None = None
    engines: int = 1
    uses: frozenset[Use] = frozenset()
    missing: Mapping[Use, tuple[str, ...]] | None = None
    unseen: frozenset[Unseen] = frozenset()


def discover(
    base_url: str, token_file: Path | None = None, timeouts: Timeouts | None = None, *, ca_file: Path | None = None
) -> Found:
    """What is at ``base_url``.

    Raises PortError when nothing answers, or when the protocol is there and refuses (wrong token, another version);
    InputError for an address or a file that cannot be used. The tuning token is sent to the protocol's routes alone.
    """
    with closing(HttpPort(base_url, token_file, timeouts, ca_file=ca_file)) as port:
        try:
            state = port.state()
        except PortError as error:
            if error.fault is not PortFault.NO_PROTOCOL:
                raise
        else:
            version = parse_version(state.engine_version) if state.engine == "vllm" else None
            able = capabilities(version) if state.engine == "vllm" else None
            return Found(Access.PROTOCOL, state, version, able)
    with closing(Fetcher(base_url, None, timeouts, ca_file=ca_file)) as fetcher:
        return _without_hook(fetcher)


def _without_hook(fetcher: Fetcher) -> Found:
    page = fetcher.ask("GET", "/metrics", limit_bytes=PAGE_BYTES)
    text = page.body.decode("utf-8", "replace") if page.status == 200 else ""
    series = frozenset(match[1] for match in _SAMPLE.finditer(text))
    if not series:
        return Found(Access.UNKNOWN_SERVER)
    version = _version(fetcher.ask("GET", "/version", limit_bytes=_SMALL_BYTES))
    missing = {use: lacks for use in _NEEDS if (lacks := _lacks(use, series))}
    labels = [dict(_LABEL.findall(match[1])) for match in _CONFIG.finditer(text)]
    return Found(
        Access.OBSERVE_ONLY,
        version=version,
        able=capabilities(version),
        engines=max(1, len({engine.get("engine") for engine in labels})),
        uses=frozenset({*_NEEDS, Use.BOOT_ADVICE} - set(missing)),
        missing=missing,
        unseen=frozenset(Unseen),
    )


def _lacks(use: Use, series: frozenset[str]) -> tuple[str, ...]:
    return tuple(names[0] for names in _NEEDS[use] if not any(name in series for name in names))


class _Version(BaseModel):
    version: str


def _version(reply: Reply) -> Version | None:
    try:
        return parse_version(_Version.model_validate_json(reply.body).version) if reply.status == 200 else None
    except ValidationError:
        return None
