"""Figures of matplotlib, and the HTML page that holds them: one file that loads nothing from the network."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError, MissingDependencyError
from hvdkit.optional_import import optional_import

_STYLE = """\
body { background: #ffffff; color: #1c1c1c; font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } pre { white-space: pre-wrap; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid #d8d8d8; padding: .25rem .75rem; text-align: left; }
svg { height: auto; max-width: 100%; }
"""


#: Suffixes of files for figures.
SUFFIXES = (".svg", ".png", ".pdf")


def check_plot(option: str, path: Path) -> None:
    """Raise HvdkitError or MissingDependencyError, before any computation, if a figure cannot be drawn."""
    if path.suffix not in SUFFIXES:
        raise HvdkitError(f"{option} {path}: the suffix chooses the format. Use {', '.join(SUFFIXES)}.")
    new_figure(option, 1, 1)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to a file. Raises HvdkitError if that is not possible."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise HvdkitError(f"{path} cannot be written: {error.strerror}. Name a file in an existing folder.") from None


def new_figure(option: str, width: float, height: float) -> Any:
    """Make an empty figure. option: the option for the figure, for errors. width, height: inches.

    Raises MissingDependencyError without matplotlib.
    """
    try:
        optional_import("matplotlib", "plot")
    except MissingDependencyError:
        raise MissingDependencyError(
            f"{option} draws with matplotlib, which is not installed. Run: pip install 'hvdkit[plot]'"
        ) from None
    return optional_import("matplotlib.figure", "plot").Figure(figsize=(width, height), layout="constrained")


def draw_bars(
    axis: Any, bars: Mapping[str, Mapping[str, float]], *, title: str = "", show: Callable[[float], str] = "{:g}".format
) -> None:
    """Draw horizontal bars, each with its sum written at its end. bars: row name -> segment name -> size."""
    rows = list(bars)
    ends = dict.fromkeys(rows, 0.0)
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    for name in names:
        sizes = [max(0.0, bars[row].get(name, 0.0)) for row in rows]
        axis.barh(rows, sizes, left=list(ends.values()), label=name)
        ends = {row: ends[row] + size for row, size in zip(rows, sizes, strict=True)}
    for row, end in ends.items():
        axis.annotate(show(end), (end, row), (4, 0), textcoords="offset points", va="center")
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_title(title)
    if len(names) > 1:
        axis.legend()


def draw_lines(axis: Any, lines: Mapping[str, Sequence[tuple[float, float]]], *, dashed: Sequence[str] = ()) -> None:
    """Draw named lines through points (x, y). dashed: names of the dashed lines."""
    for name, points in lines.items():
        axis.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker="." if len(points) < 50 else "",
            linestyle="--" if name in dashed else "-",
            label=name,
        )
    axis.grid(alpha=0.3)
    axis.legend()


def label_log_axis(axis: Any, values: Sequence[float], show: Callable[[float], str] = "{:g}".format) -> None:
    """Make x logarithmic, with ticks only at the values."""
    axis.set_xscale("log")
    axis.set_xticks(values, [show(value) for value in values])
    axis.minorticks_off()


def embed(figure: Any) -> str:
    """Return the figure as an <svg> for a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def build_page(title: str, parts: Sequence[str]) -> str:
    """Build a complete HTML page. parts: HTML, from top to bottom."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>\n{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{chr(10).join(parts)}\n</body>\n</html>\n"
    )
