"""A report for people: a table, what has changed since a baseline, and what was left out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdkit.tools.bench.baseline import Change
from hvdkit.tools.bench.figures import Figures, show_time
from hvdkit.tools.bench.report import Case, Report, bandwidths


def print_report(report: Report, changes: Sequence[Change], console: Console) -> None:
    """Print the machine, the table, and the changes if there are any."""
    console.print(escape(describe(report)), highlight=False, style="dim")
    table = Table(
        title=f"{report.kind}{f' of {report.dtype}' * (report.kind != 'step')}", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    table.title_justify = "left"
    for number, title in enumerate(list_titles(report, changes)):
        table.add_column(title, justify="left" if number < 2 else "right", no_wrap=True)
    slower = {(change.work, change.peer) for change in changes if change.slower}
    for row in list_rows(report, changes):
        table.add_row(*map(escape, row), style="red" if (row[0], row[1]) in slower else "")
        if row[1] == report.peers()[-1]:
            table.add_section()
    console.print(table)
    for note in (*explain(report), *tell_changes(changes)):
        console.print(escape(note), highlight=False)


def describe(report: Report) -> str:
    """Where it was measured, in a line."""
    machine = ", ".join(f"{name} {value}" if name != "processor" else value for name, value in report.machine.items())
    return f"{report.where}; {machine}"


def explain(report: Report) -> list[str]:
    """What the columns are, and who was left out."""
    what = (
        "spread: half of the rounds lie this near the median. ratio: the peer's time to that of "
        f"{report.base}, within each round; above x1 it takes longer."
    )
    bandwidth = " GB/s: bytes over time; bus: what crosses a link, as in nccl-tests."
    return [what + bandwidth * (report.kind != "step"), *report.notes]


def list_titles(report: Report, changes: Sequence[Change]) -> list[str]:
    """The columns of the table."""
    bandwidth = ["GB/s", "bus GB/s"] if report.kind != "step" else []
    first = "model" if report.kind == "step" else "size"
    return [first, "peer", "median", "spread", *bandwidth, "ratio", *(["since"] if changes else [])]


def list_rows(report: Report, changes: Sequence[Change]) -> list[list[str]]:
    """A row for each work and peer."""
    since = {(change.work, change.peer): tell_change(change) for change in changes}
    rows = []
    for case in report.cases:
        for peer, figures in report.figures(case).items():
            row = [case.work, peer, *_cells(report, case, figures)]
            rows.append([*row, since.get((case.work, peer), "")] if changes else row)
    return rows


def tell_change(change: Change) -> str:
    """A change in a cell: "+31 % slower", "-2 % noise"."""
    word = "noise" if change.noise else "slower" if change.slower else "faster"
    return f"{change.percent:+.0f} % {word}"


def tell_changes(changes: Sequence[Change]) -> list[str]:
    """The changes in a sentence; none if there was no baseline."""
    if not changes:
        return []
    slower = [f"{change.peer}, {change.work}: {change.percent:+.0f} %" for change in changes if change.slower]
    told = f"Slower than the baseline by more than noise: {'; '.join(slower)}." if slower else "Nothing has got slower."
    return [told + " Noise: the middle halves of both runs' rounds overlap."]


def _cells(report: Report, case: Case, figures: Figures) -> list[str]:
    spread = 50 * (figures.high_s - figures.low_s) / figures.median_s
    cells = [show_time(figures.median_s), f"{spread:.0f} %"]
    if case.nbytes:
        cells += [f"{one / 1e9:.2f}" for one in bandwidths(report, case, figures.median_s)]
    return [*cells, f"x{figures.ratio:.2f}"]
