"""A run of hvdkit bench: on ranks that it starts, or as a rank of another launcher."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from hvdkit.errors import BenchError, MissingDependencyError
from hvdkit.launch.agent.session_reaper import die_with_parent
from hvdkit.tools.bench.report import (
    CPU,
    CUDA,
    MARK,
    Change,
    Plan,
    Progress,
    Report,
    compare,
    decode_report,
    encode_report,
    failed,
    read_report,
    select_models,
    write_report,
)
from hvdkit.tools.bench.show import PLOT, print_report, write_plot
from hvdkit.tools.charts import check_plot
from hvdkit.tools.installed import read_frameworks
from hvdkit.tools.training_command import HvdrunOption, plan_hvdrun
from hvdkit.world import read_world

#: Device -> hvdrun's -np if no option or allocation sets the ranks.
RANKS = {CPU: "2", CUDA: "gpu"}
_LINE = re.compile(rf"(?:\[[^\]]*\] )?{MARK}(.*)")


def run_bench(options: argparse.Namespace, plan: Plan) -> int:
    """Measure and report; returns the exit code. Raises BenchError if nothing can be measured."""
    world = read_world()
    if world.launcher != "none":
        if options.hvdrun:
            raise BenchError(
                f"{world.launcher} has started this rank already, so {options.hvdrun[0].words[0]} cannot start any. "
                f"Leave it out, or run hvdkit bench outside of {world.launcher}."
            )
        if world.rank:
            measure_here(plan, lambda *_: None)
            return 0
    check(options)
    before = read_report(options.baseline) if options.baseline else None
    with show_progress() as progress:
        if world.launcher != "none":
            report = measure_here(plan, progress)
        else:
            report = start_ranks(plan, options.hvdrun, progress)
    return show(options, report, compare(before, report) if before else [])


def check(options: argparse.Namespace) -> None:
    """Raise HvdkitError for problems that would otherwise appear after the measurement."""
    if options.fail_over is not None and options.baseline is None:
        raise BenchError("--fail-over needs a run to compare with: --baseline FILE.")
    if options.kind == "step":
        select_models(options.models, options.device)
    frameworks = read_frameworks()
    if options.device != CPU and frameworks.torch and not frameworks.torch_cuda and "hip" not in frameworks.torch_other:
        raise BenchError(
            f"--device cuda: no GPU can be used, as torch {frameworks.torch} is a build without CUDA. Install a CUDA "
            "build of torch, or one for ROCm, or measure with --device cpu."
        )
    if options.plot:
        check_plot(PLOT, options.plot)
    for path in (options.output, options.plot):
        if path and path.is_dir():
            raise BenchError(f"{path} is a folder. Name a file in it.")
        if path and not path.absolute().parent.is_dir():
            raise BenchError(f"The folder {path.absolute().parent} of {path.name} does not exist. Make it first.")
        if path and not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise BenchError(f"{path.absolute()} cannot be written: permission denied. Name a file in another folder.")


def show(options: argparse.Namespace, report: Report, changes: Sequence[Change]) -> int:
    """Print the report and write the requested files; returns the exit code."""
    if options.json:
        print(json.dumps({**encode_report(report), "changes": [asdict(change) for change in changes]}, indent=1))
    else:
        print_report(report, changes, Console())
    if options.output:
        write_report(report, options.output)
    if options.plot:
        write_plot(report, options.plot)
    return int(options.fail_over is not None and bool(failed(changes, options.fail_over)))


def measure_here(plan: Plan, progress: Progress) -> Report:
    """Measure on ranks of which this process is one; collective."""
    _check_torch()
    from hvdkit.tools.bench.worker import measure  # imports torch, which the command that starts ranks does not load

    return measure(plan, progress)


def start_ranks(plan: Plan, hvdrun: Sequence[HvdrunOption], progress: Progress) -> Report:
    """Measure on ranks that hvdrun starts. Raises BenchError if they fail, after their output on stderr."""
    _check_torch()
    script = [sys.executable, "-m", "hvdkit.tools.bench.worker", json.dumps(asdict(plan))]
    command = plan_hvdrun(hvdrun, script, ranks=RANKS[plan.device])
    report = None
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(os.getpid(), signal.SIGHUP),
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            found = _LINE.fullmatch(line.rstrip("\n"))
            if found is None:
                sys.stderr.write(line)
                continue
            message = json.loads(found[1])
            if "report" in message:
                report = decode_report(message["report"])
            else:
                progress(*message["progress"])
    if job.returncode or report is None:
        raise BenchError(f"The ranks ended with exit code {job.returncode}; their output above says why.")
    return report


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("hvdkit bench needs torch. Run: pip install 'hvdkit[torch]'")


@contextlib.contextmanager
def show_progress() -> Iterator[Progress]:
    """Show a progress bar on stderr, if that is a terminal; yields the function that advances it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting the ranks", total=None)
        yield lambda work, done, of: bar.update(task, description=work, completed=done, total=of)
