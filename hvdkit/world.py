"""Reads rank and size from the launcher's variables, and checks that the MPI library agrees.

A launcher is a table from our words to its variables. A new launcher is a new table.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdkit.errors import WorldError
from hvdkit.ranges import TooManyNumbersError, read_counts


@dataclass(frozen=True)
class World:
    """This process's position among the ranks of the world, which is the whole job or a part of it.

    rank: this process's number in the world, from 0.
    size: the number of ranks; 0 if the launcher does not set it (PMIx alone), and then MPI supplies it.
    local_rank: the number among the ranks of this host; None if the launcher does not set it.
    local_size: the number of ranks of this host; None as above.
    cross_rank: the number among the ranks with the same local_rank, of which a host has one; None as above.
    cross_size: the number of ranks with the same local_rank; None as above.
    host: this host's name.
    launcher: the name of the table that the variables matched; "none" for a process without a launcher.
    homogeneous: all hosts have the same number of ranks; None until `complete_world`, which fills in all None values.
    job_ranks: the ranks in MPI_COMM_WORLD of the world's ranks, in order; () if the world is the whole job.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    cross_rank: int | None
    cross_size: int | None
    host: str
    launcher: str
    homogeneous: bool | None = None
    job_ranks: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Return this rank's number for messages; if the world is a part of the job, as "1 (job rank 3)"."""
        return label_rank(self.rank, self.job_rank)

    @property
    def job_rank(self) -> int | None:
        """Return this rank's number in MPI_COMM_WORLD if the world is a part of the job; else None."""
        return self.job_ranks[self.rank] if self.job_ranks else None


def label_rank(rank: int, job_rank: int | None) -> str:
    """Return a rank's number for messages. job_rank: see World."""
    return str(rank) if job_rank is None else f"{rank} (job rank {job_rank})"


def describe_death(rank: int, host: str, job_rank: int | None = None) -> str:
    """Describe the death of a process. rank: its number in the whole world. job_rank: see World."""
    return (
        f"Rank {label_rank(rank, job_rank)} on host {host} has died: it raised an error, was killed, "
        "crashed, ran out of memory or called os._exit(). See its output, or the system log of that host."
    )


def describe_leaving(rank: int, host: str, waiting: int, job_rank: int | None = None) -> str:
    """Describe a rank that has shut hvdkit down while the rank `waiting` waits for it. job_rank: see World."""
    return (
        f"Rank {label_rank(rank, job_rank)} on host {host} has shut hvdkit down (or reached the end of its script) "
        f"while rank {waiting} still waits for it. Give every rank the same number of steps; if the "
        "optimizer has a finish(), call that on all ranks before the script ends."
    )


# Launchers nest, and the inner launcher counts, so it comes first: mpirun or srun may start torchrun, and mpirun in a
# Slurm job starts its daemons with srun, so that its ranks see SLURM_PROCID=0 and SLURM_NTASKS=1 of the daemon.
# If a word has several variables, the first that is set counts.
_LAUNCHERS: dict[str, dict[str, tuple[str, ...]]] = {
    "horovodrun": {
        "rank": ("HOROVOD_RANK",),
        "size": ("HOROVOD_SIZE",),
        "local_rank": ("HOROVOD_LOCAL_RANK",),
        "local_size": ("HOROVOD_LOCAL_SIZE",),
        "cross_rank": ("HOROVOD_CROSS_RANK",),
        "cross_size": ("HOROVOD_CROSS_SIZE",),
        "host": ("HOROVOD_HOSTNAME",),
    },
    "torchrun": {
        "rank": ("RANK",),
        "size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
        "local_size": ("LOCAL_WORLD_SIZE",),
        "cross_rank": ("GROUP_RANK",),
        "cross_size": ("GROUP_WORLD_SIZE",),
    },
    "openmpi": {
        "rank": ("OMPI_COMM_WORLD_RANK",),
        "size": ("OMPI_COMM_WORLD_SIZE",),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "local_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        "host": ("PMIX_HOSTNAME",),
    },
    "mvapich": {
        "rank": ("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),
        "size": ("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"),
        "local_rank": ("MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"),
        "local_size": ("MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"),
    },
    "pals": {
        "rank": ("PALS_RANKID",),
        "size": ("PMI_SIZE",),
        "local_rank": ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        "local_size": ("PMI_LOCAL_SIZE",),
        "cross_rank": ("PALS_NODEID",),
    },
    "jsrun": {
        "rank": ("JSM_NAMESPACE_RANK",),
        "size": ("JSM_NAMESPACE_SIZE",),
        "local_rank": ("JSM_NAMESPACE_LOCAL_RANK",),
        "local_size": ("JSM_NAMESPACE_LOCAL_SIZE",),
    },
    "hydra": {  # MPICH and Intel MPI; srun --mpi=pmi2 sets the first two as well
        "rank": ("PMI_RANK",),
        "size": ("PMI_SIZE",),
        "local_rank": ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        "local_size": ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        "host": ("PMI_HOSTNAME",),
    },
    "pmix": {"rank": ("PMIX_RANK",), "host": ("PMIX_HOSTNAME",)},
    "slurm": {
        "rank": ("SLURM_PROCID",),
        "size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "local_rank": ("SLURM_LOCALID",),
        "cross_rank": ("SLURM_NODEID",),
        "cross_size": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        "host": ("SLURMD_NODENAME",),
    },
}

#: hvdrun gives its ranks torchrun's variables, with a TORCHELASTIC_RUN_ID that begins with HVDRUN_RUN_ID, and
#: horovodrun's variables except HOROVODRUN_STORE, the address at which horovodrun's ranks connect. The launcher of
#: these ranks is still the launcher through which hvdrun has started them.
HVDRUN_RUN_ID = "hvdrun-"
HOROVODRUN_STORE = "HOROVOD_GLOO_RENDEZVOUS_ADDR"

#: Launchers that do not start MPI, even if an MPI launcher started them.
WITHOUT_MPI = frozenset({"horovodrun", "torchrun"})

_MAY_OMIT_SIZE = frozenset({"pals", "pmix"})

#: Slurm's steps from this number on (batch, extern, interactive) are not steps of ranks.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

_MOST_SLURM_NODES = 65536

_START_WITH_HVDRUN = "Or start the script with hvdrun, which selects the right mpirun."
_CURES: dict[str, str] = {
    "slurm": (
        "Start the script with `srun --mpi={pmi}` (`srun --mpi=list` shows the types of this site), or use "
        "hvdrun or mpirun inside the allocation instead of srun. A shell opened by `srun --pty` is itself a "
        "Slurm task: leave it, or use salloc."
    ),
    "openmpi": (
        "The mpirun that started the ranks belongs to Open MPI, but mpi4py has loaded another library. Use the "
        "mpirun or mpiexec of that library, or install an mpi4py for Open MPI. "
    )
    + _START_WITH_HVDRUN,
    "hydra": (
        "The mpiexec that started the ranks belongs to MPICH or Intel MPI, but mpi4py has loaded another "
        "library. Use the mpirun of that library, or install an mpi4py for MPICH. "
    )
    + _START_WITH_HVDRUN,
    "mvapich": (
        "The launcher belongs to MVAPICH, but mpi4py has loaded another library. Build mpi4py with the mpicc of "
        "MVAPICH. "
    )
    + _START_WITH_HVDRUN,
    "pals": "The launcher is Cray PALS; mpi4py must use cray-mpich. Build mpi4py with the compiler wrapper cc: "
    "`MPICC='cc -shared' pip install --no-binary mpi4py mpi4py`.",
    "jsrun": "The launcher is jsrun; mpi4py must use Spectrum MPI. Load its module and build mpi4py with its mpicc.",
    "pmix": "The MPI library of mpi4py does not support PMIx. Use the mpirun of that library. " + _START_WITH_HVDRUN,
    "torchrun": (
        "torchrun does not start MPI. Remove HVDKIT_TRANSPORT=mpi, so that the ranks communicate over torch's "
        "Gloo, or start the script with `hvdrun -np {size}` or mpirun."
    ),
    "horovodrun": (
        "horovodrun started the ranks with Gloo, not with MPI. Remove HVDKIT_TRANSPORT=mpi, so that the ranks "
        "communicate over torch's Gloo, or start the script with `hvdrun -np {size}` or mpirun."
    ),
}


def read_world(environ: Mapping[str, str] | None = None) -> World:
    """Read this process's rank, size and host from the launcher's variables.

    environ: environment variables; None reads os.environ.
    Values that the launcher leaves out are derived where they follow (one host, or one rank), else None.
    Raises WorldError that names every variable with an impossible value.
    """
    variables = {name: value for name, value in (os.environ if environ is None else environ).items() if value}
    launcher = _find_launcher(variables)
    if launcher == "none":
        return World(0, 1, 0, 1, 0, 1, socket.gethostname(), "none")
    table = _LAUNCHERS[launcher]
    numbers, problems = _read_numbers(variables, table, launcher)
    if launcher == "slurm" and not problems:
        numbers["local_size"] = _slurm_local_size(variables, numbers.get("cross_rank"))
    problems += _check_numbers(variables, table, numbers)
    if problems:
        raise WorldError(
            f"The variables of {launcher} are invalid: {'; '.join(problems)}. If they are left over from another "
            "job, unset them. Otherwise start the ranks again with hvdrun."
        )
    host = next((variables[name] for name in table.get("host", ()) if name in variables), None)
    rank, size = numbers["rank"], numbers["size"] or 0
    assert rank is not None  # _find_launcher() found the launcher by this variable
    local_rank, local_size = numbers.get("local_rank"), numbers.get("local_size")
    cross_rank, cross_size = numbers.get("cross_rank"), numbers.get("cross_size")
    if size == 1 or cross_size == 1:
        local_rank, local_size, cross_rank, cross_size = rank, size, 0, 1
    elif size and local_size == size:
        cross_rank, cross_size = 0, 1
    return World(rank, size, local_rank, local_size, cross_rank, cross_size, host or socket.gethostname(), launcher)


def under_agent(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether hvdrun's agent started this process and ends the job when it fails."""
    return (os.environ if environ is None else environ).get("HVDKIT_AGENT") == "1"


def read_job(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return the name of this process's hvdrun job and the host of hvdrun; ("", "") without hvdrun."""
    name, _, host = (os.environ if environ is None else environ).get("HVDKIT_JOB", "").partition("@")
    return name, host


def parse_slurm_counts(text: str) -> list[int]:
    """Parse Slurm's counts: "2(x3),1" is three nodes with two tasks each, then one node with one task.

    Raises ValueError with a text that continues a message after the variable's name and value.
    """
    try:
        return read_counts(text, _MOST_SLURM_NODES)
    except TooManyNumbersError:
        raise ValueError(f"lists more than {_MOST_SLURM_NODES} nodes") from None
    except ValueError:
        raise ValueError("cannot be parsed; the expected form is '2(x3),1'") from None


def complete_world(
    world: World,
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    cross_rank: int,
    cross_size: int,
    homogeneous: bool,
    job_ranks: Sequence[int] = (),
) -> World:
    """Return `world` with these fields, found among the connected ranks, in place of the launcher's; see World."""
    return replace(
        world,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=cross_rank,
        cross_size=cross_size,
        homogeneous=homogeneous,
        job_ranks=tuple(job_ranks),
    )


def check_world(world: World, mpi_size: int, mpi_library: str) -> None:
    """Check that the launcher's number of tasks equals the size that MPI found.

    mpi_library: MPI's own description of its library, of any length.
    Raises WorldError with both numbers and the cure.
    """
    if world.launcher == "none" or world.size in (0, mpi_size):
        return
    library = re.split(r"[,\n\0]", mpi_library.strip(), maxsplit=1)[0].strip()
    seen = (
        f"{world.launcher} started {world.size} task{'s' * (world.size != 1)}, this one as rank {world.rank} on "
        f"{world.host}, but MPI sees a world of size {mpi_size} (MPI library of mpi4py: {library})."
    )
    if mpi_size == 1:
        pmi = "pmix" if "Open MPI" in mpi_library else "pmi2"
        cure = _CURES[world.launcher].format(size=world.size, pmi=pmi)
        raise WorldError(f"{seen} Each rank would train alone. {cure}")
    raise WorldError(f"{seen} One launcher was started inside another. Start the ranks once, with hvdrun or mpirun.")


def _find_launcher(variables: Mapping[str, str]) -> str:
    for launcher, table in _LAUNCHERS.items():
        named = any(name in variables for name in table["rank"])
        if named and (launcher not in _APPLIES or _APPLIES[launcher](variables)):
            return launcher
    # Without the address of their store the ranks of horovodrun cannot connect, and init() raises an error. In a child
    # process of a rank of hvdrun's the numbers are that rank's.
    lost = "HOROVOD_RANK" in variables and not has_hvdruns_torch_variables(variables)
    return "horovodrun" if lost else "none"


def has_master_address() -> bool:
    """Return whether MASTER_ADDR or MASTER_PORT is set, by which torch.distributed's ranks find each other."""
    return any(name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT"))


def has_hvdruns_torch_variables(variables: Mapping[str, str]) -> bool:
    """Return whether hvdrun, not a torchrun that a rank of hvdrun's has started, has set torchrun's variables."""
    return variables.get("TORCHELASTIC_RUN_ID", "").startswith(HVDRUN_RUN_ID)


def name_as_horovodrun(words: Mapping[str, int | str]) -> dict[str, str]:
    """Return the given words of a World, with their values, under the names of horovodrun's variables."""
    return {_LAUNCHERS["horovodrun"][word][0]: str(value) for word, value in words.items()}


def is_torchrun(variables: Mapping[str, str]) -> bool:
    """Return whether torchrun has set these variables."""
    named = "TORCHELASTIC_RUN_ID" in variables or "GROUP_RANK" in variables
    return named and not has_hvdruns_torch_variables(variables)


def is_slurm_step(variables: Mapping[str, str]) -> bool:
    """Return whether this is a task of a Slurm step; a batch script is not, though it has a SLURM_PROCID."""
    step = variables.get("SLURM_STEP_ID", "")
    return step != "" and not (step.isdecimal() and len(step) < 20 and int(step) >= _FIRST_SPECIAL_STEP)


def _is_hydra(variables: Mapping[str, str]) -> bool:
    # srun --mpi=pmi2 sets PMI_RANK too, equal to Slurm's own; Hydra inside a Slurm job sets the local rank itself.
    same = (variables["PMI_RANK"], variables.get("PMI_SIZE")) == (
        variables.get("SLURM_PROCID"),
        variables.get("SLURM_STEP_NUM_TASKS", variables.get("SLURM_NTASKS")),
    )
    return "MPI_LOCALRANKID" in variables or not (same and is_slurm_step(variables))


def _is_pmix(variables: Mapping[str, str]) -> bool:
    return not variables.get("PMIX_NAMESPACE", "").startswith("slurm.")


_APPLIES: dict[str, Callable[[Mapping[str, str]], bool]] = {
    "horovodrun": lambda variables: HOROVODRUN_STORE in variables,
    "torchrun": is_torchrun,
    "hydra": _is_hydra,
    "pmix": _is_pmix,
    "slurm": is_slurm_step,
}


def _read_numbers(
    variables: Mapping[str, str], table: Mapping[str, tuple[str, ...]], launcher: str
) -> tuple[dict[str, int | None], list[str]]:
    numbers: dict[str, int | None] = {"size": None}
    problems = []
    for word, names in table.items():
        name = next((name for name in names if name in variables), None)
        if word == "host":
            continue
        if name is None:
            if word == "size" and launcher not in _MAY_OMIT_SIZE:
                problems.append(f"{' or '.join(names)} is not set, although the rank is")
        elif re.fullmatch(r"\s*\d+\s*", variables[name], re.ASCII):
            numbers[word] = int(variables[name])
        else:
            problems.append(f"{name}={variables[name]!r} is not a number from 0 up")
    return numbers, problems


def _check_numbers(
    variables: Mapping[str, str], table: Mapping[str, tuple[str, ...]], numbers: Mapping[str, int | None]
) -> list[str]:
    problems = []
    for kind in ("", "local_", "cross_"):
        rank, size = numbers.get(f"{kind}rank"), numbers.get(f"{kind}size")
        if rank is not None and size is not None and rank >= size:
            rank_name, size_name = (
                next((name for name in table.get(word, ()) if name in variables), word)
                for word in (f"{kind}rank", f"{kind}size")
            )
            problems.append(f"{rank_name}={rank} must be below {size_name}={size}")
    return problems


def _slurm_local_size(variables: Mapping[str, str], node: int | None) -> int | None:
    """Return the number of tasks on this node; None if unknown."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE", "")
    try:
        counts = parse_slurm_counts(text)
    except ValueError as error:
        raise WorldError(f"SLURM_STEP_TASKS_PER_NODE={text!r} {error}.") from None
    return counts[node] if node is not None and node < len(counts) else None
