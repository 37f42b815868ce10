"""Choose the program that starts the ranks, by the scheduler, the MPI and the launchers of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hvdkit.errors import LaunchError
from hvdkit.launch.plan.mpi import Mpi


@dataclass(frozen=True, kw_only=True)
class LauncherEnvironment:
    """The facts that the choice of a launcher depends on.

    scheduler: the scheduler of the job that this runs in: slurm, pbs, lsf, sge; "" for none.
    local: all ranks run on this machine.
    named_hosts: the user has named the hosts.
    mpi: the MPI of the mpirun that was found; None without an mpirun.
    no_mpi: the error message if mpi is None.
    programs: paths of mpiexec, srun, jsrun and qrsh, if they exist; of qrsh only if Open MPI would use it.
    own_ssh: the user has set options of ssh (-p, -i), so Open MPI uses it in place of qrsh.
    pmi: the plugins that `srun --mpi=list` prints.
    pmi_wish: the user's plugin for srun (SLURM_MPI_TYPE).
    pmi_library: the user's library for Intel MPI under srun (I_MPI_PMI_LIBRARY).
    cray: the environment is Cray MPICH's.
    """

    scheduler: str = ""
    local: bool = False
    named_hosts: bool = False
    mpi: Mpi | None = None
    no_mpi: str = ""
    programs: Mapping[str, str] = field(default_factory=dict)
    own_ssh: bool = False
    pmi: tuple[str, ...] = ()
    pmi_wish: str = ""
    pmi_library: str = ""
    cray: bool = False


LAUNCHERS = ("mpirun", "mpiexec", "srun", "jsrun", "ssh")

# Kind of MPI -> the plugins of srun that its ranks can connect with.
_PMI_OF: Mapping[str, tuple[str, ...]] = {"open_mpi": ("pmix",), "mpich": ("pmi2",), "intel_mpi": ("pmi2",)}


@dataclass(frozen=True)
class SelectedLauncher:
    """The program that starts the ranks.

    launcher: a name in LAUNCHERS.
    reason: a sentence without its full stop.
    program: its path; "" for the MPI's own mpirun.
    mpi: the MPI that belongs to it; None without one.
    pmi: the plugin for srun; with one that the ranks' MPI does not support, each rank would be alone.
    qrsh: Grid Engine's qrsh if Open MPI's mpirun starts its daemons with it in place of ssh; else "".
    """

    launcher: str
    reason: str
    program: str = ""
    mpi: Mpi | None = None
    pmi: str = ""
    qrsh: str = ""

    @property
    def ssh(self) -> bool:
        """Are daemons started over ssh even where the scheduler could start them?"""
        return self.launcher == "ssh"

    @property
    def own_mpi(self) -> Mpi:
        """Return the MPI whose launcher starts the ranks, with that program. Raises LaunchError without one."""
        if self.mpi is None:
            raise LaunchError(
                f"{self.launcher} was chosen without an MPI. This is a bug in hvdkit.", code="bug-launcher-without-mpi"
            )
        return replace(self.mpi, mpirun=self.program) if self.program else self.mpi


def select_launcher(environment: LauncherEnvironment, wish: str = "") -> SelectedLauncher:
    """Choose the launcher.

    wish: the user's --launcher; "" for none.
    Raises LaunchError for a wish that cannot be satisfied, or if no launcher is found.
    """
    if wish == "srun":
        return _choose_srun(environment, "--launcher srun")
    if wish == "jsrun":
        return _choose_jsrun(environment, "--launcher jsrun")
    if wish:
        return _choose_mpis_own(environment, wish)
    if environment.scheduler == "lsf" and "jsrun" in environment.programs and not environment.named_hosts:
        return _choose_jsrun(environment, "jsrun: this is an LSF job, and the site has jsrun")
    if environment.mpi is not None:
        return _choose_mpirun(environment, _explain_mpirun(environment, environment.mpi))
    if environment.scheduler == "slurm" and "srun" in environment.programs:
        return _choose_srun(environment, "srun: this is a Slurm job, and there is no mpirun")
    raise LaunchError(environment.no_mpi, code="mpi-missing")


def _explain_mpirun(environment: LauncherEnvironment, mpi: Mpi) -> str:
    launcher = f"{mpi.name}'s {'mpiexec' if mpi.kind == 'pals' else 'mpirun'}"
    if mpi.kind == "pals":
        return f"{launcher}: it is this site's launcher"
    if environment.local:
        return f"{launcher}: all ranks are on this machine"
    if not environment.scheduler:
        return f"{launcher}, over ssh: the hosts are named, and this is not a scheduler's job"
    if environment.scheduler == "sge" and mpi.kind == "open_mpi":
        qrsh = _qrsh(environment)
        why = "-p or -i was given" if environment.own_ssh else "there is no qrsh on PATH or in $SGE_ROOT/bin/$ARC"
        return f"{launcher}: it starts its daemons {f'through {qrsh}' if qrsh else f'over ssh, as {why}'}"
    names = {"slurm": "srun", "pbs": "PBS", "lsf": "LSF", "sge": "qrsh", "flux": "Flux", "htcondor": "HTCondor"}
    through = names.get(environment.scheduler, environment.scheduler)
    return f"{launcher}: it starts its daemons through {through} if it was built with support for it, else over ssh"


def _choose_mpirun(environment: LauncherEnvironment, reason: str) -> SelectedLauncher:
    return SelectedLauncher("mpirun", reason, mpi=environment.mpi, qrsh=_qrsh(environment))


def _qrsh(environment: LauncherEnvironment) -> str:
    """Return Grid Engine's qrsh if Open MPI starts its daemons with it: not if the user has set options of ssh."""
    return "" if environment.own_ssh else environment.programs.get("qrsh", "")


_WITHOUT_PALS = {
    "mpirun": "this site's launcher is mpiexec of Cray PALS. Use --launcher mpiexec, or remove it.",
    "ssh": "mpiexec of Cray PALS uses its own daemons instead of ssh. Remove --launcher, or put another MPI's mpirun "
    "first on PATH.",
}


def _choose_mpis_own(environment: LauncherEnvironment, wish: str) -> SelectedLauncher:
    """Choose a launcher that belongs to the MPI. wish: mpirun, mpiexec or ssh."""
    mpi = environment.mpi
    if mpi is None:
        raise LaunchError(environment.no_mpi, code="mpi-missing")
    if mpi.kind == "pals" and wish in _WITHOUT_PALS:
        raise LaunchError(f"--launcher {wish}: {_WITHOUT_PALS[wish]}", code="launcher-not-of-pals")
    if wish == "mpirun":
        return _choose_mpirun(environment, "--launcher mpirun")
    program = environment.programs.get("mpiexec", "") if wish == "mpiexec" else ""
    return SelectedLauncher(wish, f"--launcher {wish}", mpi=mpi, program=program)


def _choose_srun(environment: LauncherEnvironment, reason: str) -> SelectedLauncher:
    if "srun" not in environment.programs:
        raise LaunchError(
            "--launcher srun: there is no srun on PATH. Load the site's Slurm module, or use --launcher ssh.",
            code="srun-missing",
        )
    if environment.scheduler != "slurm":
        raise LaunchError(
            "--launcher srun: this is not a Slurm job, and srun would wait in the queue for one. Get a job with "
            "salloc, sbatch or hvdkit submit; or use --launcher ssh.",
            code="not-a-slurm-job",
        )
    mpi = environment.mpi
    if mpi is not None and mpi.kind == "intel_mpi" and not environment.pmi_library:
        raise LaunchError(
            "--launcher srun: without Slurm's PMI library each rank of Intel MPI would train alone. Set "
            "I_MPI_PMI_LIBRARY to the site's libpmi2.so, or remove --launcher.",
            code="srun-pmi-library",
        )
    pmi = _choose_pmi(environment)
    return SelectedLauncher("srun", f"{reason}; ranks connect by {pmi}", environment.programs["srun"], mpi, pmi)


def _choose_pmi(environment: LauncherEnvironment) -> str:
    """Choose the plugin of srun that the ranks' MPI supports."""
    mpi, offered = environment.mpi, environment.pmi
    wish = environment.pmi_wish.partition("_v")[0]
    if wish not in ("", "none") and (mpi is None or wish in _PMI_OF.get(mpi.kind, ())):
        return environment.pmi_wish
    supported: tuple[str, ...] = ("cray_shasta",) if environment.cray else ("pmix", "pmi2", "cray_shasta")
    name = "Cray MPICH" if environment.cray else "an MPI"
    if mpi is not None and mpi.kind in _PMI_OF:
        supported, name = _PMI_OF[mpi.kind], f"{mpi.name} {mpi.version}"
    elif len(set(supported) & set(offered)) > 1:
        raise LaunchError(
            f"srun offers {', '.join(offered)}. Without an mpirun on PATH hvdrun cannot determine which of them the "
            "MPI of this environment supports. Set SLURM_MPI_TYPE=pmix (Open MPI) or pmi2 (MPICH, Intel MPI).",
            code="srun-plugin-unknown",
        )
    for pmi in supported:
        if pmi in offered:
            return pmi
    raise LaunchError(
        f"this site's srun offers {', '.join(offered) or 'no PMI'}, and {name} supports {' or '.join(supported)}: each "
        "rank would train alone. Remove --launcher, or use an MPI that fits (see srun --mpi=list).",
        code="srun-plugin-missing",
    )


def _choose_jsrun(environment: LauncherEnvironment, reason: str) -> SelectedLauncher:
    if "jsrun" not in environment.programs:
        raise LaunchError("--launcher jsrun: there is no jsrun on PATH. Remove --launcher.", code="jsrun-missing")
    if environment.scheduler != "lsf":
        raise LaunchError(
            "--launcher jsrun: this is not an LSF job. Get one with bsub or hvdkit submit; or use --launcher ssh.",
            code="not-an-lsf-job",
        )
    return SelectedLauncher("jsrun", reason, environment.programs["jsrun"], environment.mpi)
