"""Compiled copies of plain functions, with numba.

numba compiles a function but not the plain helpers it calls, so every helper is compiled first and the
function is rebuilt over globals that name the compiled ones. The disk cache of numba does not notice an
edit in another file, so the cache folder carries a hash of all sources involved and of the numba version.

Two things keep it cheap. Helpers with type annotations are compiled before their callers, each once: left
to itself numba compiles a second copy for every argument that is a constant somewhere. And helpers that run for every
request of every step are inlined into their callers, because a call passes every array of the state.
"""

import hashlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import numba

PACKAGES = ("rooftune.policies", "rooftune.tuner.sim")
# Called in a step for every running or waiting request. Inlining these halves the time of a replay.
IN_PLACE = frozenset(
    {
        "_hold_blocks", "_plan", "effective_chunk_cap", "goes_before", "grow", "is_decode", "rank", "tokens_left",
    }
)  # fmt: skip


def cache_root() -> Path:
    """Folder for compiled code: ROOFTUNE_CACHE_DIR, else the user's cache folder. For a user without a home it is a
    path where no folder can be created, so that nothing is kept."""
    given = os.environ.get("ROOFTUNE_CACHE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "rooftune"
    except RuntimeError:  # a container's user often has neither HOME nor an entry among the system's users
        return Path(os.devnull, "rooftune")


def _is_ours(value: object) -> bool:
    return isinstance(value, types.FunctionType) and value.__module__.startswith(PACKAGES)


def _sources(function: types.FunctionType, seen: dict[str, str]) -> None:
    """Collect the source of every module that ``function`` reaches through plain helpers."""
    name = function.__module__
    if name not in seen:
        seen[name] = inspect.getsource(sys.modules[name])
    for global_name in function.__code__.co_names:
        value = function.__globals__.get(global_name)
        if _is_ours(value) and value is not function and id(value) not in _VISITING:
            _VISITING.add(id(value))
            _sources(value, seen)  # type: ignore[arg-type]  # _is_ours narrowed it


_VISITING: set[int] = set()


def sources_hash(function: types.FunctionType) -> str:
    """Hash of every source that the compiled ``function`` depends on, and of numba's and Python's version."""
    _VISITING.clear()
    seen: dict[str, str] = {__name__: inspect.getsource(sys.modules[__name__])}
    _sources(function, seen)
    digest = hashlib.sha256(f"numba {numba.__version__} python {sys.version}".encode())
    for name in sorted(seen):
        digest.update(name.encode() + b"\0" + seen[name].encode())
    return digest.hexdigest()[:16]


def code_folder(function: Callable[..., Any]) -> Path:
    """The folder for the machine code of exactly these sources, at this place: numba finds code by its source's path,
    so what an installation elsewhere has compiled is of no use here."""
    assert isinstance(function, types.FunctionType)
    place = hashlib.sha256(os.fsencode(inspect.getfile(function))).hexdigest()[:8]
    return cache_root() / f"twin-{sources_hash(function)}-{place}"


def holds_code(folder: Path) -> bool:
    """Whether a ``code_folder`` holds machine code; an unreadable one holds none."""
    try:
        return any(folder.rglob("*.nbc"))
    except OSError:
        return False


def is_writable(folder: Path) -> bool:
    """Whether machine code can be kept in a ``code_folder``, which is made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def compiled(function: Callable[..., Any], *, like: Sequence[tuple[Any, ...]] = ()) -> Any:
    """The compiled twin of a plain function and of all plain helpers of ours that it calls.

    like: one value of each named tuple that helpers take, to complete their type annotations.
    The machine code is kept under ``cache_root()``; an unwritable folder only costs the compilation.
    """
    assert isinstance(function, types.FunctionType)
    folder = code_folder(function)
    cache = is_writable(folder)
    if cache:
        numba.config.CACHE_DIR = str(folder)
    helpers: dict[int, Any] = {}
    twin = numba.njit(_rebound(function, helpers), cache=cache, nogil=True, error_model="numpy")
    if not (cache and holds_code(folder)):
        _compile_once(helpers, {type(value): numba.typeof(value) for value in like})
    return twin


def _compile_once(helpers: Mapping[int, Any], known: Mapping[type, Any]) -> None:
    """Compile helpers, callees first, for their annotated types; the others are compiled on their first call."""
    kinds: dict[Any, Any] = {int: numba.int64, float: numba.float64, bool: numba.boolean, **known}
    for helper in helpers.values():
        plain = helper.py_func
        hints = get_type_hints(plain)
        wanted = [hints.get(name) for name in plain.__code__.co_varnames[: plain.__code__.co_argcount]]
        if all(kind in kinds for kind in wanted):
            helper.compile(tuple(kinds[kind] for kind in wanted))
            helper.disable_compile()


def _rebound(function: types.FunctionType, done: dict[int, Any]) -> types.FunctionType:
    """A copy of ``function`` whose globals name the compiled helpers."""
    names = dict(function.__globals__)
    for global_name in function.__code__.co_names:
        value = names.get(global_name)
        if _is_ours(value) and value is not function:
            names[global_name] = _helper(value, done)  # type: ignore[arg-type]  # _is_ours narrowed it
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__module__ = function.__module__
    copy.__qualname__ = function.__qualname__
    copy.__annotations__ = function.__annotations__
    return copy


def _helper(function: types.FunctionType, done: dict[int, Any]) -> Any:
    """A compiled helper: linked into its caller, so it needs neither a cache file nor a Python entry point."""
    if id(function) not in done:
        # A helper that creates no array only touches arrays of its callers: without reference counts a call is
        # many times cheaper.
        counted = "empty" in function.__code__.co_names or "_room" in "".join(function.__code__.co_names)
        done[id(function)] = numba.njit(
            _rebound(function, done),
            nogil=True,
            error_model="numpy",
            no_cpython_wrapper=True,
            no_cfunc_wrapper=True,
            forceinline=function.__name__ in IN_PLACE,
            _nrt=counted,
        )
    return done[id(function)]
