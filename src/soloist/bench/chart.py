"""Bars and lines as SVG, drawn with nothing but text. Pure.

Sizes are in the SVG's own units; a page may scale it. Colours come from the page: series i is drawn
in the class `c0`, `c1`, … , text in its own colour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

NUM_COLOURS = 8
_WIDTH, _LABELS, _VALUES = 960, 400, 110
_BAR, _GAP = 18, 8
_PLOT_HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 320, 70, 30, 40, 14
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Attributes:
        label: beside it.
        value: its length.
        low, high: the range drawn over it, or None.
        shown: the value in words.
        colour: from 0.
    """

    label: str
    value: float
    low: float | None
    high: float | None
    shown: str
    colour: int


def bars(items: Sequence[Bar], limit: float | None = None) -> str:
    """Horizontal bars from zero, each with its range; at least one.

    Args:
        items: from above to below.
        limit: length of the axis; None for the largest value.
    """
    most = limit or max(max(item.value, item.high or 0) for item in items) or 1
    scale = (_WIDTH - _LABELS - _VALUES) / most
    parts = []
    for i, item in enumerate(items):
        y = i * (_BAR + _GAP)
        middle = y + _BAR / 2
        end = _LABELS + min(item.value, most) * scale
        parts += [
            _text(_LABELS - 8, middle, item.label, "end"),
            f'<rect class="c{item.colour % NUM_COLOURS}" x="{_LABELS}" y="{y}" '
            f'width="{max(end - _LABELS, 1):.1f}" height="{_BAR}"/>',
        ]
        if item.low is not None and item.high is not None:
            low, end = _LABELS + item.low * scale, _LABELS + min(item.high, most) * scale
            parts.append(
                f'<line class="range" x1="{low:.1f}" x2="{end:.1f}" y1="{middle}" y2="{middle}"/>'
            )
        shown_at = max(end, _LABELS + min(item.value, most) * scale) + 6
        parts.append(_text(shown_at, middle, item.shown, "start"))
    return _svg(len(items) * (_BAR + _GAP), parts)


def lines(series: Mapping[str, Sequence[tuple[float, float]]], x_name: str, y_name: str) -> str:
    """Points joined by lines, both axes from zero; at least one point.

    Args:
        series: label → points, x rising.
        x_name: what is drawn to the right.
        y_name: what is drawn upwards.
    """
    points = [point for of_one in series.values() for point in of_one]
    x_step, y_step = (_step(max(point[i] for point in points)) for i in (0, 1))
    x_most, y_most = x_step * _TICKS, y_step * _TICKS
    width, height = _WIDTH - _LEFT - _RIGHT, _PLOT_HEIGHT - _TOP - _BOTTOM
    bottom = _PLOT_HEIGHT - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / x_most * width, bottom - y / y_most * height

    parts = []
    for i in range(_TICKS + 1):
        x, y = at(i * x_step, i * y_step)
        parts += [
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            _text(_LEFT - 8, y, f"{i * y_step:,g}", "end"),
            _text(x, bottom + 14, f"{i * x_step:,g}", "middle"),
        ]
    parts.append(_text(_LEFT + width / 2, bottom + 32, f"{x_name}, upwards {y_name}", "middle"))
    for i, (label, of_one) in enumerate(series.items()):
        colour = i % NUM_COLOURS
        places = [at(x, y) for x, y in of_one]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="s{colour}" points="{joined}"/>')
        parts += [f'<circle class="c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
        key = _PLOT_HEIGHT + 8 + i * 18
        parts.append(
            f'<rect class="c{colour}" x="{_LEFT}" y="{key}" width="10" height="10"/>'
            + _text(_LEFT + 16, key + 5, label, "start")
        )
    return _svg(_PLOT_HEIGHT + 8 + len(series) * 18, parts)


def _step(most: float) -> float:
    """Distance of marks: round, and such that `most` is within them."""
    raw = (most or 1) / _TICKS
    power = 10.0 ** floor(log10(raw))
    return next(m * power for m in (1, 1.5, 2, 3, 4, 5, 7.5, 10) if m * power >= raw * (1 - 1e-9))


def _text(x: float, y: float, words: str, anchor: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} dominant-baseline="central">{escape(words)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    box = f"0 0 {_WIDTH} {ceil(height)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">\n' + "\n".join(parts) + "</svg>"
    )
