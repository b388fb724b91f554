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
LEFT, RIGHT, TOP, BOTTOM = 76.0, 16.0, 26.0, 46.0
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


@dataclass
class Plot:
    """Draw onto it, then ``render``. title and description are what a screen reader says."""

    title: str
    description: str
    x: Axis
    y: Axis
    strip: bool = False
    parts: list[str] = field(default_factory=list)

    @property
    def height(self) -> float:
        """Of the whole plot."""
        return HEIGHT + (STRIP if self.strip else 0.0)

    def px(self, value: float) -> float:
        return LEFT + self.x.at(value) * (WIDTH - LEFT - RIGHT)

    def py(self, value: float) -> float:
        return HEIGHT - BOTTOM - self.y.at(value) * (HEIGHT - TOP - BOTTOM)

    def line(self, points: Sequence[Point], style: str) -> None:
        """A polyline through the points."""
        path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in points)
        self.parts.append(f'<polyline class="line {style}" points="{path}"/>')

    def dots(self, points: Sequence[Point], style: str, radius: float = 3.0) -> None:
        """One dot a point."""
        for x, y in points:
            place = f'cx="{self.px(x):.1f}" cy="{self.py(y):.1f}"'
            self.parts.append(f'<circle class="dot {style}" {place} r="{radius:g}"/>')

    def diamond(self, point: Point, style: str, label: str) -> None:
        """A large mark with a word beside it."""
        x, y = self.px(point[0]), self.py(point[1])
        path = f"M{x:.1f},{y - 8:.1f} l8,8 l-8,8 l-8,-8 z"
        self.parts.append(f'<path class="mark {style}" d="{path}"/>')
        self.text(x, y - 13 if y > TOP + 20 else y + 21, label, style)

    def band(self, low: float, high: float, style: str) -> None:
        """A shaded range of x."""
        x, width = self.px(low), self.px(high) - self.px(low)
        self.parts.append(
            f'<rect class="band {style}" x="{x:.1f}" y="{TOP:g}" width="{max(width, 2.0):.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM:g}"/>'
        )

    def blocks(self, boxes: Sequence[tuple[float, float, float, float]], style: str) -> None:
        """Filled boxes (x from, x to, y from, y to), one shape for all of them."""
        path = "".join(
            f"M{self.px(left):.1f},{self.py(low):.1f}V{self.py(high):.1f}H{self.px(right):.1f}V{self.py(low):.1f}z"
            for left, right, low, high in boxes
            if high > low
        )
        if path:
            self.parts.append(f'<path class="block {style}" d="{path}"/>')

    def under(self, spans: Sequence[Point], style: str) -> None:
        """Pieces (x from, x to) of the strip below the frame."""
        top = HEIGHT - BOTTOM + 4
        path = "".join(f"M{self.px(a):.1f},{top:g}V{top + 8:g}H{self.px(b):.1f}V{top:g}z" for a, b in spans)
        if path:
            self.parts.append(f'<path class="block {style}" d="{path}"/>')

    def upright(self, value: float, style: str, label: str, row: int = 0) -> None:
        """A vertical line with a word at its top; ``row`` 1 writes it lower, so that two do not overlap."""
        x = self.px(value)
        self.parts.append(
            f'<line class="rule {style}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}"/>'
        )
        self.text(x, TOP - 6 + 15 * row + (6 if row else 0), label, style, shift=4.0 if row else 0.0)

    def level(self, value: float, style: str, label: str) -> None:
        """A horizontal line with a word at its right end."""
        y = self.py(value)
        self.parts.append(
            f'<line class="rule {style}" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        self.parts.append(
            f'<text class="word {style}" x="{WIDTH - RIGHT - 4:g}" y="{y - 5:.1f}" '
            f'text-anchor="end">{escape(label)}</text>'
        )

    def text(self, x: float, y: float, label: str, style: str, shift: float = 0.0) -> None:
        """A word near a point of the page, kept inside the frame."""
        anchor = "start" if x < LEFT + 60 or shift else "end" if x > WIDTH - RIGHT - 60 else "middle"
        if shift and x > WIDTH - RIGHT - 120:
            anchor, shift = "end", -shift
        self.parts.append(
            f'<text class="word {style}" x="{x + shift:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(label)}</text>'
        )

    def render(self, name: str) -> str:
        """The SVG element; ``name`` makes its ids unique in a page."""
        return "\n".join(
            [
                f'<svg viewBox="0 0 {WIDTH:g} {self.height:g}" role="img" aria-labelledby="{name}-t {name}-d">',
                f'<title id="{name}-t">{escape(self.title)}</title>',
                f'<desc id="{name}-d">{escape(self.description)}</desc>',
                *self._frame(),
                *self.parts,
                "</svg>",
            ]
        )

    def _frame(self) -> list[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        below = bottom + 16 + (STRIP if self.strip else 0.0)
        found = []
        for value in self.x.ticks():
            x = self.px(value)
            found.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP:g}" y2="{bottom:g}"/>')
            found.append(
                f'<text class="tick" x="{x:.1f}" y="{below:g}" text-anchor="middle">{escape(self.x.show(value))}</text>'
            )
        for value in self.y.ticks():
            y = self.py(value)
            found.append(f'<line class="grid" x1="{LEFT:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
            found.append(
                f'<text class="tick" x="{LEFT - 7:g}" y="{y + 4:.1f}" text-anchor="end">'
                f"{escape(self.y.show(value))}</text>"
            )
        found.append(
            f'<rect class="frame" x="{LEFT:g}" y="{TOP:g}" width="{right - LEFT:g}" height="{bottom - TOP:g}"/>'
        )
        middle_x, middle_y = (LEFT + right) / 2, (TOP + bottom) / 2
        found.append(
            f'<text class="label" x="{middle_x:g}" y="{self.height - 8:g}" text-anchor="middle">'
            f"{escape(self.x.label)}</text>"
        )
        found.append(
            f'<text class="label" x="14" y="{middle_y:g}" text-anchor="middle" '
            f'transform="rotate(-90 14 {middle_y:g})">{escape(self.y.label)}</text>'
        )
        return found
