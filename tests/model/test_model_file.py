"""model.json: what is written is read back, and what is not usable is refused with the reason."""

import json
import math
from pathlib import Path

import pytest

from policies.errors import InputError
from policies.step_time import NAMED_MODELS, StepModel
from tuner.model.model_file import ModelFile, load_step_model, read_model_file, write_model_file

MODEL = StepModel(0.001, 1e-5, 0.008, 6e-8, 4e-5, 2e-10, 8.0)


def written(tmp_path: Path) -> tuple[Path, dict[str, object]]:
    path = tmp_path / "model.json"
    write_model_file(
        path, ModelFile(MODEL, "test", {"knee_tokens": (150.0, math.inf)}, ("x",), {"held_out_mape": 0.07})
    )
    return path, json.loads(path.read_text())


def test_a_written_file_is_read_back_whole(tmp_path: Path) -> None:
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
        ({"version": 2}, "version"),
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
