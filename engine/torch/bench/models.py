"""Models that the engine's benches run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rooftune.engine.torch.get_model import get_model, quiet
from rooftune.engine.torch.make_model import make_model
from rooftune.policies.errors import InputError, MissingDataError


@contextmanager
def bench_model(made_size: str | None = None) -> Iterator[Path]:
    """SmolLM2 in a folder of its own; made_size: instead a model with random weights, of ``rooftune make-model``.

    Raises MissingDataError where SmolLM2's package, or what reads it, is missing.
    """
    quiet()
    with TemporaryDirectory(prefix="rooftune-bench-") as folder:
        target = Path(folder) / "model"
        if made_size is not None:
            make_model(target, size=made_size, seed=0)
        else:
            try:
                get_model("smollm2-135m", target)
            except InputError as error:
                raise MissingDataError(str(error)) from error
        yield target
