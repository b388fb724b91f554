"""Windows that stand in for long traffic: the busiest among them, nothing cut in two, contents kept."""

from itertools import pairwise

import numpy as np
import pytest

from rooftune.tuner.search.arena import APART_S, WINDOWS, slices
from rooftune.tuner.traffic.generate import Gamma, document_mix, generate, named_mix
from rooftune.tuner.traffic.workload import Traffic

LONG = generate(Gamma(2.0, 3.0), named_mix("chat"), 3600.0, 4, "long")


def groups(short: Traffic) -> list[slice]:
    edges = np.flatnonzero(np.diff(short.arrival_s) > APART_S / 2) + 1
    bounds = [0, *edges.tolist(), len(short)]
    return [slice(a, b) for a, b in pairwise(bounds)]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_windows_are_unchanged_stretches_of_the_traffic(share: float) -> None:
    short = slices(LONG, share)
    parts = groups(short)
    # Half of the traffic in windows that may not touch leaves no place for the last of them.
    assert len(parts) == WINDOWS or (share == 0.5 and len(parts) == WINDOWS - 1)
    whole = list(zip(LONG.prompt_tokens.tolist(), LONG.output_tokens.tolist(), strict=True))
    for part in parts:
        rows = list(zip(short.prompt_tokens[part].tolist(), short.output_tokens[part].tolist(), strict=True))
        at = next(i for i in range(len(whole)) if whole[i : i + len(rows)] == rows)
        np.testing.assert_allclose(
            np.diff(short.arrival_s[part]), np.diff(LONG.arrival_s[at : at + len(rows)]), atol=1e-6
        )
        assert short.arrival_s[part][-1] - short.arrival_s[part][0] <= LONG.span_s * share / WINDOWS


def test_the_busiest_window_is_among_them() -> None:
    short = slices(LONG, 0.2)
    length_s = LONG.span_s * 0.2 / WINDOWS
    tokens = LONG.prompt_tokens + LONG.output_tokens
    busiest = max(
        tokens[(LONG.arrival_s >= start) & (LONG.arrival_s < start + length_s)].sum()
        for start in np.linspace(0.0, LONG.span_s - length_s, 60) + LONG.arrival_s[0]
    )
    assert max((short.prompt_tokens + short.output_tokens)[part].sum() for part in groups(short)) == busiest


def test_contents_of_prompts_travel_with_them() -> None:
    n = 400
    rng = np.random.default_rng(1)
    prompt = rng.integers(512, 2048, n)
    counts = prompt // 512
    keys = np.arange(counts.sum())
    traffic = Traffic(
        np.sort(rng.uniform(0.0, 1000.0, n)),
        prompt,
        np.ones(n, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        prefix_offsets=np.concatenate([[0], np.cumsum(counts)]),
        prefix_keys=keys,
        prefix_span_tokens=512,
    )
    short = slices(traffic, 0.3)
    by_keys = {
        tuple(keys[a:b]): int(p)
        for a, b, p in zip(traffic.prefix_offsets[:-1], traffic.prefix_offsets[1:], prompt, strict=True)
    }
    for row in range(len(short)):
        own = tuple(short.prefix_keys[short.prefix_offsets[row] : short.prefix_offsets[row + 1]])
        assert by_keys[own] == short.prompt_tokens[row]


def test_short_traffic_is_not_cut() -> None:
    at_once = document_mix(1, 5.0, 1.0, 10, (2_000, 3_000))
    assert slices(at_once, 1.0) is at_once
