"""The structure stays small: rooms, files, cycles, dead modules, the map, and links in the docs."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.contracts.import_rules import PACKAGES, import_graph, imports_of, module_name, on_a_cycle, reachable

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
ROOMS = sorted({path.parent.relative_to(ROOT) for path in MODULES})
GRAPH = import_graph(ROOT)
MAP = (ROOT / "docs" / "architecture.md").read_text()
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/runbook.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
MOST_FILES, MOST_IN_A_ROOM = 300, 16


def test_the_number_of_files_is_bounded() -> None:
    assert len(MODULES) <= MOST_FILES


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_the_number_of_modules_in_a_room_is_bounded(room: Path) -> None:
    held = [path.name for path in MODULES if path.parent == ROOT / room and path.name != "__init__.py"]
    assert len(held) <= MOST_IN_A_ROOM


def test_no_module_is_on_an_import_cycle() -> None:
    assert on_a_cycle(GRAPH) == set()


def test_the_cycle_finder_finds_one() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": set()}
    assert on_a_cycle(graph) == {"b", "c"}
    assert on_a_cycle({"a": {"b"}, "b": set()}) == set()


def _entries() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    points = project["project"]["entry-points"] | {"scripts": project["project"]["scripts"]}
    entries = {value.partition(":")[0] for group in points.values() for value in group.values()}
    # Run by name in a process of their own.
    text = "\n".join(path.read_text() for path in [*MODULES, ROOT / "Makefile"])
    started = set(re.findall(r"-m\"?,? \"?(rooftune[\w.]+)", text)) | set(
        re.findall(r'MODULE = "(rooftune[\w.]+)"', text)
    )
    # What benches of a checkout use.
    for path in (ROOT / "tests" / "bench").glob("*.py"):
        if not path.name.startswith("test_"):
            started |= {name for _, name in imports_of(path.read_text(), "tests.bench", False)}
            started |= {name.rpartition(".")[0] for _, name in imports_of(path.read_text(), "tests.bench", False)}
    return entries | started


def test_every_module_is_reached_from_a_command_a_bench_or_a_plugin() -> None:
    reached = reachable(GRAPH, _entries())
    empty = {module_name(path, ROOT) for path in MODULES if path.name == "__init__.py"}
    assert set(GRAPH) - reached - empty == set()


def test_the_map_names_every_room_once_and_only_modules_that_exist() -> None:
    rows = re.findall(r"^\| `([^`]+)/` \| .* \| (.*) \|$", MAP, flags=re.M)
    assert Counter(room for room, _ in rows) == Counter(str(room) for room in ROOMS)
    for room, modules in rows:
        for name in re.findall(r"`([^`]+\.py)`", modules):
            assert (ROOT / room / name).is_file(), f"{room}/{name}"


def test_the_map_names_only_paths_that_exist() -> None:
    paths = set(re.findall(r"`((?:policies|tuner|engine|tests|deploy|docs)/[\w/.]+)", MAP))
    assert paths and [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (page.parent / link).exists()] == []
