"""Who may import whom, as data and pure functions: layers, fences, and what ``policies`` may use at all.

Every import counts: at the top, inside a function, under ``if TYPE_CHECKING`` and by
``importlib.import_module("name")``. A lazy or type-only import is a type that lives too high.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("policies", "tuner", "engine")  # folders; imported as rooftune.policies and so on

# Highest first. A module may import strictly lower layers and its own part, never another part of its layer.
TUNER_LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("bench",),
    ("control", "report"),
    ("search", "replay"),
    ("observe", "ports", "sim"),
    ("model", "traffic"),
    ("config", "record"),
    ("address", "clock", "files"),
)

# Inside tuner.control: the loop may use every room, a room only its own modules and the shared values beside the rooms.
CONTROL_TOP = ("cycle", "assemble")
CONTROL_ROOMS = ("signals", "state", "status", "searcher", "explain")
CONTROL_NEIGHBOURS = {("status", "state")}  # its pages show and accept operator requests

# Library -> the only places (module, or package with everything below it) that may import it.
FENCES: dict[str, tuple[str, ...]] = {
    "optuna": ("rooftune.tuner.search.study", "rooftune.tuner.search.archive"),
    "torch": ("rooftune.engine.torch",),
    "transformers": ("rooftune.engine.torch",),
    "vllm": ("rooftune.engine.vllm",),
    "kubernetes": ("rooftune.tuner.ports.kubernetes",),
    "prometheus_api_client": ("rooftune.tuner.observe.prometheus",),
    "numba": ("rooftune.tuner.sim.kernel", "rooftune.tuner.sim.compile"),
    "pydantic": ("rooftune.policies.wire", "rooftune.tuner", "rooftune.engine"),
    "sched_sim": ("rooftune.tuner.bench",),
}

# policies: pure decisions. No clock, no chance, no input or output, so only these.
POLICIES_MAY_USE = frozenset(
    "__future__ abc bisect collections dataclasses enum fractions functools heapq itertools math numbers numpy "
    "operator re statistics string types typing".split()
)
POLICIES_EXTRA: dict[str, frozenset[str]] = {
    "rooftune.policies.wire": frozenset({"pydantic", "json"}),
    "rooftune.policies.commands": frozenset({"argparse"}),  # the type of a parser that a command fills
}
NO_CHANCE = ("numpy.random",)


def below(name: str, place: str) -> bool:
    """Whether ``name`` is ``place`` or lies in it."""
    return name == place or name.startswith(f"{place}.")


def module_name(path: Path, root: Path) -> str:
    """``tuner/sim/kernel.py`` -> ``rooftune.tuner.sim.kernel``; a package's ``__init__`` is the package."""
    parts = ("rooftune", *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, imported name) of every import in ``source``; ``from a import b`` yields ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    keep = len(parts) - node.level + (1 if is_package else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def violation(module: str, imported: str) -> str | None:
    """Why ``module`` may not import ``imported``; None when it may."""
    top = imported.partition(".")[0]
    if top in PACKAGES:
        return f"the import name is rooftune.{top}"
    if top in FENCES and not any(below(module, place) for place in FENCES[top]):
        return f"{top} is only for {', '.join(FENCES[top])}"
    own, theirs = package_of(module), package_of(imported)
    if own == "policies":
        return _policies_violation(module, imported, top)
    if theirs == "engine" and own != "engine":
        return "nothing imports engine"
    if theirs == "tuner" and own == "engine":
        return "engine imports policies and nothing of tuner"
    if theirs == "tuner" and own == "tuner":
        return _layer_violation(module, imported)
    return None


def package_of(name: str) -> str:
    """``rooftune.tuner.sim.kernel`` -> ``tuner``; empty for what is not ours."""
    parts = name.split(".")
    return parts[1] if parts[0] == "rooftune" and len(parts) > 1 else ""


def _policies_violation(module: str, imported: str, top: str) -> str | None:
    if any(below(imported, place) for place in NO_CHANCE):
        return "policies knows no chance"
    allowed = POLICIES_MAY_USE | POLICIES_EXTRA.get(module, frozenset())
    if top in allowed or package_of(imported) == "policies":
        return None
    kind = "standard module" if top in sys.stdlib_module_names else "library"
    return f"policies may use numpy and a few pure standard modules, not the {kind} {top}"


def _layer_violation(module: str, imported: str) -> str | None:
    mine, theirs = part_of(module), part_of(imported)
    if mine == theirs == "control":
        return _control_violation(module, imported)
    if not theirs or mine == theirs:
        return None
    if not mine:
        return "the package tuner itself imports none of its parts"
    if layer_of(theirs) <= layer_of(mine):
        return f"tuner.{theirs} is not below tuner.{mine}"
    return None


def _control_violation(module: str, imported: str) -> str | None:
    mine, theirs = ([*name.split("."), "", ""][3] for name in (module, imported))
    if mine in CONTROL_TOP or mine == theirs:
        return None
    if theirs in CONTROL_TOP:
        return f"tuner.control.{theirs} is above tuner.control.{mine}"
    if theirs in CONTROL_ROOMS and (mine, theirs) not in CONTROL_NEIGHBOURS:
        return f"tuner.control.{theirs} is a room beside tuner.control.{mine}"
    return None


def part_of(name: str) -> str:
    """``rooftune.tuner.sim.kernel`` -> ``sim``; empty for ``tuner`` itself."""
    return [*name.split("."), "", ""][2]


def layer_of(part: str) -> int:
    """Place of a part of tuner from the top; ``KeyError`` when no layer names it."""
    for place, parts in enumerate(TUNER_LAYERS):
        if part in parts:
            return place
    raise KeyError(f"tuner.{part} has no layer; give it one in TUNER_LAYERS")


Graph = dict[str, set[str]]


def import_graph(root: Path) -> Graph:
    """Module of ours -> the modules of ours that it imports. A package's ``__init__`` is the package."""
    files = {module_name(path, root): path for package in PACKAGES for path in (root / package).rglob("*.py")}
    graph: Graph = {}
    for module, path in files.items():
        names = {name for _, name in imports_of(path.read_text(), module, path.name == "__init__.py")}
        # ``from a import b`` yields a.b: a module itself, or a name in module a.
        graph[module] = {name if name in files else name.rpartition(".")[0] for name in names} & set(files)
    return graph


def reachable(graph: Graph, start: set[str]) -> set[str]:
    """The modules that importing ``start`` leads to, with the packages that hold them."""
    found: set[str] = set()
    waiting = [name for name in start if name in graph]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [*graph[name], *([name.rpartition(".")[0]] if name.rpartition(".")[0] in graph else [])]
    return found


def on_a_cycle(graph: Graph) -> set[str]:
    """The modules on an import cycle."""
    left = {name: set(targets) - {name} for name, targets in graph.items()}
    while leaves := {name for name, targets in left.items() if not targets & set(left)}:
        left = {name: targets for name, targets in left.items() if name not in leaves}
    # What is left leads to a cycle; the same from the other side leaves the cycles and what lies between them.
    while roots := set(left) - {target for targets in left.values() for target in targets & set(left)}:
        left = {name: targets for name, targets in left.items() if name not in roots}
    return set(left)
