"""Models that the engine's benches run: the packaged small one, and a made one where seconds count."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rooftune.engine.catalog import find_packaged
from rooftune.engine.torch.get_model import get_model, quiet
from rooftune.engine.torch.make_model import make_model
from rooftune.policies.errors import InputError, MissingDataError

PACKAGED = "smollm2-135m"


@contextmanager
def packaged_model() -> Iterator[Path]:
    """SmolLM2 in a folder of its own. Raises MissingDataError where its package, or what reads it, is missing."""
    quiet()
    with TemporaryDirectory(prefix="rooftune-bench-") as folder:
        target = Path(folder) / PACKAGED
        try:
            find_packaged(PACKAGED)
            get_model(PACKAGED, target)
        except InputError as error:
            raise MissingDataError(str(error)) from error
        yield target


@contextmanager
def made_model(size: str) -> Iterator[Path]:
    """A model with random weights; sizes of ``rooftune make-model``."""
    quiet()
    with TemporaryDirectory(prefix="rooftune-bench-") as folder:
        target = Path(folder) / size
        make_model(target, size=size, seed=0)
        yield target
