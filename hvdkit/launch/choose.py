"""Which program starts the ranks: planned from what there is and what is wished."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdkit.errors import LaunchError
from hvdkit.launch.mpi import Mpi

STARTERS = ("mpirun", "mpiexec", "srun", "jsrun", "ssh")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What there is.

    scheduler: whose job this is in: slurm, pbs, lsf, sge; "" for none.
    local: all ranks are to be on this machine. by_hand: the user has named the hosts.
    mpi: the MPI whose mpirun was found; None if there is none, and then no_mpi says why and what to do.
    programs: paths of srun and jsrun, where they are.
    pmi: what `srun --mpi=list` names. pmi_wish: what the user has set for srun (SLURM_MPI_TYPE).
    pmi_library: what the user has set for Intel MPI under srun (I_MPI_PMI_LIBRARY).
    cray: the environment is one of Cray MPICH.
    """

    scheduler: str = ""
    local: bool = False
    by_hand: bool = False
    mpi: Mpi | None = None
    no_mpi: str = ""
    programs: Mapping[str, str] = field(default_factory=dict)
    pmi: tuple[str, ...] = ()
    pmi_wish: str = ""
    pmi_library: str = ""
    cray: bool = False


@dataclass(frozen=True)
class Choice:
    """What starts the ranks, and why, as a sentence.

    starter: one of STARTERS. program: its path; "" for the MPI's own mpirun.
    pmi: for srun.
    """

    starter: str
    reason: str
    program: str = ""
    mpi: Mpi | None = None
    pmi: str = ""


def choose_starter(facts: Facts, wish: str = "") -> Choice:
    """Choose what starts the ranks.

    wish: what the user insists on (--launcher); "" for no wish.
    Raises LaunchError, with what to do, for a wish that cannot be fulfilled, or if there is nothing at all.
    """
    if wish:
        return _WISHES[wish](facts)
    if facts.scheduler == "lsf" and "jsrun" in facts.programs and not facts.by_hand:
        return _choose_jsrun(facts, "this is a job of LSF, and the site has jsrun")
    if facts.mpi is not None:
        return Choice("mpirun", _explain_mpirun(facts, facts.mpi), mpi=facts.mpi)
    if facts.scheduler == "slurm" and "srun" in facts.programs:
        return _choose_srun(facts, "this is a job of Slurm, and there is no mpirun")
    raise LaunchError(facts.no_mpi)


def _explain_mpirun(facts: Facts, mpi: Mpi) -> str:
    whose = f"{mpi.name}'s {'mpiexec' if mpi.kind == 'pals' else 'mpirun'}"
    if mpi.kind == "pals":
        return f"{whose}: it is the launcher of this site"
    if facts.local:
        return f"{whose}: all ranks are on this machine"
    if not facts.scheduler:
        return f"{whose}, over ssh: the hosts are given, and this is no job of a scheduler"
    how = {"slurm": "srun", "pbs": "PBS", "lsf": "LSF", "sge": "qrsh"}.get(facts.scheduler, facts.scheduler)
    return f"{whose}: it starts its daemons through {how} where it was built for that, else over ssh"


def _wish_mpirun(facts: Facts) -> Choice:
    mpi = _need_mpi(facts)
    if mpi.kind == "pals":
        raise LaunchError(
            "The launcher of this site is mpiexec of Cray PALS. Write --launcher mpiexec, or leave it out."
        )
    return Choice("mpirun", "--launcher mpirun", mpi=mpi)


def _wish_mpiexec(facts: Facts) -> Choice:
    mpi = _need_mpi(facts)
    return Choice("mpiexec", "--launcher mpiexec", mpi=mpi, program=facts.programs.get("mpiexec", ""))


def _wish_ssh(facts: Facts) -> Choice:
    mpi = _need_mpi(facts)
    if mpi.kind == "pals":
        raise LaunchError(
            "--launcher ssh: mpiexec of Cray PALS has daemons of its own in place of ssh. Leave --launcher out, or put "
            "another MPI's mpirun first on PATH."
        )
    return Choice("ssh", "--launcher ssh", mpi=mpi)


def _wish_srun(facts: Facts) -> Choice:
    return _choose_srun(facts, "--launcher srun")


def _wish_jsrun(facts: Facts) -> Choice:
    return _choose_jsrun(facts, "--launcher jsrun")


_WISHES: Mapping[str, Callable[[Facts], Choice]] = {
    "mpirun": _wish_mpirun,
    "mpiexec": _wish_mpiexec,
    "ssh": _wish_ssh,
    "srun": _wish_srun,
    "jsrun": _wish_jsrun,
}


def _need_mpi(facts: Facts) -> Mpi:
    if facts.mpi is None:
        raise LaunchError(facts.no_mpi)
    return facts.mpi


def _choose_srun(facts: Facts, why: str) -> Choice:
    if "srun" not in facts.programs:
        raise LaunchError(
            "--launcher srun: there is no srun on PATH. Load the site's slurm module, or use --launcher ssh."
        )
    if facts.scheduler != "slurm":
        raise LaunchError(
            "--launcher srun: this is no job of Slurm, and srun would wait in the queue for one. Get one first with "
            "salloc, sbatch or hvdkit submit; or use --launcher ssh."
        )
    if facts.mpi is not None and facts.mpi.kind == "intel_mpi" and not facts.pmi_library:
        raise LaunchError(
            "--launcher srun: Intel MPI needs Slurm's PMI library, or each rank would train alone. Set "
            "I_MPI_PMI_LIBRARY to the site's libpmi2.so, or leave --launcher out."
        )
    pmi = _choose_pmi(facts)
    return Choice("srun", f"{why}; ranks meet by {pmi}", facts.programs["srun"], facts.mpi, pmi)


def _choose_pmi(facts: Facts) -> str:
    """Choose the plugin of srun that the ranks' MPI speaks."""
    wished = facts.pmi_wish.partition("_v")[0]
    if wished not in ("", "none") and (facts.mpi is None or wished in _SPOKEN.get(facts.mpi.kind, ())):
        return facts.pmi_wish
    spoken: tuple[str, ...] = ("cray_shasta",) if facts.cray else ("pmix", "pmi2", "cray_shasta")
    who = "Cray MPICH" if facts.cray else "an MPI"
    if facts.mpi is not None and facts.mpi.kind in _SPOKEN:
        spoken, who = _SPOKEN[facts.mpi.kind], f"{facts.mpi.name} {facts.mpi.version}"
    elif len(set(spoken) & set(facts.pmi)) > 1:
        raise LaunchError(
            f"srun has {', '.join(facts.pmi)}, and without an mpirun on PATH it is not known which of them the MPI of "
            "this environment speaks. Say it: SLURM_MPI_TYPE=pmix (Open MPI) or pmi2 (MPICH, Intel MPI)."
        )
    for pmi in spoken:
        if pmi in facts.pmi:
            return pmi
    there = ", ".join(facts.pmi) or "no PMI"
    raise LaunchError(
        f"srun of this site has {there}; {who} speaks {' or '.join(spoken)}: each rank would train alone. Leave "
        "--launcher out, or take an MPI that fits (srun --mpi=list shows what the site has)."
    )


_SPOKEN: Mapping[str, tuple[str, ...]] = {
    "open_mpi": ("pmix",),
    "mpich": ("pmi2",),
    "intel_mpi": ("pmi2",),
}


def _choose_jsrun(facts: Facts, why: str) -> Choice:
    if "jsrun" not in facts.programs:
        raise LaunchError("--launcher jsrun: there is no jsrun on PATH. Leave --launcher out.")
    if facts.scheduler != "lsf":
        raise LaunchError(
            "--launcher jsrun: this is no job of LSF. Get one first with bsub or hvdkit submit; or use --launcher ssh."
        )
    return Choice("jsrun", why, facts.programs["jsrun"], facts.mpi)
