"""Entry points: find and load what ``policies/commands.py`` describes, without importing what is not asked for."""

import ast
import difflib
import importlib.util
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from rooftune.policies.errors import InputError

_OWN_PACKAGES = frozenset({"rooftune"})
_DEV_ONLY = ("sched_sim",)  # baselines of benchmarks
_SERVER_ONLY = {"starlette", "uvicorn", "prometheus_client", "jinja2"}


def registered(group: str) -> dict[str, EntryPoint]:
    """Entry points of ``group`` by name, in the order of their names."""
    return {point.name: point for point in sorted(entry_points(group=group), key=lambda point: point.name)}


def find(name: str, points: dict[str, EntryPoint], what: str) -> EntryPoint:
    """The entry point ``name``; an unknown name is an ``InputError`` that lists the known ones."""
    if name in points:
        return points[name]
    close = difflib.get_close_matches(name, points, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(points) or 'none'}"
    raise InputError(f"unknown {what} {name!r}; {hint}")


def missing_extra(error: ModuleNotFoundError, point: EntryPoint) -> InputError | None:
    """The one line for a library that an extra brings; None when the missing module is one of ours."""
    missing = (error.name or "").partition(".")[0]
    if not missing or missing in _OWN_PACKAGES:
        return None
    side = "engine" if point.module.startswith("rooftune.engine.") else "tuner"
    extra = "dev" if missing in _DEV_ONLY else "serve" if side == "engine" and missing in _SERVER_ONLY else side
    return InputError(f"{point.name!r} needs the module {missing!r}; run: pip install 'rooftune[{extra}]'")


def help_of(point: EntryPoint) -> str:
    """The command's one-line help, read from its source: the overview must not import numba, optuna or torch."""
    try:
        spec = importlib.util.find_spec(point.module)
    except ModuleNotFoundError:
        return ""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    tree = ast.parse(Path(spec.origin).read_bytes())
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets: Iterable[ast.expr] = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        named = any(isinstance(target, ast.Name) and target.id == point.attr for target in targets)
        if named and isinstance(node.value, ast.Call):
            return _help_argument(node.value)
    return ""


def _help_argument(call: ast.Call) -> str:
    """``help`` is the second argument of ``Command``, or its keyword."""
    candidates = [keyword.value for keyword in call.keywords if keyword.arg == "help"] + call.args[1:2]
    for value in candidates:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    return ""
