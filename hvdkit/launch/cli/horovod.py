"""horovodrun's options that hvdrun does not have itself, and its --config-file, a YAML file of options.

Each option is accepted with its meaning, or accepted without effect and with a note, or refused with a cure.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.launch.cli import numbers
from hvdkit.launch.cli.parser import OptionParser, record_settings
from hvdkit.launch.plan.horovod_options import FLAGS, OTHERS, Flag
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
            type=numbers.nonnegative_int if flag.has_value and not flag.takes else str,
            dest=f"horovod{names[0]}",
            default=argparse.SUPPRESS,
            metavar="N",
            help=flag.help if flag.help and parser.everything else argparse.SUPPRESS,
        )
        assert isinstance(action, _FlagAction)
        action.flag = flag
