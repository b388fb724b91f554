"""Step samples: what is refused, the file, and the reservoir's invariants."""

import gzip
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftune.policies.errors import InputError
from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.bench.knee_fit import make_steps
from rooftune.tuner.model.reservoir import Reservoir
from rooftune.tuner.model.sample_file import FILE_COLUMNS, read_steps, write_steps
from rooftune.tuner.model.samples import COLUMNS, StepSamples, join, split_alternating

STEPS = make_steps(NAMED_MODELS["8b-2tbs"], seed=3, steps=400)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_an_impossible_value_is_refused_with_its_column_and_row(name: str, bad: float) -> None:
    column = getattr(STEPS, name).copy()
    column[7] = bad
    with pytest.raises(InputError, match="step 7"):
        replace(STEPS, **{name: column})


def test_steps_without_tokens_time_or_requests_are_refused() -> None:
    for name in ("duration_s", "sequences"):
        with pytest.raises(InputError, match=name):
            replace(STEPS, **{name: np.zeros(len(STEPS))})
    with pytest.raises(InputError, match="at least 1"):
        replace(STEPS, prefill_tokens=np.zeros(len(STEPS)), decode_tokens=np.zeros(len(STEPS)))
    with pytest.raises(InputError, match="shape"):
        replace(STEPS, duration_s=np.ones(3))


@pytest.mark.parametrize("name", ["steps.csv", "steps.csv.gz"])
def test_a_written_file_is_read_back(tmp_path: Path, name: str) -> None:
    write_steps(tmp_path / name, STEPS)
    again = read_steps(tmp_path / name)
    for column in COLUMNS:
        np.testing.assert_allclose(getattr(again, column), getattr(STEPS, column), rtol=1e-11)


@pytest.mark.parametrize("name", ["steps.csv", "steps.csv.gz"])
def test_a_pipe_is_read_like_a_file(tmp_path: Path, name: str) -> None:
    """What a shell gives for <(cat steps.csv) can be read once."""
    write_steps(tmp_path / name, STEPS)
    os.mkfifo(tmp_path / "pipe")
    feeder = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes((tmp_path / name).read_bytes()))
    feeder.start()
    again = read_steps(tmp_path / "pipe")
    feeder.join()
    assert len(again) == len(STEPS)


def test_json_lines_hold_the_same_names(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    row = '{"duration_s": 0.01, "prefill_tokens": 0, "decode_tokens": 8, "sequences": 8, '
    row += '"context_decode_tokens": 9120, "context_prefill_tokens": 0, "attention_work": 0}'
    path.write_text('{"format": "rooftune-steps", "version": 1}\n' + row + "\n" + row + "\n")
    assert list(read_steps(path).context_tokens) == [9120.0, 9120.0]
    path.write_text('{"format": "rooftune-steps", "version": 2}\n' + row)
    with pytest.raises(InputError, match="version"):
        read_steps(path)
    path.write_text(row.replace("decode_tokens", "decoded_tokens"))
    with pytest.raises(InputError, match="keys"):
        read_steps(path)


HEAD = ",".join(FILE_COLUMNS)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "empty"),
        ("# rooftune-steps 9\n" + HEAD + "\n", "marker"),
        (HEAD + "\n", "no steps"),
        (HEAD.replace("sequences,", "") + "\n", "sequences"),
        (HEAD + ",extra\n0.01,0,1,1,5,0,0,1\n", "extra"),
        (HEAD + "\n0.01,0,1,1,5,0\n", "cells"),
        (HEAD + "\n0.01,0,x,1,5,0,0\n", "decode_tokens"),
        (HEAD + "\n0.01,0,nan,1,5,0,0\n", "finite"),
        (HEAD + "\n,0,1,1,5,0,0\n", "duration_s"),
        (HEAD + "\n12000,0,1,1,5,0,0\n", "duration_s"),
        (HEAD + "\n0.01,0,1,1,-5,0,0\n", "context_decode_tokens of step 0"),
    ],
)
def test_a_broken_file_is_refused_and_the_message_names_the_place(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=named):
        read_steps(path)


def test_what_is_not_a_text_file_is_refused(tmp_path: Path) -> None:
    cut = gzip.compress((HEAD + "\n" + "0.01,0,1,1,5,0,0\n" * 500).encode())[:-20]
    for content in (cut, b"\x1f\x8bxx", b"\xff\xfe\x00", b"\x00" * 10):
        path = tmp_path / "steps.csv.gz"
        path.write_bytes(content)
        with pytest.raises(InputError):
            read_steps(path)
    with pytest.raises(InputError, match="does not exist"):
        read_steps(tmp_path / "absent.csv")


def test_a_sweep_is_read_in_seconds_and_counts_its_requests(shared_data: Path) -> None:
    steps = read_steps(shared_data / "vllm-cpu-sweep" / "b_512_t0_r1.steps.csv.gz")
    assert len(steps) == 6850
    assert steps.duration_s[0] == pytest.approx(0.035164)
    assert (steps.prefill_tokens[0], steps.decode_tokens[0], steps.sequences[0]) == (468.0, 0.0, 1.0)
    assert steps.computed_tokens.max() == 512.0


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 2000), max_size=6), capacity=st.integers(64, 700), seed=st.integers(0, 99))
def test_the_reservoir_keeps_the_same_steps_in_any_batches(cuts: list[int], capacity: int, seed: int) -> None:
    steps = make_steps(NAMED_MODELS["8b-2tbs"], seed=1, steps=2000)
    whole, parts = Reservoir(capacity, seed), Reservoir(capacity, seed)
    whole.add(steps)
    for left, right in zip([0, *sorted(cuts)], [*sorted(cuts), 2000], strict=True):
        parts.add(steps.select(np.arange(left, right)))
    assert len(whole) <= capacity
    np.testing.assert_array_equal(whole.samples.duration_s, parts.samples.duration_s)


def test_decode_only_steps_do_not_crowd_out_the_rest() -> None:
    rare = make_steps(NAMED_MODELS["8b-2tbs"], seed=1, steps=200, tokens=(1024, 4096))
    common = make_steps(NAMED_MODELS["8b-2tbs"], seed=2, steps=50_000, tokens=(4, 7))
    reservoir = Reservoir(1000)
    for place in range(0, 50_000, 500):
        reservoir.add(common.select(np.arange(place, place + 500)))
        reservoir.add(rare.select(np.arange(place // 250, place // 250 + 2)))
    kept = reservoir.samples.computed_tokens
    assert (kept >= 1024).sum() == 200
    assert len(kept) <= 1000 and (kept < 8).sum() > 700


def test_held_out_steps_are_whole_blocks_and_disjoint() -> None:
    seen, held = split_alternating(STEPS, every=4, block=25)
    assert len(seen) == 300 and len(held) == 100
    np.testing.assert_array_equal(held.duration_s[:25], STEPS.duration_s[75:100])
    with pytest.raises(InputError, match="at least"):
        split_alternating(STEPS.select(np.arange(10)))


def test_an_empty_sample_is_valid() -> None:
    assert len(join([])) == 0 and isinstance(join([]), StepSamples)


def test_a_huge_number_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"duration_s": ' + "9" * 5000 + "}\n")
    with pytest.raises(InputError, match="line 1 is not JSON"):
        read_steps(path)
