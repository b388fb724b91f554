"""From file, environment and flags to a ``Config``. What stands on the command line wins, then the environment."""

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rooftune.policies.errors import InputError, shown
from rooftune.tuner.config.model import Config
from rooftune.tuner.config.tree import MAX_FILE_BYTES, Tree, parse_tree
from rooftune.tuner.config.values import CODE
from rooftune.tuner.files import at_home, read_small, shown_path

# Secrets and places that differ between machines; everything else belongs into the file.
ENVIRONMENT = {
    "ROOFTUNE_ENGINE_TOKEN_FILE": "engine.token_file",
    "ROOFTUNE_TOKEN_FILE": "token_file",
    "ROOFTUNE_STORAGE": "storage",
    "ROOFTUNE_STATE": "state",
}
EXAMPLE = "see deploy/rooftune.yaml"
_HIDDEN = ("storage",)  # may hold a password
_NATIVE_BOUNDS = {
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "one of {expected}",
    "too_short": "at least {min_length} long",
    "too_long": "at most {max_length} long",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "finite_number": "a finite number",
}


@dataclass(frozen=True)
class Override:
    """A value from outside the file. key: dotted; origin: the flag or variable, for messages."""

    key: str
    value: object
    origin: str


def load_config(
    path: str | Path | None, overrides: Sequence[Override] = (), environ: Mapping[str, str] | None = None
) -> Config:
    """The configuration, its relative paths counted from the file's folder (flags, environment: from the working one).

    path None: defaults, environment and flags alone. Raises InputError: one line with file, line, key, value, bound.
    """
    found = os.environ if environ is None else environ
    where = "the configuration" if path is None else shown_path(path)
    tree = Tree({}, {}) if path is None else parse_tree(_read(path, where), where)
    base = Path.cwd() if path is None else Path(path).resolve().parent
    extra = [Override(key, found[name], name) for name, key in ENVIRONMENT.items() if found.get(name)]
    origins: dict[str, str] = {}
    for given in (*extra, *overrides):
        origins[given.key] = given.origin
        value = given.value
        if given.key in ("state", "token_file", "engine.token_file") and isinstance(value, str | Path):
            value = str(Path.cwd() / at_home(value))
        _place(tree, given.key, value, given.origin)
    try:
        # Through JSON, so that lists are tuples and words are paths without giving up strictness.
        config = Config.model_validate_json(json.dumps(tree.values))
    except ValidationError as error:
        raise InputError(_line(error, tree, where, origins)) from None
    return config.resolved(base)


def json_schema() -> str:
    """The JSON schema of the file, as text that ends with a line break."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "rooftune.yaml"}
    made = Config.model_json_schema()
    return json.dumps(made | schema, indent=2, sort_keys=True) + "\n"


def _read(path: str | Path, where: str) -> str:
    try:
        return read_small(path, where, MAX_FILE_BYTES, EXAMPLE).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8 text (byte {error.start}); {EXAMPLE}") from None


def _place(tree: Tree, key: str, value: object, origin: str) -> None:
    *above, last = key.split(".")
    target: Any = tree.values
    for name in above:
        if target.get(name) is None:
            target[name] = {}
        target = target[name]
        if not isinstance(target, dict):
            raise InputError(f"{origin}: {name} in the file is {shown(target)}, must be a mapping of keys; correct it")
    target[last] = value


def _line(error: ValidationError, tree: Tree, where: str, origins: Mapping[str, str]) -> str:
    """The first complaint as one line, and how many others there are."""
    found = error.errors(include_url=False)
    # A mistyped key is both unknown and missing: the first of the two says more.
    first = min(found, key=lambda one: one["type"] != "extra_forbidden")
    path = tuple(step for step in first["loc"] if step not in ("int", "float"))  # branches of a union
    ctx = first.get("ctx", {})
    key = ".".join(map(str, path))
    if first["type"] == CODE and ctx["key"] != "it":
        key = str(ctx["key"])
        path = tuple(key.split("."))
    origin = origins.get(key)
    line = tree.where(path)
    place = origin or (f"{where}:{line}" if line else where)
    others = f" ({len(found) - 1} more after it)" if len(found) > 1 else ""
    return f"{place}: {_complaint(first, key, ctx, path)}{others}"


def _complaint(first: ErrorDetails, key: str, ctx: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
    kind = first["type"]
    hidden = key in _HIDDEN
    if kind == "missing":
        remedy = "give --engine URL, or engine.url in the file" if key in ("engine", "engine.url") else "add it"
        return f"{key} is missing; {remedy}"
    if kind == "extra_forbidden":
        return f"unknown key {key}; {_hint(path)}"
    if kind == CODE:
        return f"{key} is {ctx['value']}, must be {ctx['bound']}; {ctx['remedy']}"
    value = "not shown" if hidden else shown(first["input"])
    bound = _NATIVE_BOUNDS.get(kind)
    text = bound.format(**ctx) if bound else first["msg"].removeprefix("Input should be ").lower()
    return f"{key or 'the file'} is {value}, must be {text}; correct it, {EXAMPLE}"


def _hint(path: tuple[str | int, ...]) -> str:
    """The nearest known key of the same section, or all of them."""
    section: type[BaseModel] = Config
    for step in path[:-1]:
        if isinstance(step, int):
            continue
        field = section.model_fields.get(step)
        inner = field.annotation if field else None
        inner = getattr(inner, "__args__", (inner,))[0]
        section = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else section
    names = list(section.model_fields)
    close = difflib.get_close_matches(str(path[-1]), names, n=1)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(names)}"
