"""A small plot as inline SVG: two axes, lines, dots, bands and marks. Same input, same bytes; no fonts, no scripts.

Colours and strokes are classes that the page styles, so that the plot follows it in print and on a phone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

Kind = Literal["linear", "log2", "log10"]
Point = tuple[float, float]

WIDTH, HEIGHT = 680.0, 330.0
LEFT, TOP = 76.0, 26.0
END, FLOOR = WIDTH - 16.0, HEIGHT - 46.0  # of the frame
MOST_TICKS = 7
STRIP = 14.0  # room for a strip between frame and ticks


@dataclass(frozen=True)
class Axis:
    """label with unit; low < high (above 0 on a logarithmic axis); show: how a tick's value is written."""

    label: str
    low: float
    high: float
    kind: Kind = "linear"
    show: Callable[[float], str] = "{:g}".format

    def __post_init__(self) -> None:
        if not self.low < self.high or not math.isfinite(self.high - self.low):
            raise ValueError(f"axis {self.label}: low {self.low} and high {self.high} must be finite and ascend")
        if self.kind != "linear" and self.low <= 0:
            raise ValueError(f"axis {self.label}: low is {self.low}, must be above 0 on a logarithmic axis")

    def at(self, value: float) -> float:
        """Place of a value along the axis, 0..1; clipped to the ends."""
        if self.kind == "linear":
            place = (value - self.low) / (self.high - self.low)
        else:
            place = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return min(max(place, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """At most a handful of round values within the axis."""
        if self.kind == "linear":
            step = _round_step((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
        base, mantissas = (2.0, (1.0,)) if self.kind == "log2" else (10.0, (1.0, 2.0, 5.0))
        lowest, highest = math.floor(math.log(self.low, base) - 1e-9), math.ceil(math.log(self.high, base) + 1e-9)
        values = [m * base**power for power in range(lowest, highest + 1) for m in mantissas]
        inside = [value for value in values if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)]
        if self.kind == "log10" and len(inside) > MOST_TICKS:
            inside = [value for value in inside if math.isclose(math.log10(value) % 1.0, 0.0, abs_tol=1e-9)]
        return inside[:: max(1, math.ceil(len(inside) / (2 * MOST_TICKS)))]


def _round_step(rough: float) -> float:
    scale = 10.0 ** math.floor(math.log10(rough))
    return next(factor * scale for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if rough <= factor * scale * (1 + 1e-9))


def _px(*places: float) -> str:
    """Pixels to a tenth, with commas between."""
    return ",".join(f"{round(place, 1):g}" for place in places)


@dataclass
class Plot:
    """One figure with its caption: draw onto it, then take ``svg``. name: makes its ids unique in a page.

    title and description are what a screen reader says. legend: (style, words).
    """

    name: str
    title: str
    description: str
    x: Axis
    y: Axis
    strip: bool = False
    caption: str = ""
    legend: list[tuple[str, str]] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for value in self.x.ticks():
            x = self.px(value)
            self._rule("grid", x, TOP, x, FLOOR)
            self._word("tick", x, FLOOR + 16 + (STRIP if self.strip else 0.0), self.x.show(value))
        for value in self.y.ticks():
            y = self.py(value)
            self._rule("grid", LEFT, y, END, y)
            self._word("tick", LEFT - 7, y + 4, self.y.show(value), "end")
        self._add("rect", "frame", x=LEFT, y=TOP, width=END - LEFT, height=FLOOR - TOP)
        middle = (TOP + FLOOR) / 2
        self._word("label", (LEFT + END) / 2, self._height - 8, self.x.label)
        self._word("label", 14.0, middle, self.y.label, transform=f"rotate(-90 14 {middle:g})")

    @property
    def _height(self) -> float:
        return HEIGHT + (STRIP if self.strip else 0.0)

    def px(self, value: float) -> float:
        return LEFT + self.x.at(value) * (END - LEFT)

    def py(self, value: float) -> float:
        return FLOOR - self.y.at(value) * (FLOOR - TOP)

    def _add(self, tag: str, style: str, word: str = "", **attributes: float | str) -> None:
        given = "".join(
            f' {name.replace("_", "-")}="{value if isinstance(value, str) else _px(value)}"'
            for name, value in attributes.items()
        )
        self.parts.append(f'<{tag} class="{style}"{given}' + (f">{escape(word)}</{tag}>" if word else "/>"))

    def _rule(self, style: str, x1: float, y1: float, x2: float, y2: float) -> None:
        self._add("line", style, x1=x1, x2=x2, y1=y1, y2=y2)

    def _word(self, style: str, x: float, y: float, word: str, anchor: str = "middle", **more: str) -> None:
        if word:
            self._add("text", style, word, x=x, y=y, text_anchor=anchor, **more)

    def line(self, points: Sequence[Point], style: str) -> None:
        """A polyline through the points."""
        self._add("polyline", f"line {style}", points=" ".join(_px(self.px(x), self.py(y)) for x, y in points))

    def dots(self, points: Sequence[Point], style: str, radius: float = 3.0) -> None:
        """One dot a point."""
        for x, y in points:
            self._add("circle", f"dot {style}", cx=self.px(x), cy=self.py(y), r=radius)

    def diamond(self, point: Point, style: str, word: str) -> None:
        """A large mark with a word beside it."""
        x, y = self.px(point[0]), self.py(point[1])
        self._add("path", f"mark {style}", d=f"M{_px(x, y - 8)} l8,8 l-8,8 l-8,-8 z")
        self.text(x, y - 13 if y > TOP + 20 else y + 21, word, style)

    def band(self, low: float, high: float, style: str) -> None:
        """A shaded range of x."""
        width = max(self.px(high) - self.px(low), 2.0)
        self._add("rect", f"band {style}", x=self.px(low), y=TOP, width=width, height=FLOOR - TOP)

    def blocks(self, boxes: Sequence[tuple[float, float, float, float]], style: str) -> None:
        """Filled boxes (x from, x to, y from, y to), one shape for all of them."""
        self._boxes([(a, b, self.py(low), self.py(high)) for a, b, low, high in boxes if high > low], style)

    def under(self, spans: Sequence[Point], style: str) -> None:
        """Pieces (x from, x to) of the strip below the frame."""
        self._boxes([(left, right, FLOOR + 4, FLOOR + 12) for left, right in spans], style)

    def _boxes(self, boxes: Sequence[tuple[float, float, float, float]], style: str) -> None:
        path = "".join(
            f"M{_px(self.px(left), low)}V{_px(high)}H{_px(self.px(right))}V{_px(low)}z"
            for left, right, low, high in boxes
        )
        if path:
            self._add("path", f"block {style}", d=path)

    def upright(self, value: float, style: str, word: str, row: int = 0) -> None:
        """A vertical line with a word at its top; ``row`` 1 writes it lower, so that two do not overlap."""
        x = self.px(value)
        self._rule(f"rule {style}", x, TOP, x, FLOOR)
        self.text(x, TOP - 6 + 15 * row + (6 if row else 0), word, style, shift=4.0 if row else 0.0)

    def level(self, value: float, style: str, word: str) -> None:
        """A horizontal line with a word at its right end."""
        y = self.py(value)
        self._rule(f"rule {style}", LEFT, y, END, y)
        self._word(f"word {style}", END - 4, y - 5, word, "end")

    def text(self, x: float, y: float, word: str, style: str, shift: float = 0.0) -> None:
        """A word near a point of the page, kept inside the frame."""
        anchor = "start" if x < LEFT + 60 or shift else "end" if x > END - 60 else "middle"
        if shift and x > END - 120:
            anchor, shift = "end", -shift
        self._word(f"word {style}", x + shift, y, word, anchor)

    @property
    def svg(self) -> str:
        """The plot as an SVG element."""
        name = self.name
        return "\n".join(
            [
                f'<svg viewBox="0 0 {WIDTH:g} {self._height:g}" role="img" aria-labelledby="{name}-t {name}-d">',
                f'<title id="{name}-t">{escape(self.title)}</title>',
                f'<desc id="{name}-d">{escape(self.description)}</desc>',
                *self.parts,
                "</svg>",
            ]
        )
