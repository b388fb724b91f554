"""The bench ``a100-yi34b``: the knee has an interval, and errors are of batches outside the fit."""

from pathlib import Path

import numpy as np
import pytest

from rooftune.policies.errors import InputError
from rooftune.policies.step_time import StepModel, step_time
from rooftune.tuner.model.samples import StepSamples
from tests.bench.a100_yi34b import FOLDER, bench, decode_ratio, fit_few, knee_interval, read_steps

TRUTH = StepModel(0.0, 0.001, 0.05, 0.0, 2e-4, 8e-9, 0.0)


def steps_of(model: StepModel) -> StepSamples:
    """Decode batches of 1 to 128 and prompts of 128 to 16,384, priced by the model."""
    decode, prefill = 2.0 ** np.arange(8), 2.0 ** np.arange(7, 15)
    none = np.zeros(8)
    work = np.concatenate([none, prefill**2 / 2])
    tokens, requests = np.concatenate([decode, prefill]), np.concatenate([decode, none + 1])
    times = [step_time(model, n, r, 0.0, w) for n, r, w in zip(tokens, requests, work, strict=True)]
    zeros = np.zeros(16)
    return StepSamples(
        np.array(times), np.concatenate([none, prefill]), np.concatenate([decode, none]), requests, zeros, zeros, work
    )


def test_a_known_model_is_recovered() -> None:
    found = fit_few(steps_of(TRUTH))
    assert found == pytest.approx(TRUTH, rel=1e-4)
    assert decode_ratio(found) == pytest.approx(5.0, rel=1e-4)


def test_the_interval_widens_with_what_one_batch_can_do() -> None:
    assert knee_interval(200.0, [200.0] * 16) == (200.0, 200.0)
    low, high = knee_interval(200.0, [190.0, *[200.0] * 14, 210.0])
    wider_low, wider_high = knee_interval(200.0, [150.0, *[200.0] * 14, 250.0])
    assert wider_low < low < 200.0 < high < wider_high


def test_the_measured_batches(shared_data: Path) -> None:
    figures = {figure.name: figure.value for figure in bench(True)}
    assert figures["fit_steps_refused"] == 1.0
    assert 0.0 < figures["knee_low"] < figures["knee_tokens"] < figures["knee_high"]
    assert figures["knee_high"] / figures["knee_low"] > 2.0  # sixteen batches do not determine it better
    assert figures["decode_held_out_mape"] < 0.12 and figures["prefill_held_out_mape"] < 0.25
    assert figures["worst_held_out_error"] > 0.5  # the first batch is not dropped


def test_a_damaged_file_is_refused(tmp_path: Path, shared_data: Path) -> None:
    for name in ("decode.csv", "prefill.csv"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    assert len(read_steps(tmp_path)) == 16
    (tmp_path / "decode.csv").write_text((FOLDER / "decode.csv").read_text().replace("0.0468", "-0.0468"))
    with pytest.raises(InputError, match="batch_execution_time"):
        read_steps(tmp_path)
    (tmp_path / "decode.csv").unlink()
    with pytest.raises(InputError, match=r"decode\.csv"):
        read_steps(tmp_path)
