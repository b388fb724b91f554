"""The checkout under its import name, for another interpreter in whose environment nothing of ours is installed."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def import_path() -> str:
    """PYTHONPATH with ``rooftune`` (links, as ``make types`` makes them) and ``tests``."""
    links = ROOT / "build" / "import" / "rooftune"
    links.mkdir(parents=True, exist_ok=True)
    for name in ("policies", "tuner", "engine"):
        if not (links / name).exists():
            (links / name).symlink_to(Path("..", "..", "..", name), target_is_directory=True)
    return f"{links.parent}:{ROOT}"
