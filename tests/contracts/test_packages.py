"""A wheel holds exactly what the folders hold, all of it under ``rooftune``."""

import tomllib
from pathlib import Path

import pytest

from tests.contracts.import_rules import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_folder_with_modules_is_a_package_of_the_wheel() -> None:
    folders = {path.parent.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert sorted(SETUPTOOLS["packages"]) == sorted(f"rooftune.{str(folder).replace('/', '.')}" for folder in folders)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_folder_is_imported_under_rooftune(package: str) -> None:
    assert SETUPTOOLS["package-dir"][f"rooftune.{package}"] == package


def test_every_file_beside_the_modules_is_in_the_wheel() -> None:
    data = SETUPTOOLS["package-data"]
    named = {
        path for package, patterns in data.items() for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
    }  # fmt: skip
    beside = {
        path for package in PACKAGES for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }  # fmt: skip
    assert named == beside
