"""A report in the terminal, as a table with the changes since a baseline, and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdkit.tools.bench.report import CPU, Change, Report, bandwidths, show_bytes, show_time
from hvdkit.tools.charts import draw_bars, draw_lines, label_log_axis, new_figure, save_figure


def print_report(report: Report, changes: Sequence[Change], console: Console) -> None:
    """Print the machine, the table, and the changes if there are any."""
    console.print(escape(describe(report)), highlight=False, style="dim")
    title = f"{report.kind}{f' of {report.dtype}' * (report.kind != 'step')}{' on GPUs' * (report.device != CPU)}"
    space = 0 if changes else 1  # so that the table fits into 80 columns with the changes
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, space, 0, 0))
    rows = list_rows(report, changes)
    for number, column in enumerate(rows[0]):
        table.add_column(column, justify="left" if number < 2 else "right", no_wrap=True)
    slower = {(change.work, change.peer) for change in changes if change.slower}
    for row in rows:
        work, peer, *_ = cells = list(row.values())
        table.add_row(*map(escape, cells), style="red" if (work, peer) in slower else "")
        if peer == report.peers()[-1]:
            table.add_section()
    console.print(table)
    for note in (*explain(report), *describe_changes(changes)):
        console.print(escape(note), highlight=False)


def describe(report: Report) -> str:
    """Describe ranks and machine in a line."""
    machine = ", ".join(f"{name} {value}" if name != "processor" else value for name, value in report.machine.items())
    return f"{report.where}; {machine}"


def explain(report: Report) -> list[str]:
    """Explain the columns, and which peers were left out."""
    columns = (
        f"spread: half the interquartile range, in percent of the median. ratio: the peer's time over that of "
        f"{report.base}, within each round; above x1 the peer is slower."
    )
    bandwidth = " GB/s: bytes over time; bus: as in nccl-tests, what crosses a link."
    memory = " memory: on the GPU, with what libraries and torch's allocator keep."
    return [columns + bandwidth * (report.kind != "step") + memory * _has_memory(report), *report.notes]


def list_rows(report: Report, changes: Sequence[Change]) -> list[dict[str, str]]:
    """Build a row for each work and peer: column to cell."""
    since = {(change.work, change.peer): _describe_change(change) for change in changes}
    step, has_memory = report.kind == "step", _has_memory(report)
    rows = []
    for case in report.cases:
        for peer, summary in report.summaries(case).items():
            spread = 50 * (summary.high_s - summary.low_s) / summary.median_s
            row = {"model" if step else "size": case.work, "peer": peer, "median": show_time(summary.median_s)}
            row["spread"] = f"{spread:.0f} %"
            if not step:
                algorithm, bus = bandwidths(report, case, summary.median_s)
                row |= {"GB/s": f"{algorithm / 1e9:.2f}", "bus GB/s": f"{bus / 1e9:.2f}"}
            row["ratio"] = f"x{summary.ratio:.{2 if report.device == CPU else 3}f}"  # GPUs: precise to a percent
            if has_memory:
                row["memory"] = f"{case.memory[peer] / 2**20:.0f} MiB" if peer in case.memory else ""
            if changes:
                row["since"] = since.get((case.work, peer), "")
            rows.append(row)
    return rows


def describe_changes(changes: Sequence[Change]) -> list[str]:
    """Write the changes in a sentence; none without a baseline."""
    if not changes:
        return []
    slower = [f"{change.peer}, {change.work}: {change.percent:+.0f} %" for change in changes if change.slower]
    summary = f"Slower than the baseline by more than noise: {'; '.join(slower)}." if slower else "Nothing is slower."
    return [summary + " Noise: the interquartile ranges of both runs overlap."]


def _describe_change(change: Change) -> str:
    word = "noise" if change.noise else "slower" if change.slower else "faster"
    return f"{change.percent:+.0f} % {word}"


def _has_memory(report: Report) -> bool:
    return any(case.memory for case in report.cases)


#: Name of the option for the figure, for errors.
PLOT = "--plot"


def write_plot(report: Report, path: Path) -> None:
    """Draw bars of a step, or time and bus bandwidth over size. Raises HvdkitError if the file cannot be written."""
    if report.kind == "step":
        figure = new_figure(PLOT, 7, 2 * len(report.cases))
        for case, axis in zip(report.cases, figure.subplots(len(report.cases), squeeze=False)[:, 0], strict=True):
            steps = {peer: {"step": summary.median_s} for peer, summary in report.summaries(case).items()}
            draw_bars(axis, steps, title=case.work, show=show_time)
            axis.set_xlabel("seconds")
    else:
        figure = new_figure(PLOT, 12, 5)
        times, buses = figure.subplots(1, 2)
        medians = {
            peer: [(case, report.summaries(case)[peer].median_s) for case in report.cases if peer in case.times]
            for peer in report.peers()
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
    save_figure(figure, path)
