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
    package_of,
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
    ("rooftune.tuner.model.fit", "from rooftune.tuner.search.study import Study", "up a layer"),
    ("rooftune.tuner.sim.kernel", "import rooftune.tuner.ports.http", "beside, in the same layer"),
    ("rooftune.tuner.sim.result", "def f():\n    from rooftune.tuner.cli import main\n    return main", "lazy"),
    ("rooftune.tuner.control.memory", "from rooftune.tuner.control.cycle.book import Book", "up into the loop"),
    ("rooftune.tuner.control.signals.find", "import rooftune.tuner.control.state.store", "a room beside"),
    ("rooftune.tuner.clock", "if TYPE_CHECKING:\n    from rooftune.tuner.config import Config", "type-only"),
    ("rooftune.tuner.sim.result", "from ..cli.main import main", "relative"),
    ("rooftune.tuner.sim.result", "import importlib\nimportlib.import_module('rooftune.tuner.cli.main')", "dynamic"),
    ("rooftune.tuner.search.objective", "import optuna", "optuna outside its fence"),
    ("rooftune.tuner.report.render", "import kubernetes", "kubernetes outside its fence"),
    ("rooftune.tuner.sim.result", "import numba", "numba outside its fence"),
    ("rooftune.tuner.cli.recommend", "import torch", "torch in tuner"),
    ("rooftune.tuner.cli.main", "from rooftune.engine.cli import SERVE", "tuner imports engine"),
    ("rooftune.engine.loop", "from rooftune.tuner.clock import Clock", "engine imports tuner"),
    ("rooftune.engine.loop", "import torch", "torch outside rooftune.engine.torch"),
    ("rooftune.engine.torch.runner", "import vllm", "vllm outside rooftune.engine.vllm"),
    ("rooftune.policies.packing", "import time", "a clock in policies"),
    ("rooftune.policies.packing", "from numpy import random", "chance in policies"),
    ("rooftune.policies.packing", "import numpy.random as chance", "chance in policies"),
    ("rooftune.policies.slo", "import pydantic", "pydantic outside wire"),
    ("rooftune.policies.slo", "from rooftune.tuner import clock", "policies imports tuner"),
    ("rooftune.policies.slo", "from policies import errors", "the folder's name"),
]


@pytest.mark.parametrize(("module", "source", "kind"), BREACHES, ids=[f"{m}: {k}" for m, _, k in BREACHES])
def test_the_checker_finds_a_breach(module: str, source: str, kind: str) -> None:
    found = [violation(module, imported) for _, imported in imports_of(source, module, is_package=False)]
    assert any(found), kind


ALLOWED = [
    ("rooftune.tuner.cli.recommend", "from rooftune.tuner.search.study import search"),
    (
        "rooftune.tuner.search.study",
        "import optuna\nfrom rooftune.tuner.sim.kernel import replay\nfrom rooftune.policies import errors",
    ),
    (
        "rooftune.tuner.sim.kernel",
        "import numba\nfrom rooftune.tuner.traffic.workload import Traffic\nfrom rooftune.tuner.model.fit import Fit",
    ),
    (
        "rooftune.engine.torch.runner",
        "import torch\nfrom rooftune.engine.kv_blocks import Blocks\nfrom rooftune.policies import packing",
    ),
    ("rooftune.policies.wire", "import pydantic\nfrom rooftune.policies.errors import InputError"),
    ("rooftune.policies.packing", "import math\nimport numpy as np"),
]


@pytest.mark.parametrize(("module", "source"), ALLOWED, ids=[module for module, _ in ALLOWED])
def test_the_checker_accepts_allowed_imports(module: str, source: str) -> None:
    assert [why for _, name in imports_of(source, module, is_package=False) if (why := violation(module, name))] == []


def test_relative_imports_of_a_package_resolve_to_itself() -> None:
    assert list(imports_of("from .study import search", "rooftune.tuner.search", is_package=True)) == [
        (1, "rooftune.tuner.search.study.search")
    ]


def test_restrictions_name_only_our_packages() -> None:
    assert {package_of(place) for places in FENCES.values() for place in places} <= set(PACKAGES)
