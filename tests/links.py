"""The checkout under its import name, for mypy and for an interpreter in whose environment nothing of ours is."""

from pathlib import Path

from rooftune.tuner.bench.children import link_packages

ROOT = Path(__file__).resolve().parents[1]


def import_path() -> str:
    """PYTHONPATH with ``rooftune`` and ``tests``."""
    return f"{link_packages(ROOT / 'build' / 'import')}:{ROOT}"


if __name__ == "__main__":
    import_path()
