"""YAML to plain values, with the line of every key: no tags, no aliases, no repeated keys, bounded depth and size."""

import re
from dataclasses import dataclass
from typing import Any

import yaml

from rooftune.policies.errors import InputError, shown

MAX_FILE_BYTES = 262_144
MAX_DEPTH = 12
Path = tuple[str | int, ...]

_PLAIN = {
    "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float",
    "tag:yaml.org,2002:str",
}  # fmt: skip


class _Loader(yaml.SafeLoader):
    """Composes nodes; refuses what could make a small file large (aliases) or deep."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # its stub has no types
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed; write the value", mark)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            problem = f"nested deeper than {MAX_DEPTH}; flatten it"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


# YAML 1.1 wants a dot before an exponent, so 1e-4 would be a word; JSON, and people, mean a number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


@dataclass
class Tree:
    """values: plain JSON values; lines: path -> line, counted from 1, of every key and list entry."""

    values: dict[str, Any]
    lines: dict[Path, int]

    def where(self, path: Path) -> int | None:
        """Line of a path, or of the nearest part above it that stands in the file."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


def parse_tree(text: str, where: str) -> Tree:
    """One YAML mapping. Raises InputError, one line with file, line and what is wrong."""
    loader = _Loader(text)
    lines: dict[Path, int] = {}
    try:
        node = loader.get_single_node()
        values = {} if node is None else _value(loader, node, (), lines, where)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f":{mark.line + 1}" if mark else ""
        problem = " ".join(str(error.problem or error.context or "not YAML").split())
        raise InputError(f"{where}{at}: {problem}; correct the YAML") from None
    except yaml.YAMLError as error:
        raise InputError(f"{where}: {' '.join(str(error).split())}; correct the YAML") from None
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise InputError(f"{where} holds {shown(values)}, must be a mapping of keys; see the complete example")
    return Tree(values, lines)


def _value(loader: _Loader, node: yaml.Node, path: Path, lines: dict[Path, int], where: str) -> Any:
    line = node.start_mark.line + 1
    if path:
        lines.setdefault(path, line)
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, entry, (*path, index), lines, where) for index, entry in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return _mapping(loader, node, path, lines, where)
    if node.tag not in _PLAIN:
        kind = node.tag.rpartition(":")[2]
        key = ".".join(map(str, path)) or "the file"
        raise InputError(f"{where}:{line}: {key} is {shown(node.value)}, a {kind}, must be plain; write it in quotes")
    try:
        return loader.construct_object(node)
    except ValueError:
        key = ".".join(map(str, path)) or "the file"
        raise InputError(f"{where}:{line}: {key} is {shown(node.value)}, must be a number; correct it") from None


def _mapping(loader: _Loader, node: yaml.MappingNode, path: Path, lines: dict[Path, int], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is None or key_node.tag != "tag:yaml.org,2002:str":
            raise InputError(f"{where}:{line}: key {shown(key)} is not a plain word; write it in quotes")
        if key in found:
            first = lines[(*path, key)]
            full = ".".join(map(str, (*path, key)))
            raise InputError(f"{where}:{line}: {full} is given twice, first in line {first}; keep one")
        lines[(*path, key)] = line
        found[key] = _value(loader, value_node, (*path, key), lines, where)
    return found
