"""How a bench finds vLLM and makes the hook visible to it, without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rooftune.policies.errors import MissingDataError
from rooftune.tuner.bench.vllm_bed import cpu_dtype, visible, vllm_python

LOOK = """
import sys
from importlib.metadata import entry_points, version
from rooftune import engine, policies, tuner
from rooftune.policies import errors
print(version("rooftune"))
for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
    print(*sorted({point.value for point in entry_points(group=group) if point.name == "rooftune"}))
print(errors.__file__)
"""


def test_without_the_environment_the_message_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="make vllm-env"):
        vllm_python({}, tmp_path)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    assert vllm_python({"ROOFTUNE_VLLM_ENV": str(tmp_path)}, tmp_path / "other") == python


def test_another_interpreter_finds_the_hook_and_only_our_packages(tmp_path: Path) -> None:
    links = visible(tmp_path / "links")
    assert sorted(path.name.partition("-")[0] for path in links.iterdir()) == ["rooftune", "rooftune"]
    assert sorted(path.name for path in (links / "rooftune").iterdir()) == ["engine", "policies", "tuner"]
    environment = os.environ | {"PYTHONPATH": str(links)}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    _, general, endpoint, where = done.stdout.split()
    assert (general, endpoint) == ("rooftune.engine.vllm.plugin:register", "rooftune.engine.vllm.endpoint:TuningPlugin")
    assert where.startswith(str(links))


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 fma\n", "float32"),
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16 fma\n", "bfloat16"),
        ("flags : amx_bf16\n\nflags : fpu\n", "bfloat16"),
        ("Features : asimd bf16\n", "float32"),
    ],
)
def test_a_cpu_uses_its_fastest_dtype(tmp_path: Path, cpuinfo: str, dtype: str) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    assert cpu_dtype(file) == dtype
    assert cpu_dtype(tmp_path / "absent") == "float32"
