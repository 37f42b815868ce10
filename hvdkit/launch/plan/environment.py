"""Select the variables that reach the ranks."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from hvdkit.errors import LaunchError

# Set by the launcher of another job (hvdrun inside a rank): with them a second mpirun would act as part of that job.
_OTHER_LAUNCHER = re.compile(
    r"OMPI_(?!MCA_|ALLOW_RUN_AS_ROOT).*|PMIX_(?!MCA_).*|PRTE_(?!MCA_).*|PMI_.*|HYDI_.*|HYDRA_PROXY.*|MPI_LOCAL.*"
    r"|HVDKIT_AGENT|HVDKIT_JOB|HVDKIT_START|HVDKIT_PREFIX|HVDKIT_CONTROL.*|OPAL_PREFIX|ORTE_.*"
)

# Valid on this host, in this login or in this shell only.
_HOST_ONLY = re.compile(
    r"HOSTNAME|HOST|DISPLAY|XAUTHORITY|SSH_.*|TMPDIR|TMP|TEMP|XDG_.*|DBUS_.*|PWD|OLDPWD|SHLVL|_|TTY|GPG_TTY|TMUX.*|STY"
    r"|WINDOWID|TERM_SESSION_ID|VSCODE_.*|BASH_FUNC.*|BASHOPTS|SHELLOPTS|PS[0-4]|LS_COLORS|MAIL|LOGNAME|USER|HOME|SHELL"
    r"|SLURM_.*|PBS_.*|LSB_.*|OMPI_.*|PMIX_.*|PRTE_.*|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_.*|NOTIFY_SOCKET"
)
# Required by launchers, Python and hvdkit to start a rank.
_NEEDED = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHONPATH|PYTHONHOME|VIRTUAL_ENV|CONDA_PREFIX|HVDKIT_.*|I_MPI_.*|HYDRA_.*|MPICH_.*"
    r"|MPIEXEC_.*|MPI4PY_.*|PALS_.*|JSM_.*|LSF_.*"
)
# Sent by mpirun itself.
_MCA = re.compile(r"(OMPI|PMIX|PRTE)_MCA_.*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


# Of torchrun, or of a rank of hvdrun's, both of which set a TORCHELASTIC_RUN_ID; else the user's own.
_OTHER_TORCHRUN = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_(RANK|WORLD_SIZE)|ROLE_(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_.*|KERAS_DISTRIBUTION_.*|JAX_(COORDINATOR_ADDRESS|NUM_PROCESSES|PROCESS_ID)"
)


def find_launcher_variables(environ: Iterable[str]) -> tuple[str, ...]:
    """Name the variables of another job's launcher, which must not reach this one."""
    names = set(environ)
    torchruns = {name for name in names if _OTHER_TORCHRUN.fullmatch(name)} if "TORCHELASTIC_RUN_ID" in names else set()
    return tuple(sorted(torchruns | {name for name in names if _OTHER_LAUNCHER.fullmatch(name)}))


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy the environment without another launcher's variables."""
    removed = set(find_launcher_variables(environ))
    return {name: value for name, value in environ.items() if name not in removed}


def withhold(environ: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """Copy the environment without the variables that match a pattern, such as "AWS_*".

    Variables that ranks or launchers require are kept. So are those of this host (SSH_AUTH_SOCK, TMPDIR), which the
    launcher and ranks on this host inherit.
    Raises LaunchError for a pattern that matches only such variables.
    """
    kept = [name for name in environ if _NEEDED.fullmatch(name) or _HOST_ONLY.fullmatch(name)]
    for pattern in patterns:
        matches = fnmatch.filter(environ, pattern)
        if matches and set(matches) <= set(kept):
            raise LaunchError(
                f"--no-forward-env {pattern}: {', '.join(sorted(matches))} cannot be withheld, because ranks or the "
                "launcher require it. Variables of this host, such as SSH_AUTH_SOCK, are not sent to other hosts. "
                "Remove the option, or unset the variable."
            )
    return {
        name: value
        for name, value in environ.items()
        if name in kept or not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def select_forwarded(environ: Mapping[str, str], wanted: Collection[str] = ()) -> tuple[str, ...]:
    """Name the variables to send to other hosts: all but those of this host.

    OMPI_MCA_ and similar ones are left out because mpirun sends them itself; values with a line break because ssh's
    command line does not preserve them. wanted: sent even if they are this host's (-x).
    """
    return tuple(
        sorted(
            name
            for name, value in environ.items()
            if _IDENTIFIER.fullmatch(name)
            and "\n" not in value
            and (not _HOST_ONLY.fullmatch(name) or (name in wanted and not _MCA.fullmatch(name)))
        )
    )
