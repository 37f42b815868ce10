"""horovodrun's options that hvdrun does not have itself, and its --config-file, a YAML file of options.

Each option is accepted with its meaning, or accepted without effect and with a note, or refused with a cure.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.launch.cli import numbers
from hvdkit.launch.cli.parser import OptionParser, record_settings
from hvdkit.optional_import import optional_import

# Section -> the prefix of its options.
_PREFIXES = {
    "params": "--",
    "autotune": "--autotune-",
    "timeline": "--timeline-",
    "stall_check": "--stall-check-",
    "library_options": "--",
    "logging": "--log-",
}
# Section -> its keys with a value; the option has the key's name, with dashes.
_VALUES: Mapping[str, Sequence[str]] = {
    "params": ("fusion_threshold_mb", "cycle_time_ms", "cache_capacity"),
    "autotune": "log_file warmup_samples steps_per_sample bayes_opt_max_samples gaussian_process_noise".split(),
    "timeline": ("filename",),
    "stall_check": ("warning_time_seconds", "shutdown_time_seconds"),
    "library_options": ("num_nccl_streams", "thread_affinity", "gloo_timeout_seconds"),
    "logging": ("level",),
}
# Section -> its keys that are switches; false is the option with the prefix --no-.
_SWITCHES: Mapping[str, Sequence[str]] = {
    "params": ("hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce"),
    "autotune": ("enabled",),
    "timeline": ("mark_cycles",),
    "stall_check": ("enabled",),
    "library_options": ("mpi_threads_disable",),
    "logging": ("with_timestamp",),
}
_CONTROLLERS = {"mpi": "--mpi", "gloo": "--gloo"}


def read_flags(path: str) -> list[str]:
    """Read a file, and return its entries as options.

    Raises LaunchError with all entries that horovodrun does not have, MissingDependencyError without PyYAML.
    """
    yaml = optional_import("yaml", "config")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise LaunchError(
            f"--config-file {path} cannot be read: {why}. Check that the path is right and the file is YAML.",
            code="config-file-unreadable",
        ) from None
    return write_flags(content if content is not None else {}, path)


def write_flags(content: Any, path: str) -> list[str]:
    """Return the entries of a configuration as options. path: for messages. Raises LaunchError as `read_flags` does."""
    if not isinstance(content, Mapping):
        raise LaunchError(
            f"--config-file {path} has no sections. Write sections, such as params: or timeline:.",
            code="config-file-without-sections",
        )
    flags: list[str] = []
    problems: list[str] = []
    for section, entries in content.items():
        if section == "controller":
            known = _CONTROLLERS.get(str(entries).lower())
            flags += [known] if known else []
            problems += [] if known else [f"controller: {entries!r} is not a controller; use mpi or gloo"]
        elif section in _VALUES and isinstance(entries, Mapping):
            for key, value in entries.items():
                _write_entry(section, str(key), value, flags, problems)
        elif entries is not None or section not in _VALUES:
            problems.append(f"{section!r} is not a section; use controller, {', '.join(_VALUES)}")
    if problems:
        raise LaunchError(f"--config-file {path}: {'; '.join(problems)}.", code="config-file-entries")
    return flags


def _write_entry(section: str, key: str, value: Any, flags: list[str], problems: list[str]) -> None:
    if value is None:
        return
    flag = f"{_PREFIXES[section]}{key.replace('_', '-')}".removesuffix("-enabled")
    if key in _SWITCHES[section]:
        if isinstance(value, bool):
            flags.append(flag if value else _negate(flag))
        else:
            problems.append(f"{section}.{key}: {value!r} is not a switch; use true or false")
    elif key in _VALUES[section]:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            flags.append(f"{flag}={value}")
        else:
            problems.append(f"{section}.{key}: {value!r} is not a single value")
    else:
        known = ", ".join((*_VALUES[section], *_SWITCHES[section]))
        problems.append(f"{section}.{key} is not an entry; use {known}")


def _negate(flag: str) -> str:
    return flag.replace("-with-", "-without-") if "-with-" in flag else flag.replace("--", "--no-", 1)


@dataclass(frozen=True)
class Flag:
    """An option of another launcher.

    names: of the option.
    sets: variables and their values; a function computes the value from the option's, a whole number.
    refused: the alternative, as a sentence; "" if the option is accepted.
    help: of an accepted option.
    program: the launcher.
    ignored: why an accepted option has no effect, and the setting to use in its place; "" if it has an effect, or is
    the default.
    takes: is an ignored option followed by a value?
    variables: Horovod's variables without effect for the same reason.
    """

    names: tuple[str, ...]
    sets: Mapping[str, str | Callable[[int], str]] = field(default_factory=dict)
    refused: str = ""
    help: str = ""
    program: str = "horovodrun"
    ignored: str = ""
    takes: bool = False
    variables: tuple[str, ...] = ()

    @property
    def has_value(self) -> bool:
        """Is an accepted option followed by a value?"""
        return self.takes or any(callable(value) for value in self.sets.values())


def _megabytes(count: int) -> str:
    return str(count * 1024 * 1024)


def _accept(*names: str, help: str = "", **sets: str | Callable[[int], str]) -> Flag:
    return Flag(names, sets, help=help)


def _refuse(*names: str, instead: str, program: str = "horovodrun") -> Flag:
    return Flag(names, refused=instead, program=program)


def _ignore(*names: str, why: str, takes: bool = False, variables: str = "") -> Flag:
    found = tuple(f"HOROVOD_{name}" for name in variables.split())
    own = " With --engine horovod set Horovod's variable." if found else ""
    return Flag(names, help="no effect", ignored=f"{why}{own}", takes=takes, variables=found)


_TUNE = "--autotune takes ten steps per trial, and --autotune-steps limits the number of steps."
_CLOCK = "Output lines have no timestamp; for timestamps use: hvdrun ... 2>&1 | ts."

FLAGS = (
    # Settings of the same meaning.
    _accept(
        "--fusion-threshold-mb",
        HVDKIT_FUSION_BYTES=_megabytes,
        help="--fusion-bytes in MiB; Horovod's usual 64 or 128 are slower here than the default",
    ),
    _accept("--hierarchical-allreduce", HVDKIT_TRANSPORT="hierarchical", help="same as --transport hierarchical"),
    _accept("--no-hierarchical-allreduce", HVDKIT_TRANSPORT="mpi", help="same as --transport mpi"),
    _accept(
        "--no-stall-check",
        HVDKIT_STALL_CHECK_S="0",
        HVDKIT_STALL_SHUTDOWN_S="0",
        help="same as --stall-check-s 0 --stall-shutdown-s 0",
    ),
    _accept("--stall-check-warning-time-seconds", HVDKIT_STALL_CHECK_S=str, help="same as --stall-check-s"),
    _accept("--stall-check-shutdown-time-seconds", HVDKIT_STALL_SHUTDOWN_S=str, help="same as --stall-shutdown-s"),
    _accept("--gloo", HVDKIT_TRANSPORT="gloo", help="same as --transport gloo; MPI still starts the ranks"),
    _accept("--min-num-proc", HVDKIT_MIN_NP=str, help="same as --min-np"),
    _accept("--max-num-proc", HVDKIT_MAX_NP=str, help="same as --max-np"),
    _accept("--no-autotune", HVDKIT_AUTOTUNE="0", help="do not tune settings (default)"),
    # The default.
    _accept("--mpi", help="start ranks through MPI (default)"),
    _accept("--disable-cache", help="coordinate every operation, without a cache (default)"),
    _accept("--stall-check", help="report stalled operations (default)"),
    _accept("--no-torus-allreduce", help="no effect"),
    _accept("--no-hierarchical-allgather", help="no effect"),
    _accept("--no-timeline-mark-cycles", help="no effect"),
    _accept("--no-mpi-threads-disable", help="no effect"),
    _accept("--log-without-timestamp", "--log-hide-timestamp", help="no timestamps (default)"),
    # Features that hvdkit does not have.
    _refuse("-cb", "--check-build", instead="hvdkit has no build options. To see what works here use: hvdkit doctor."),
    _ignore("--cycle-time-ms", why="hvdkit has no cycles, and needs no setting.", takes=True, variables="CYCLE_TIME"),
    _ignore(
        "--timeline-mark-cycles",
        why="hvdkit has no cycles, and needs no setting.",
        variables="TIMELINE_MARK_CYCLES",
    ),
    _ignore(
        "--cache-capacity",
        why="hvdkit has no such limit, and needs no setting.",
        takes=True,
        variables="CACHE_CAPACITY",
    ),
    _ignore(
        "--hierarchical-allgather",
        why="One transport serves all operations: --transport hierarchical.",
        variables="HIERARCHICAL_ALLGATHER",
    ),
    _ignore("--torus-allreduce", why="--transport hierarchical is similar.", variables="TORUS_ALLREDUCE"),
    _ignore(
        *("--autotune-warmup-samples", "--autotune-steps-per-sample"),
        *("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"),
        why=_TUNE,
        takes=True,
        variables="AUTOTUNE_WARMUP_SAMPLES AUTOTUNE_STEPS_PER_SAMPLE AUTOTUNE_BAYES_OPT_MAX_SAMPLES "
        "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    ),
    _ignore(
        "--mpi-threads-disable",
        why="hvdkit needs an MPI with threads, and no setting.",
        variables="MPI_THREADS_DISABLE",
    ),
    _ignore("--num-nccl-streams", why="hvdkit needs no setting.", takes=True, variables="NUM_NCCL_STREAMS"),
    _ignore("--thread-affinity", why="Use --bind.", takes=True, variables="THREAD_AFFINITY"),
    _ignore(
        "--gloo-timeout-seconds",
        why="To end a job in which a rank is missing use --stall-shutdown-s.",
        takes=True,
        variables="GLOO_TIMEOUT_SECONDS",
    ),
    _ignore("--log-with-timestamp", "--no-log-hide-timestamp", why=_CLOCK),
    _ignore("-prefix-timestamp", "--prefix-output-with-timestamp", why=_CLOCK),
)

#: Horovod's variables without an option in FLAGS -> why they have no effect.
_VARIABLES = {
    "HOROVOD_FUSION_THRESHOLD": "hvdkit's buckets fit into the cache; --fusion-bytes sets them.",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "--transport hierarchical is the same, and --transport auto uses it.",
}

#: Options that users of other launchers type.
OTHERS = (
    _refuse("-ppn", program="mpiexec", instead="Use --slots-per-host N, or -H host1:N,host2:N."),
    _refuse("-c", program="mpirun", instead="Use -np N. For Python's -c write: hvdrun -np 2 python -c CODE."),
    _refuse(
        *("--nproc-per-node", "--nproc_per_node"),
        program="torchrun",
        instead="Use -np N for the ranks of one machine, and -H host1:N,host2:N for several hosts.",
    ),
    _refuse(
        *("--nnodes", "--node-rank", "--node_rank", "--standalone", "--rdzv-endpoint", "--rdzv_endpoint"),
        *("--rdzv-backend", "--rdzv_backend", "--rdzv-id", "--rdzv_id", "--master-addr", "--master_addr"),
        *("--master-port", "--master_port"),
        program="torchrun",
        instead="hvdrun runs once for all hosts. Use -H host1:N,host2:N or --hostfile.",
    ),
)

_OPPOSITES = (("--mpi", "--gloo"), ("--stall-check", "--no-stall-check"))


class _FlagAction(argparse.Action):
    """Record an option as the variables that pass it to the ranks, or refuse it with the cure."""

    flag: Flag

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self.flag.refused:
            raise argparse.ArgumentError(
                None,
                f"{option_string} is an option of {self.flag.program} that hvdrun does not have. "
                f"{self.flag.refused.removesuffix('.')}",
            )
        if self.flag.ignored:
            line = f"{option_string} has no effect. {self.flag.ignored}"
            namespace.ignored = (*getattr(namespace, "ignored", ()), line)
            return
        typed = {*getattr(namespace, "horovod", ()), str(option_string)}
        for one, other in _OPPOSITES:
            if {one, other} <= typed:
                raise argparse.ArgumentError(None, f"{one} contradicts {other}; leave one of them out")
        namespace.horovod = typed
        sets = {name: value(values) if callable(value) else value for name, value in self.flag.sets.items()}
        record_settings(self, namespace, option_string, sets)


def find_ignored(environ: Mapping[str, str]) -> list[str]:
    """Describe Horovod's variables that are set but have no effect on hvdkit's engine, each with an alternative."""
    reasons = {name: flag.ignored for flag in FLAGS for name in flag.variables} | _VARIABLES
    return [
        f"{name}={environ[name]} has no effect. {why}"
        for name, why in reasons.items()
        if environ.get(name, "") not in ("", "0")
    ]


def add_horovod_flags(parser: OptionParser) -> None:
    """Add the options, without names that hvdrun has itself."""
    group, add = parser.add_group(
        "options of horovodrun",
        "Its other options are refused; the error says what to use instead." if parser.everything else None,
    )
    add(
        "--config-file",
        metavar="FILE",
        help="horovodrun's YAML file of settings; options on the command line override it",
    )
    for flag in (*FLAGS, *OTHERS):
        names = [name for name in flag.names if name not in parser._option_string_actions]
        action = group.add_argument(
            *names,
            action=_FlagAction,
            nargs="?" if flag.refused else None if flag.has_value else 0,
            type=numbers.count_or_none if flag.has_value and not flag.takes else str,
            dest=f"horovod{names[0]}",
            default=argparse.SUPPRESS,
            metavar="N",
            help=flag.help if flag.help and parser.everything else argparse.SUPPRESS,
        )
        assert isinstance(action, _FlagAction)
        action.flag = flag
