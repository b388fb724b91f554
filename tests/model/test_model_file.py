"""model.json: files round-trip, and an unusable file is refused with the reason."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.policies.step_time import NAMED_MODELS, NO_ATTENTION, AttentionTable, StepCost, StepModel
from rooftune.tuner.model.model_file import ModelFile, load_step_model, read_model_file, write_model_file

MODEL = StepModel(0.001, 1e-5, 0.008, 6e-8, 4e-5, 2e-10, 8.0)


def written(tmp_path: Path) -> tuple[Path, dict[str, object]]:
    path = tmp_path / "model.json"
    write_model_file(
        path, ModelFile(MODEL, "test", {"knee_tokens": (150.0, math.inf)}, ("x",), {"held_out_mape": 0.07})
    )
    return path, json.loads(path.read_text())


def test_a_model_file_round_trips(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    contents = read_model_file(path)
    assert contents.model == MODEL
    assert contents.intervals == {"knee_tokens": (150.0, math.inf)}
    assert contents.codes == ("x",) and contents.errors == {"held_out_mape": 0.07}
    assert load_step_model(str(path)) == MODEL


def test_names_are_loaded_and_an_unknown_name_lists_them() -> None:
    assert load_step_model("8b-2tbs") == NAMED_MODELS["8b-2tbs"]
    with pytest.raises(InputError) as error:
        load_step_model("9b-3tbs")
    for name in NAMED_MODELS:
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"schema": "other"}, "schema"),
        ({"version": 3}, "version"),
        ({"version": True}, "version"),
        ({"version": 1, "tables": {}}, "tables"),
        ({"typo": 1}, "typo"),
        ({"model": {"overhead_s": 1.0}}, "model"),
        ({"model": {**MODEL._asdict(), "slope_s_per_token": -1.0}}, "slope_s_per_token"),
        ({"model": {**MODEL._asdict(), "floor_s": 8000.0}}, "floor_s"),
        ({"model": {**MODEL._asdict(), "sharpness": 0.5}}, "sharpness"),
        ({"model": {**MODEL._asdict(), "floor_s": "8"}}, "floor_s"),
        ({"model": {**MODEL._asdict(), "floor_s": True}}, "floor_s"),
        ({"model": dict.fromkeys(StepModel._fields, 0.0)}, "no time"),
        ({"intervals": {"knee_tokens": [3, 2]}}, "knee_tokens"),
        ({"intervals": {"knee_tokens": 3}}, "knee_tokens"),
        ({"intervals": [1]}, "intervals"),
        ({"errors": {"held_out_mape": "x"}}, "held_out_mape"),
        ({"errors": [1]}, "errors"),
        ({"errors": {"held_out_mape": math.nan}}, "held_out_mape"),
        ({"errors": {"held_out_mape": 10**400}}, "held_out_mape"),
        ({"model": {**MODEL._asdict(), "floor_s": 10**400}}, "floor_s"),
        ({"source": {"a": 1}}, "source"),
        ({"source": "x" * 2001}, "source: String should have at most 2000 characters"),
        ({"codes": 3}, "codes"),
    ],
)
def test_a_broken_file_is_refused_and_the_message_names_the_value(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    path, document = written(tmp_path)
    path.write_text(json.dumps({**document, **change}))
    with pytest.raises(InputError, match=named):
        load_step_model(str(path))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"[" * 100_000, b'{"schema": NaN}'])
def test_what_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(InputError):
        load_step_model(str(path))


def tables(attention: bool = True) -> StepCost:
    axes = (np.array([0.0, 16.0]), np.array([-8.0, 0.0, 32.0]), np.array([0.0, 4.0]), np.array([0.0, 64.0]))
    table = AttentionTable(*axes, np.arange(24, dtype=np.float64).reshape(2, 3, 2, 2) / 7e3 - 1e-3)
    return StepCost(
        MODEL, np.array([0.0, 0.01, 0.011]), np.array([0.0, 1 / 3e4]), 1e-5, 2e-8, 3e-8, 4e-10,
        table if attention else NO_ATTENTION,
    )  # fmt: skip


def written_tables(tmp_path: Path, cost: StepCost) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "tables.json"
    write_model_file(path, ModelFile(MODEL, "test", cost=cost))
    return path, json.loads(path.read_text())


@pytest.mark.parametrize("attention", [True, False])
def test_tables_round_trip_bit_for_bit(tmp_path: Path, attention: bool) -> None:
    cost = tables(attention)
    path, _ = written_tables(tmp_path, cost)
    back = load_step_model(str(path))
    assert isinstance(back, StepCost) and back.formula == MODEL == read_model_file(path).model
    assert back[3:7] == cost[3:7]
    for one, other in zip((back.base_s, back.sequences_s, *back.attention), (*cost[1:3], *cost.attention), strict=True):
        assert one.dtype == np.float64 and one.flags.c_contiguous and np.array_equal(one, other)


def test_a_file_of_version_1_still_loads(tmp_path: Path) -> None:
    path, document = written(tmp_path)
    path.write_text(json.dumps({**document, "version": 1}))
    assert load_step_model(str(path)) == MODEL and read_model_file(path).cost is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"base_s": [0.0]}, "base_s"),
        ({"base_s": [0.0, 0.01, 0.0]}, "base_s"),
        ({"base_s": [0.0, "0.01"]}, "base_s"),
        ({"base_s": [0.0, True]}, "base_s"),
        ({"base_s": [[0.0, 0.01]]}, "base_s"),
        ({"base_s": [0.0, 1e9]}, "base_s"),
        ({"sequences_s": [-1.0]}, "sequences_s"),
        ({"kv_decode_s": None}, "kv_decode_s"),
        ({"kv_decode_s": float("nan")}, "kv_decode_s"),
        ({"typo": 1}, "tables"),
        ({"attention": {"decodes": [0, 1]}}, "attention"),
        ({"attention": []}, "attention"),
    ],
)
def test_broken_tables_are_refused(tmp_path: Path, change: dict[str, object], named: str) -> None:
    path, document = written_tables(tmp_path, tables())
    document["tables"].update(change)
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=named):
        load_step_model(str(path))


@pytest.mark.parametrize(
    "change", [{"decodes": [0, 0]}, {"decodes": [0]}, {"decodes": [0, 1, 2]}, {"time_s": [1]}, {"prior_tokens": ["a"]}]
)
def test_a_broken_attention_table_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path, document = written_tables(tmp_path, tables())
    document["tables"]["attention"].update(change)
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="attention"):
        load_step_model(str(path))


def test_tables_that_lack_a_part_are_refused(tmp_path: Path) -> None:
    path, document = written_tables(tmp_path, tables())
    del document["tables"]["kv_prefill_s"]
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="kv_prefill_s"):
        load_step_model(str(path))


def test_a_huge_number_and_a_too_long_file_name_are_one_line(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    path.write_text(path.read_text().replace('"version": 2', '"version": ' + "9" * 5000))
    for name in (str(path), "x" * 300):
        with pytest.raises(InputError):
            load_step_model(name)
