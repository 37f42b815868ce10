"""Charts as SVG, and the page that holds them: one file, readable in light and in dark, that asks no network.

The colours come from the page's style sheet, so a chart is shown inside a page of `build_page`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 52, 48
_ROW = 26
_COLOURS = 8

# Okabe and Ito's colours, told apart by colour-blind readers too, each a little darker on white and lighter on black.
_LIGHT = ("#0072b2", "#d55e00", "#00875f", "#b5558c", "#a87800", "#2a9bd6", "#6b4fa0", "#555555")
_DARK = ("#4aa8e8", "#ff8a4c", "#2cc79b", "#e69bc6", "#f0c24b", "#8bd0f5", "#b39ddb", "#bbbbbb")

_STYLE = """\
:root { color-scheme: light dark; --page: #ffffff; --text: #1c1c1c; --faint: #d8d8d8; --quiet: #606060; %s }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --text: #e8e8e8; --faint: #3a3d44; --quiet: #a8a8a8; %s }
}
body { background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid var(--faint); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.quiet { color: var(--quiet); }
svg { display: block; height: auto; margin: 1rem 0; max-width: 100%%; }
svg text { fill: var(--text); font-size: 12px; }
svg text.quiet { fill: var(--quiet); }
svg .grid { stroke: var(--faint); stroke-width: 1; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .dashed { stroke-dasharray: 6 4; }
%s"""


@dataclass(frozen=True)
class Line:
    """A named line through points (x, y); without finite points it is left out."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """What an axis shows. show: writes a value of it. ticks: where it is marked; chosen from the data if empty."""

    title: str
    log: bool = False
    show: Callable[[float], str] = "{:g}".format
    ticks: Sequence[float] = ()


def draw_lines(lines: Sequence[Line], *, x: Axis, y: Axis, title: str = "", size: tuple[int, int] = (760, 420)) -> str:
    """Draw lines over two axes as an <svg>; points have their values as tooltips. size: width and height in pixels.

    On a log axis values that are not above 0 are left out.
    """
    width, height = size
    kept = [_keep(line, x, y) for line in lines]
    across = _scale(x, [px for line in kept for px, _ in line.points], _LEFT, width - _RIGHT)
    up = _scale(y, [py for line in kept for _, py in line.points], height - _BOTTOM, _TOP)
    parts = [_text(_LEFT, 18, title, weight="bold"), _legend([(line.name, line.dashed) for line in kept], _LEFT, 38)]
    for tick in across.ticks:
        at = across(tick)
        parts.append(_rule(at, _TOP, at, height - _BOTTOM))
        parts.append(_text(at, height - _BOTTOM + 18, x.show(tick), anchor="middle", quiet=True))
    for tick in up.ticks:
        at = up(tick)
        parts.append(_rule(_LEFT, at, width - _RIGHT, at))
        parts.append(_text(_LEFT - 8, at + 4, y.show(tick), anchor="end", quiet=True))
    for number, line in enumerate(kept):
        parts.append(_draw_line(line, number, [(across(px), up(py)) for px, py in line.points], x, y))
    parts.append(_text((_LEFT + width - _RIGHT) / 2, height - 8, x.title, anchor="middle"))
    middle = (_TOP + height - _BOTTOM) / 2
    parts.append(
        f'<text transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">{escape(y.title)}</text>'
    )
    return _svg(width, height, title, parts)


def draw_bars(
    bars: Mapping[str, Mapping[str, float]], *, title: str = "", show: Callable[[float], str] = "{:g}".format
) -> str:
    """Draw horizontal bars from 0 as an <svg>, one a row, with its sum written at its end.

    bars: the row's name to its parts, name to size, which are stacked; a part has one colour in all rows. With one part
    in all there is no legend. show: writes a size.
    """
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    left = 20 + 7 * max((len(name) for name in bars), default=0)
    width, top = 760, _TOP if len(names) > 1 else 32
    most = max((sum(parts.values()) for parts in bars.values()), default=0) or 1
    room = width - left - 90
    drawn = [_text(8, 18, title, weight="bold")]
    if len(names) > 1:
        drawn.append(_legend([(name, False) for name in names], left, 38))
    for row, (name, parts) in enumerate(bars.items()):
        at, down = float(left), top + row * _ROW
        drawn.append(_text(left - 8, down + 15, name, anchor="end"))
        for part, value in parts.items():
            long = room * max(0.0, value) / most
            tip = f"{name}, {part}: {show(value)}" if len(names) > 1 else f"{name}: {show(value)}"
            drawn.append(
                f'<rect class="fill{names.index(part) % _COLOURS}" x="{at:.1f}" y="{down}" width="{long:.1f}" '
                f'height="{_ROW - 8}"><title>{escape(tip)}</title></rect>'
            )
            at += long
        drawn.append(_text(at + 6, down + 15, show(sum(parts.values())), quiet=True))
    return _svg(width, top + len(bars) * _ROW + 8, title, drawn)


def build_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Build an HTML table of plain text."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"


def build_page(title: str, parts: Sequence[str], *, style: str = "") -> str:
    """Build a whole HTML page. parts: HTML as it is, one below the other. style: more CSS."""
    series = "".join(
        f".stroke{n} {{ stroke: var(--series{n}); }} .fill{n} {{ fill: var(--series{n}); }}\n" for n in range(_COLOURS)
    )
    light, dark = (
        " ".join(f"--series{n}: {colour};" for n, colour in enumerate(colours)) for colours in (_LIGHT, _DARK)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE % (light, dark, series)}{style}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{chr(10).join(parts)}\n</body>\n</html>\n"
    )


@dataclass(frozen=True)
class _Scale:
    """Values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: Sequence[float]

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / (high - low)


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
    low, high = min(values, default=1.0), max(values, default=10.0)
    if not axis.log:
        low = min(low, 0.0)
    if low == high:
        low, high = (low / 2, high * 2) if axis.log else (low, high + 1)
    ticks = axis.ticks or (_log_ticks(low, high) if axis.log else _even_ticks(low, high))
    low, high = min(low, *ticks), max(high, *ticks)
    return _Scale(low, high, start, end, axis.log, ticks)


def _log_ticks(low: float, high: float) -> list[float]:
    """From the last power of ten at or below to the first at or above; 2 and 5 between them on short axes."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / 8))
    between = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1, every) for factor in between]
    below = max(tick for tick in ticks if tick <= low * 1.000001)
    above = min((tick for tick in ticks if tick >= high / 1.000001), default=ticks[-1])
    return [tick for tick in ticks if below <= tick <= above]


def _even_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999999)
    return [number * step for number in range(math.floor(low / step), math.ceil(high / step - 1e-9) + 1)]


def _keep(line: Line, x: Axis, y: Axis) -> Line:
    points = [
        (px, py)
        for px, py in line.points
        if math.isfinite(px) and math.isfinite(py) and (px > 0 or not x.log) and (py > 0 or not y.log)
    ]
    return Line(line.name, points, line.dashed)


def _draw_line(line: Line, number: int, pixels: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    colour = number % _COLOURS
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in pixels)
    dots = "".join(
        f'<circle class="fill{colour}" cx="{px:.1f}" cy="{py:.1f}" r="3.5">'
        f"<title>{escape(f'{line.name}: {x.show(vx)}, {y.show(vy)}')}</title></circle>"
        for (px, py), (vx, vy) in zip(pixels, line.points, strict=True)
    )
    dashed = " dashed" if line.dashed else ""
    return f'<polyline class="line stroke{colour}{dashed}" points="{path}"/>{dots}'


def _legend(entries: Sequence[tuple[str, bool]], left: float, at: float) -> str:
    parts = []
    for number, (name, dashed) in enumerate(entries):
        style = f"line stroke{number % _COLOURS}{' dashed' if dashed else ''}"
        parts.append(f'<path class="{style}" d="M{left} {at - 4}h20"/>{_text(left + 25, at, name)}')
        left += 42 + 7 * len(name)
    return "".join(parts)


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="grid" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal", quiet: bool = False) -> str:
    style = ' class="quiet"' if quiet else ""
    return (
        f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
        if words
        else ""
    )


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">\n{chr(10).join(filter(None, parts))}\n</svg>'
    )
