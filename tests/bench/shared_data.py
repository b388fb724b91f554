"""The measurements that the project does not ship."""

from pathlib import Path

from rooftune.policies.errors import MissingDataError

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def need_shared_data(folder: Path = SHARED_DATA) -> None:
    """Raise MissingDataError when the whole folder is absent; a file missing inside it is the reader's business."""
    if not folder.is_dir():
        raise MissingDataError(f"no folder {folder}; put shared/data beside the project")
