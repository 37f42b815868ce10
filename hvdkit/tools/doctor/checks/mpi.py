"""Checks of the MPI library and the launchers: do they exist, and do they belong to the same MPI?"""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.tools.doctor.checks.abilities import GET_MPI, assess_transports
from hvdkit.tools.doctor.facts import KIND_NAMES, HostFacts, Launcher
from hvdkit.tools.doctor.findings import Finding, JobRequest

#: Kinds that speak the same language between launcher and ranks (PMIx, or PMI).
_FAMILIES = {
    "open_mpi": "Open MPI",
    "mpich": "MPICH",
    "intel_mpi": "MPICH",
    "cray_mpich": "MPICH",
    "mvapich": "MPICH",
    "pals": "MPICH",
}

#: A scheduler's launcher -> what is set where it has a job to do.
_JOBS = {"srun": "SLURM_JOB_ID", "jsrun": "LSB_JOBID"}

_ONE_MPI = (
    "Start with hvdrun, which uses the right library; or use one MPI for both: load the module or activate the "
    "environment of one of them, or set MPI4PY_LIBMPI to the libmpi that belongs to the launcher."
)


def check_mpi(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check the library and the launchers."""
    abilities = {ability.name: ability for ability in assess_transports(facts)}
    mpi = abilities["mpi"]
    if not mpi.works:
        away = abilities["gloo"].works
        rest = "torchrun with Gloo still works." if away else "Only jobs of one process work."
        yield Finding("warning" if away else "error", "mpi-missing", f"MPI cannot be used: {mpi.why}. {rest}", mpi.cure)
        return
    if facts.mpi.threads == "MPI_THREAD_SERIALIZED":
        yield Finding(
            "note",
            "mpi-threads",
            f"{facts.mpi.path or facts.mpi.library} allows one thread at a time: hvdkit's threads take turns.",
            "No action is needed; a library with MPI_THREAD_MULTIPLE overlaps more.",
        )
    if facts.hvdrun.error:
        yield Finding("error", "mpirun-missing", f"hvdrun cannot start ranks: {facts.hvdrun.error}", GET_MPI)
    else:
        yield from _check_families(facts)
    for launcher in facts.launchers:
        # A scheduler's commands on a host that is not of its cluster (any more) do no harm.
        idle = launcher.name in _JOBS and _JOBS[launcher.name] not in facts.environ
        if launcher.error and not idle:
            yield Finding(
                "warning",
                "launcher-broken",
                f"{launcher.path} does not work: {launcher.error}",
                "Repair it, load the module that it belongs to, or take its folder off PATH.",
            )


def _check_families(facts: HostFacts) -> Iterator[Finding]:
    """Find launchers that would start N processes which are each in a world of size 1."""
    library, hvdrun = facts.mpi, facts.hvdrun
    name = library.name
    family = _FAMILIES.get(library.kind)
    if family is None:
        return
    # hvdrun has its ranks load the library that belongs to its mpirun, where it finds that.
    if _FAMILIES.get(hvdrun.kind, family) != family and not hvdrun.library:
        yield Finding(
            "error",
            "launcher-of-other-mpi",
            f"hvdrun uses {hvdrun.mpirun} ({hvdrun.name} {hvdrun.version}), but mpi4py loads {name} "
            f"({library.path}): every rank would be in a world of size 1.",
            f"Set MPI4PY_LIBMPI to the libmpi of {hvdrun.name}, or take that mpirun off PATH.",
        )
        return
    trial = facts.machine.trial
    for launcher in _first_of_kind(facts):
        if _FAMILIES.get(launcher.kind, family) != family:
            tried = (
                "in a world of size 1, as two ranks were when tried"
                if set(trial.sizes) == {1}
                else "in a world of size 1"
            )
            yield Finding(
                "warning",
                "launcher-of-other-mpi",
                f"{launcher.name} on PATH is {KIND_NAMES[launcher.kind]} {launcher.version} ({launcher.path}), and "
                f"mpi4py loads {name} ({library.path}): every rank that it starts is {tried}.",
                _ONE_MPI,
            )
            return
    if set(trial.sizes) == {1}:
        yield Finding(
            "warning",
            "singletons",
            f"{trial.mpirun} -n 2 started two ranks that are each in a world of size 1, though launcher and library "
            f"are both {name}: two installations of it, or one without PMI.",
            _ONE_MPI,
        )
    elif trial.error:
        yield Finding(
            "warning",
            "mpirun-fails",
            f"{trial.mpirun} -n 2 does not start two ranks: {trial.error}",
            "hvdrun may work; else repair this MPI or use another one.",
        )


def check_srun(facts: HostFacts, job: JobRequest) -> Iterator[Finding]:
    """Check the two ranks that srun started, in an allocation."""
    trial = facts.machine.srun
    pmix = facts.mpi.kind == "open_mpi"
    best = next((kind for kind in trial.kinds if kind.startswith("pmix" if pmix else "pmi2")), "")
    option = f"srun --mpi={best}" if best else "srun of a Slurm built with PMIx" if pmix else "srun --mpi=pmi2"
    cure = f"Start with {option}; or with hvdrun or mpirun in place of srun, which find the allocation by themselves."
    if len(trial.sizes) > 1 and set(trial.sizes) == {1}:
        yield Finding(
            "warning",
            "srun-singletons",
            f"srun started two ranks that are each in a world of size 1: its PMI is not that of {facts.mpi.name}.",
            cure,
        )
    elif trial.error:
        yield Finding("warning", "srun-fails", f"srun -n 2 does not start two ranks of MPI: {trial.error}", cure)


def _first_of_kind(facts: HostFacts) -> Iterator[Launcher]:
    seen = set()
    for launcher in facts.launchers:
        if launcher.name in ("mpirun", "mpiexec") and launcher.kind not in seen:
            seen.add(launcher.kind)
            yield launcher
