"""A short stand-in for long traffic: a few windows, the busiest among them, far enough apart not to touch.

Most settings are far from the best and a glance shows it; only the leaders are replayed on everything.
"""

from dataclasses import replace

import numpy as np
from rooftune.tuner.sim.reshape import window
from rooftune.tuner.sim.workload import Traffic

WINDOWS = 6
CANDIDATES = 60
# Between two windows everything drains: no queue outlasts this.
APART_S = 50_000.0


def slices(traffic: Traffic, share: float, windows: int = WINDOWS) -> Traffic:
    """About ``share`` (0..1) of the requests in so many windows: the busiest, and others spread evenly over the ranks.

    Windows are chosen by their tokens, so that a stretch of long prompts counts as busy. Deterministic.
    """
    length_s = traffic.span_s * share / windows
    if length_s <= 0.0 or share >= 1.0:
        return traffic
    starts = traffic.arrival_s[0] + np.linspace(0.0, traffic.span_s - length_s, CANDIDATES)
    work = np.concatenate([[0.0], np.cumsum((traffic.prompt_tokens + traffic.output_tokens).astype(np.float64))])
    first = np.searchsorted(traffic.arrival_s, starts)
    after = np.searchsorted(traffic.arrival_s, starts + length_s)
    ranked = np.argsort(work[first] - work[after], kind="stable")  # busiest first
    chosen: list[int] = []
    for rank in np.linspace(0, CANDIDATES - 1, windows):
        nearest = ranked[np.argsort(np.abs(np.arange(CANDIDATES) - rank), kind="stable")]
        apart = (w for w in nearest if all(abs(starts[w] - starts[c]) >= length_s for c in chosen))
        free = next((w for w in apart if first[w] < after[w]), None)
        if free is not None:
            chosen.append(int(free))
    chosen.sort(key=lambda w: float(starts[w]))
    parts = [window(traffic, float(starts[w]), length_s) for w in chosen]
    keys = [len(part.prefix_keys) for part in parts]
    before = np.concatenate([[0], np.cumsum(keys)[:-1]])
    offsets = [part.prefix_offsets[:-1] + base for part, base in zip(parts, before, strict=True)]
    return replace(
        traffic,
        arrival_s=np.concatenate([part.arrival_s + place * APART_S for place, part in enumerate(parts)]),
        prompt_tokens=np.concatenate([part.prompt_tokens for part in parts]),
        output_tokens=np.concatenate([part.output_tokens for part in parts]),
        cached_tokens=np.concatenate([part.cached_tokens for part in parts]),
        tenant=np.concatenate([part.tenant for part in parts]),
        prefix_offsets=np.concatenate([*offsets, [sum(keys)]])
        if len(traffic.prefix_offsets)
        else traffic.prefix_offsets,
        prefix_keys=np.concatenate([part.prefix_keys for part in parts]),
        name=f"{traffic.name} ({len(parts)} windows)",
    )
