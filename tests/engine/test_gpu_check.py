"""``make gpu-check`` on a CPU: everything but the card."""

import importlib.util
import random
import sys
from pathlib import Path
from statistics import median

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch", reason="needs torch (make engine-env)")

from rooftune.engine.torch import gpu_check  # noqa: E402 - after the check for torch
from rooftune.tuner.model.sample_file import read_steps  # noqa: E402

HAS_FIT = Path(sys.executable).with_name("rooftune").exists() and importlib.util.find_spec("optuna") is not None


def test_a_dry_run_measures_every_kind_of_step_and_fits_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "ROUND_STEPS", 2)
    words = ["--device", "cpu", "--size", "tiny", "--seconds", "0.01", "--most-tokens", "512", "--out", str(tmp_path)]
    code = gpu_check.main(words)
    printed = capfd.readouterr().out
    kinds = [kind for kind in gpu_check.KINDS if kind.computed_tokens <= 512]
    assert "dry run" in printed and all(f"\n{kind.computed_tokens:6d}  " in printed for kind in kinds)
    steps = read_steps(tmp_path / "steps.csv")
    assert len(steps) == 2 * 2 * len(kinds)  # two rounds of two steps each
    assert set(steps.computed_tokens) == {kind.computed_tokens for kind in kinds}
    rows = zip(steps.prefill_tokens, steps.prefill_context_tokens, steps.attention_work, strict=True)
    assert all(work == pytest.approx(chunk * (prior + chunk / 2)) for chunk, prior, work in rows)
    assert max(steps.attention_work) > 0.0
    by_tokens = [median(steps.duration_s[steps.prefill_tokens == tokens]) for tokens in (16, 512)]
    assert by_tokens[1] > by_tokens[0]
    if HAS_FIT:
        assert code == 0 and "knee" in printed and (tmp_path / "model.json").exists()
    else:
        assert code != 0


@pytest.mark.parametrize(("worst", "code"), [(0.01, 0), (0.5, 1)])
def test_kernels_that_disagree_stop_the_check_before_measuring(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    worst: float,
    code: int,
) -> None:
    monkeypatch.setattr(gpu_check, "kernels_differ", lambda runner: worst)
    monkeypatch.setattr(gpu_check, "measure", lambda *_: {})
    monkeypatch.setattr(gpu_check, "_fit", lambda out: 0)
    out = tmp_path / "out"
    assert gpu_check.main(["--device", "cpu", "--size", "tiny", "--out", str(out)]) == code
    shown = capfd.readouterr()
    assert f"{worst:.4f}" in shown.out and ("differ by more" in shown.err) is (code == 1)
    assert out.exists() is (code == 0)


def test_unusable_flags_are_one_line_each(capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu", "--seconds", "0"]) == 2
    assert gpu_check.main(["--device", "cpu", "--most-tokens", "5"]) == 2
    assert capfd.readouterr().err.count("\n") == 2


def test_blocks_of_a_step_are_each_request_s_own() -> None:
    kind = gpu_check.Kind(decodes=5, context=40, chunk=33, prior=16)
    step = gpu_check.make_step(kind.sizes, 100, random.Random(0))
    blocks = [block for segment in step.segments for block in segment.block_table]
    assert len(set(blocks)) == len(blocks) and max(blocks) * gpu_check.BLOCK_TOKENS < kind.kv_tokens
    assert step.computed_tokens == kind.computed_tokens
