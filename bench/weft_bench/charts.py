"""Pictures of figures: bars of one metric as Mermaid that Markdown viewers draw; curves and groups of bars as SVG."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from weft_stage.lines import Line


def charts(metrics: Sequence[str], lines: Iterable[Line]) -> list[str]:
    """Draw a chart for each of the metrics that has at least two values, in the order given."""
    found = {metric: dict[str, float]() for metric in metrics}
    units = dict[str, str]()
    for line in lines:
        if line.metric in found and line.value is not None:
            found[line.metric][line.case] = line.value
            units[line.metric] = line.unit
    return [bars(metric, units[metric], values) for metric, values in found.items() if len(values) > 1]


def bars(title: str, unit: str, values: dict[str, float]) -> str:
    """Draw horizontal bars from zero, one a label."""
    labels = ", ".join(f'"{_plain(label)}"' for label in values)
    numbers = ", ".join(f"{value:.3g}" for value in values.values())
    return "\n".join(
        [
            "```mermaid",
            "xychart-beta horizontal",
            f'    title "{_plain(title)} ({_plain(unit)})"',
            f"    x-axis [{labels}]",
            f"    y-axis 0 --> {max([1e-9, *values.values()]) * 1.1:.3g}",
            f"    bar [{numbers}]",
            "```",
        ]
    )


def _plain(text: str) -> str:
    """Return the text without what would end a string of Mermaid."""
    return text.replace('"', "'").replace("\n", " ")


# ---------------------------------------------------------------- SVG, where Mermaid cannot draw it

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 70, 170, 40, 50
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
TICKS = 5


class Point(NamedTuple):
    """A point of a curve; `label` stands beside it."""

    x: float
    y: float
    label: str = ""


def curves(title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[Point]]) -> str:
    """Draw lines through points, from zero on both axes: an SVG picture."""
    points = [point for line in series.values() for point in line]
    x_most, y_most = _round_up(max(point.x for point in points)), _round_up(max(point.y for point in points))
    parts = [_axes(title, x_label, y_label, x_most, y_most)]
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(_across(point.x / x_most), _up(point.y / y_most), point.label) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y, label in places:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')
            parts.append(_text(x + 5, y - 6, label, size=10) if label else "")
        parts.append(_legend(number, name, colour))
    return _svg(parts)


def roofline(title: str, gb_s: float, gflop_s: float, series: Mapping[str, Sequence[Point]]) -> str:
    """Draw points of (FLOPs a byte, GFLOP/s) below a machine's rates, on log axes: an SVG picture.

    Williams, Waterman and Patterson, "Roofline" (CACM 2009).
    """
    points = [point for found in series.values() for point in found]
    across = _Decades([point.x for point in points] + [gflop_s / gb_s])
    up = _Decades([point.y for point in points] + [gflop_s])
    parts = [_axes(title, "FLOPs a byte", "GFLOP/s", 0.0, 0.0, len(up.powers) - 1)]
    for power in up.powers:
        parts += [_text(LEFT - 6, _up(up.share(power)) + 4, f"{power:g}", size=11, anchor="end")]
    for power in across.powers:
        parts += [_text(_across(across.share(power)), HEIGHT - BOTTOM + 16, f"{power:g}", size=11, anchor="middle")]
    left = max(across.powers[0], up.powers[0] / gb_s)
    corners = [(left, left * gb_s), (gflop_s / gb_s, gflop_s), (across.powers[-1], gflop_s)]
    path = " ".join(f"{_across(across.share(x)):.1f},{_up(up.share(y)):.1f}" for x, y in corners)
    parts.append(f'<polyline points="{path}" fill="none" stroke="#333" stroke-width="2"/>')
    for number, (name, found) in reversed([*enumerate(series.items())]):  # the first one's points lie on top
        colour = COLOURS[number % len(COLOURS)]
        for point in found:
            place = f'cx="{_across(across.share(point.x)):.1f}" cy="{_up(up.share(point.y)):.1f}"'
            parts.append(f'<circle {place} r="3" fill="{colour}" fill-opacity="0.7"/>')
        parts.append(_legend(number, name, colour))
    return _svg(parts)


class _Decades:
    """The powers of ten round positive values: a log axis."""

    def __init__(self, values: Sequence[float]) -> None:
        self._first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        self.powers = [10.0**power for power in range(self._first, last + 1)]

    def share(self, value: float) -> float:
        return (math.log10(value) - self._first) / max(1, len(self.powers) - 1)


def groups(title: str, y_label: str, values: Mapping[str, Mapping[str, float]]) -> str:
    """Draw bars side by side, in one group for each key of `values`: an SVG picture. What a group lacks has no bar."""
    names = list(dict.fromkeys(name for bars_of in values.values() for name in bars_of))
    y_most = _round_up(max(value for bars_of in values.values() for value in bars_of.values()))
    parts = [_axes(title, "", y_label, 0.0, y_most)]
    wide = 1.0 / max(1, len(values))
    for place, (group, bars_of) in enumerate(values.items()):
        for number, name in enumerate(names):
            if name in bars_of:
                x, width = place * wide + wide * (0.1 + 0.8 * number / len(names)), 0.8 * wide / len(names)
                top, colour = _up(bars_of[name] / y_most), COLOURS[number % len(COLOURS)]
                size = f'width="{_across(width) - _across(0) - 1:.1f}" height="{_up(0) - top:.1f}"'
                shown = f"<title>{escape(name)}: {bars_of[name]:.4g}</title>"
                parts.append(f'<rect x="{_across(x):.1f}" y="{top:.1f}" {size} fill="{colour}">{shown}</rect>')
        parts.append(_text(_across((place + 0.5) * wide), HEIGHT - BOTTOM + 16, group, size=11, anchor="middle"))
    parts += [_legend(number, name, COLOURS[number % len(COLOURS)]) for number, name in enumerate(names)]
    return _svg(parts)


def heatmap(title: str, x_label: str, y_label: str, cells: Mapping[tuple[int, int], float]) -> str:
    """Draw a square for each (column, row), the nearer to 1 the darker: an SVG picture."""
    columns, rows = max(x for x, _ in cells) + 1, max(y for _, y in cells) + 1
    parts = [_axes(title, x_label, y_label, columns, rows)]
    wide, high = _across(1 / columns) - _across(0), _up(0) - _up(1 / rows)
    for (x, y), share in sorted(cells.items()):
        place = f'x="{_across(x / columns):.1f}" y="{_up((y + 1) / rows):.1f}"'
        size = f'width="{wide - 0.5:.1f}" height="{high - 0.5:.1f}"'
        parts.append(f'<rect {place} {size} fill="{COLOURS[0]}" fill-opacity="{min(1.0, share):.2f}"/>')
    return _svg(parts)


def _svg(parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return "\n".join(
        [head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *filter(None, parts), "</svg>\n"]
    )


def _axes(title: str, x_label: str, y_label: str, x_most: float, y_most: float, ticks: int = TICKS) -> str:
    """Draw frame, ticks and names; no ticks where the most of an axis is 0."""
    parts = [_text(LEFT, TOP - 16, title, size=14)]
    for tick in range(ticks + 1):
        share, y = tick / ticks, _up(tick / ticks)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        if y_most:
            parts.append(_text(LEFT - 6, y + 4, f"{share * y_most:.3g}", size=11, anchor="end"))
        if x_most:
            parts.append(_text(_across(share), HEIGHT - BOTTOM + 16, f"{share * x_most:.3g}", size=11, anchor="middle"))
    parts.append(_text(_across(0.5), HEIGHT - 10, x_label, size=12, anchor="middle"))
    turned = (
        f'<g transform="translate(16 {_up(0.5):.0f}) rotate(-90)">{_text(0, 0, y_label, size=12, anchor="middle")}</g>'
    )
    return "\n".join([*parts, turned])


def _legend(number: int, name: str, colour: str) -> str:
    y = TOP + 18 * number
    box = f'<rect x="{WIDTH - RIGHT + 14}" y="{y}" width="11" height="11" fill="{colour}"/>'
    return box + _text(WIDTH - RIGHT + 30, y + 10, name, size=11)


def _text(x: float, y: float, text: str, *, size: int, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


def _across(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _up(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _round_up(value: float) -> float:
    """Return the next round number."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return next(
        step * power for step in (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0) if step * power >= value
    )
