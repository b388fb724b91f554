"""The lines between the controller and its child process: one JSON object a line, checked on both sides."""

from typing import Annotated, Final, TypeVar

from pydantic import Field, ValidationError
from rooftune.tuner.control.job import Answer, Job
from rooftune.tuner.record import Count, Part, Words

# A job of 100,000 requests is about 10 MB; a line beyond this is nonsense, and neither side keeps more of it in memory.
MAX_JOB_BYTES: Final = 64_000_000
MAX_REPLY_BYTES: Final = 4_000_000
OUT_OF_MEMORY_EXIT: Final = 77  # the child's exit code when a limit of memory ended it
LATE_EXIT: Final = 75  # when it gave up by itself, after Order.limit_s
IDLE_EXIT: Final = 0

Line = TypeVar("Line", bound=Part)


class Order(Part):
    """Parent to child. number: repeated in every reply; limit_s: seconds after which the child gives up by itself."""

    number: Count
    job: Job
    limit_s: Annotated[float, Field(gt=0)]


class Reply(Part):
    """Child to parent: exactly one of answer, refused and stage. stage: what the child is at, for people.

    refused: the child's own error, in words.
    """

    number: Count
    stage: Words | None = None
    done: Count = 0
    total: Count = 0
    answer: Answer | None = None
    refused: Words | None = None


def encoded(line: Part) -> bytes:
    """One line, with its end."""
    return line.model_dump_json(by_alias=True).encode() + b"\n"


def decoded(kind: type[Line], raw: bytes) -> Line | None:
    """A line as a value; None when it is none of this kind."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError:
        return None
