"""Tables of plain text."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: frozenset[int] = frozenset()) -> list[str]:
    """Lines of a table with columns as wide as they need; columns in ``left`` start at the left, others end right."""
    cells = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(_cell(text, widths[i], i in left) for i, text in enumerate(row)).rstrip() for row in cells]


def _cell(text: str, width: int, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)
