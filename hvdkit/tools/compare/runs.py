"""The runs that are compared: the script on many ranks, then on one rank with the same batches."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hvdkit.config import read_environment
from hvdkit.errors import CompareError
from hvdkit.launch.process import read_tail, run_into_file
from hvdkit.launch.state.runtime_dir import RuntimeDirectory
from hvdkit.startup import plan_variables
from hvdkit.tools.compare.records import RankRecord, read_records
from hvdkit.tools.compare.verdict import judge, print_verdict, show_json
from hvdkit.tools.training_command import PLACEMENT, HvdrunOption, read_ranks, split_command

_TAIL = 15  # number of last lines shown of a failed run
_ONE_RANK = (HvdrunOption("np", ("-np", "1", "-H", "localhost:1")),)


@dataclass(frozen=True)
class Plan:
    """The plan of the runs.

    script: the script with its arguments.
    hvdrun: options of hvdrun for the run on many ranks.
    ranks: number of ranks; 0 if the hosts decide.
    shared: ranks may be on other hosts.
    steps: steps of an optimizer.
    own_rates: keep the learning rates that the script sets on one rank.
    limit_s: time limit of each run.
    """

    script: tuple[str, ...]
    hvdrun: tuple[HvdrunOption, ...]
    ranks: int = 2
    shared: bool = False
    steps: int = 5
    own_rates: bool = False
    limit_s: float = 600.0

    @property
    def alone(self) -> tuple[HvdrunOption, ...]:
        """Options of the run on one rank."""
        kept = [option for option in self.hvdrun if option.name not in {*PLACEMENT, "network_interfaces"}]
        return (*_ONE_RANK, *kept)


def compare(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises CompareError if the runs could not be compared."""
    plan = plan_runs(options)
    environ = read_environment()
    progress = Console(stderr=True, highlight=False, quiet=options.json)
    with _make_folder(plan) as folder:
        progress.print(f"Running the script on {plan.ranks or 'all'} ranks.")
        many = run_script(plan, plan.hvdrun, plan.ranks, folder / "ranks", environ)
        progress.print("Running the script on 1 rank with the same batches.")
        one = run_script(plan, plan.alone, 1, folder / "one", environ, folder / "ranks")[0]

        def run_again() -> RankRecord:
            progress.print("Running the script on 1 rank once more, to see whether it is deterministic.")
            return run_script(plan, plan.alone, 1, folder / "again", environ, folder / "ranks")[0]

        wrapped = any(option.name == "wrap" for option in plan.hvdrun)
        verdict = judge(many, one, run_again, wrapped=wrapped, own_rates=plan.own_rates)
    if options.json:
        print(show_json(verdict))
    else:
        print_verdict(verdict, Console(soft_wrap=not sys.stdout.isatty()))
    return 0 if verdict.equal else 1


def plan_runs(options: argparse.Namespace) -> Plan:
    """Plan the runs: on this host unless hosts are given. Raises CompareError for options that cannot be compared."""
    hvdrun, script = split_command(options.command, options.hvdrun)
    if not script:
        raise CompareError("No script was given. Example: hvdkit compare -np 2 -- python train.py")
    placed = [option.name for option in hvdrun if option.name in PLACEMENT]
    ranks = read_ranks(hvdrun) if placed else 2
    shared = any(name != "np" for name in placed) or not ranks  # -np auto may use the hosts of an allocation
    if ranks == 1:
        raise CompareError("-np is 1. The comparison with one rank needs 2 ranks or more.")
    if not shared:
        hvdrun = (
            HvdrunOption("np", ("-np", str(ranks), "-H", f"localhost:{ranks}")),
            *(option for option in hvdrun if option.name != "np"),
        )
    return Plan(tuple(script), hvdrun, ranks, shared, options.steps, options.lr == "script", options.timeout)


def run_script(
    plan: Plan,
    hvdrun: tuple[HvdrunOption, ...],
    ranks: int,
    folder: Path,
    environ: Mapping[str, str],
    others: Path | None = None,
) -> list[RankRecord]:
    """Run the script and return the records of its ranks.

    plan: the plan.
    hvdrun: options of hvdrun.
    ranks: number of ranks, 0 if unknown.
    folder: the folder to make for this run.
    environ: the variables of this process.
    others: the folder of the run on many ranks, whose batches one rank takes.
    Raises CompareError if the run fails, takes too long, or a rank has recorded nothing.
    """
    folder.mkdir()
    settings = {
        "folder": str(folder),
        "ranks": str(others) if others else None,
        "steps": plan.steps,
        "own_rates": plan.own_rates,
    }
    variables = plan_variables({"HVDKIT_COMPARE": json.dumps(settings)}, environ)
    arguments = [*(word for option in hvdrun for word in option.words), "--", *plan.script]
    command = [sys.executable, "-m", "hvdkit.launch", *arguments]
    code = run_into_file(command, environ={**environ, **variables}, output=folder / "output", timeout_s=plan.limit_s)
    records = read_records(folder)
    ranks = max(ranks, *(record.size for record in records), 1)
    if ranks == 1 and others is None:
        raise CompareError(
            "The hosts have slots for only 1 rank, but the comparison with one rank needs 2 ranks or more. Add slots, "
            "or use -np N."
        )
    steps = [len(record.steps) for record in records] + [0] * (ranks - len(records))
    if min(steps) >= plan.steps:
        return records  # the exit code is ignored, because the recorder ended the processes
    who, tail = f"{ranks} ranks" if ranks > 1 else "1 rank", _tail(folder / "output")
    if code is None:
        raise CompareError(
            f"The script on {who} took fewer than {plan.steps} steps in {plan.limit_s:g} s. {tail}"
            f"Increase the limit with --timeout, or compare fewer steps with --steps."
        )
    if plan.shared and records and not min(steps) and max(steps):
        raise CompareError(
            f"Only {len(records)} of {ranks} ranks have written records to {folder.parent}. {tail}"
            f"All hosts must share this folder. Run the command in a shared folder."
        )
    if code and max(steps) >= plan.steps:
        raise CompareError(
            f"Some of {who} took {plan.steps} steps, others only {min(steps)}. {tail}"
            f"Ranks that train different models (process sets) cannot be compared with one rank. Compare each model by "
            f"itself."
        )
    if code:
        raise CompareError(
            f"The script on {who} ended with exit code {code}. {tail}To run it without compare: hvdrun "
            f"{' '.join(arguments)}"
        )
    if not min(steps):
        raise CompareError(
            f"The script on {who} ended without a recorded training step. {tail}"
            f"hvdkit compare records steps of torch.optim optimizers and of keras.Model.fit(), in the process that "
            f"hvdrun starts. Pass a training script."
        )
    return records


@contextmanager
def _make_folder(plan: Plan) -> Iterator[Path]:
    """Make a private folder for the records: with several hosts in the working folder, which they share."""
    if plan.shared:
        try:
            folder = tempfile.TemporaryDirectory(prefix=".hvdkit-compare-", dir=Path.cwd())
        except OSError as error:
            raise CompareError(
                f"No folder for the ranks' records can be made in {Path.cwd()}: {error.strerror}. Run the command in a "
                "folder that you may write and all hosts share."
            ) from None
        with folder as path:
            yield Path(path)
    else:
        with RuntimeDirectory("compare") as path:
            yield Path(path)


def _tail(output: Path) -> str:
    lines = read_tail(output, _TAIL)
    return "The last lines of its output:\n    " + "\n    ".join(lines) + "\n" if lines else ""
