"""hvdrun's options, in the groups of its help."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hvdkit import __version__
from hvdkit.config import read_settings
from hvdkit.errors import LaunchError
from hvdkit.launch.cli import numbers
from hvdkit.launch.cli.horovod import add_horovod_flags, read_flags
from hvdkit.launch.cli.launcher_options import add_launcher_options, add_ssh_flags
from hvdkit.launch.cli.parser import SHELLS, OptionParser, PrintCompletion, record_settings
from hvdkit.launch.hostfiles import AUTO, DIALECTS
from hvdkit.launch.options import OPTIONS, LaunchOptions
from hvdkit.package_settings import find_package_settings
from hvdkit.setting import Setting

_EXAMPLES = """\
examples:
  hvdrun -np 2 train.py --lr 0.1                2 ranks on this machine
  hvdrun -np 2 -m package.train                 a Python module
  hvdrun -H node1:4,node2:4 train.py            8 ranks on two hosts, over ssh
  hvdrun --hostfile hosts.txt python train.py   the hosts of a file
  hvdrun train.py                               in a job of Slurm, PBS, LSF or SGE: its hosts and tasks
"""
_DETAILS = """
The command follows the options. A .py file runs with this Python. Each line of output begins with its rank: [0], or
[0 node1] on several hosts. When a rank fails hvdrun ends all ranks. Its exit code is that of the failed rank, 128+n for
signal n, 130 for Ctrl-C, 2 if the job was not started, 75 if the training was saved and is not finished.
"""
_PAGE = "hvdrun --help-all prints all options. Documentation: hvdkit docs clusters/hvdrun\n"

# The settings of the short help, with their text there.
_COMMON = {
    "elastic": "continue when ranks die",
    "min_np": "minimum number of ranks, else the job ends",
    "max_np": "maximum number of ranks",
    "elastic_checkpoints": "directory for checkpoints of committed states",
    "transport": "transport of the native engine (default: auto)",
    "bind": "CPU binding of the ranks (default: auto)",
    "autotune": "tune the settings during the first steps",
    "check_replicas": "check every N steps that parameters are equal",
    "stall_shutdown_s": "end a stalled job after this time (0: never)",
    "log_level": "minimum level of messages (default: warning)",
}
# The settings of the group "elastic"; other settings are in "settings".
_ELASTIC = (
    *("elastic", "min_np", "max_np", "elastic_checkpoints"),
    *("elastic_restarts", "elastic_hang_timeout_s", "elastic_save_s"),
)
# Groups of settings in the long help; the short help has one group. Other settings are in "settings".
_TUNING = (
    *("fusion_bytes", "buckets_in_flight", "progress", "chunk_bytes", "malloc_keep_bytes", "algorithm"),
    *("autotune", "autotune_steps", "autotune_log", "autotune_save", "tuned", "share_gpus"),
)
# Prefix of the settings of a package in packages/ -> its folder there.
_PACKAGES = {"wrap": "wrap"}


class _SettingAction(argparse.Action):
    """Check a setting, and record it as the variable that passes it to the ranks."""

    variable = ""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        text = "1" if self.nargs == 0 else values
        record_settings(self, namespace, option_string, {self.variable: text})


class _HelpAll(argparse.Action):
    """Print all options, and exit."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        build_parser(everything=True).print_help()
        parser.exit()


def build_parser(*, everything: bool = False) -> OptionParser:
    """Build the parser of the options. everything: its help shows all of them, and the variables of settings."""
    parser = OptionParser(
        prog="hvdrun",
        usage="hvdrun [options] {train.py | -m package.module | program} [arguments]",
        description="Run a training script as several ranks, on this machine or on several hosts.",
        epilog=_EXAMPLES + _DETAILS * everything + _PAGE,
        everything=everything,
    )
    _add_ranks_and_hosts(parser)
    _add_launching(parser)
    _add_output(parser)
    _add_elastic(parser)
    _add_settings(parser)
    add_horovod_flags(parser)
    _add_help(parser)
    parser.set_defaults(settings={})
    return parser


def parse_arguments(arguments: Sequence[str]) -> LaunchOptions:
    """Parse hvdrun's arguments; `command` has the words after the options.

    The entries of a --config-file come first, so that options on the command line override them.
    Raises LaunchError for two launchers.
    """
    parser = build_parser()
    words, command = parser.split(arguments)
    options = parser.parse_args(words)
    if options.config_file is not None:
        flags = read_flags(options.config_file)
        from_file = build_parser()
        from_file.prog = f"hvdrun: {options.config_file}"
        others = from_file.parse_args(flags)
        options.settings = {**others.settings, **options.settings}
        options.ignored = (*getattr(others, "ignored", ()), *getattr(options, "ignored", ()))
    if not command:
        parser.error("no command was given; write it after the options, as in: hvdrun -np 2 train.py")
    if options.host_discovery_script is not None and options.np == "auto":
        options.np = None
    return _make_options(options, command)


def _make_options(options: argparse.Namespace, command: Sequence[str]) -> LaunchOptions:
    if options.jsrun and options.launcher not in (None, "jsrun"):
        raise LaunchError(
            f"--jsrun contradicts --launcher {options.launcher}. Leave one of them out.", code="launchers-contradict"
        )
    cooldown = options.blacklist_cooldown_range
    values = {
        **{name: value for name, value in vars(options).items() if name in OPTIONS},
        "command": tuple(command),
        "env": tuple(options.env or ()),
        "no_forward_env": tuple(options.no_forward_env or ()),
        "launcher": "jsrun" if options.jsrun else options.launcher or "",
        "blacklist_cooldown_range": tuple(cooldown) if cooldown is not None else None,
    }
    return LaunchOptions(**values)


def _add_ranks_and_hosts(parser: OptionParser) -> None:
    _, add = parser.add_group("ranks and hosts")
    add(
        *("-np", "-n"),
        dest="np",
        type=numbers.ranks_or_word,
        metavar="N|auto|gpu",
        brief="number of ranks; gpu: one per GPU of this machine",
        aliases=("--num-proc", "--np"),
        help="number of ranks; auto: one per slot of the hosts, else one per core of this machine; gpu: one per "
        "visible GPU of this machine. With gpu or --device-transport nccl, ranks that would share a GPU are refused; "
        "otherwise hvdrun warns of them, as the job may be one on CPUs",
    )
    add("-H", "--hosts", metavar="HOST:N,...", brief=True, help="hosts and their slots")
    add(
        "--hostfile",
        metavar="FILE",
        brief="file of hosts: Open MPI, MPICH, PBS, Slurm, ...",
        aliases=("-hostfile",),
        help="file of hosts, as for Open MPI, MPICH, PBS, Slurm, ...",
    )
    add(
        "--hostfile-format",
        default=AUTO,
        choices=(AUTO, *sorted(DIALECTS)),
        metavar="NAME",
        help=f"format of the hostfile: {AUTO} (default), {', '.join(sorted(DIALECTS))}",
    )
    add(
        "--slots-per-host",
        type=numbers.positive_int,
        metavar="N",
        brief="slots of hosts without a number",
        help="slots of hosts listed without a number, and of all hosts of a scheduler's job",
    )


def _add_launching(parser: OptionParser) -> None:
    group, add = parser.add_group("launching")
    add(
        *("-m", "--module"),
        action="store_true",
        brief="the command is a Python module, as python -m",
        help="the command is a Python module, as with python -m",
    )
    add(
        *("-x", "--env"),
        action="append",
        metavar="NAME[=VALUE]",
        brief="variable for all ranks; may be repeated",
        help="variable for all ranks, with this value or the one it has here; may be repeated. For secrets use "
        "-x NAME: other users can read command lines",
    )
    add_launcher_options(add)
    add_ssh_flags(group, shown=parser.everything)
    add(
        "--network-interfaces",
        metavar="NAME",
        brief="network between hosts",
        aliases=("--network-interface",),
        help="interfaces or subnets between the hosts, separated by commas (default: the subnet that all hosts share)",
    )
    add(
        "--start-timeout",
        type=numbers.positive_seconds,
        default=60.0,
        metavar="SECONDS",
        help="time in which all ranks must start (default: 60)",
    )
    add(
        "--save-timeout",
        type=numbers.nonnegative_seconds,
        default=25.0,
        metavar="SECONDS",
        help="time for ranks with a SIGTERM handler to save and exit after hvdrun receives SIGTERM (default: 25)",
    )
    add(
        "--alias-horovod",
        action="store_true",
        brief="run a script for Horovod without changes",
        help="run a script for Horovod without changes: `import horovod...` imports hvdkit; experimental patches of "
        "Keras restore what Keras 3 removed",
    )
    add(
        "--wrap",
        action="store_true",
        brief="experimental: run a script for one process",
        help="experimental: run a PyTorch or Keras 3 script for one process without changes, by patches of the "
        "framework; a table lists what is changed; see --wrap-batch",
    )
    add(
        "--mpi-backend",
        action="store_true",
        help='torch.distributed: let hvdkit answer to the backend "mpi", which wheels of PyTorch lack, and to "hvdkit" '
        "without an import",
    )
    add("--dry-run", action="store_true", brief=True, help="print the launcher's command line, and exit")


def _add_output(parser: OptionParser) -> None:
    group, add = parser.add_group("output")
    add(
        "--output-filename",
        metavar="DIR",
        brief="also write output to DIR/rank.N.log",
        help="also write each rank's output to DIR/rank.N.log",
    )
    add(
        "--show-ranks",
        type=numbers.rank_list,
        metavar="LIST",
        brief="show the output of these ranks only: 0,2 or 0-3",
        help="show the output of these ranks only, as 0,2 or 0-3",
    )
    add("--no-prefix", action="store_true", brief=True, help="do not write the rank before each line")
    add("--tag-output", action="store_true", help="write the rank before each line (default)")
    parser.add(
        group, *("-q", "--quiet"), action="store_true", brief=True, help="print hvdrun's own lines only on a problem"
    )
    add(
        "--verbose",
        action="store_true",
        brief=True,
        help="print the launcher, and the host and CPUs of each rank",
    )
    add(
        "--metrics-port",
        type=numbers.tcp_port_or_any,
        metavar="PORT",
        help="answer Prometheus at http://127.0.0.1:PORT/metrics on this host; 0 for any free port, which is printed",
    )
    _add_setting(parser, group, next(each for each in read_settings({}) if each.name == "timeline"))


def _add_elastic(parser: OptionParser) -> None:
    group, add = parser.add_group("elastic")
    settings = {each.name: each for each in read_settings({})}
    for name in _ELASTIC:
        _add_setting(parser, group, settings[name])
    add(
        "--host-discovery-script",
        metavar="SCRIPT",
        brief="program that prints the current hosts",
        help="program that prints the current hosts, one host:slots per line; hvdrun runs it at each start and every "
        "second",
    )
    add(
        "--blacklist-cooldown-range",
        aliases=("--blacklist-cooldown",),
        type=numbers.positive_seconds,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="seconds until a lost host is used again: MIN after its first loss, then longer, up to MAX (default: it "
        "is never used again)",
    )
    add(
        "--reset-limit",
        type=numbers.nonnegative_int,
        metavar="N",
        help="maximum number of restarts of the job (default: no limit)",
    )
    add(
        "--elastic-timeout",
        type=numbers.nonnegative_seconds,
        metavar="SECONDS",
        help="time to wait for --min-np slots (default: 600)",
    )


def _add_settings(parser: OptionParser) -> None:
    packages = find_package_settings()
    parser.missing = {f"--{prefix}-": folder for prefix, folder in _PACKAGES.items() if prefix not in packages}
    if parser.everything:
        settings = parser.add_argument_group("settings", "Each sets the variable in brackets for all ranks.")
        of_packages = {prefix: parser.add_argument_group(f"settings of --{prefix}") for prefix in packages}
        tuning = parser.add_argument_group("tuning", "Settings for speed, and for tests; the defaults suit most jobs.")
    else:
        settings = tuning = parser.add_argument_group("common settings")
        of_packages = dict.fromkeys(packages, settings)
    for setting in read_settings({}):
        if setting.flag and setting.name not in (*_ELASTIC, "timeline"):
            _add_setting(parser, tuning if setting.name in _TUNING else settings, setting)
    for prefix, kind in packages.items():
        for setting in read_settings({}, kind):
            if setting.flag:
                _add_setting(parser, of_packages[prefix], setting)


def _add_setting(parser: OptionParser, group: argparse._ArgumentGroup, setting: Setting) -> None:
    switch = setting.default is False
    default = "" if setting.default in (False, "") else f"default: {setting.default}"
    details = "; ".join([*([default] if default else []), *([setting.variable] if parser.everything else [])])
    action = parser.add(
        group,
        setting.flag,
        action=_SettingAction,
        nargs=0 if switch else None,
        default=argparse.SUPPRESS,
        metavar=f"{{{','.join(setting.choices)}}}" if setting.choices else setting.metavar,
        brief=_COMMON.get(setting.name, ""),
        help=f"{setting.help.replace('%', '%%')}{f' ({details})' if details else ''}",
    )
    assert isinstance(action, _SettingAction)
    action.variable = setting.variable


def _add_help(parser: OptionParser) -> None:
    _, add = parser.add_group("help")
    add(*("-h", "--help"), action="help", brief=True, help="print the common options, and exit")
    add(
        "--help-all",
        action=_HelpAll,
        nargs=0,
        dest="help_all",
        default=argparse.SUPPRESS,
        brief=True,
        help="print all options",
    )
    add(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        dest="print_completion",
        default=argparse.SUPPRESS,
        metavar=f"{{{','.join(SHELLS)}}}",
        help="print the completion script of a shell",
    )
    add(
        *("-v", "--version"),
        action="version",
        version=f"hvdrun {__version__}",
        brief=True,
        help="print the version",
    )
