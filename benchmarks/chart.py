"""Charts with two logarithmic axes, as SVG: the same text on every machine, so that a test can tell
whether a committed picture shows the committed numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 470, 330  # of a panel's plot area, in pixels
LEFT, TOP, BETWEEN, RIGHT = 62, 62, 78, 14
LEGEND_TOP, LEGEND_ROW, LEGEND_COLUMNS = 56, 20, 2
MARGIN = 0.04  # of an axis, beyond the outermost values
FONT = "font-family='sans-serif' fill='#24292f'"


@dataclass(frozen=True)
class Style:
    """How a curve looks. dash: of SVG, empty for a solid line, None for no line. marker: a filled
    "dot", a hollow "ring", or a short "bar". An area is filled down to the axis instead."""

    color: str
    dash: str | None = ""
    marker: str = "dot"
    is_area: bool = False


@dataclass(frozen=True)
class Curve:
    """Values of y by x, all positive."""

    label: str
    points: Mapping[int, float]
    style: Style


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    curves: Sequence[Curve]


@dataclass(frozen=True)
class Axis:
    """Pixels of a value: `start` for `low`, `end` for `high`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> Axis:
        """With a margin on either side."""
        low, high = math.log(min(values)), math.log(max(values))
        margin = MARGIN * max(high - low, 0.1)
        return cls(math.exp(low - margin), math.exp(high + margin), start, end)

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, steps: Sequence[float], base: float) -> list[float]:
        """Every step * base^n on the axis.

        >>> Axis(40, 3000, 0, 1).ticks((1, 2, 5), 10)
        [50, 100, 200, 500, 1000, 2000]
        """
        first, last = (math.floor(math.log(end, base)) for end in (self.low, self.high))
        all_ticks = (
            step * base**power for power in range(first, last + 1) for step in sorted(steps)
        )
        return [tick for tick in all_ticks if self.low <= tick <= self.high]

    def round_ticks(self) -> list[float]:
        """At least three round numbers of the axis, if it is that long: of 1, 2 and 5, or finer.

        >>> Axis(40, 3000, 0, 1).round_ticks()
        [50, 100, 200, 500, 1000, 2000]
        >>> Axis(2.2, 5.4, 0, 1).round_ticks(), Axis(2.5, 2.9, 0, 1).round_ticks()
        ([3, 4, 5], [2.5, 2.6, 2.7, 2.8, 2.9])
        """
        ticks: list[float] = []
        for steps in ((1, 2, 5), range(1, 10), [tenths / 10 for tenths in range(10, 100)]):
            ticks = self.ticks(steps, 10)
            if len(ticks) >= 3:
                break
        return ticks


def chart(title: str, panels: Sequence[Panel], *, x_label: str, y_label: str) -> str:
    """Panels side by side with one scale for y, and one legend below them."""
    legend = list({curve.label: curve for panel in panels for curve in panel.curves}.values())
    num_rows = -(-len(legend) // LEGEND_COLUMNS)
    width = LEFT + len(panels) * WIDTH + (len(panels) - 1) * BETWEEN + RIGHT
    height = TOP + HEIGHT + LEGEND_TOP + num_rows * LEGEND_ROW + 8
    values = [y for panel in panels for curve in panel.curves for y in curve.points.values()]
    y_axis = Axis.around(values, TOP + HEIGHT, TOP)
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}'>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        _text(width / 2, 22, title, size=13),
    ]
    for i, panel in enumerate(panels):
        left = LEFT + i * (WIDTH + BETWEEN)
        lines += _panel(panel, left, y_axis, x_label, y_label)
    for i, curve in enumerate(legend):
        column, row = divmod(i, num_rows)
        x = LEFT + column * (width - LEFT) / LEGEND_COLUMNS
        y = TOP + HEIGHT + LEGEND_TOP + row * LEGEND_ROW + 6
        lines += _sample(curve.style, x, y)
        lines.append(_text(x + 44, y + 4, curve.label, anchor="start"))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(panel: Panel, left: float, y_axis: Axis, x_label: str, y_label: str) -> Iterator[str]:
    bottom, right = TOP + HEIGHT, left + WIDTH
    x_axis = Axis.around([x for curve in panel.curves for x in curve.points], left, right)
    yield _text((left + right) / 2, TOP - 12, panel.title, size=13, weight="bold")
    for tick in y_axis.round_ticks():
        y = y_axis(tick)
        yield _line(left, y, right, y, "#d8dee4")
        yield _text(left - 6, y + 4, f"{tick:g}", anchor="end")
    for tick in x_axis.ticks((1,), 2):
        x = x_axis(tick)
        yield _line(x, bottom, x, TOP, "#eff2f5")
        yield _text(x, bottom + 16, f"{tick:g}", size=10)
    areas = [curve for curve in panel.curves if curve.style.is_area]
    for curve in areas:
        points = _pixels(curve, x_axis, y_axis)
        corners = [(points[0][0], bottom), *points, (points[-1][0], bottom)]
        yield f"<polygon points='{_joined(corners)}' fill='{curve.style.color}'/>"
    yield (
        f"<rect x='{left}' y='{TOP}' width='{WIDTH}' height='{HEIGHT}' fill='none' "
        "stroke='#57606a'/>"
    )
    for curve in panel.curves:
        if curve in areas:
            continue
        points = _pixels(curve, x_axis, y_axis)
        if curve.style.dash is not None:
            yield (
                f"<polyline points='{_joined(points)}' fill='none' stroke='{curve.style.color}' "
                f"stroke-width='1.8'{_dash(curve.style)}/>"
            )
        for x, y in points:
            yield _marker(curve.style, x, y)
    yield _text((left + right) / 2, bottom + 36, x_label)
    middle = TOP + HEIGHT / 2
    yield (
        f"<text x='{left - 46}' y='{middle:.1f}' font-size='11' text-anchor='middle' {FONT} "
        f"transform='rotate(-90 {left - 46} {middle:.1f})'>{escape(y_label)}</text>"
    )


def _pixels(curve: Curve, x_axis: Axis, y_axis: Axis) -> list[tuple[float, float]]:
    return [(x_axis(x), y_axis(y)) for x, y in sorted(curve.points.items())]


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _sample(style: Style, x: float, y: float) -> Iterator[str]:
    """What stands for a curve in the legend."""
    if style.is_area:
        yield f"<rect x='{x:.1f}' y='{y - 6:.1f}' width='36' height='12' fill='{style.color}'/>"
        return
    if style.dash is not None:
        yield (
            f"<line x1='{x:.1f}' y1='{y:.1f}' x2='{x + 36:.1f}' y2='{y:.1f}' "
            f"stroke='{style.color}' stroke-width='1.8'{_dash(style)}/>"
        )
    yield _marker(style, x + 18, y)


def _marker(style: Style, x: float, y: float) -> str:
    if style.marker == "bar":
        return (
            f"<line x1='{x - 8:.1f}' y1='{y:.1f}' x2='{x + 8:.1f}' y2='{y:.1f}' "
            f"stroke='{style.color}' stroke-width='2.6'/>"
        )
    fill = style.color if style.marker == "dot" else "white"
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.2' fill='{fill}' stroke='{style.color}'/>"


def _dash(style: Style) -> str:
    return f" stroke-dasharray='{style.dash}'" if style.dash else ""


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{color}'/>"


def _text(
    x: float, y: float, text: str, *, size: int = 11, anchor: str = "middle", weight: str = "normal"
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' font-weight='{weight}' "
        f"text-anchor='{anchor}' {FONT}>{escape(text)}</text>"
    )
