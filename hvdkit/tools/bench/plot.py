"""A report as a picture: HTML that needs nothing else, or PNG by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from hvdkit.errors import BenchError, MissingDependencyError
from hvdkit.optional_import import optional_import
from hvdkit.tools.bench.baseline import Change
from hvdkit.tools.bench.figures import show_bytes, show_time
from hvdkit.tools.bench.report import Report, bandwidths
from hvdkit.tools.bench.show import describe, explain, list_rows, list_titles, tell_changes
from hvdkit.tools.charts import Axis, Line, build_page, build_table, draw_bars, draw_lines

SUFFIXES = (".html", ".png")


def check_plot(path: Path) -> None:
    """Raise BenchError or MissingDependencyError if no picture can be written there: before anything is measured."""
    if path.suffix not in SUFFIXES:
        raise BenchError(f"--plot {path}: the name says what is drawn; end it in {' or '.join(SUFFIXES)}.")
    if path.suffix == ".png":
        _need_pyplot()


def write_plot(report: Report, changes: Sequence[Change], path: Path) -> None:
    """Write the picture. Raises BenchError if the file cannot be written."""
    try:
        if path.suffix == ".png":
            _write_png(report, path)
        else:
            path.write_text(build_html(report, changes))
    except OSError as error:
        raise BenchError(
            f"{path} cannot be written: {error.strerror}. Name a file in a folder that is there."
        ) from None


def build_html(report: Report, changes: Sequence[Change] = ()) -> str:
    """Build a page with the charts and the table; it asks no network."""
    told = "".join(f"<p>{escape(line)}</p>\n" for line in (*tell_changes(changes), *explain(report)))
    table = build_table(list_titles(report, changes), list_rows(report, changes))
    machine = f'<p class="quiet">{escape(describe(report))}</p>'
    return build_page(f"hvdkit bench {report.kind}", [machine, *_draw(report), table, told])


def _draw(report: Report) -> list[str]:
    if report.kind == "step":
        return [
            draw_bars(
                {peer: {"step": figures.median_s} for peer, figures in report.figures(case).items()},
                title=case.work,
                show=show_time,
            )
            for case in report.cases
        ]
    x = Axis("size", log=True, show=show_bytes, ticks=sorted({case.nbytes for case in report.cases}))
    charts = ((0, "time of a call", Axis("median", log=True, show=show_time)), (1, "bus bandwidth", Axis("GB/s")))
    return [
        draw_lines([Line(name, points[which]) for name, points in _list_points(report)], x=x, y=y, title=title)
        for which, title, y in charts
    ]


def _list_points(report: Report) -> list[tuple[str, tuple[list[tuple[float, float]], list[tuple[float, float]]]]]:
    """Per peer, its times in seconds and its bus bandwidths in GB/s, each over the size in bytes."""
    found = []
    for peer in report.peers():
        cases = [case for case in report.cases if peer in case.times]
        medians = [(case, report.figures(case)[peer].median_s) for case in cases]
        times = [(float(case.nbytes), seconds) for case, seconds in medians]
        buses = [(float(case.nbytes), bandwidths(report, case, seconds)[1] / 1e9) for case, seconds in medians]
        found.append((peer, (times, buses)))
    return found


def _need_pyplot() -> Any:
    try:
        matplotlib = optional_import("matplotlib", "plot")
    except MissingDependencyError:
        raise MissingDependencyError(
            "PNG is drawn by matplotlib, which is not installed. Run: pip install 'hvdkit[plot]', or name .html."
        ) from None
    matplotlib.use("Agg")
    return optional_import("matplotlib.pyplot", "plot")


def _write_png(report: Report, path: Path) -> None:
    pyplot = _need_pyplot()
    if report.kind == "step":
        figure, axes = pyplot.subplots(1, len(report.cases), figsize=(5 * len(report.cases), 4), squeeze=False)
        for case, axis in zip(report.cases, axes[0], strict=True):
            figures = report.figures(case)
            axis.barh(list(figures)[::-1], [1000 * one.median_s for one in figures.values()][::-1])
            axis.set(title=case.work, xlabel="ms a step")
    else:
        figure, (times, buses) = pyplot.subplots(1, 2, figsize=(12, 5))
        for peer, (seconds, bandwidth) in _list_points(report):
            times.plot(*zip(*seconds, strict=True), marker="o", label=peer)
            buses.plot(*zip(*bandwidth, strict=True), marker="o", label=peer)
        times.set(title=report.kind, xscale="log", yscale="log", xlabel="bytes", ylabel="seconds")
        buses.set(title="bus bandwidth", xscale="log", xlabel="bytes", ylabel="GB/s")
        times.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
