"""The MPI library and the launchers: is there one of each, and are they of the same MPI?"""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.tools.doctor.abilities import GET_MPI, judge_transports
from hvdkit.tools.doctor.facts import KIND_NAMES, Facts, Launcher
from hvdkit.tools.doctor.finding import Finding
from hvdkit.tools.doctor.job import Job

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
    "Start with hvdrun, which takes the right library; or make them one MPI: load the module or activate the "
    "environment of one of them, or set MPI4PY_LIBMPI to the libmpi that belongs to the launcher."
)


def check_mpi(facts: Facts, job: Job) -> Iterator[Finding]:
    """Judge library and launchers."""
    abilities = {ability.name: ability for ability in judge_transports(facts)}
    mpi = abilities["mpi"]
    if not mpi.works:
        away = abilities["gloo"].works
        rest = "What is left is torchrun with Gloo." if away else "Only jobs of one process can run."
        yield Finding("warning" if away else "error", "mpi-missing", f"MPI cannot be used: {mpi.why}. {rest}", mpi.cure)
        return
    if facts.mpi.threads == "MPI_THREAD_SERIALIZED":
        yield Finding(
            "note",
            "mpi-threads",
            f"{facts.mpi.path or facts.mpi.library} lets one thread at a time call it: hvdkit's threads take turns.",
            "Nothing has to be done; a library with MPI_THREAD_MULTIPLE overlaps more.",
        )
    if facts.hvdrun.error:
        yield Finding(
            "error", "mpirun-missing", f"hvdrun has nothing to start ranks with: {facts.hvdrun.error}", GET_MPI
        )
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


def _check_families(facts: Facts) -> Iterator[Finding]:
    """Find launchers that would start N processes which each think to be alone."""
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
            f"hvdrun takes {hvdrun.mpirun} ({hvdrun.name} {hvdrun.version}), and mpi4py loads {name} "
            f"({library.path}): every rank would be alone, in a world of size 1.",
            f"Set MPI4PY_LIBMPI to the libmpi of {hvdrun.name}, or take that mpirun off PATH.",
        )
        return
    trial = facts.machine.trial
    for launcher in _first_of_kind(facts):
        if _FAMILIES.get(launcher.kind, family) != family:
            tried = "as two ranks did when tried" if set(trial.sizes) == {1} else "in a world of size 1"
            yield Finding(
                "warning",
                "launcher-of-other-mpi",
                f"{launcher.name} on PATH is {KIND_NAMES[launcher.kind]} {launcher.version} ({launcher.path}), and "
                f"mpi4py loads {name} ({library.path}): every rank that it starts is alone, {tried}.",
                _ONE_MPI,
            )
            return
    if set(trial.sizes) == {1}:
        yield Finding(
            "warning",
            "singletons",
            f"{trial.mpirun} -n 2 started two ranks that each think to be alone, though launcher and library are both "
            f"{name}: two installations of it, or one without PMI.",
            _ONE_MPI,
        )
    elif trial.error:
        yield Finding(
            "warning",
            "mpirun-fails",
            f"{trial.mpirun} -n 2 does not start two ranks: {trial.error}",
            "hvdrun may do better; else repair this MPI or take another one.",
        )


def check_srun(facts: Facts, job: Job) -> Iterator[Finding]:
    """Judge what srun did with two ranks, where there is an allocation to try it in."""
    trial = facts.machine.srun
    pmix = facts.mpi.kind == "open_mpi"
    best = next((kind for kind in trial.kinds if kind.startswith("pmix" if pmix else "pmi2")), "")
    option = f"srun --mpi={best}" if best else "srun of a Slurm built with PMIx" if pmix else "srun --mpi=pmi2"
    cure = f"Start with {option}; or with hvdrun or mpirun in place of srun, which find the allocation by themselves."
    if len(trial.sizes) > 1 and set(trial.sizes) == {1}:
        yield Finding(
            "warning",
            "srun-singletons",
            f"srun started two ranks that each think to be alone: as it is set here it does not speak the language of "
            f"{facts.mpi.name}.",
            cure,
        )
    elif trial.error:
        yield Finding("warning", "srun-fails", f"srun -n 2 does not start two ranks of MPI: {trial.error}", cure)


def _first_of_kind(facts: Facts) -> Iterator[Launcher]:
    seen = set()
    for launcher in facts.launchers:
        if launcher.name in ("mpirun", "mpiexec") and launcher.kind not in seen:
            seen.add(launcher.kind)
            yield launcher
