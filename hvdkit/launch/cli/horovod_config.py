"""horovodrun's --config-file: a YAML file whose entries are options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.optional_import import optional_import

# Section -> key -> flag.
_VALUES: Mapping[str, Mapping[str, str]] = {
    "params": {
        "fusion_threshold_mb": "--fusion-threshold-mb",
        "cycle_time_ms": "--cycle-time-ms",
        "cache_capacity": "--cache-capacity",
    },
    "autotune": {
        "log_file": "--autotune-log-file",
        "warmup_samples": "--autotune-warmup-samples",
        "steps_per_sample": "--autotune-steps-per-sample",
        "bayes_opt_max_samples": "--autotune-bayes-opt-max-samples",
        "gaussian_process_noise": "--autotune-gaussian-process-noise",
    },
    "timeline": {"filename": "--timeline-filename"},
    "stall_check": {
        "warning_time_seconds": "--stall-check-warning-time-seconds",
        "shutdown_time_seconds": "--stall-check-shutdown-time-seconds",
    },
    "library_options": {
        "num_nccl_streams": "--num-nccl-streams",
        "thread_affinity": "--thread-affinity",
        "gloo_timeout_seconds": "--gloo-timeout-seconds",
    },
    "logging": {"level": "--log-level"},
}
# Section -> key -> (flag for true, flag for false).
_SWITCHES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "params": {
        "hierarchical_allreduce": ("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
        "hierarchical_allgather": ("--hierarchical-allgather", "--no-hierarchical-allgather"),
        "torus_allreduce": ("--torus-allreduce", "--no-torus-allreduce"),
    },
    "autotune": {"enabled": ("--autotune", "--no-autotune")},
    "timeline": {"mark_cycles": ("--timeline-mark-cycles", "--no-timeline-mark-cycles")},
    "stall_check": {"enabled": ("--stall-check", "--no-stall-check")},
    "library_options": {"mpi_threads_disable": ("--mpi-threads-disable", "--no-mpi-threads-disable")},
    "logging": {"with_timestamp": ("--log-with-timestamp", "--log-without-timestamp")},
}
_CONTROLLERS = {"mpi": "--mpi", "gloo": "--gloo"}


def read_flags(path: str) -> list[str]:
    """Read a file, and return its entries as options.

    Raises LaunchError with all entries that are not horovodrun's, MissingDependencyError without PyYAML.
    """
    yaml = optional_import("yaml", "config")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise LaunchError(
            f"--config-file {path} cannot be read: {why}. Check that the path is right and the file is YAML."
        ) from None
    return write_flags(content if content is not None else {}, path)


def write_flags(content: Any, path: str) -> list[str]:
    """Return the entries of a configuration as options. path: for messages. Raises LaunchError as `read_flags` does."""
    if not isinstance(content, Mapping):
        raise LaunchError(f"--config-file {path} has no sections. Write sections, such as params: or timeline:.")
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
        raise LaunchError(f"--config-file {path}: {'; '.join(problems)}.")
    return flags


def _write_entry(section: str, key: str, value: Any, flags: list[str], problems: list[str]) -> None:
    if value is None:
        return
    if key in _SWITCHES[section]:
        if isinstance(value, bool):
            flags.append(_SWITCHES[section][key][not value])
        else:
            problems.append(f"{section}.{key}: {value!r} is not a switch; use true or false")
    elif key in _VALUES[section]:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            flags.append(f"{_VALUES[section][key]}={value}")
        else:
            problems.append(f"{section}.{key}: {value!r} is not a single value")
    else:
        known = ", ".join((*_VALUES[section], *_SWITCHES[section]))
        problems.append(f"{section}.{key} is not an entry; use {known}")
