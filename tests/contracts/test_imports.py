"""The import contracts hold, and the checker sees each kind of breach."""

from pathlib import Path

import pytest

from tests.contracts.import_rules import (
    FENCES,
    PACKAGES,
    TUNER_LAYERS,
    imports_of,
    layer_of,
    module_name,
    part_of,
    violation,
)

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path, ROOT))
def test_imports_point_down(path: Path) -> None:
    module = module_name(path, ROOT)
    breaches = [
        f"{path.relative_to(ROOT)}:{line}: {module} imports {imported}: {why}"
        for line, imported in imports_of(path.read_text(), module, path.name == "__init__.py")
        if (why := violation(module, imported)) is not None
    ]
    assert not breaches, "\n".join(breaches)


def test_every_part_of_tuner_has_one_layer() -> None:
    parts = {part_of(module_name(path, ROOT)) for path in FILES if path.is_relative_to(ROOT / "tuner")} - {""}
    assert parts
    for part in parts:
        assert layer_of(part) >= 0
    named = [part for layer in TUNER_LAYERS for part in layer]
    assert len(named) == len(set(named))


BREACHES = [
    ("tuner.model.fit", "from tuner.search.study import Study", "up a layer"),
    ("tuner.sim.kernel", "import tuner.ports.http", "beside, in the same layer"),
    ("tuner.sim.result", "def f():\n    from tuner.cli import main\n    return main", "lazy"),
    ("tuner.clock", "if TYPE_CHECKING:\n    from tuner.config import Config", "type-only"),
    ("tuner.sim.result", "from ..cli.main import main", "relative"),
    ("tuner.sim.result", "import importlib\nimportlib.import_module('tuner.cli.main')", "dynamic"),
    ("tuner.search.objective", "import optuna", "optuna outside its fence"),
    ("tuner.report.render", "from matplotlib import pyplot", "matplotlib outside its fence"),
    ("tuner.sim.result", "import numba", "numba outside its fence"),
    ("tuner.cli.recommend", "import torch", "torch in tuner"),
    ("tuner.cli.main", "from engine.cli import SERVE", "tuner imports engine"),
    ("engine.loop", "from tuner.clock import Clock", "engine imports tuner"),
    ("engine.loop", "import torch", "torch outside engine.torch"),
    ("engine.torch.runner", "import vllm", "vllm outside engine.vllm"),
    ("policies.packing", "import time", "a clock in policies"),
    ("policies.packing", "from numpy import random", "chance in policies"),
    ("policies.packing", "import numpy.random as chance", "chance in policies"),
    ("policies.slo", "import pydantic", "pydantic outside wire"),
    ("policies.slo", "from tuner import clock", "policies imports tuner"),
]


@pytest.mark.parametrize(("module", "source", "kind"), BREACHES, ids=[f"{m}: {k}" for m, _, k in BREACHES])
def test_checker_sees_the_breach(module: str, source: str, kind: str) -> None:
    found = [violation(module, imported) for _, imported in imports_of(source, module, is_package=False)]
    assert any(found), kind


ALLOWED = [
    ("tuner.cli.recommend", "from tuner.search.study import search"),
    ("tuner.search.study", "import optuna\nfrom tuner.sim.kernel import replay\nfrom policies import errors"),
    ("tuner.sim.kernel", "import numba\nfrom tuner.sim.workload import Traffic\nfrom tuner.model.fit import Fit"),
    ("engine.torch.runner", "import torch\nfrom engine.kv_blocks import Blocks\nfrom policies import packing"),
    ("policies.wire", "import pydantic\nfrom policies.errors import InputError"),
    ("policies.packing", "import math\nimport numpy as np"),
]


@pytest.mark.parametrize(("module", "source"), ALLOWED, ids=[module for module, _ in ALLOWED])
def test_checker_lets_the_rest_pass(module: str, source: str) -> None:
    assert [why for _, name in imports_of(source, module, is_package=False) if (why := violation(module, name))] == []


def test_relative_imports_of_a_package_resolve_to_itself() -> None:
    assert list(imports_of("from .study import search", "tuner.search", is_package=True)) == [
        (1, "tuner.search.study.search")
    ]


def test_fences_name_only_our_packages() -> None:
    assert {place.partition(".")[0] for places in FENCES.values() for place in places} <= set(PACKAGES)
