"""A comparison from the command line: the runs, and what is said of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from hvdkit.config import read_environment
from hvdkit.errors import CompareError
from hvdkit.launch.folders import OwnFolder
from hvdkit.tools.compare.records import RankRecord
from hvdkit.tools.compare.runs import Plan, run_script
from hvdkit.tools.compare.show import print_verdict, show_json
from hvdkit.tools.compare.verdict import judge


def compare(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises CompareError if the runs could not be compared."""
    plan = _plan(options)
    environ = read_environment()
    told = Console(stderr=True, highlight=False, quiet=options.json)
    with OwnFolder("compare") as folder:
        here = Path(folder)
        told.print(f"running it on {plan.ranks} ranks")
        many = run_script(plan, plan.ranks, here / "ranks", environ)
        told.print("running it on 1 rank with the same batches")
        one = run_script(plan, 1, here / "one", environ, here / "ranks")[0]

        def run_again() -> RankRecord:
            told.print("running it on 1 rank once more, to see whether chance is why they differ")
            return run_script(plan, 1, here / "again", environ, here / "ranks")[0]

        verdict = judge(many, one, run_again, wrapped=options.wrap)
    if options.json:
        print(show_json(verdict))
    else:
        print_verdict(verdict, Console(soft_wrap=not sys.stdout.isatty()))
    return 0 if verdict.equal else 1


def _plan(options: argparse.Namespace) -> Plan:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise CompareError("There is no command to run; write it after --, like: hvdkit compare -- python train.py")
    if options.ranks < 2:
        raise CompareError(f"-np is {options.ranks}; one rank is compared with 2 or more.")
    if options.steps < 1:
        raise CompareError(f"--steps is {options.steps}; it must be 1 or more.")
    flags = [flag for flag, on in (("--wrap", options.wrap), ("--alias-horovod", options.alias_horovod)) if on]
    return Plan(
        command=tuple(command),
        ranks=options.ranks,
        flags=tuple(flags),
        steps=options.steps,
        own_rates=options.lr == "script",
        limit=options.timeout,
    )
