"""The child's own work without its process, for tests of what is proposed. It compiles the twin, so they are slow."""

from collections.abc import Callable

from rooftune.tuner.control.job import Answer, Job
from tests.control.doubles import Rig, Scripted, rig


def searching() -> Callable[[Job], Answer]:
    """Replies as the child would."""
    from rooftune.tuner.control.searcher.run import run_job

    return lambda job: run_job(job, lambda stage, done, total: None, lambda: 0.0)


def twin_rig(**parts: object) -> Rig:
    made = rig(searching(), **parts)  # type: ignore[arg-type]  # as rig takes them
    assert isinstance(made.searcher, Scripted)
    return made
