"""Prompts: exact lengths, ids within bounds, equal exactly where the traffic says so."""

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.tuner.replay.prompts import CLASSES, FIRST_TOKEN_ID, PRESETS, PromptMaker, preset_traffic, scale_lengths
from rooftune.tuner.traffic.workload import Traffic


def traffic(prompt: list[int], *, cached: list[int] | None = None, keys: list[list[int]] | None = None) -> Traffic:
    n = len(prompt)
    content = {}
    if keys is not None:
        content = {
            "prefix_offsets": np.cumsum([0, *map(len, keys)]),
            "prefix_keys": np.array([key for row in keys for key in row], dtype=np.int64),
            "prefix_span_tokens": 16,
        }
    return Traffic(
        np.arange(n, dtype=np.float64),
        np.array(prompt),
        np.full(n, 4),
        np.array(cached or [0] * n),
        np.zeros(n, dtype=np.int64),
        **content,
    )


def test_equal_keys_are_equal_ids_and_everything_else_differs() -> None:
    made = PromptMaker(traffic([50, 40, 60, 40], keys=[[1, 2], [1, 2], [1, 3], [4, 2]]), 1000, seed=7)
    a, b, c, d = (made.token_ids(row) for row in range(4))
    assert [len(ids) for ids in (a, b, c, d)] == [50, 40, 60, 40]
    assert (a[:32] == b[:32]).all() and (a[:16] == c[:16]).all()
    assert (a[16:32] != c[16:32]).mean() > 0.9  # another key
    assert (a[32:40] != b[32:40]).mean() > 0.9  # beyond the keys
    assert (a[:16] != d[:16]).mean() > 0.9


def test_a_key_for_part_of_a_span_gives_its_prefix() -> None:
    made = PromptMaker(traffic([20, 32], keys=[[1, 2], [1, 2]]), 1000, seed=0)
    short, long = made.token_ids(0), made.token_ids(1)
    assert len(short) == 20 and (short == long[:20]).all()


def test_cached_tokens_are_a_shared_prefix() -> None:
    made = PromptMaker(traffic([30, 30, 30], cached=[20, 10, 0]), 1000, seed=0)
    a, b, c = (made.token_ids(row) for row in range(3))
    assert (a[:10] == b[:10]).all()
    assert (a[10:] != b[10:]).mean() > 0.9 and (a != c).mean() > 0.9


def test_ids_stay_within_the_vocabulary_and_above_the_special_ones() -> None:
    ids = PromptMaker(traffic([20_000]), 64, seed=1).token_ids(0)
    assert ids.min() == FIRST_TOKEN_ID and ids.max() == 63


def test_the_seed_decides() -> None:
    one = traffic([200, 200])
    first, again, other = (PromptMaker(one, 1000, seed).token_ids(0) for seed in (5, 5, 6))
    assert (first == again).all() and (first != other).mean() > 0.9


@pytest.mark.parametrize(("vocab", "seed"), [(31, 0), (2**24 + 1, 0), (1000, -1)])
def test_values_out_of_range_are_refused(vocab: int, seed: int) -> None:
    with pytest.raises(InputError):
        PromptMaker(traffic([5]), vocab, seed)


def test_presets_hold_the_classes_they_name_in_their_shares() -> None:
    for name in CLASSES:
        assert set(preset_traffic(name, 5.0, 20.0, 1).tenant_names) == {name}
    long_share = {}
    for name in ("real-ratio", "peak-ratio"):
        made = preset_traffic(name, 50.0, 100.0, 1)
        assert made.tenant_names == tuple(CLASSES)
        shares = np.bincount(made.tenant) / len(made)
        assert np.abs(shares - PRESETS[name]).max() < 0.03
        documents = made.prompt_tokens[made.tenant == 2]
        assert documents.min() >= 20_000
        long_share[name] = (made.prompt_tokens >= 20_000).mean()
    assert long_share["peak-ratio"] > 3 * long_share["real-ratio"]
    with pytest.raises(InputError, match="real-ratio"):
        preset_traffic("nothing", 1.0, 10.0, 0)


def test_scaled_lengths_keep_the_bounds_and_refuse_known_content() -> None:
    small = scale_lengths(traffic([1000, 3], cached=[990, 2]), 0.1)
    assert small.prompt_tokens.tolist() == [100, 1] and small.cached_tokens.tolist() == [99, 0]
    assert small.output_tokens.tolist() == [1, 1]
    with pytest.raises(InputError, match="prefix_keys"):
        scale_lengths(traffic([50], keys=[[1]]), 0.5)
    same = traffic([50])
    assert scale_lengths(same, 1.0) is same
