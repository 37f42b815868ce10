"""hvdrun: the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from hvdkit import __version__
from hvdkit.config import read_config, read_environment, read_settings
from hvdkit.errors import HvdkitError, LaunchError
from hvdkit.launch import check
from hvdkit.launch.commands import build_launch
from hvdkit.launch.environment import clean_environment, find_launcher_variables
from hvdkit.launch.hosts import Host, parse_host_list, read_hostfile
from hvdkit.launch.job import Job, Launch, format_shell_line, plan_places, plan_ranks
from hvdkit.launch.mpi import Mpi, find_mpi
from hvdkit.launch.network import parse_wish

_EXAMPLES = """\
examples:
  hvdrun -np 2 python train.py                       2 ranks on this machine
  hvdrun -H node1:4,node2:4 python train.py          8 ranks on two hosts, over ssh
  hvdrun -np 6 --hostfile hosts.txt python train.py  6 ranks on the hosts of a file, filled in order
  hvdrun -np 2 --output-filename logs python train.py --lr 0.1
                                                     logs/rank.0.log, logs/rank.1.log beside the usual output
  hvdrun -np 4 --dry-run python train.py             print the command, start nothing

Everything after the options is the command. Each line of output begins with its rank: [0], or [0 node1] on several
hosts. All ranks are ended when one fails; the exit code is that rank's (128+n: killed by signal n; 130: Ctrl-C; 2: not
started).
"""


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints the defaults, and the examples as they are; an option without a default says nothing of one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


class _Setting(argparse.Action):
    """Checks a setting and keeps it as the variable that carries it to the ranks."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            read_config({self.variable: values})
        except HvdkitError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        namespace.settings = {**namespace.settings, self.variable: values}

    variable = ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with one sentence: the usage line of this many options would bury it."""
        if message.endswith("required: command"):
            message = "there is no command to run; write it after the options, like: hvdrun -np 2 python train.py"
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; the flags of settings come from Config's table."""
    parser = _Parser(
        prog="hvdrun",
        usage="hvdrun [options] command [arguments]",
        description="Run a training script as several ranks, here or on other hosts.",
        epilog=_EXAMPLES,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-np", "--num-proc", dest="ranks", type=int, metavar="N", help="ranks; as many as slots if left out"
    )
    parser.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts and how many ranks each may run")
    parser.add_argument("--hostfile", metavar="FILE", help="the same from a file, a host a line: node1 slots=4")
    parser.add_argument(
        "--network-interfaces",
        "--network-interface",
        metavar="NAME|SUBNET,...",
        help="what ranks on different hosts talk over; if left out, the subnet that all hosts share",
    )
    parser.add_argument(
        "--start-timeout", type=float, default=60.0, metavar="SECONDS", help="how long all ranks may take to be there"
    )
    parser.add_argument("--output-filename", metavar="DIR", help="also write all output of each rank to DIR/rank.N.log")
    parser.add_argument("--dry-run", action="store_true", help="print the line that would be run, and end")
    parser.add_argument("--verbose", action="store_true", help="tell which mpirun is used and where each rank runs")
    parser.add_argument("--version", action="version", version=f"hvdrun {__version__}")
    settings = parser.add_argument_group("settings", "Each sets the variable that is named, for all ranks.")
    for setting in read_settings({}):
        if setting.flag:
            action = settings.add_argument(
                setting.flag,
                action=_Setting,
                default=setting.default,
                metavar="VALUE",
                help=f"{setting.help}; {setting.variable}",
            )
            assert isinstance(action, _Setting)
            action.variable = setting.variable
    parser.add_argument("command", nargs=argparse.PARSER, help=argparse.SUPPRESS)
    parser.set_defaults(settings={})
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run hvdrun; returns the exit code."""
    options = build_parser().parse_args(arguments)
    try:
        return _run(options, read_environment())
    except HvdkitError as error:
        print(f"hvdrun: {error}", file=sys.stderr)
        return 2


def plan_job(options: argparse.Namespace, environ: Mapping[str, str]) -> Job:
    """Turn the options into a job, or raise LaunchError for what cannot be started."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.hosts is not None and options.hostfile is not None:
        raise LaunchError("-H and --hostfile both say where to run. Leave one of them out.")
    hosts = _read_hosts(options)
    here = [host for host in hosts if check.is_local(host)]
    ranks = plan_ranks(options.ranks, hosts, {host.name: check.count_cores() for host in here})
    check.check_hosts(hosts)
    local = len(here) == len(hosts)
    environ = clean_environment(environ)
    if local:
        check.check_command(command, environ.get("PATH", os.defpath))
    networks = parse_wish(options.network_interfaces) if options.network_interfaces is not None else ()
    variables = dict(options.settings)
    if not local:
        variables.update(check.plan_daemon_variables(hosts, networks, environ))
    read_config({**environ, **variables})
    if "PYTHONUNBUFFERED" not in environ:
        variables["PYTHONUNBUFFERED"] = "1"  # a rank that is killed has shown all it printed
    if options.output_filename:
        variables["HVDKIT_OUTPUT_DIRECTORY"] = os.path.abspath(options.output_filename)
    return Job(
        command=tuple(command),
        ranks=ranks,
        hosts=hosts,
        local=local,
        environ=environ,
        variables=variables,
        root=os.geteuid() == 0,
        python=sys.executable,
    )


def _read_hosts(options: argparse.Namespace) -> tuple[Host, ...]:
    if options.hostfile is not None:
        return read_hostfile(options.hostfile)
    return parse_host_list(options.hosts) if options.hosts is not None else ()


def _run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    job = plan_job(options, environ)
    mpi = find_mpi(job.environ, sys.prefix)
    if options.dry_run:
        launch = build_launch(job, mpi)
        print(format_shell_line(replace(launch, removed=find_launcher_variables(environ))))
        return 0
    return _start(options, job, mpi)


def _start(options: argparse.Namespace, job: Job, mpi: Mpi) -> int:
    import asyncio  # not needed for --help and --dry-run, and not quick to load

    from hvdkit.launch.runner import Runner, describe_launch

    logs = job.variables.get("HVDKIT_OUTPUT_DIRECTORY", "")
    if logs:
        try:
            os.makedirs(logs, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"--output-filename {logs}: {error.strerror}. Choose a folder that can be written."
            ) from None
    addresses = () if job.local else check.find_addresses(job.hosts)

    def build(control: Mapping[str, str]) -> Launch:
        return build_launch(replace(job, variables={**job.variables, **control}), mpi)

    runner = Runner(
        build=build,
        size=job.ranks,
        environ=job.environ,
        addresses=addresses,
        planned=plan_places(job.ranks, job.hosts) if all(host.slots for host in job.hosts) else (),
        networks=parse_wish(options.network_interfaces) if options.network_interfaces is not None else (),
        start_timeout_s=options.start_timeout,
        verbose=options.verbose,
        logs=options.output_filename or "",
    )
    if options.verbose:
        origin = "found on PATH" if mpi.site else "from this Python environment"
        runner.output.say(f"{mpi.name} {mpi.version}, {origin}: {mpi.mpirun}")
        runner.output.say(describe_launch(build({})))
    return asyncio.run(runner.run())
