"""``rooftune fit`` from file to file."""

import json
import os
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from rooftune.policies.commands import COMMAND_GROUP
from rooftune.policies.step_time import NAMED_MODELS, StepCost
from rooftune.tuner.bench.knee_fit import make_steps
from rooftune.tuner.cli.main import main
from rooftune.tuner.model.fit import seen_before
from rooftune.tuner.model.model_file import load_step_model, read_model_file
from rooftune.tuner.model.sample_file import write_steps
from tests.model.test_profile import write_profile

TRUTH = NAMED_MODELS["8b-2tbs"]


def fit(*words: str) -> int:
    return main(["fit", *words], {"fit": EntryPoint("fit", "rooftune.tuner.cli.fit:COMMAND", COMMAND_GROUP)})


@pytest.fixture
def steps(tmp_path: Path) -> str:
    path = tmp_path / "steps.csv.gz"
    write_steps(path, make_steps(TRUTH, seed=0))
    return str(path)


@pytest.mark.slow
def test_steps_become_a_model_that_loads(steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.json"
    assert fit("--steps", steps, "--out", str(out)) == 0
    text = capsys.readouterr().out
    assert "knee: " in text and "held-out" in text and "floor" in text
    assert read_model_file(out).model.slope_s_per_token == pytest.approx(4e-5, rel=0.03)
    contents = read_model_file(out)
    low, high = contents.intervals["knee_tokens"]
    assert low < 200.0 < high and 0.05 < contents.errors["held_out_mape"] < 0.12
    picture = (tmp_path / "model.svg").read_text()
    assert "<svg" in picture and "knee" in picture
    assert fit("--steps", steps, "--out", str(out)) == 0
    assert (tmp_path / "model.svg").read_text() == picture


@pytest.mark.slow
def test_json_marks_unknown_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "low.csv"
    write_steps(path, make_steps(TRUTH, seed=0, tokens=(1, 100)))
    assert fit("--steps", str(path), "--json") == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["knee_tokens"] is None and alone["intervals"]["knee_tokens"][1] is None
    assert "slope_unknown" in alone["codes"]
    assert fit("--steps", str(path), "--json", "--card", "a100-80gb", "--parameters", "8e9") == 0
    leaning = json.loads(capsys.readouterr().out)
    low, high = leaning["intervals"]["knee_tokens"]
    assert low < 200.0 < high and "prior_used" in leaning["codes"]


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (("--steps", "{absent}"), 2, "absent"),
        (("--steps", "{steps}", "--card", "l4"), 2, "--parameters"),
        (("--steps", "{steps}", "--card", "l5", "--parameters", "8e9"), 2, "l4"),
        (("--steps", "{steps}", "--parameters", "-1", "--card", "l4"), 2, "--parameters"),
        (("--steps", "{steps}", "--keep", "3"), 2, "--keep"),
        (("--steps", "{steps}", "--cards", "2"), 2, "--cards does nothing without --card"),
        (("--steps", "{steps}", "--precision", "fp8"), 2, "--precision does nothing without --card"),
        (("--steps", "{steps}", "--out", "{absent}/model.json"), 2, "cannot be written"),
        (("--steps", "{few}"), 1, "too_few_steps"),
    ],
)
def test_refusals_are_one_line_with_the_right_code(
    words: tuple[str, ...], code: int, named: str, steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few.csv"
    write_steps(few, make_steps(TRUTH, seed=0, steps=20))
    places = {"absent": str(tmp_path / "absent"), "steps": steps, "few": str(few)}
    assert fit(*(word.format(**places) for word in words)) == code
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_layer_profile_becomes_tables_that_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.json"
    folder = str(write_profile(tmp_path))
    assert fit("--profile", folder, "--layers", "3", "--out", str(out)) == 0
    text = capsys.readouterr().out
    assert "3 layers" in text and "knee" in text and "held-out" in text and "nothing padded" in text
    loaded = load_step_model(str(out))
    assert isinstance(loaded, StepCost) and len(loaded.base_s) == 65 and len(loaded.attention.decodes) == 4
    assert (tmp_path / "model.svg").exists()
    assert fit("--profile", folder, "--layers", "3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["profile"] == {"max_tokens": 64, "graph_sizes": [], "layers": 3}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--profile", "nowhere", "--layers", "3"], "nowhere"),
        (["--profile", "nowhere"], "--layers"),
        (["--profile", "nowhere", "--layers", "x"], "--layers"),
        (["--profile", "nowhere", "--layers", "3", "--card", "a100-80gb"], "--card"),
        (["--steps", "nowhere", "--layers", "3"], "--layers"),
        (["--profile", "nowhere", "--layers", "3", "--keep", "100"], "--keep does nothing with --profile"),
        (["--profile", "nowhere", "--layers", "3", "--first-seen", "drop"], "--first-seen does nothing with --profile"),
        (["--steps", "nowhere", "--profile", "nowhere"], "--profile"),
        ([], "--profile"),
    ],
)
def test_invalid_profile_flags_are_refused(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(*words) == 2
    assert named in capsys.readouterr().err


@pytest.mark.slow
def test_costlier_first_steps_of_a_size_are_left_out_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cpu.csv"
    steps = make_steps(TRUTH, seed=3)
    first = ~seen_before(steps)
    write_steps(path, replace(steps, duration_s=np.where(first, 1.4 * steps.duration_s, steps.duration_s)))
    slopes = {}
    for how in ("auto", "keep", "drop"):
        assert fit("--steps", str(path), "--json", "--first-seen", how) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["left_out_first_seen"] == (0 if how == "keep" else int(first.sum()))
        slopes[how] = found["model"]["slope_s_per_token"]
    assert slopes["auto"] == slopes["drop"] == pytest.approx(4e-5, rel=0.05)
    assert slopes["keep"] > slopes["drop"] * 1.05
    assert fit("--steps", str(path)) == 0
    assert f"left out   {int(first.sum()):,} first steps" in capsys.readouterr().out
    assert fit("--steps", str(path), "--first-seen", "some") == 2


@pytest.mark.parametrize(
    "given", [("--steps", "nowhere.csv"), ("--steps", "."), ("--profile", "nowhere", "--layers", "3")]
)
def test_a_missing_path_is_one_line(given: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(*given) == 2
    output = capsys.readouterr().err
    assert len(output.splitlines()) == 1 and "Errno" not in output and given[1] in output


def test_if_one_file_cannot_be_written_neither_is(
    steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, pipe = tmp_path / "model.json", tmp_path / "pipe"
    os.mkfifo(pipe)
    bad = (tmp_path / "none" / "x.svg", tmp_path / ("x" * 300), tmp_path / "steps.csv.gz" / "x.svg")
    for plot in (tmp_path, pipe, *bad):
        assert fit("--steps", steps, "--out", str(out), "--plot", str(plot)) == 2
        output = capsys.readouterr().err
        assert "--plot" in output and "cannot be written" in output and output.count("\n") == 1 and not out.exists()
    assert fit("--steps", steps, "--out", "") == 2


def test_all_missing_columns_are_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "few.csv"
    path.write_text("duration_s,prefill_tokens\n0.1,2\n")
    assert main(["fit", "--steps", str(path)]) == 2
    said = capsys.readouterr().err
    assert "columns decode_tokens, sequences, context_decode_tokens," in said and said.count("\n") == 1
