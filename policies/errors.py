"""The one error tree. A message names the value, the bound and the remedy.

Every error for the user derives from ``RooftuneError`` and carries the command's exit code: 1 refused or infeasible,
2 usage or input, 3 unreachable. Any other exception is a defect of ours and is reported as one.
"""


class RooftuneError(Exception):
    """Base of every error that Rooftune raises on purpose."""

    exit_code: int = 1


class InputError(RooftuneError):
    """An invalid flag, file, configuration or value."""

    exit_code: int = 2


class MissingDataError(InputError):
    """Measurements that the project does not ship are missing."""


class InfeasibleError(RooftuneError):
    """The request is valid, but nothing satisfies it."""

    exit_code: int = 1


class RefusedError(RooftuneError):
    """A guard, a bound or the other side refused."""

    exit_code: int = 1


class UnreachableError(RooftuneError):
    """A server, a file system or a store did not answer."""

    exit_code: int = 3


def shown(value: object, limit: int = 60) -> str:
    """A value for a message: one line, escaped, at most ``limit`` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers above some thousand digits
        text = "a huge number"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def printable(text: str, other: str = " ") -> str:
    """The text with ``other`` for every character that a terminal or a header cannot show."""
    return "".join(letter if letter.isprintable() else other for letter in text)


def bad_value(what: str, value: object, bound: str, remedy: str) -> InputError:
    """One line: the value, the bound, the remedy."""
    return InputError(f"{what} is {value!r}, must be {bound}; {remedy}")
