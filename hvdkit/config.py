"""Every setting of hvdkit: one field each, with its variable, unit, default and meaning.

An argument beats an HVDKIT_ variable, which beats Horovod's variable of the same meaning, which beats the default.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hvdkit.errors import ConfigError

MIB = 1024 * 1024


def parse_bool(text: str) -> bool:
    """Turn "1 true yes on" or "0 false no off" (any case) into a bool; ValueError for anything else."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("use 1 or 0")


def parse_bytes(text: str) -> int:
    """Turn "4194304", "4096k", "4m" or "1g" (binary multiples, any case) into a number of bytes."""
    word = text.strip().lower().removesuffix("b").removesuffix("i")
    factor = {"k": 1024, "m": MIB, "g": 1024 * MIB}.get(word[-1:], 1)
    number = float(word.rstrip("kmg")) * factor
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is no number of bytes")
    return int(number)


def choice(*names: str) -> Callable[[str], str]:
    """Make a parser that accepts just these names, in any case."""

    def parse(text: str) -> str:
        if text.strip().lower() not in names:
            raise ValueError(f"use one of {', '.join(names)}")
        return text.strip().lower()

    return parse


def setting(
    default: Any,
    parse: Callable[[str], Any],
    help: str,
    *,
    horovod: str = "",
    disable: str = "",
    flag: str = "",
    secret: bool = False,
) -> Any:
    """Describe a field of Config.

    parse: turns the variable's text into the value; raises ValueError saying what would be accepted.
    horovod: Horovod's variable of the same meaning and unit. disable: Horovod's that makes the setting 0 if it is true.
    flag: the option of hvdrun that sets it; "" for none. secret: its value is not to be shown.
    """
    metadata = {"parse": parse, "help": help, "horovod": horovod, "disable": disable, "flag": flag, "secret": secret}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings, read once by `init()`."""

    engine: str = setting(
        "auto",
        choice("auto", "native", "horovod"),
        "what carries operations out: hvdkit itself, or Horovod's core; auto takes that under horovodrun's Gloo",
        flag="--engine",
    )
    transport: str = setting(
        "auto",
        choice("auto", "single", "mpi", "gloo", "shared_memory", "hierarchical"),
        "how bytes travel; auto takes shared memory inside a host, and MPI between hosts (Gloo under torchrun)",
        flag="--transport",
    )
    fusion_bytes: int = setting(
        4 * MIB,
        parse_bytes,
        "bytes of gradients in a bucket; 0 sends each tensor by itself",
        flag="--fusion-bytes",
    )
    buckets_in_flight: int = setting(
        4,
        int,
        "buckets that may be under way at a time; few stay in cache, more let ranks drift further apart",
        flag="--buckets-in-flight",
    )
    progress: str = setting(
        "auto",
        choice("auto", "thread", "inline"),
        "who drives a reduction: a thread of its own, or the training thread; auto: a thread if a core is spare",
        flag="--progress",
    )
    chunk_bytes: int = setting(
        512 * 1024,
        parse_bytes,
        "bytes of a bucket that are summed and handed out at a time in shared memory; few stay in a core's own cache",
        flag="--chunk-bytes",
    )
    malloc_keep_bytes: int = setting(
        1024 * MIB,
        parse_bytes,
        "freed bytes that glibc's malloc keeps for the next step, where it would give them back to the kernel; 0 "
        "leaves malloc alone, as MALLOC_..._ and GLIBC_TUNABLES do",
        flag="--malloc-keep-bytes",
    )
    gc_freeze: bool = setting(
        True,
        parse_bool,
        "leave the objects that are there at the first init() out of Python's garbage collections, each of which looks "
        "at all of them otherwise",
    )
    autotune: bool = setting(
        False,
        parse_bool,
        "find the bucket size, the buckets in flight, the chunk, the progress and the algorithm that suit the training "
        "in its first steps",
        horovod="HOROVOD_AUTOTUNE",
        flag="--autotune",
    )
    autotune_steps: int = setting(
        200, int, "steps that --autotune may search in, ten for each trial", flag="--autotune-steps"
    )
    autotune_log: str = setting(
        "", str, "CSV file for what --autotune tries", horovod="HOROVOD_AUTOTUNE_LOG", flag="--autotune-log-file"
    )
    autotune_save: str = setting(
        "", str, "file in which --autotune, which this implies, keeps what it has found", flag="--autotune-save"
    )
    tuned: str = setting("", str, "file of --autotune-save whose settings are taken", flag="--tuned")
    algorithm: str = setting(
        "auto",
        choice("auto", "library", "pieces", "doubling", "halving"),
        "how gradients are summed between hosts; auto takes what is fastest there, by size, from what is measured",
        flag="--algorithm",
    )
    small_bytes: int = setting(
        64 * 1024,
        parse_bytes,
        "an allreduce between hosts goes to MPI or Gloo alone below this many bytes; within one host memory is shared",
    )
    stall_check_s: float = setting(
        60.0,
        float,
        "seconds that an operation waits for some ranks before that is told, with what they are doing; 0 never",
        horovod="HOROVOD_STALL_CHECK_TIME_SECONDS",
        disable="HOROVOD_STALL_CHECK_DISABLE",
        flag="--stall-check-s",
    )
    stall_shutdown_s: float = setting(
        0.0,
        float,
        "seconds after which such an operation fails; 0 waits for ever",
        horovod="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        disable="HOROVOD_STALL_CHECK_DISABLE",
        flag="--stall-shutdown-s",
    )
    bind: str = setting(
        "auto",
        choice("auto", "none", "core", "numa"),
        "which cores each rank of a host may use: auto, its part, unless the launcher has bound it; core, that in any "
        "case; numa, the NUMA nodes of its part; none, all",
        flag="--bind",
    )
    elastic: bool = setting(
        False,
        parse_bool,
        "training goes on when ranks die: with elastic.run within the job, under Open MPI 5, which takes in others in "
        "their place; under other MPIs hvdrun starts it again from its last checkpoint",
        flag="--elastic",
    )
    elastic_restarts: bool = setting(
        False,
        parse_bool,
        "with --elastic: hvdrun starts the job again when a rank dies, also where the others could go on; so it is "
        "under MPIs without fault tolerance",
        flag="--elastic-restarts",
    )
    min_np: int = setting(
        0, int, "training ends when fewer ranks than this are left, 1 for 0; implies --elastic", flag="--min-np"
    )
    max_np: int = setting(
        0, int, "ranks are replaced up to this many, as many as were started for 0; implies --elastic", flag="--max-np"
    )
    elastic_checkpoints: str = setting(
        "",
        str,
        "with --elastic: folder in which commits are saved now and then, at SIGTERM, and when too few ranks are left; "
        "a job that is started again goes on from there",
        flag="--elastic-checkpoints",
    )
    elastic_patience_s: float = setting(
        60.0,
        float,
        "with --elastic: a rank is killed that is stopped for longer, or that others wait for longer to go on with "
        "after a change; 0 never",
        flag="--elastic-patience-s",
    )
    elastic_save_s: float = setting(
        5.0, float, "seconds from one commit that is saved there to the next, at least", flag="--elastic-save-s"
    )
    news: str = setting("", str, "open socket through which a rank tells hvdrun how far it is; agents set this")
    elastic_command: str = setting("", str, "what starts another rank, as JSON; hvdrun's agents set this")
    host_slots: int = setting(0, int, "ranks that this host has slots for; hvdrun sets this")
    check_replicas: int = setting(
        0,
        int,
        "steps of an optimizer after which it is checked that all ranks' parameters are equal; 0 never",
        flag="--check-replicas",
    )
    straggler_percent: float = setting(
        20.0,
        float,
        "tell of a rank that the others wait for, 150 steps long, for more than so much of each step; 0 never",
        flag="--straggler-percent",
    )
    timeline: str = setting(
        "",
        str,
        "file for a Chrome trace of all named operations, written by rank 0; none if empty",
        horovod="HOROVOD_TIMELINE",
        flag="--timeline-filename",
    )
    profile: str = setting("", str, "where `hvdkit profile` listens, which sets this", secret=True)
    shared_directory: str = setting("/dev/shm", str, "where node-shared memory is made; must be a memory file system")
    wrap_batch: str = setting(
        "split",
        choice("split", "multiply"),
        "with --wrap: split each batch of the script over the ranks, or give every rank one of that size",
        flag="--wrap-batch",
    )
    wrap_rate: str = setting(
        "linear",
        choice("linear", "sqrt", "keep"),
        "with --wrap-batch multiply: scale the learning rate by the number of ranks, its root, or not",
        flag="--wrap-rate",
    )
    wrap_warmup: float = setting(
        1.0,
        float,
        "with --wrap-batch multiply: epochs over which the learning rate rises to that; 0 for none",
        flag="--wrap-warmup",
    )
    wrap_batch_norm: str = setting(
        "rank",
        choice("rank", "all"),
        "with --wrap: torch's batch normalization over the rows of each rank, or over those of all",
        flag="--wrap-batch-norm",
    )
    wrap_seed: int = setting(
        0, int, "with --wrap: what the random numbers of all ranks begin with, unless the script says; hvdrun draws it"
    )
    log_level: str = setting(
        "warning",
        choice("trace", "debug", "info", "warning", "error", "fatal", "critical"),
        "least level of hvdkit's own messages",
        horovod="HOROVOD_LOG_LEVEL",
        flag="--log-level",
    )

    def __post_init__(self) -> None:
        problems = []
        if self.fusion_bytes < 0:
            problems.append(f"fusion_bytes is {self.fusion_bytes}; it must be 0 or more")
        if self.buckets_in_flight < 1:
            problems.append(f"buckets_in_flight is {self.buckets_in_flight}; it must be 1 or more")
        if self.chunk_bytes < 4096:
            problems.append(f"chunk_bytes is {self.chunk_bytes}; it must be 4096 or more")
        if self.malloc_keep_bytes < 0:
            problems.append(f"malloc_keep_bytes is {self.malloc_keep_bytes}; it must be 0 or more")
        if self.autotune_steps < 10:
            problems.append(f"autotune_steps is {self.autotune_steps}; a trial takes 10")
        if self.straggler_percent < 0:
            problems.append(f"straggler_percent is {self.straggler_percent}; it must be 0 or more")
        if self.min_np < 0:
            problems.append(f"min_np is {self.min_np}; it must be 0 or more")
        if self.max_np < 0:
            problems.append(f"max_np is {self.max_np}; it must be 0 or more")
        if self.small_bytes < 0:
            problems.append(f"small_bytes is {self.small_bytes}; it must be 0 or more")
        if self.check_replicas < 0:
            problems.append(f"check_replicas is {self.check_replicas}; it must be 0 or more")
        if self.wrap_warmup < 0:
            problems.append(f"wrap_warmup is {self.wrap_warmup}; it must be 0 or more")
        if self.elastic_patience_s < 0:
            problems.append(f"elastic_patience_s is {self.elastic_patience_s:g}; it must be 0 or more")
        if self.elastic_save_s < 0:
            problems.append(f"elastic_save_s is {self.elastic_save_s}; it must be 0 or more")
        stays = self.engine == "horovod" or self.transport in ("gloo", "single")
        if self.elastic and stays and not self.elastic_restarts:
            problems.append(
                f"elastic is for hvdkit's own engine over MPI, and engine is {self.engine}, transport is "
                f"{self.transport}; leave those out, or have the job started again when a rank dies: elastic_restarts"
            )
        if self.engine == "horovod" and self.transport != "auto":
            problems.append(
                f"transport={self.transport} is for hvdkit's own engine, and engine=horovod moves bytes itself; leave "
                f"one of them out"
            )
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def searches(self) -> bool:
        """Are settings to be found in the first steps?"""
        return self.autotune or bool(self.autotune_save)


@dataclass(frozen=True)
class Setting:
    """One setting as it stands: for `hvdkit doctor --settings` and for hvdrun's flags."""

    name: str
    variable: str
    horovod: str
    flag: str
    help: str
    default: Any
    value: Any
    origin: str
    secret: bool = False

    @property
    def shown(self) -> Any:
        """The value, for whom it may be shown to."""
        return "(not shown)" if self.secret and self.value else self.value


def read_environment() -> dict[str, str]:
    """Copy this process's variables, for code that takes them as an argument (hvdrun)."""
    return dict(os.environ)


def read_settings(environ: Mapping[str, str] | None = None) -> list[Setting]:
    """Read every setting, with where its value comes from.

    environ: the variables; this process's own if None.
    Raises ConfigError naming all variables that cannot be understood, together.
    """
    variables = os.environ if environ is None else environ
    found, problems = [], []
    for item in fields(Config):
        variable, horovod, disable = f"HVDKIT_{item.name.upper()}", item.metadata["horovod"], item.metadata["disable"]
        value, origin = item.default, "default"
        for name in (variable, disable, horovod):
            text = variables.get(name, "") if name else ""
            if not text:
                continue
            try:
                if name == disable:
                    if not parse_bool(text):
                        continue
                    value, origin = item.metadata["parse"]("0"), name
                else:
                    value, origin = item.metadata["parse"](text), name
            except ValueError as error:
                problems.append(f"{name}={text!r}: {error}")
            break
        found.append(
            Setting(
                item.name,
                variable,
                horovod,
                item.metadata["flag"],
                item.metadata["help"],
                item.default,
                value,
                origin,
                item.metadata["secret"],
            )
        )
    if problems:
        raise ConfigError("Settings that cannot be used: " + "; ".join(problems))
    return found


def read_config(environ: Mapping[str, str] | None = None, **arguments: Any) -> Config:
    """Build the Config from the environment; keyword arguments beat it.

    Raises ConfigError for a value that cannot be used, TypeError for an unknown argument.
    """
    values = {item.name: item.value for item in read_settings(environ)}
    return Config(**{**values, **arguments})
