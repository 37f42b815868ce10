"""Options of horovodrun and other launchers, and Horovod's variables: what each sets, or why it has no effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


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


def find_ignored(environ: Mapping[str, str]) -> list[str]:
    """Describe Horovod's variables that are set but have no effect on hvdkit's engine, each with an alternative."""
    reasons = {name: flag.ignored for flag in FLAGS for name in flag.variables} | _VARIABLES
    return [
        f"{name}={environ[name]} has no effect. {why}"
        for name, why in reasons.items()
        if environ.get(name, "") not in ("", "0")
    ]
