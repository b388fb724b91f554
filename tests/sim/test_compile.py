"""Compiled copies: helpers are compiled too, the cache is used, an edit anywhere is seen, a bad folder only costs time.

Each run is its own process over a small tree of modules that carries our compile.py as it is.
"""

import ast
import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core.dispatcher import Dispatcher

from rooftune.tuner.sim import compile as compiling
from rooftune.tuner.sim import kernel, twin

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "rooftune/policies/__init__.py": "",
    "rooftune/policies/rates.py": "PER_TOKEN = 3\n\n\ndef cost(tokens: int) -> int:\n    return PER_TOKEN * tokens\n",
    "rooftune/policies/steps.py": (
        "from rooftune.policies.rates import cost\n\n\n"
        "def step_cost(tokens):\n    total = cost(0)\n    for index in range(tokens):\n        total += cost(index)\n"
        "    return total\n"
    ),
    "rooftune/tuner/__init__.py": "",
    "rooftune/tuner/sim/__init__.py": "",
    "rooftune/tuner/sim/run.py": (
        "from rooftune.policies.steps import step_cost\n\n\ndef replay(tokens):\n    return step_cost(tokens) + 1\n"
    ),
}
# Prints what the compiled and the plain function return, and whether the machine code was read from disk.
PROGRAM = """
import json
from rooftune.policies import rates, steps
from rooftune.tuner.sim import compile, run
twin = compile.compiled(run.replay)
def copies():
    return len(twin.py_func.__globals__["step_cost"].py_func.__globals__["cost"].signatures)
print(json.dumps({
    "twin": twin(4), "copies": copies(), "plain": run.replay(4), "hits": sum(twin.stats.cache_hits.values()),
    "helper_stays_plain": type(steps.step_cost).__name__ == type(rates.cost).__name__ == "function",
    "nopython": bool(twin.nopython_signatures), "hash": compile.sources_hash(run.replay),
}))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(ROOT / "tuner" / "sim" / "compile.py", tmp_path / "tree" / "rooftune" / "tuner" / "sim" / "compile.py")
    return tmp_path / "tree"


def run(tree: Path, cache: Path) -> dict[str, object]:
    # No byte code: two edits within a second and of one length would look the same to Python itself.
    environment = os.environ | {"ROOFTUNE_CACHE_DIR": str(cache), "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.mark.slow
def test_an_edit_of_a_helper_is_seen_although_the_cache_is_warm(tree: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cold = run(tree, cache)
    assert (cold["twin"], cold["plain"], cold["hits"]) == (19, 19, 0)
    assert cold["helper_stays_plain"] and cold["nopython"]
    # ``cost`` is called with a constant and with a variable, and is annotated: one copy serves both.
    assert cold["copies"] == 1
    warm = run(tree, cache)
    assert (warm["twin"], warm["hits"], warm["copies"]) == (19, 1, 0)
    assert warm["hash"] == cold["hash"]
    # Two calls away and in another package; only a constant beside the helper changes.
    rates = tree / "rooftune" / "policies" / "rates.py"
    rates.write_text(rates.read_text().replace("PER_TOKEN = 3", "PER_TOKEN = 5"))
    edited = run(tree, cache)
    assert (edited["twin"], edited["plain"], edited["hits"]) == (31, 31, 0)
    assert edited["hash"] != cold["hash"]
    # And back again: the first machine code still lies there and is right.
    rates.write_text(rates.read_text().replace("PER_TOKEN = 5", "PER_TOKEN = 3"))
    back = run(tree, cache)
    assert (back["twin"], back["hits"]) == (19, 1)


def test_without_a_home_no_code_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "ROOFTUNE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def unknown(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    folder = compiling.code_folder(kernel.replay)
    assert not compiling.holds_code(folder)
    with pytest.raises(OSError, match="Not a directory"):
        folder.mkdir(parents=True, exist_ok=True)


def test_another_installation_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba would not find its code here, and it would look as if nothing had to be compiled."""
    here = compiling.code_folder(kernel.replay)
    monkeypatch.setattr(compiling.inspect, "getfile", lambda function: "/elsewhere/kernel.py")
    assert compiling.code_folder(kernel.replay) != here


def test_an_unreadable_cache_folder_counts_as_empty(tmp_path: Path) -> None:
    assert not compiling.holds_code(tmp_path / ("x" * 300))


@pytest.mark.slow
def test_an_unwritable_cache_folder_only_costs_the_compilation(tree: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "a file, not a folder"
    blocked.write_text("")
    for folder in (blocked, blocked / "below it"):
        for _ in range(2):
            answer = run(tree, folder)
            assert (answer["twin"], answer["hits"]) == (19, 0)
    assert blocked.read_text() == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_folder_only_costs_the_compilation(tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o500)
    answer = run(tree, folder)
    assert (answer["twin"], answer["hits"]) == (19, 0)


def test_the_key_covers_every_module_that_the_twin_takes_a_name_from() -> None:
    """Constants end in the machine code as well, also those of a module whose functions the twin does not call."""
    seen: dict[str, str] = {}
    compiling._VISITING.clear()
    compiling._sources(kernel.replay, seen)
    policies = {f"rooftune.policies.{name}" for name in ("packing", "kv", "budget", "order", "step_time", "request")}
    assert policies | {"rooftune.tuner.sim.kernel"} <= set(seen)
    for name, source in seen.items():
        sources = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
        ours = {module for module in sources if module and module.startswith("rooftune.")}
        ours -= {"rooftune.policies.errors"}  # raises where values are made, never in compiled code
        assert ours <= set(seen), f"{name} takes names from {ours - set(seen)}, which the key does not cover"


def test_inlined_helpers_are_those_the_twin_calls() -> None:
    """A helper that was renamed would silently become slow."""
    forced = {h.py_func.__name__ for h in _helpers().values() if h.targetoptions["forceinline"]}
    assert forced == compiling.IN_PLACE


def test_nearly_every_helper_is_annotated_and_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """By annotation; what takes bare arrays waits for its first call."""
    compiled_names: list[str] = []

    def note(helper: Any, types: tuple[Any, ...]) -> None:
        compiled_names.append(helper.py_func.__name__)

    monkeypatch.setattr(Dispatcher, "compile", note)
    monkeypatch.setattr(Dispatcher, "disable_compile", lambda helper: None)
    compiling._compile_once(_helpers(), {type(value): numba.typeof(value) for value in twin.like()})
    names = [h.py_func.__name__ for h in _helpers().values()]
    assert set(names) - set(compiled_names) == {
        "setting_from_row", "_room", "_run_stretch", "_place", "_log_stretch", "_log_room", "_book_step", "_log_step",
    }  # fmt: skip
    assert names.index("grow") < names.index("_hold_blocks") < names.index("plan_step")  # callees first


def _helpers() -> dict[int, Any]:
    helpers: dict[int, Any] = {}
    compiling._rebound(kernel.replay, helpers)
    return helpers
