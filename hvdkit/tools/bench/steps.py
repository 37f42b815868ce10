"""What hvdkit bench does, in order."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hvdkit.errors import BenchError
from hvdkit.tools.bench.baseline import Change, compare, failed
from hvdkit.tools.bench.here import measure_here
from hvdkit.tools.bench.plan import Plan
from hvdkit.tools.bench.plot import check_plot, write_plot
from hvdkit.tools.bench.report import Report, read_report, write_report
from hvdkit.tools.bench.show import print_report
from hvdkit.tools.bench.start import start_ranks
from hvdkit.world import read_world


def carry_out(options: argparse.Namespace, plan: Plan) -> int:
    """Measure on new ranks, or as one of those that something has started; returns the exit code."""
    world = read_world()
    if world.launcher != "none":
        if options.hvdrun:
            raise BenchError(
                f"{world.launcher} has started this rank already, so {options.hvdrun[0]} can start none. Leave it out, "
                f"or run hvdkit bench by itself."
            )
        if world.rank:
            measure_here(plan, _say_nothing)
            return 0
    check(options)
    before = read_report(options.baseline) if options.baseline else None
    with Bar() as bar:
        here = world.launcher != "none"
        report = measure_here(plan, bar.tell) if here else start_ranks(plan, options.hvdrun, bar.tell)
    changes = compare(before, report) if before else []
    return tell(options, report, changes)


def check(options: argparse.Namespace) -> None:
    """Raise BenchError or MissingDependencyError for what would fail after all has been measured."""
    if options.fail_over is not None and options.baseline is None:
        raise BenchError("--fail-over needs something to compare with: --baseline FILE.")
    if options.plot:
        check_plot(options.plot)
    for path in (options.json, options.save_baseline, options.plot):
        if path and not path.absolute().parent.is_dir():
            raise BenchError(f"There is no folder {path.absolute().parent} for {path.name}. Make it, or name another.")


def tell(options: argparse.Namespace, report: Report, changes: Sequence[Change]) -> int:
    """Print the report and write the files that were asked for; returns the exit code."""
    print_report(report, changes, Console())
    for path in filter(None, (options.json, options.save_baseline)):
        write_report(report, path)
    if options.plot:
        write_plot(report, changes, options.plot)
    return int(options.fail_over is not None and bool(failed(changes, options.fail_over)))


class Bar:
    """How far the measuring is, on stderr if that is a terminal; shown inside a `with`."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("starting the ranks", total=None)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    def tell(self, what: str, done: int, of: int) -> None:
        """Show that so many rounds of so many are done."""
        self._progress.update(self._task, description=what, completed=done, total=of)


def _say_nothing(what: str, done: int, of: int) -> None:
    pass
