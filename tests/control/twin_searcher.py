"""The child's own work without its process, for tests of what is proposed. It compiles the twin, so they are slow."""

from collections.abc import Callable

from rooftune.tuner.control.job import Expected, Job, SearchAnswer
from tests.control.doubles import Rig, Scripted, rig


def searching() -> Callable[[Job], SearchAnswer]:
    """Replies as the child would."""
    from rooftune.tuner.control.searcher.run import run_job

    return lambda job: run_job(job, lambda stage, done, total: None)


def foretells(job: Job) -> Expected:
    """What the child says of blocks."""
    from rooftune.tuner.control.searcher.run import expected_of

    return expected_of(job)


def twin_rig(**parts: object) -> Rig:
    made = rig(searching(), **parts)  # type: ignore[arg-type]  # as rig takes them
    assert isinstance(made.searcher, Scripted)
    made.searcher.foretell = foretells
    return made
