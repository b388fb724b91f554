"""The controller's own process: its imports, and what the bench reads from its log."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rooftune.tuner.bench.children import Children, serve
from rooftune.tuner.bench.controller_weight import _cycles, _searches
from tests.links import import_path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "numba", "llvmlite", "optuna", "matplotlib", "scipy", "pandas")
RUN = f"""
import sys
from rooftune.tuner.cli.controller import run
import argparse
parser = argparse.ArgumentParser()
run.add_arguments(parser)
code = run.run(parser.parse_args(sys.argv[1:]))
found = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"imported: {{found}}" if found else code)
"""


def run_controller(*words: str) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"PYTHONPATH": import_path()}
    return subprocess.run(
        [sys.executable, "-c", RUN, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_neither_torch_nor_numba_is_imported_by_a_controller_that_has_run_cycles(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-the-weight-test")
    config = tmp_path / "rooftune.yaml"
    with Children(tmp_path / "logs") as children:
        served = serve(children, ["--model", "fake:8b-2tbs", "--tuning-token-file", str(tmp_path / "token")])
        engine = {"url": served.tuning, "token_file": "token"}
        given = {"engine": engine, "profile": "chat", "state": "state", "listen": None, "cadence": {"cycle_s": 0.1}}
        config.write_text(json.dumps(given))  # JSON is YAML
        ended = run_controller("--config", str(config), "--cycles", "3", "--report", str(tmp_path / "report"))
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "report" / "live.md").read_text().startswith("# Live run")


@pytest.mark.slow
def test_a_configuration_is_checked_without_them() -> None:
    ended = run_controller("--engine", "http://127.0.0.1:9", "--check")
    assert ended.returncode == 0, ended.stderr


def test_cycles_and_searches_are_counted_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    reasons = ["idle", "searching", "searching", "null_result", "searching", "within_noise"]
    lines = [json.dumps({"event": "cycle", "cycle": at, "reason": reason}) for at, reason in enumerate(reasons)]
    log.write_text("\n".join(["a warning", *lines, json.dumps({"event": "stop"})]) + "\n")
    assert _cycles(log) == 6 and _searches(log) == 2
