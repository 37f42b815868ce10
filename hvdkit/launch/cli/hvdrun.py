"""hvdrun: plan a job from the command line, and run it."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hvdkit.config import read_environment
from hvdkit.errors import LaunchError
from hvdkit.launch.cli.command import check_working_directory
from hvdkit.launch.cli.console import run_command
from hvdkit.launch.cli.launcher_options import choose_launcher
from hvdkit.launch.cli.options import parse_arguments
from hvdkit.launch.cli.own_arguments import hide_values
from hvdkit.launch.cli.plan_job import plan_job
from hvdkit.launch.elastic.options import (
    describe_restarts,
    plan_host_pool,
    plan_restart_policy,
    restart_instead,
    starts_over_ssh,
)
from hvdkit.launch.hostfiles import FoundHosts, Host
from hvdkit.launch.job.output import Output
from hvdkit.launch.launchers import build_launch
from hvdkit.launch.plan.job import Job, Launch, format_shell_line
from hvdkit.launch.plan.launcher_choice import LauncherChoice, detect_launchers, plan_launcher
from hvdkit.launch.plan.resolve_hosts import find_addresses

if TYPE_CHECKING:
    from hvdkit.launch.job.output import Interruption
    from hvdkit.launch.job.runner import Runner
    from hvdkit.launch.job.standard_input import StandardInput


def main(arguments: Sequence[str] | None = None) -> int:
    """Run hvdrun; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    return run_command("hvdrun", lambda: _run(parse_arguments(words), read_environment()))


def _run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    hide_values(options.env or ())
    check_working_directory()
    output = Output(quiet=options.quiet, shown=options.show_ranks)
    job = plan_job(options, environ, note=output.note)
    named_hosts = any(one is not None for one in (options.hosts, options.hostfile, options.host_discovery_script))
    launcher = choose_launcher(options)
    own_ssh = bool(job.ssh_options)
    facts = detect_launchers(
        job.environ, sys.prefix, local=job.local, named_hosts=named_hosts, wish=launcher, own_ssh=own_ssh
    )
    choice = plan_launcher(facts, launcher)
    restarts = describe_restarts(job, choice)
    if restarts:
        job = restart_instead(job, restarts)
    for note in job.notes:
        output.note(note)
    if options.dry_run:
        launch = build_launch(job, choice)
        output.note(f"{choice.reason}.")
        removed = sorted(environ.keys() - job.environ.keys())
        print(format_shell_line(replace(launch, removed=(*launch.removed, *removed))))
        return 0
    return _start(options, environ, job, choice, starts_over_ssh(choice, facts.scheduler, job.environ), output)


def _start(
    options: argparse.Namespace, environ: Mapping[str, str], job: Job, choice: LauncherChoice, ssh: bool, output: Output
) -> int:
    import asyncio  # slow to import, and not needed for --help and --dry-run

    from hvdkit.launch.job.output import Interruption
    from hvdkit.launch.job.standard_input import StandardInput

    stdin = StandardInput()
    interruption = Interruption(output)
    if not job.config.elastic:
        return asyncio.run(_build_runner(job, choice, output, interruption, stdin).run())
    from hvdkit.launch.elastic.supervisor import JobSupervisor

    if "HVDKIT_WRAP_SEED" in job.variables:
        environ = {**environ, "HVDKIT_WRAP_SEED": job.variables["HVDKIT_WRAP_SEED"]}
    started = itertools.count(1)

    def build(hosts: tuple[Host, ...], ranks: int) -> Runner:
        number = next(started)
        if number == 1:
            return _build_runner(job, choice, output, interruption, stdin)
        again = plan_job(options, environ, FoundHosts(hosts, "the remaining hosts"), ranks)
        again = replace(again, variables={**again.variables, "HVDKIT_START": str(number)})
        again = again if job.elastic else restart_instead(again)
        return _build_runner(again, choice, output, interruption, stdin)

    pool = plan_host_pool(options, environ, job, ssh, output.say)
    least = max(1, job.config.min_np)
    policy = plan_restart_policy(options, job.config, least, job.ranks, ranks_survive=job.elastic)
    return asyncio.run(JobSupervisor(build, job.hosts, job.ranks, policy, pool, output, interruption).run())


def _build_runner(
    job: Job, choice: LauncherChoice, output: Output, interruption: Interruption, stdin: StandardInput
) -> Runner:
    from hvdkit.launch.job.runner import Runner

    logs = job.variables.get("HVDKIT_OUTPUT_DIRECTORY", "")
    if logs:
        try:
            os.makedirs(logs, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"--output-filename {logs}: {error.strerror}. Choose a directory in which you may write."
            ) from None
    prefix = {"HVDKIT_PREFIX": "colour"} if output.takes_colours(job.environ) else {}

    def build(control: Mapping[str, str], directory: str = "") -> Launch:
        variables = {**prefix, **job.variables, **control}
        return build_launch(replace(job, variables=variables, directory=directory), choice)

    addresses = () if job.local else find_addresses(job.hosts)
    runner = Runner(build, replace(job, addresses=addresses), output, interruption, stdin)
    if job.verbose:
        mpi = choice.mpi
        if mpi is not None:
            origin = "found on PATH" if mpi.site else "from this Python environment"
            output.say(f"{mpi.name} {mpi.version}, {origin}: {mpi.mpirun}")
        output.say(f"{choice.reason}.")
        launch = build({})  # the job's directory is made when it runs
        shown = {name: "..." if name in job.forwarded else value for name, value in launch.variables.items()}
        output.say(format_shell_line(replace(launch, variables=shown)))  # a value of -x may be a secret
    return runner


if __name__ == "__main__":
    sys.exit(main())
