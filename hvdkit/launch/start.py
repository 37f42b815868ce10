"""Run a job from its options: collect the facts, plan it, print its notes, start it, restart it if it is elastic."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hvdkit.errors import LaunchError
from hvdkit.launch.detect.command import check_working_directory
from hvdkit.launch.detect.hosts import find_addresses
from hvdkit.launch.elastic.options import plan_host_pool, plan_restart_policy
from hvdkit.launch.hostfiles import Host
from hvdkit.launch.launchers import build_launch
from hvdkit.launch.options import LaunchOptions
from hvdkit.launch.plan.elasticity import Elasticity
from hvdkit.launch.plan.job import Job, Launch, format_shell_line
from hvdkit.launch.plan.selected_launcher import SelectedLauncher
from hvdkit.launch.plan_start import StartPlan, plan_restart, plan_start
from hvdkit.launch.prepare import on_hosts, prepare
from hvdkit.launch.run.output import Output
from hvdkit.launch.run.own_arguments import hide_values

if TYPE_CHECKING:
    from hvdkit.launch.run.output import Interruption
    from hvdkit.launch.run.runner import Runner
    from hvdkit.launch.state.standard_input import StandardInput


def run_options(options: LaunchOptions, environ: Mapping[str, str]) -> int:
    """Prepare, plan and run a job; returns the exit code."""
    hide_values(options.env)
    check_working_directory()
    output = Output(quiet=options.quiet, shown=options.show_ranks)
    facts = prepare(options, environ, note=output.note)
    return run(plan_start(options, facts), output)


def run(plan: StartPlan, output: Output) -> int:
    """Run the job to its end, or print its command line for --dry-run; returns the exit code."""
    for note in plan.job.notes:
        output.note(note)
    if plan.options.dry_run:
        launch = build_launch(plan.job, plan.choice)
        output.note(f"{plan.choice.reason}.")
        removed = sorted(plan.facts.environ.keys() - plan.job.environ.keys())
        print(format_shell_line(replace(launch, removed=(*launch.removed, *removed))))
        return 0
    import asyncio  # slow to import, and not needed for --help and --dry-run

    return asyncio.run(_run(plan, output))


async def _run(plan: StartPlan, output: Output) -> int:
    from hvdkit.launch.run.output import Interruption
    from hvdkit.launch.state.standard_input import StandardInput

    job, options = plan.job, plan.options
    stdin = StandardInput()
    interruption = Interruption(output)
    if job.elasticity is Elasticity.OFF:
        return await _build_runner(job, plan.choice, output, interruption, stdin).run()
    from hvdkit.launch.run.supervisor import JobSupervisor

    started = itertools.count(1)

    def build(hosts: tuple[Host, ...], ranks: int) -> Runner:
        number = next(started)
        again = job if number == 1 else plan_restart(plan, on_hosts(plan.facts, hosts), ranks, number)
        return _build_runner(again, plan.choice, output, interruption, stdin)

    pool = plan_host_pool(options, plan.facts.environ, job, plan.over_ssh, output.say)
    least = max(1, job.config.min_np)
    policy = plan_restart_policy(options, job.config, least, job.ranks, ranks_survive=job.survives)
    return await JobSupervisor(build, job.hosts, job.ranks, policy, pool, output, interruption).run()


def _build_runner(
    job: Job, choice: SelectedLauncher, output: Output, interruption: Interruption, stdin: StandardInput
) -> Runner:
    from hvdkit.launch.run.runner import Runner

    logs = job.variables.get("HVDKIT_OUTPUT_DIRECTORY", "")
    if logs:
        try:
            os.makedirs(logs, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"--output-filename {logs}: {error.strerror}. Choose a directory in which you may write.",
                code="output-directory-unusable",
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
        launch = build({})  # the job's directory is created only when it runs
        shown = {name: "..." if name in job.forwarded else value for name, value in launch.variables.items()}
        output.say(format_shell_line(replace(launch, variables=shown)))  # a value of -x may be a secret
    return runner
