"""Layer profiles: whole steps are the sum of their kernels, and a file that is not a full profile is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.policies.step_time import step_cost
from rooftune.tuner.model.profile import attention_table, read_profile

DENSE = {"layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1, "gate_up_proj": 1, "act_fn": 1, "down_proj": 1}
CHUNKS, PRIORS, DECODES, CONTEXTS = (0, 16, 64), (0, 16, 64), (0, 1, 4, 8), (0, 16, 256)


def attention_us(chunk: float, prior: float, decodes: float, context: float) -> float:
    """Linear in each, so that any interpolation is exact."""
    prefill = 5.0 + 0.5 * chunk + 0.01 * chunk * prior if chunk else 0.0
    return prefill + 2.0 * decodes + 0.01 * decodes * context


def write_profile(folder: Path) -> Path:
    """A whole profile; every dense kernel takes 10 + 0.1 x tokens us, every output kernel 100 + requests us."""
    sizes = (1, 4, 16, 64)
    dense = [f"{name},{n},{10 + 0.1 * n}" for name in (*DENSE, "embedding", "final_layernorm") for n in sizes]
    (folder / "dense.csv").write_text("layer,tokens,time_us\n" + "\n".join(dense) + "\n")
    output = [f"{name},{n},{100 + n}" for name in ("lm_head", "sampler") for n in (1, 16)]
    (folder / "per_sequence.csv").write_text("layer,sequences,time_us\n" + "\n".join(output) + "\n")
    rows = [
        f"{c},{p},{n},{k},{attention_us(c, p, n, k)}"
        for c in CHUNKS
        for p in PRIORS
        for n in DECODES
        for k in CONTEXTS
        if (c or not p) and (n or not k) and (k or not n) and (c or n) and not (c and n == 8)
    ]
    head = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    (folder / "attention.csv").write_text("\n".join([head, *rows]) + "\n")
    return folder


def test_a_step_is_the_sum_of_its_kernels(tmp_path: Path) -> None:
    cost = read_profile(write_profile(tmp_path), 3).cost
    calls = 3 * sum(DENSE.values()) + 2
    for tokens, sequences, decodes, context, chunk, prior in [
        (8, 8, 8, 8 * 100.0, 0, 0),
        (40, 1, 0, 0.0, 40, 30),
        (40, 5, 4, 4 * 256.0, 36, 64),
        (48, 9, 8, 8 * 40.0, 40, 16),  # more decodes beside a prompt than were measured: continued
    ]:
        expected_us = calls * (10 + 0.1 * tokens) + 2 * (100 + sequences)
        expected_us += 3 * attention_us(chunk, prior, decodes, context / decodes if decodes else 0.0)
        got = step_cost(cost, tokens, sequences, decodes, context, float(prior), chunk * (prior + chunk / 2))
        assert got == pytest.approx(expected_us * 1e-6, rel=1e-9)


def test_two_short_prompts_cost_less_than_a_long_one(tmp_path: Path) -> None:
    cost = read_profile(write_profile(tmp_path), 3).cost
    long_one = step_cost(cost, 64, 1, 0, 0.0, 0.0, 64 * 32.0)
    short_ones = step_cost(cost, 64, 1, 0, 0.0, 0.0, 4 * 16 * 8.0)
    # Per token half of the prefix price: work / 64 falls from 32 to 8.
    assert long_one - short_ones == pytest.approx(3 * 0.01 * 64 * 24 * 1e-6)


def test_graphs_pad_steps_to_their_sizes(tmp_path: Path) -> None:
    plain = read_profile(write_profile(tmp_path), 3)
    sizes = {"resolved_config": {"compilation_config": {"cudagraph_capture_sizes": [8, 1, 32]}}}
    (tmp_path / "meta.json").write_text(json.dumps(sizes))
    padded = read_profile(tmp_path, 3)
    assert plain.graph_sizes == () and padded.graph_sizes == (1, 8, 32)
    base = plain.cost.base_s
    for tokens, as_if in [(1, 1), (2, 8), (8, 8), (9, 32), (32, 32), (33, 33), (64, 64)]:
        assert padded.cost.base_s[tokens] == base[as_if]


def test_the_formula_beside_the_tables_describes_them(tmp_path: Path) -> None:
    profile = read_profile(write_profile(tmp_path), 3)
    assert profile.formula_mape < 0.1 and profile.max_tokens == 64
    assert profile.cost.formula == profile.fit.model


Change = Callable[[str], str]


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("dense.csv", lambda text: "", "empty"),
        ("dense.csv", lambda text: "layer,tokens,time_us\n", "no rows"),
        ("dense.csv", lambda text: text.replace("qkv_proj,", "moe,"), "moe"),
        ("dense.csv", lambda text: text + "qkv_proj,4,1.0\n", "once"),
        ("dense.csv", lambda text: text + "qkv_proj,5\n", "fields"),
        ("dense.csv", lambda text: text + "qkv_proj,5,fast\n", "fast"),
        ("dense.csv", lambda text: text + "qkv_proj,5,nan\n", "nan"),
        ("dense.csv", lambda text: text + "qkv_proj,5,-1\n", "-1"),
        ("dense.csv", lambda text: text + "qkv_proj,0,1\n", "tokens"),
        ("dense.csv", lambda text: text.replace("embedding", "act_fn_2"), "act_fn_2"),
        ("dense.csv", lambda text: "\n".join(x for x in text.splitlines() if "embedding" not in x), "embedding"),
        ("per_sequence.csv", lambda text: text.replace("sampler", "head"), "head"),
        ("per_sequence.csv", lambda text: text.replace("sequences", "tokens"), "sequences"),
        ("attention.csv", lambda text: text.replace("16,16,1,16,", "16,16,1,17,"), "attention.csv"),
        ("attention.csv", lambda text: "\n".join(text.splitlines()[:3]), "prefill_chunk"),
        ("attention.csv", lambda text: text + "1,2,3,4,inf\n", "inf"),
        ("meta.json", lambda text: "{", "meta.json"),
        ("meta.json", lambda text: '{"resolved_config":{"compilation_config":{"cudagraph_capture_sizes":["a"]}}}', "a"),
    ],
)
def test_a_damaged_profile_is_refused(tmp_path: Path, name: str, change: Change, named: str) -> None:
    write_profile(tmp_path)
    path = tmp_path / name
    path.write_text(change(path.read_text() if path.exists() else ""))
    with pytest.raises(InputError, match=named):
        read_profile(tmp_path, 3)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x00" * 100])
@pytest.mark.parametrize("name", ["dense.csv", "per_sequence.csv", "attention.csv"])
def test_bytes_that_are_not_a_table_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    write_profile(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=name):
        read_profile(tmp_path, 3)


@pytest.mark.parametrize("layers", [0, -1, 1001])
def test_layers_out_of_range_are_refused(tmp_path: Path, layers: int) -> None:
    with pytest.raises(InputError, match="layers"):
        read_profile(write_profile(tmp_path), layers)


def test_a_hole_in_the_grid_is_named(tmp_path: Path) -> None:
    shapes = np.array([[c, p, n, k] for c in CHUNKS for p in PRIORS for n in DECODES for k in CONTEXTS], dtype=float)
    times = np.ones(len(shapes))
    keep = ~((shapes[:, 0] == 16) & (shapes[:, 1] == 64) & (shapes[:, 2] == 1))
    with pytest.raises(InputError, match=r"16\.0, 64\.0, 1\.0"):
        attention_table(shapes[keep], times[keep], 1, "attention.csv")
    assert attention_table(shapes, times, 2, "attention.csv").time_s[1, 1, 1, 1] == pytest.approx(2e-6)
