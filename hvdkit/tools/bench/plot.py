"""A report as a figure."""

from __future__ import annotations

from pathlib import Path

from hvdkit.errors import BenchError
from hvdkit.tools.bench.report import Report, bandwidths
from hvdkit.tools.bench.summary import show_bytes, show_time
from hvdkit.tools.charts import draw_bars, draw_lines, label_log_axis, new_figure

SUFFIXES = (".svg", ".png", ".pdf")
_OPTION = "hvdkit bench --plot"


def check_plot(path: Path) -> None:
    """Raise BenchError or MissingDependencyError, before anything is measured, if the figure cannot be drawn."""
    if path.suffix not in SUFFIXES:
        raise BenchError(f"--plot {path}: the suffix chooses the format. Use {', '.join(SUFFIXES)}.")
    new_figure(_OPTION, 1, 1)


def write_plot(report: Report, path: Path) -> None:
    """Draw bars of a step, or time and bus bandwidth over size. Raises BenchError if the file cannot be written."""
    if report.kind == "step":
        figure = new_figure(_OPTION, 7, 2 * len(report.cases))
        for case, axis in zip(report.cases, figure.subplots(len(report.cases), squeeze=False)[:, 0], strict=True):
            steps = {peer: {"step": summary.median_s} for peer, summary in report.summaries(case).items()}
            draw_bars(axis, steps, title=case.work, show=show_time)
            axis.set_xlabel("seconds")
    else:
        figure = new_figure(_OPTION, 12, 5)
        times, buses = figure.subplots(1, 2)
        cases = {peer: [case for case in report.cases if peer in case.times] for peer in report.peers()}
        medians = {
            peer: [(case, report.summaries(case)[peer].median_s) for case in cases[peer]] for peer in report.peers()
        }
        draw_lines(times, {peer: [(case.nbytes, time) for case, time in row] for peer, row in medians.items()})
        draw_lines(
            buses,
            {
                peer: [(case.nbytes, bandwidths(report, case, time)[1] / 1e9) for case, time in row]
                for peer, row in medians.items()
            },
        )
        for axis in (times, buses):
            label_log_axis(axis, [case.nbytes for case in report.cases], show_bytes)
        times.set(title=report.kind, yscale="log", ylabel="seconds")
        buses.set(title="bus bandwidth", ylabel="GB/s")
    try:
        figure.savefig(path)
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}. Name a file in an existing folder.") from None
