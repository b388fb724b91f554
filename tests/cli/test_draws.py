"""recommend takes other models from the intervals of model.json, and from nowhere else."""

from pathlib import Path

from rooftune.policies.step_time import NAMED_MODELS
from rooftune.tuner.cli.flags.traffic import read_draws
from rooftune.tuner.model.intervals import DRAWS
from rooftune.tuner.model.model_file import ModelFile, write_model_file

MODEL = NAMED_MODELS["8b-2tbs"]


def test_a_fitted_file_gives_draws_by_seed_and_a_named_set_gives_none(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    write_model_file(path, ModelFile(MODEL, intervals={"slope_s_per_token": (3e-5, 5e-5)}))
    draws = read_draws(str(path), 1)
    assert len(draws) == DRAWS and {d.slope_s_per_token for d in draws} != {MODEL.slope_s_per_token}
    assert draws == read_draws(str(path), 1) != read_draws(str(path), 2)
    assert read_draws("8b-2tbs", 1) == ()
    write_model_file(path, ModelFile(MODEL))
    assert read_draws(str(path), 1) == ()
