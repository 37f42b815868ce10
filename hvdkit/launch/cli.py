"""hvdrun: the command line."""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from hvdkit import __version__
from hvdkit.config import read_config, read_environment, read_settings
from hvdkit.errors import HvdkitError, LaunchError
from hvdkit.launch import check, numbers
from hvdkit.launch.allocation.slurm import describe_strays, find_strays
from hvdkit.launch.choose import Choice, choose_starter
from hvdkit.launch.commands import build_choice
from hvdkit.launch.elastic import (
    add_elastic_flags,
    describe_restarts,
    find_discovered,
    plan_available,
    plan_elastic,
    plan_terms,
    restart_instead,
    starts_over_ssh,
)
from hvdkit.launch.environment import clean_environment, withhold
from hvdkit.launch.facts import gather_facts
from hvdkit.launch.horovod_config import read_flags
from hvdkit.launch.horovod_flags import add_flags
from hvdkit.launch.hosts import AUTO, DIALECTS, FoundHosts, Host, format_hosts
from hvdkit.launch.job import Job, Launch, format_shell_line, plan_places, plan_ranks
from hvdkit.launch.network import parse_wish
from hvdkit.launch.starter_flags import add_starter_flags, read_ssh_options, split_words
from hvdkit.launch.where import find_hosts
from hvdkit.startup import plan_variables

if TYPE_CHECKING:
    from hvdkit.launch.runner import Runner

_EXAMPLES = """\
examples:
  hvdrun -np 2 python train.py                       2 ranks on this machine
  hvdrun -H node1:4,node2:4 python train.py          8 ranks on two hosts, over ssh
  hvdrun -np 6 --hostfile hosts.txt python train.py  6 ranks on the hosts of a file, filled in order
  hvdrun python train.py                             inside a job of Slurm, PBS, LSF or SGE: its hosts and its tasks
  hvdrun -np 2 --output-filename logs python train.py --lr 0.1
                                                     logs/rank.0.log, logs/rank.1.log beside the usual output
  hvdrun -np 2 --wrap python train.py                a script for one process, unchanged, on 2 ranks
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
        text = "1" if self.nargs == 0 else values
        try:
            read_config({self.variable: text})
        except HvdkitError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        namespace.settings = {**namespace.settings, self.variable: text}

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
        "-np", "-n", "--num-proc", dest="ranks", type=numbers.ranks, metavar="N", help="ranks; else as many as slots"
    )
    parser.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts and how many ranks each may run")
    parser.add_argument(
        "--hostfile",
        "-hostfile",
        metavar="FILE",
        help="the same from a file: of Open MPI, MPICH, PBS, Slurm, ...",
    )
    parser.add_argument(
        "--hostfile-format", default=AUTO, metavar="NAME", help=f"how to read it: {AUTO}, {', '.join(sorted(DIALECTS))}"
    )
    parser.add_argument(
        "--slots-per-host",
        type=int,
        metavar="N",
        help="slots of hosts whose list gives no number, and of those that a scheduler gave",
    )
    parser.add_argument(
        "--network-interfaces",
        "--network-interface",
        metavar="NAME|SUBNET,...",
        help="what ranks on different hosts talk over; if left out, the subnet that all hosts share",
    )
    parser.add_argument(
        "--start-timeout",
        type=numbers.seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long all ranks may take to be there",
    )
    parser.add_argument(
        "--save-timeout",
        type=numbers.seconds_or_none,
        default=25.0,
        metavar="SECONDS",
        help="how long ranks with a handler for SIGTERM may take to save and end, once hvdrun is sent one",
    )
    parser.add_argument("--output-filename", metavar="DIR", help="also write all output of each rank to DIR/rank.N.log")
    add_starter_flags(parser)
    add_elastic_flags(parser)
    parser.add_argument(
        "--config-file", metavar="FILE", help="horovodrun's YAML file of settings; flags go before what it says"
    )
    parser.add_argument(
        "--alias-horovod",
        action="store_true",
        help="run a script for Horovod as it is: `import horovod...` gives hvdkit, and what of Keras 2 is gone is "
        "put back where that is safe",
    )
    parser.add_argument(
        "--wrap",
        action="store_true",
        help="a PyTorch or Keras 3 script for one process trains on all ranks as it is: its optimizers, data, files "
        "and output are seen to, and a table says how; see --wrap-batch",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the line that would be run, and end")
    parser.add_argument("--verbose", action="store_true", help="tell which mpirun is used and where each rank runs")
    parser.add_argument("-v", "--version", action="version", version=f"hvdrun {__version__}")
    settings = parser.add_argument_group("settings", "Each sets the variable that is named, for all ranks.")
    for setting in read_settings({}):
        if setting.flag:
            action = settings.add_argument(
                setting.flag,
                action=_Setting,
                nargs=0 if setting.default is False else None,
                default=setting.default,
                metavar="VALUE",
                help=f"{setting.help}; {setting.variable}",
            )
            assert isinstance(action, _Setting)
            action.variable = setting.variable
    add_flags(parser, tuple(parser._option_string_actions))
    parser.add_argument("command", nargs=argparse.PARSER, help=argparse.SUPPRESS)
    parser.set_defaults(settings={})
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run hvdrun; returns the exit code."""
    try:
        options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        return _run(options, read_environment())
    except HvdkitError as error:
        print(f"hvdrun: {error}", file=sys.stderr)
        return 2


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse hvdrun's arguments, with those of a --config-file before them, so that what is typed goes before."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.config_file is None:
        return options
    flags = read_flags(options.config_file)
    from_file = build_parser()
    from_file.prog = f"hvdrun: {options.config_file}"
    from_file.parse_args([*flags, "true"])
    return parser.parse_args([*flags, *arguments])


def plan_job(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    found: FoundHosts | None = None,
    ranks: int | None = None,
) -> Job:
    """Turn the options into a job, or raise LaunchError for what cannot be started.

    found, ranks: of a job that is started again; None to go by the options.
    """
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    found = found or _find_hosts(options, environ)
    hosts = found.hosts
    here = [host for host in hosts if check.is_local(host)]
    asked = found.ranks if options.ranks is None or options.host_discovery_script is not None else options.ranks
    cores = {host.name: check.count_cores() for host in here}
    ranks = plan_ranks(asked, hosts, cores, more=found.more) if ranks is None else ranks
    check.check_hosts(hosts)
    local = len(here) == len(hosts)
    strays = find_strays(environ)
    environ = {name: value for name, value in clean_environment(environ).items() if name not in strays}
    environ = withhold(environ, options.no_forward_env or ())
    if local:
        check.check_command(command, environ.get("PATH", os.defpath))
    networks = parse_wish(options.network_interfaces) if options.network_interfaces is not None else ()
    variables = dict(options.settings)
    if not local:
        variables.update(check.plan_daemon_variables(hosts, networks, environ))
    variables.update(plan_variables(_starts_asked_for(options), environ))
    if options.wrap and "HVDKIT_WRAP_SEED" not in environ:
        variables["HVDKIT_WRAP_SEED"] = str(secrets.randbelow(2**31))
    config = read_config({**environ, **variables})
    variables.update(plan_elastic(options, config, ranks))
    config = read_config({**environ, **variables})
    if "PYTHONUNBUFFERED" not in environ:
        variables["PYTHONUNBUFFERED"] = "1"  # a rank that is killed has shown all it printed
    if options.tcp and "NCCL_IB_DISABLE" not in environ:
        variables["NCCL_IB_DISABLE"] = "1"
    if options.output_filename:
        variables["HVDKIT_OUTPUT_DIRECTORY"] = check.make_absolute("--output-filename", options.output_filename)
    return Job(
        command=tuple(command),
        ranks=ranks,
        hosts=hosts,
        local=local,
        environ=environ,
        variables=variables,
        root=os.geteuid() == 0,
        python=sys.executable,
        notes=(*found.notes, *([_tell_allocation(found, ranks)] if found.allocated else [])),
        ssh_options=read_ssh_options(options),
        starter_arguments=split_words("--mpi-args", options.mpi_args) or (),
        binding=split_words("--binding-args", options.binding_args),
        bind=_choose_binding(config.bind, options.binding_args),
        tcp=options.tcp,
        elastic=config.elastic,
    )


def _starts_asked_for(options: argparse.Namespace) -> dict[str, str]:
    """What ranks are to do before the script: variables of hvdkit.startup."""
    if options.wrap and options.alias_horovod:
        raise LaunchError("--wrap is for a script for one process and --alias-horovod for one for Horovod; choose one.")
    idle = [name for name in options.settings if name.startswith("HVDKIT_WRAP_")]
    if idle and not options.wrap:
        raise LaunchError(f"{', '.join(idle)} says how --wrap works; give --wrap as well, or leave it out.")
    if options.wrap:
        return {"HVDKIT_WRAP": "1"}
    return {"HVDKIT_ALIAS_HOROVOD": "1"} if options.alias_horovod else {}


def _choose_binding(bind: str, binding_args: str | None) -> str:
    """The setting `bind`, unless the user has told the launcher what to do."""
    if binding_args is None:
        return bind
    if bind in ("core", "numa"):
        raise LaunchError(
            f"--bind {bind} has hvdkit bind the ranks, and --binding-args the launcher; leave one of them out."
        )
    return "none"


def _find_hosts(options: argparse.Namespace, environ: Mapping[str, str]) -> FoundHosts:
    if options.host_discovery_script is not None:
        return find_discovered(options, environ)
    found = find_hosts(
        options.hosts, options.hostfile, environ, format=options.hostfile_format, slots=options.slots_per_host
    )
    return found or FoundHosts((), "this machine", describe_strays(environ))


def _tell_allocation(found: FoundHosts, ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks != 1)} on {format_hosts(found.hosts)}, from {found.source}."


def _run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    job = plan_job(options, environ)
    by_hand = any(one is not None for one in (options.hosts, options.hostfile, options.host_discovery_script))
    facts = gather_facts(job.environ, sys.prefix, local=job.local, by_hand=by_hand, wish=options.launcher or "")
    choice = choose_starter(facts, options.launcher or "")
    restarts = describe_restarts(job, choice)
    if restarts:
        job = restart_instead(job, restarts)
    for note in job.notes:
        print(f"hvdrun: {note}", file=sys.stderr)
    if options.dry_run:
        launch = build_choice(job, choice)
        print(f"hvdrun: {choice.reason}.", file=sys.stderr)
        removed = sorted(environ.keys() - job.environ.keys())
        print(format_shell_line(replace(launch, removed=(*launch.removed, *removed))))
        return 0
    return _start(options, environ, job, choice, starts_over_ssh(choice, facts.scheduler, job.environ))


def _start(options: argparse.Namespace, environ: Mapping[str, str], job: Job, choice: Choice, ssh: bool) -> int:
    import asyncio  # not needed for --help and --dry-run, and not quick to load

    if not read_config({**job.environ, **job.variables}).elastic:
        return asyncio.run(_make_runner(options, job, choice).run())
    from hvdkit.launch.lives import Lives
    from hvdkit.launch.output import Output

    if "HVDKIT_WRAP_SEED" in job.variables:
        environ = {**environ, "HVDKIT_WRAP_SEED": job.variables["HVDKIT_WRAP_SEED"]}
    started = itertools.count(1)

    def make(hosts: tuple[Host, ...], ranks: int) -> Runner:
        number = next(started)
        if number == 1:
            return _make_runner(options, job, choice)
        again = plan_job(options, environ, FoundHosts(hosts, "what is left"), ranks)
        again = replace(again, variables={**again.variables, "HVDKIT_START": str(number)})
        return _make_runner(options, again if job.elastic else restart_instead(again), choice)

    output = Output()
    available = plan_available(options, environ, job, ssh, output.say)
    folder = read_config({**job.environ, **job.variables}).elastic_checkpoints
    lives = Lives(make, job.hosts, job.ranks, plan_terms(options, job), available, folder, output)
    return asyncio.run(lives.run())


def _make_runner(options: argparse.Namespace, job: Job, choice: Choice) -> Runner:
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
        return build_choice(replace(job, variables={**job.variables, **control}), choice)

    config = read_config({**job.environ, **job.variables})
    # Where the user's own words go to the starter, ranks may be placed otherwise than hvdrun would.
    as_planned = all(host.slots for host in job.hosts) and job.binding is None and not job.starter_arguments
    one_host_of_many_names = job.local and len(job.hosts) > 1
    runner = Runner(
        build=build,
        size=job.ranks,
        command=job.command,
        environ=job.environ,
        addresses=addresses,
        planned=plan_places(job.ranks, job.hosts) if as_planned and not one_host_of_many_names else (),
        slots={host.name: host.slots or 0 for host in job.hosts} if job.elastic else {},
        networks=parse_wish(options.network_interfaces) if options.network_interfaces is not None else (),
        start_timeout_s=options.start_timeout,
        save_timeout_s=options.save_timeout,
        verbose=options.verbose,
        logs=options.output_filename or "",
        bind=job.bind,
        least=max(1, config.min_np) if job.elastic else 0,
        patience_s=config.elastic_patience_s if config.elastic else 0.0,
    )
    if options.verbose:
        mpi = choice.mpi
        if mpi is not None:
            origin = "found on PATH" if mpi.site else "from this Python environment"
            runner.output.say(f"{mpi.name} {mpi.version}, {origin}: {mpi.mpirun}")
        runner.output.say(f"{choice.reason}.")
        runner.output.say(describe_launch(build({})))
    return runner
