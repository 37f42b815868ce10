"""Which variables reach the ranks."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence

from hvdkit.errors import LaunchError

# Left by the launcher of another job (hvdrun inside a rank, say): a second mpirun would take itself for part of it.
_OTHER_LAUNCHER = re.compile(
    r"OMPI_(?!MCA_|ALLOW_RUN_AS_ROOT).*|PMIX_(?!MCA_).*|PRTE_(?!MCA_).*|PMI_.*|HYDI_.*|HYDRA_PROXY.*|MPI_LOCAL.*"
    r"|HVDKIT_AGENT|HVDKIT_JOB|HVDKIT_START|HVDKIT_CONTROL.*|OPAL_PREFIX|ORTE_.*"
)

# True of this host or this login only, or of the shell.
_HOST_ONLY = re.compile(
    r"HOSTNAME|HOST|DISPLAY|XAUTHORITY|SSH_.*|TMPDIR|TMP|TEMP|XDG_.*|DBUS_.*|PWD|OLDPWD|SHLVL|_|TTY|GPG_TTY|TMUX.*|STY"
    r"|WINDOWID|TERM_SESSION_ID|VSCODE_.*|BASH_FUNC.*|BASHOPTS|SHELLOPTS|PS[0-4]|LS_COLORS|MAIL|LOGNAME|USER|HOME|SHELL"
    r"|SLURM_.*|PBS_.*|LSB_.*|OMPI_.*|PMIX_.*|PRTE_.*|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_.*|NOTIFY_SOCKET"
)
# What launchers, Python and hvdkit itself need to start a rank.
_NEEDED = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHONPATH|PYTHONHOME|VIRTUAL_ENV|CONDA_PREFIX|HVDKIT_.*|I_MPI_.*|HYDRA_.*|MPICH_.*"
    r"|MPIEXEC_.*|MPI4PY_.*|PALS_.*|JSM_.*|LSF_.*"
)
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def find_launcher_variables(environ: Iterable[str]) -> tuple[str, ...]:
    """Name the variables that another launcher left and that must not reach ours."""
    return tuple(sorted(name for name in environ if _OTHER_LAUNCHER.fullmatch(name)))


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy the environment without another launcher's variables."""
    removed = set(find_launcher_variables(environ))
    return {name: value for name, value in environ.items() if name not in removed}


def withhold(environ: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """Copy the environment without the variables that match a pattern, as "AWS_*".

    Variables that ranks or launchers need stay. So do those of this host (SSH_AUTH_SOCK, TMPDIR): the launcher has
    them, and ranks on this host inherit them.
    Raises LaunchError for a pattern that matches such variables only.
    """
    stays = [name for name in environ if _NEEDED.fullmatch(name) or _HOST_ONLY.fullmatch(name)]
    for pattern in patterns:
        matches = fnmatch.filter(environ, pattern)
        if matches and set(matches) <= set(stays):
            raise LaunchError(
                f"--no-forward-env {pattern}: {', '.join(sorted(matches))} cannot be kept back, because ranks or the "
                "launcher need it. Variables of this host, such as SSH_AUTH_SOCK, go to no other host through ssh. "
                "Leave the option out, or unset the variable."
            )
    return {
        name: value
        for name, value in environ.items()
        if name in stays or not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def select_forwarded(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Name the variables to send to other hosts: all but those that belong to this host.

    OMPI_MCA_ and its like are left out because mpirun sends them by itself; a value with a line break because
    the way through ssh is not safe for it.
    """
    return tuple(
        sorted(
            name
            for name, value in environ.items()
            if _IDENTIFIER.fullmatch(name) and not _HOST_ONLY.fullmatch(name) and "\n" not in value
        )
    )
