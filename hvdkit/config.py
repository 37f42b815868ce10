"""Defines every setting of hvdkit as a field, with its variable, unit, default and meaning.

Precedence: argument, HVDKIT_ variable, Horovod's variable of the same meaning, default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from hvdkit.errors import ConfigError
from hvdkit.setting import MIB, Choice, Setting, Settings, choice, parse_bool, parse_bytes, read_arguments, setting

_S = TypeVar("_S", bound=Settings)


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """hvdkit's own settings, read once by `init()`."""

    engine: str = setting(
        "auto",
        choice("auto", "native", "horovod"),
        "engine that performs collectives: hvdkit's own (native) or Horovod's core (horovod); auto selects Horovod's "
        "core under horovodrun --gloo, else native",
        flag="--engine",
    )
    transport: str = setting(
        "auto",
        choice("auto", "single", "mpi", "gloo", "shared_memory", "hierarchical"),
        "transport of the native engine; auto selects shared memory within a host and MPI between hosts (Gloo under "
        "torchrun)",
        flag="--transport",
    )
    device_transport: str = setting(
        "auto",
        choice("auto", "torch", "nccl", "host"),
        "transport of tensors on GPUs: a process group of torch (in PyTorch) or NCCL (in TensorFlow and JAX), or "
        "through host memory; auto selects the first if every rank has a GPU of its own and the library can be "
        "loaded, else host, with a notice; with torch or nccl that is an error. torch on tensors of the CPU uses "
        "Gloo, for tests; the other values have no effect on tensors of the CPU",
        flag="--device-transport",
    )
    device_sums: str = setting(
        "library",
        choice("library", "float32"),
        "sums of gradients on GPUs, in PyTorch: by the library, which may round 16-bit numbers after each addition "
        "(library), or by rank, in float32 or wider, and rounded once, with equal bits in every run (float32)",
        flag="--device-sums",
    )
    nccl_library: str = setting(
        "",
        str,
        "file of NCCL or RCCL for TensorFlow and JAX, as /opt/nccl/lib/libnccl.so.2; empty finds that of the framework",
    )
    share_gpus: bool = setting(
        False,
        parse_bool,
        "for tests on one host: let several ranks share a GPU; hvdrun sets variables of NCCL for that, unless they are "
        "set; shows that results are correct, never how long they take",
        flag="--share-gpus",
    )
    fusion_bytes: int = setting(
        4 * MIB,
        parse_bytes,
        "size of a gradient bucket; 0 reduces each tensor separately; buckets on GPUs have 25 MiB unless this is set",
        flag="--fusion-bytes",
        least=0,
        metavar="BYTES",
    )
    buckets_in_flight: int = setting(
        4,
        int,
        "maximum number of buckets reduced at the same time; a smaller number needs less cache, a larger one tolerates "
        "more skew between ranks",
        flag="--buckets-in-flight",
        least=1,
        metavar="N",
    )
    progress: str = setting(
        "auto",
        choice("auto", "thread", "inline"),
        "what drives reductions: a separate thread, or the training thread (inline); auto selects a thread if a core "
        "is free",
        flag="--progress",
    )
    chunk_bytes: int = setting(
        512 * 1024,
        parse_bytes,
        "size of the pieces in which a rank sums a bucket in shared memory; small pieces stay in the cache of a core",
        flag="--chunk-bytes",
        least=4096,
        metavar="BYTES",
    )
    malloc_keep_bytes: int = setting(
        1024 * MIB,
        parse_bytes,
        "freed memory that glibc's malloc keeps for the next step instead of returning it to the kernel; 0 leaves "
        "malloc unchanged, as do the variables MALLOC_..._ and GLIBC_TUNABLES",
        flag="--malloc-keep-bytes",
        least=0,
        metavar="BYTES",
    )
    gc_freeze: bool = setting(
        True,
        parse_bool,
        "exclude the objects that exist at the first init() from Python's garbage collection (gc.freeze)",
    )
    autotune: bool = setting(
        False,
        parse_bool,
        "tune bucket size, buckets in flight, chunk size, progress and algorithm during the first steps",
        horovod="HOROVOD_AUTOTUNE",
        flag="--autotune",
    )
    autotune_steps: int = setting(
        200,
        int,
        "maximum number of steps for --autotune, ten per trial",
        flag="--autotune-steps",
        least=10,
        metavar="N",
    )
    autotune_log: str = setting(
        "",
        str,
        "CSV file for the trials of --autotune",
        horovod="HOROVOD_AUTOTUNE_LOG",
        flag="--autotune-log-file",
        metavar="FILE",
    )
    autotune_save: str = setting(
        "",
        str,
        "file for the settings that --autotune selects; implies --autotune",
        flag="--autotune-save",
        metavar="FILE",
    )
    tuned: str = setting(
        "", str, "use the settings in this file, which --autotune-save has written", flag="--tuned", metavar="FILE"
    )
    algorithm: str = setting(
        "auto",
        choice("auto", "library", "pieces", "doubling", "halving"),
        "allreduce algorithm between hosts; auto selects the fastest for each size by measurement",
        flag="--algorithm",
    )
    small_bytes: int = setting(
        64 * 1024,
        parse_bytes,
        "size below which an allreduce between hosts uses that of MPI or Gloo; within a host, all sizes use shared "
        "memory",
        least=0,
    )
    stall_check_s: float = setting(
        60.0,
        float,
        "seconds after which a stalled operation is reported with the stacks of the missing ranks; 0 disables this",
        horovod="HOROVOD_STALL_CHECK_TIME_SECONDS",
        disable="HOROVOD_STALL_CHECK_DISABLE",
        flag="--stall-check-s",
        least=0,
        metavar="SECONDS",
    )
    stall_shutdown_s: float = setting(
        0.0,
        float,
        "seconds after which a stalled operation fails; 0 waits forever",
        horovod="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        disable="HOROVOD_STALL_CHECK_DISABLE",
        flag="--stall-shutdown-s",
        least=0,
        metavar="SECONDS",
    )
    bind: str = setting(
        "auto",
        choice("auto", "none", "core", "numa"),
        "CPU binding: auto binds each rank to its share of the host's cores unless the launcher has bound it, core "
        "does so in any case, numa binds to the NUMA nodes of that share, none does not bind",
        flag="--bind",
    )
    elastic: bool = setting(
        False,
        parse_bool,
        "continue training when ranks die: under Open MPI 5 the other ranks continue (elastic.run) and lost ranks are "
        "replaced; under other MPIs hvdrun restarts the job from its last checkpoint",
        flag="--elastic",
    )
    elastic_restarts: bool = setting(
        False,
        parse_bool,
        "with --elastic: restart the job when a rank dies, even if the other ranks could continue (always so under "
        "MPIs without fault tolerance)",
        flag="--elastic-restarts",
    )
    min_np: int = setting(
        0,
        int,
        "minimum number of ranks; below it the job ends (0 means 1); implies --elastic",
        flag="--min-np",
        least=0,
        metavar="N",
    )
    max_np: int = setting(
        0,
        int,
        "maximum number of ranks; lost ranks are replaced up to it (0 means the initial number); implies --elastic",
        flag="--max-np",
        least=0,
        metavar="N",
    )
    elastic_checkpoints: str = setting(
        "",
        str,
        "with --elastic: directory for checkpoints of committed states, written periodically, at SIGTERM and when too "
        "few ranks remain; a restarted job continues from them",
        flag="--elastic-checkpoints",
        metavar="DIR",
    )
    elastic_hang_timeout_s: float = setting(
        60.0,
        float,
        "with --elastic: seconds after which a rank is killed if it is stopped, or if the other ranks wait for it "
        "after a change of membership; 0 disables this",
        flag="--elastic-hang-timeout-s",
        least=0,
        metavar="SECONDS",
    )
    elastic_save_s: float = setting(
        5.0,
        float,
        "minimum number of seconds between two checkpoints in --elastic-checkpoints",
        flag="--elastic-save-s",
        least=0,
        metavar="SECONDS",
    )
    launcher_channel: str = setting(
        "", str, "inherited socket on which a rank reports its progress to hvdrun; set by the agent"
    )
    elastic_command: str = setting("", str, "command that starts a replacement rank, as JSON; set by the agent")
    host_slots: int = setting(0, int, "number of slots of this host; set by hvdrun", least=0)
    check_replicas: int = setting(
        0,
        int,
        "number of optimizer steps between two checks that all ranks have equal parameters; 0 disables the check",
        flag="--check-replicas",
        least=0,
        metavar="N",
    )
    straggler_percent: float = setting(
        20.0,
        float,
        "report a rank if the other ranks wait for it longer than this percentage of the step time, in each of 150 "
        "steps; 0 disables the report",
        flag="--straggler-percent",
        least=0,
        most=100,
        metavar="N",
    )
    timeline: str = setting(
        "",
        str,
        "file for a Chrome trace of all named operations, written by rank 0",
        horovod="HOROVOD_TIMELINE",
        flag="--timeline-filename",
        metavar="FILE",
    )
    profile: str = setting("", str, "address of `hvdkit profile`; set by that command", secret=True)
    metrics_s: float = setting(
        0.0,
        float,
        "seconds between two reports of this rank's sums to hvdrun, for its --metrics-port, which sets it; 0 for none",
        least=0,
    )
    shared_directory: str = setting("/dev/shm", str, "directory for shared memory; must be on a memory file system")
    log_level: str = setting(
        "warning",
        choice("trace", "debug", "info", "warning", "error", "fatal", "critical"),
        "minimum level of hvdkit's log messages",
        horovod="HOROVOD_LOG_LEVEL",
        flag="--log-level",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.max_np and self.min_np > self.max_np:
            problems.append(f"min_np is {self.min_np} and max_np is {self.max_np}; min_np must not exceed max_np")
        fixed = self.engine not in ("auto", "native") or self.transport in ("gloo", "single")
        if self.elastic and fixed and not self.elastic_restarts:
            problems.append(
                f"elastic needs the native engine over MPI, but engine is {self.engine} and transport is "
                f"{self.transport}; leave both out, or set elastic_restarts, which restarts the job when a rank dies"
            )
        if self.engine not in ("auto", "native") and self.transport != "auto":
            problems.append(
                f"transport={self.transport} is for the native engine, but engine={self.engine} has its own transport; "
                "leave one of the two out"
            )
        if self.engine not in ("auto", "native") and self.device_transport != "auto":
            problems.append(
                f"device_transport={self.device_transport} is for the native engine, but engine={self.engine} has "
                "its own transport; leave one of the two out"
            )
        if self.engine not in ("auto", "native") and self.device_sums != "library":
            problems.append(
                f"device_sums={self.device_sums} is for the native engine, but engine={self.engine} has its own sums; "
                "leave one of the two out"
            )
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def searches(self) -> bool:
        """Return whether the engine tunes its settings in the first steps."""
        return self.autotune or bool(self.autotune_save)


def read_environment() -> dict[str, str]:
    """Copy the environment of this process, for code that takes it as an argument (hvdrun)."""
    return dict(os.environ)


def read_settings(environ: Mapping[str, str] | None = None, kind: type[Settings] = Config) -> list[Setting]:
    """Read every setting of a dataclass, with the origin of its value.

    environ: environment variables; None reads os.environ.
    kind: the dataclass, Config or that of a package.
    Raises ConfigError with all variables that have an invalid value.
    """
    variables = os.environ if environ is None else environ
    found, problems = [], []
    for item in fields(kind):
        full = kind.name_of(item.name)
        variable, horovod, disable = f"HVDKIT_{full.upper()}", item.metadata["horovod"], item.metadata["disable"]
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
                kinds = {int: "use a whole number", float: "use a number"} if name != disable else {}
                problems.append(f"{name}={text!r}: {kinds.get(item.metadata['parse'], str(error))}")
            break
        found.append(
            Setting(
                full,
                variable,
                horovod,
                item.metadata["flag"],
                item.metadata["help"],
                item.default,
                value,
                origin,
                item.metadata["secret"],
                item.metadata["parse"].names if isinstance(item.metadata["parse"], Choice) else (),
                item.metadata["metavar"],
            )
        )
    if problems:
        raise ConfigError("Invalid settings: " + "; ".join(problems))
    return found


def read_config(environ: Mapping[str, str] | None = None, **arguments: Any) -> Config:
    """Build the Config from the environment; keyword arguments take precedence, except those that are None.

    Raises ConfigError for an invalid value, TypeError for an unknown argument.
    """
    values = {item.name: item.value for item in read_settings(environ)}
    return Config(**values | read_arguments(arguments, values))


def read_package_config(kind: type[_S], environ: Mapping[str, str] | None = None) -> _S:
    """Build a package's dataclass of settings from the environment. Raises ConfigError for an invalid value.

    kind: the dataclass.
    environ: environment variables; None reads os.environ.
    """
    found = read_settings(environ, kind)
    return kind(**{item.name: each.value for item, each in zip(fields(kind), found, strict=True)})
